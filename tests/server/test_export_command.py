"""`jumpstart export` as it is typed: where it reads, where it writes, what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jumpstart.errors import ConfigError
from jumpstart_server.cli import cli
from tests.server.export_lab import TWO


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Result:
    result = CliRunner().invoke(cli, ["export", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*words: str) -> str:
    result = CliRunner().invoke(cli, ["export", *words])
    if isinstance(result.exception, ConfigError):
        return str(result.exception)
    assert result.exit_code == 2
    return result.stderr


def test_it_prints_or_writes_the_same(desk: Path) -> None:
    (desk / "jumpstart.toml").write_text(TWO)
    for engine, file in (("nginx", "jumpstart.conf"), ("envoy", "envoy.yaml"), ("systemd", "jumpstart.service")):
        printed = run(engine).stdout
        assert run(engine, "-o", "out/").stdout == ""
        assert (desk / "out" / file).read_text() == printed
    assert run("kubernetes", "--image", "shop:1", "-o", "k.yaml").stderr == ""
    assert (desk / "k.yaml").read_text() == run("kubernetes", "--image", "shop:1").stdout


def test_several_files_need_a_folder(desk: Path) -> None:
    (desk / "jumpstart.toml").write_text(TWO.replace("127.0.0.1:9000", "auto"))
    words = ("systemd", "--per-tenant", "--sockets")
    assert "-o a: these are 4 files (jumpstart-web.service, " in refused(*words, "-o", "a")
    run(*words, "-o", "units/")
    names = sorted(path.name for path in (desk / "units").iterdir())
    assert names == [f"jumpstart-{name}" for name in ("genai.service", "genai.socket", "web.service", "web.socket")]
    printed = run(*words).stdout
    for name in names:
        assert f"# ---- {name} ----\n{(desk / 'units' / name).read_text()}" in printed


def test_one_tenant_of_the_file(desk: Path) -> None:
    (desk / "jumpstart.toml").write_text(TWO)
    (desk / "other").mkdir()
    text = run("systemd", "--tenant", "genai", "--command", "/opt/jumpstart").stdout
    assert f"ExecStart=/opt/jumpstart serve -c {desk}/jumpstart.toml --tenant genai\n" in text
    assert f"WorkingDirectory={desk}\n" in text
    # What the others claim stays theirs: the rest is not for a tenant that is exported alone.
    text = (desk / "jumpstart.toml").read_text()
    (desk / "jumpstart.toml").write_text(text.replace("[tenants.genai]", "[tenants.more]\nport = 1\n[tenants.genai]"))
    assert "[tenants.web] and [tenants.more] have no routes" in refused("nginx", "--tenant", "web")
    (desk / "jumpstart.toml").write_text(text)
    assert "jumpstart-web" not in run("kubernetes", "--image", "i", "--tenant", "genai").stdout
    assert refused("nginx", "--tenant", "x").endswith("jumpstart.toml has web, genai")


def test_a_tenant_that_nobody_named_is_not_named_to_the_server_either(desk: Path) -> None:
    (desk / "pyproject.toml").write_text('[tool.jumpstart.app]\ntarget = "a:b"\n')
    text = run("systemd").stdout
    assert f"serve -c {desk}/pyproject.toml\n" in text
    assert '"--tenant"' not in run("kubernetes", "--image", "i").stdout
    assert "location / {  # [tenants.web]" in run("nginx").stdout


def test_this_shells_environment_counts_for_nothing(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (desk / "jumpstart.toml").write_text(TWO)
    before = run("nginx").stdout
    for name, value in (("JUMPSTART_TIMEOUT", "1"), ("PORT", "1234"), ("JUMPSTART_ADMIN", "off")):
        monkeypatch.setenv(name, value)
    assert run("nginx").stdout == before


def test_a_proxy_that_is_not_believed_costs_a_line(desk: Path) -> None:
    (desk / "jumpstart.toml").write_text(TWO.replace("127.0.0.1:8000", "10.0.0.1:8000"))
    for engine in ("nginx", "envoy"):
        result = run(engine)
        assert result.stderr.count("warning: [tenants.web] forwarded_allow_ips") == 1
        assert "# BEWARE: [tenants.web] forwarded_allow_ips" in result.stdout
    assert run("kubernetes", "--image", "i", "--ingress", "nginx").stderr.count("warning:") == 2


@pytest.mark.parametrize(
    ("file", "words", "message"),
    [
        ("", ("nginx",), "there is no jumpstart.toml here that names the tenants; see -c FILE"),
        ("[tenants.a]", ("nginx",), "[tenants.a] has no app; write [app] target ="),
        (TWO, ("nginx", "--listen", "80; }"), "--listen '80; }': not what nginx takes there"),
        (TWO, ("nginx", "--server-name", ""), "--server-name '': not what nginx takes there"),
        (TWO, ("envoy", "--listen", "localhost:1"), "--listen localhost:1: envoy serves on IP addresses"),
        (TWO, ("envoy", "-o", "e.json"), "-o e.json: Envoy goes by the name's end; let it be .yaml or .yml"),
        (TWO, ("envoy", "--json", "-o", "e.yaml"), "-o e.yaml: Envoy goes by the name's end; let it be .json"),
        (TWO, ("nginx", "--health", "x"), "--health 'x': write a path, such as /healthz"),
        (TWO, ("kubernetes",), "--image is missing: the image with the app; for example: jumpstart export "),
        (TWO, ("nginx", "-o", "no/such/file"), "-o no/such/file: No such file or directory"),
        (TWO, ("systemd", "--command", "j"), "--command j: systemd needs the whole path"),
    ],
)
def test_what_is_wrong_is_named(desk: Path, file: str, words: tuple[str, ...], message: str) -> None:
    if file:
        (desk / "jumpstart.toml").write_text(file)
    assert message in " ".join(refused(*words).split())
