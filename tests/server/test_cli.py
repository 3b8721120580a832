"""What the command line says about options: groups in the help, and what hands type that know other servers."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from jumpstart_server.cli import cli, run
from jumpstart_server.cli.foreign import ACCEPTED, REFUSED
from jumpstart_server.config import load_settings
from jumpstart_server.exits import ExitCode
from jumpstart_server.settings import GROUPS, declared_options


class Shell:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["jumpstart", *words])
        code = run(time.monotonic(), None)
        out, err = self._capsys.readouterr()
        return code, out, err


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(monkeypatch, capsys)


def test_the_help_shows_every_option_once_under_its_heading(shell: Shell) -> None:
    code, text, _ = shell("serve", "--help")
    assert code == 0
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings == ["Options", *GROUPS]
    sections = dict(zip(headings, re.split(r"^\S.*:$", text, flags=re.MULTILINE)[1:], strict=True))
    for option in declared_options():
        if option.flags:
            flag = re.escape(option.flags[0])
            where = [
                title for title, rows in sections.items() if re.search(rf"^  (.*, )?{flag}[ ,]", rows, re.MULTILINE)
            ]
            assert where == [option.group], option.key
    assert "worker-class" not in text


def test_every_key_of_a_group_is_an_option() -> None:
    keys = [key for group in GROUPS.values() for key in group]
    assert len(keys) == len(set(keys))
    assert set(keys) <= {option.key for option in declared_options()}


def test_no_option_of_ours_is_called_foreign() -> None:
    ours = {flag for option in declared_options() for flag in option.flags}
    assert not ours & set(REFUSED)
    assert not set(REFUSED) & {flag for each in ACCEPTED for flag in each.flags}


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("-k", "sync"), "--worker-class sync: a worker runs --threads requests at once"),
        (("-k", "gthread"), "--worker-class gthread: a worker"),
        (("--worker-class=uvicorn.workers.UvicornWorker",), "--worker-class uvicorn.workers.UvicornWorker: a worker"),
        (("--preload",), "--preload: it is always so"),
        (("--worker-tmp-dir", "/dev/shm"), "--worker-tmp-dir /dev/shm: workers keep no heartbeat file"),
        (("--reuse-port",), "--reuse-port: the workers of a server share its socket"),
        (("--loop", "auto"), "--loop auto: it is uvloop"),
        (("--http", "httptools"), "--http httptools: it always is"),
    ],
)
def test_what_is_meant_anyway_is_accepted_with_a_note(shell: Shell, words: tuple[str, ...], note: str) -> None:
    code, _, err = shell("serve", "shop:app", *words, "--workers", "none")
    assert code == ExitCode.USAGE
    first, last = err.splitlines()
    assert first.startswith(f"note: {note}")
    assert last.startswith("error: --workers: 'none' is not allowed")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-k", "gevent"), "--worker-class gevent: there are no green threads here; give --threads"),
        (("-D",), "-D: the server stays in the foreground; let systemd run it (Type=notify)"),
        (("--daemon",), "--daemon: the server stays in the foreground"),
        (("-e", "A=1"), "-e: set the variable before the command, or name a file of them with --env-file"),
        (("--env", "A=1"), "--env: set the variable"),
        (("--loop", "asyncio"), "--loop asyncio: ASGI apps run on uvloop; leave the option out"),
        (("--http", "h11"), "--http h11: there is one HTTP/1.1 parser"),
        (("--statsd-host=x",), "--statsd-host: let Prometheus read /metrics at --admin"),
        (("--statsd-host", "x"), "--statsd-host: let Prometheus read /metrics at --admin"),
        (("--worker", "2"), "there is no option --worker; did you mean --workers?"),
        (("--daemonic",), "there is no option --daemonic"),
        (("-z",), "there is no option -z"),
    ],
)
def test_what_is_not_is_refused_with_what_to_do(shell: Shell, words: tuple[str, ...], error: str) -> None:
    code, _, err = shell("serve", "shop:app", *words)
    assert code == ExitCode.USAGE
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {error}")
    assert "did you mean" in last or "did you mean" not in err


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_advice_names_options_that_exist(flag: str) -> None:
    ours = {flag for option in declared_options() for flag in option.flags}
    negations = {f"--no-{option.flags[0][2:]}" for option in declared_options() if option.is_flag and option.flags}
    for named in re.findall(r"(?<![\w-])--?[a-z][a-z_-]*", REFUSED[flag]):
        assert named in ours | negations | {"-c", "-spy", "--version"}, named


def test_gunicorns_check_config_is_check(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "jumpstart.toml").write_text('[app]\ntarget = "shop:app"\n[tenants.web]\nport = 8123\n')
    code, out, _ = shell("serve", "--check-config")
    assert code == 0
    assert "127.0.0.1:8123" in out
    assert shell("serve", "--check-config", "--workers", "0")[0] == ExitCode.USAGE


def test_a_format_alone_is_reason_enough_for_an_access_log(tmp_path: Path) -> None:
    def log_file(**given: str) -> str:
        return load_settings(
            {f"tenant.{key}": value for key, value in given.items()}, {}, cwd=tmp_path
        ).tenant.access_logfile

    assert log_file() == ""
    assert log_file(access_logformat="json") == "-"
    assert log_file(access_logformat="json", access_logfile="-") == "-"
    assert log_file(access_logformat="json", access_log="false") == ""
    assert log_file(access_logformat="json", access_logfile="x.log") == f"{tmp_path}/x.log"
    (tmp_path / "jumpstart.toml").write_text('[tenants.web]\naccess_logformat = "json"\n')
    assert log_file() == "-"
    assert log_file(access_log="false") == ""


def test_permissions_of_a_socket_need_one(shell: Shell) -> None:
    code, _, err = shell("serve", "shop:app", "--uds-permissions", "660")
    assert code == ExitCode.USAGE
    assert err.startswith("error: --uds-permissions 660: there is no Unix socket of ours; name one with --uds PATH")


def test_a_target_is_asked_for_where_none_is_named(shell: Shell) -> None:
    code, _, err = shell("serve")
    assert code == ExitCode.USAGE
    assert "which app? Give TARGET" in err


def test_every_command_has_a_help(shell: Shell) -> None:
    for name in cli.list_commands(None):  # type: ignore[arg-type]  # it does not look at its context
        code, out, _ = shell(name, "--help")
        assert code == 0
        assert out.startswith(f"Usage: jumpstart {name}") or "Usage:" in out
