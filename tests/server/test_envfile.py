"""The file of ``--env-file``: what its lines mean, and what its errors name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.config import load_settings
from jumpstart_server.envfile import parse_env_file


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {}),
        ("# a comment\n\n   \n  # another\n", {}),
        ("A=1", {"A": "1"}),
        ("A=1\nA=2\n", {"A": "2"}),
        ("\ufeffA=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("export A = 1\n\texport  B=2", {"A": "1", "B": "2"}),
        ("A=\nB= \nC=''", {"A": "", "B": "", "C": ""}),
        ("A=hello there  # a comment\nB=a#b\nC=#none", {"A": "hello there", "B": "a#b", "C": ""}),
        ("A='it is $HOME\\n # so' # a comment", {"A": "it is $HOME\\n # so"}),
        ('A="one\\ntwo \\"quoted\\" \\\\ \\t| #"', {"A": 'one\ntwo "quoted" \\ \t| #'}),
        ('A="over\ntwo lines"\nB=1', {"A": "over\ntwo lines", "B": "1"}),
        ("URL=postgres://u:p=w@h/db?x=1&y=2", {"URL": "postgres://u:p=w@h/db?x=1&y=2"}),
        ("A=it's", {"A": "it's"}),
        ("A=ü\u2028x", {"A": "ü\u2028x"}),
    ],
)
def test_lines_mean_what_hands_expect(text: str, variables: dict[str, str]) -> None:
    assert parse_env_file(text, "f") == variables


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("A=1\nnonsense", "f, line 2: write NAME=VALUE"),
        ("=1", "f, line 1: write NAME=VALUE"),
        ("1A=1", "f, line 1: write NAME=VALUE"),
        ('B="x\n\ny"\nA B=1', "f, line 4: write NAME=VALUE"),
        ("\nA='x", "f, line 2: A: its ' is never closed"),
        ('A="x\\"', 'f, line 1: A: its " is never closed'),
        ("A='x' y", "f, line 1: A: something follows its closing '; quote the whole value"),
        ("A=x\0", "f, line 1: A: holds a NUL, which no variable can"),
    ],
)
def test_what_is_none_is_named_with_file_and_line(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_env_file(text, "f")
    assert str(caught.value) == error


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]*", fullmatch=True), st.text().filter(lambda s: "\0" not in s)))
def test_whatever_is_quoted_comes_back(variables: dict[str, str]) -> None:
    variables = {name: value.replace("\r\n", "\n") for name, value in variables.items()}
    quoted = [f'{n}="{v.translate({34: chr(92) + chr(34), 92: chr(92) * 2})}"' for n, v in variables.items()]
    assert parse_env_file("\n".join(quoted), "f") == variables


@given(st.text())
def test_no_text_raises_anything_but_a_configuration_error(text: str) -> None:
    try:
        found = parse_env_file(text, "f")
    except ConfigError:
        return
    assert all(name and "\0" not in value for name, value in found.items())


def test_it_gives_options_and_variables_and_what_is_set_wins(tmp_path: Path) -> None:
    (tmp_path / "prod.env").write_text("JUMPSTART_WORKERS=3\nPORT=5000\nA=file\nB=file\n")
    found = load_settings({"app.env_file": "prod.env"}, {"B": "set", "PORT": "6000"}, cwd=tmp_path)
    assert (found.tenant.workers, found.tenant.port) == (3, 6000)
    assert found.environment == {"JUMPSTART_WORKERS": "3", "A": "file"}
    assert load_settings({"app.env_file": "prod.env", "tenant.workers": "2"}, {}, cwd=tmp_path).tenant.workers == 2


def test_a_path_in_a_file_is_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "prod.env").write_text("A=1")
    (tmp_path / "deploy" / "jumpstart.toml").write_text('[app]\nenv_file = "prod.env"')
    assert load_settings({}, {}, config_file="deploy/jumpstart.toml", cwd=tmp_path).environment == {"A": "1"}


def test_a_file_that_is_not_there_or_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--env-file {tmp_path}/no.env: cannot be read: No such file"):
        load_settings({"app.env_file": "no.env"}, {}, cwd=tmp_path)
    (tmp_path / "x.env").write_text("A=1\noops")
    with pytest.raises(ConfigError, match=rf"^JUMPSTART_ENV_FILE {tmp_path}/x.env, line 2: write NAME=VALUE$"):
        load_settings({}, {"JUMPSTART_ENV_FILE": "x.env"}, cwd=tmp_path)
