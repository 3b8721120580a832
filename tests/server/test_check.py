"""`jumpstart check`: what a configuration comes to, and what in it is nonsense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.cli import cli, settings_of_all
from jumpstart_server.cli.check import check
from jumpstart_server.config import load_settings
from jumpstart_server.envelope.explain import BASE, ENVELOPE, Finding, Tenant, explain, findings
from jumpstart_server.envelope.sizing import MIB, Machine
from jumpstart_server.settings import AppSettings, HostSettings, ProfileSettings, Settings, TenantSettings

GIB = 1024 * MIB
BIG = Machine(1 << 40)
POD = Machine(2 * GIB, "the cgroup's limit", is_limited=True)


def tenant(name: str = "web", **limits: Any) -> Tenant:
    """A tenant whose *limits* stand in a file."""
    settings = Settings(
        app=AppSettings(target="shop:app"),
        tenant=TenantSettings(**limits),
        profile=ProfileSettings(),
        server=HostSettings(),
        tenant_name=name,
    )
    sources = {f"tenant.{key}": f"jumpstart.toml: [tenants.{name}] {key}" for key in limits}
    return Tenant(settings, sources, ("127.0.0.1:8000",))


def found(*tenants: Tenant, machine: Machine = BIG) -> list[Finding]:
    return findings(tenants, machine)


# -- findings --


def test_the_defaults_are_fine() -> None:
    assert found(tenant()) == []
    assert found(tenant(), machine=POD) == []


def test_the_example_of_the_documentation_is_fine() -> None:
    web = tenant("web", workers=4, threads=200, timeout=30.0)
    genai = tenant(
        "genai",
        threads="auto",
        memory_limit=2 * GIB,
        request_memory=MIB * 3 // 2,
        timeout=600.0,
        idle_timeout=60.0,
        graceful_timeout=600.0,
    )
    assert found(web, genai) == []


@pytest.mark.parametrize(
    ("limits", "key", "words"),
    [
        ({"first_byte_timeout": 60.0}, "first_byte_timeout", "60 s is never reached: the whole request has 30 s"),
        ({"timeout": 5.0, "idle_timeout": 6.0}, "idle_timeout", "timeout more than 6"),
        ({"memory_limit": 512}, "memory_limit", "did you mean 512MiB?"),
        ({"memory_limit": 5 * MIB}, "memory_limit", "less than the 24 MiB"),
        ({"memory_limit": BASE, "threads": "auto"}, "memory_limit", "no memory for a request: threads = 1 ="),
        (
            {"memory_limit": GIB, "threads": 500, "request_memory": 2 * MIB},
            "threads",
            "500 × 2 MiB = 1000 MiB, with about 64 MiB for the worker itself, is more than its 1 GiB",
        ),
    ],
)
def test_what_cannot_be_is_an_error_with_its_key_and_a_remedy(limits: dict[str, Any], key: str, words: str) -> None:
    (finding,) = [finding for finding in found(tenant(**limits)) if finding.is_error]
    assert finding.place == f"jumpstart.toml: [tenants.web] {key}"
    assert words in finding.text
    assert str(finding).startswith("error: jumpstart.toml: ")


@pytest.mark.parametrize(
    ("limits", "key", "words"),
    [
        ({"timeout": 0.0}, "timeout", "for ever"),
        ({"timeout": 600.0, "threads": 400}, "graceful_timeout", "cuts them after 30 s; make it 600"),
        ({"timeout": 600.0, "graceful_timeout": 600.0, "threads": 4}, "threads", "1 × 4 threads"),
        ({"timeout": 0.0, "timeout_extension": 5.0, "threads": 400}, "timeout_extension", "no effect"),
        ({"keep_alive": 5.0}, "keep_alive", "load balancers"),
        ({"write_timeout": 0.0}, "write_timeout", "reads nothing"),
        ({"write_timeout": 60.0}, "write_timeout", "never reached"),
        ({"header_timeout": 0.0}, "header_timeout", "for ever"),
        ({"queue_timeout": 0.0}, "queue_timeout", "for ever"),
        ({"worker_healthcheck_timeout": 1.0}, "worker_healthcheck_timeout", "short"),
        ({"max_threads": 50}, "max_threads", "no effect: threads is 40"),
    ],
)
def test_what_is_hardly_meant_is_a_warning(limits: dict[str, Any], key: str, words: str) -> None:
    warnings = [finding for finding in found(tenant(**limits)) if key in finding.place]
    assert [finding.is_error for finding in warnings] == [False]
    assert words in warnings[0].text
    assert not any(finding.is_error for finding in found(tenant(**limits)))


@pytest.mark.parametrize(
    "limits",
    [
        {"queue_timeout": 100.0},
        {"keep_alive": 0.0},
        {"keep_alive": 61.0},
        {"first_byte_timeout": 30.0, "idle_timeout": 30.0},
        {"timeout": 0.0, "first_byte_timeout": 60.0, "threads": 400},
        {"worker_healthcheck_timeout": 0.0},
        {"timeout": 20.0},
    ],
)
def test_what_makes_sense_is_not_complained_of(limits: dict[str, Any]) -> None:
    keys = {finding.place.rpartition(" ")[2] for finding in found(tenant(**limits))}
    assert not keys & {key for key in limits if key != "timeout"}


def test_all_workers_of_all_tenants_must_fit_into_the_cgroup() -> None:
    web, genai = tenant("web", workers=2, memory_limit=512 * MIB), tenant("genai", memory_limit=GIB, threads="auto")
    (finding,) = found(web, genai, machine=POD)
    assert finding.is_error and finding.place == "jumpstart.toml: [tenants.web] memory_limit"
    assert "2 × 512 MiB + 1 × 1 GiB = 2 GiB for the workers is more than the 1.875 GiB" in finding.text
    assert found(web, machine=POD) == []
    (finding,) = found(web, genai, machine=msgspec.structs.replace(POD, is_limited=False))
    assert not finding.is_error


def test_threads_that_the_kernel_will_refuse_are_named() -> None:
    (finding,) = found(tenant(threads=900), machine=Machine(1 << 40, tasks=500, tasks_source="pids.max"))
    assert "900 are more than pids.max 500 leaves a worker, which is 420" in finding.text


def test_a_limit_that_nobody_set_names_the_default() -> None:
    (finding,) = found(tenant(timeout=40.0, threads=400))
    assert finding.place == "[tenants.web] graceful_timeout (default)"


TIMES = st.sampled_from([0.0, 0.5, 1.0, 30.0, 600.0])
SIZES = st.sampled_from([0, 1, 512, 32 * MIB, 64 * MIB, GIB, 1 << 40])


@given(
    workers=st.integers(1, 1024),
    threads=st.just("auto") | st.integers(1, 10_000),
    memory_limit=SIZES,
    request_memory=SIZES,
    machine=st.builds(Machine, st.none() | st.integers(1, 1 << 42), is_limited=st.booleans(), tasks=st.just(100)),
    times=st.fixed_dictionaries(
        dict.fromkeys(
            (
                *("timeout", "first_byte_timeout", "idle_timeout", "queue_timeout", "write_timeout"),
                *("graceful_timeout", "keep_alive", "header_timeout", "worker_healthcheck_timeout"),
            ),
            TIMES,
        )
    ),
)
def test_whatever_is_configured_can_be_explained(
    workers: int, threads: Any, memory_limit: int, request_memory: int, machine: Machine, times: dict[str, Any]
) -> None:
    each = tenant(workers=workers, threads=threads, memory_limit=memory_limit, request_memory=request_memory, **times)
    for finding in found(each, each, machine=machine):
        assert finding.place and len(finding.text) > 20
    lines = explain(each, machine, workers)
    for key in ENVELOPE:
        assert any(line.split()[:1] == [key] for line in lines)
    assert not {"None", "nan", "inf"} & set(" ".join(lines).split())


# -- the command --

Check = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.chdir(tmp_path)
    for name in ("PORT", "WEB_CONCURRENCY"):
        monkeypatch.delenv(name, raising=False)

    def run_check(*words: str, file: str = "", **environ: str) -> Result:
        if file:
            (tmp_path / "jumpstart.toml").write_text(file)
        return CliRunner().invoke(check, words, env=environ, standalone_mode=False)

    return run_check


TWO = """
[app]
target = "nowhere.at_all:app"
[tenants.web]
bind = "127.0.0.1:8000"
workers = 4
[tenants.genai]
bind = "127.0.0.1:8001"
threads = "auto"
memory_limit = "2GiB"
request_memory = "1.5MiB"
timeout = 600
graceful_timeout = 600
"""


def rows(output: str, key: str) -> list[str]:
    return [" ".join(line.split()[1:]) for line in output.splitlines() if line.split()[:1] == [key]]


def test_every_value_is_shown_with_its_source(run: Check) -> None:
    """Of every tenant; and the app is not imported, for there is none."""
    result = run("--queue", "7", file=TWO, JUMPSTART_KEEP_ALIVE="99")
    assert (result.return_value, result.stderr) == (0, "")
    file = Path("jumpstart.toml").absolute()
    assert rows(result.output, "workers") == [f"4 {file}: [tenants.web] workers", "1 default"]
    assert rows(result.output, "queue") == ["7 --queue"] * 2
    assert rows(result.output, "keep_alive") == ["99 s JUMPSTART_KEEP_ALIVE"] * 2
    assert rows(result.output, "memory_limit")[1] == f"2 GiB {file}: [tenants.genai] memory_limit"
    assert "threads = 1000 = min(max_threads 1000, (2 GiB − 64 MiB) / 1.5 MiB = 1322)" in result.output
    assert "tenant genai: nowhere.at_all:app on 127.0.0.1:8001" in result.output


def test_one_tenant_can_be_picked(run: Check) -> None:
    result = run("--tenant", "genai", file=TWO)
    assert result.return_value == 0
    assert rows(result.output, "timeout") == [f"600 s {Path('jumpstart.toml').absolute()}: [tenants.genai] timeout"]


def test_a_command_line_is_checked_without_a_file(run: Check) -> None:
    result = run("shop:app", "--threads", "auto", "--memory-limit", "1GiB", "-b", "127.0.0.1:9")
    assert result.return_value == 0
    assert rows(result.output, "threads")[0] == "auto --threads"
    assert "tenant web: shop:app on 127.0.0.1:9" in result.output


def test_all_that_is_wrong_in_all_tenants_is_told_at_once_with_exit_code_2(run: Check) -> None:
    file = TWO + "idle_timeout = 900\n[tenants.third]\nmemory_limit = '2x'\n[tenants.fourth]\nthreads = 'many'\n"
    result = run(file=file)
    assert result.return_value == 2
    lines = result.stderr.splitlines()
    assert any("[tenants.genai] idle_timeout: 900 s is never reached" in line for line in lines)
    assert any("[tenants.third] memory_limit: '2x' is not allowed; write a size" in line for line in lines)
    assert any(
        "[tenants.fourth] threads: 'many' is not allowed; write a whole number >= 1 and <= 10000, or auto" in line
        for line in lines
    )
    assert all(line.startswith("error: ") for line in lines)


def test_two_tenants_on_one_address_are_refused(run: Check) -> None:
    result = run(file=TWO.replace("8001", "8000"))
    assert result.return_value == 2
    assert "[tenants.web]" in result.stderr and "[tenants.genai]" in result.stderr and "127.0.0.1:8000" in result.stderr


def test_warnings_alone_are_no_failure(run: Check) -> None:
    result = run("shop:app", "--keep-alive", "5")
    assert result.return_value == 0
    assert result.stderr.startswith("warning: --keep-alive: 5 s is not longer than load balancers")


def test_without_an_app_it_says_so(run: Check) -> None:
    result = run()
    assert result.return_value == 2 and "no app is named" in result.stderr


def test_a_variable_that_is_no_option_is_named(run: Check) -> None:
    result = run("shop:app", JUMPSTART_THREDS="5")
    assert "did you mean JUMPSTART_THREADS?" in result.stderr


def test_serve_refuses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = r"^--idle-timeout: 5 s is never reached: the whole request has 3 s \(--timeout\)"
    with pytest.raises(ConfigError, match=said):
        settings_of_all("shop:app", None, None, {"tenant__timeout": "3", "tenant__idle_timeout": "5"})


def test_the_command_is_listed() -> None:
    assert "check" in CliRunner().invoke(cli, ["--help"]).output


# -- threads and sizes, as they are written --


@pytest.mark.parametrize(("written", "value"), [("auto", "auto"), ("7", 7)])
def test_threads_are_a_number_or_auto_wherever_they_are_written(tmp_path: Path, written: str, value: int | str) -> None:
    def load(command_line: dict[str, Any], environ: dict[str, str]) -> object:
        return load_settings(command_line, environ, cwd=tmp_path).tenant.threads

    assert load({"tenant.threads": written}, {}) == value
    assert load({}, {"JUMPSTART_THREADS": written}) == value
    (tmp_path / "jumpstart.toml").write_text(f"[tenants.web]\nthreads = {value!r}")
    assert load({}, {}) == value


def test_sizes_are_read_wherever_they_are_written(tmp_path: Path) -> None:
    def load(command_line: dict[str, Any], environ: dict[str, str]) -> TenantSettings:
        return load_settings(command_line, environ, cwd=tmp_path).tenant

    assert load({"tenant.memory_limit": "2GiB"}, {}).memory_limit == 2 * GIB
    assert load({}, {"JUMPSTART_REQUEST_MEMORY": "1.5MiB"}).request_memory == MIB * 3 // 2
    (tmp_path / "jumpstart.toml").write_text('[tenants.web]\nmemory_limit = 1073741824\nlimit_request_body = "10MiB"')
    assert (load({}, {}).memory_limit, load({}, {}).limit_request_body) == (GIB, 10 * MIB)
