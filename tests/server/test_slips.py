"""What a newcomer gets wrong, on the command line and in the file, and what he is told: the place and the remedy."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from jumpstart.errors import ConfigError
from jumpstart_server.cli import run
from jumpstart_server.cli.serve import serve
from jumpstart_server.config import load_settings
from jumpstart_server.envelope.explain import Tenant, explain
from jumpstart_server.envelope.sizing import MIB, Machine
from jumpstart_server.exits import ExitCode
from jumpstart_server.problems import GUNICORN_SETTINGS, MOST_ERRORS, texts_of
from jumpstart_server.settings import declared_options

GUNICORN_27 = """
--access-logfile --access-logformat --asgi-disconnect-grace-period --asgi-lifespan --asgi-loop --backlog --bind
--ca-certs --capture-output --casefold-http-method --cert-reqs --certfile --chdir --check-config --ciphers --config
--control-socket --control-socket-mode --daemon --dirty-app --dirty-graceful-timeout --dirty-threads --dirty-timeout
--dirty-workers --disable-redirect-access-to-syslog --do-handshake-on-connect --dogstatsd-tags --enable-backlog-metric
--enable-stdio-inheritance --env --error-logfile --forwarded-allow-ips --forwarder-headers --graceful-timeout --group
--header-map --http-parser --http-protocols --http2-cleartext --http2-initial-window-size
--http2-max-concurrent-streams --http2-max-frame-size --http2-max-header-list-size --initgroups --keep-alive --keyfile
--limit-request-field_size --limit-request-fields --limit-request-line --log-config --log-config-json --log-file
--log-level --log-syslog --log-syslog-facility --log-syslog-prefix --log-syslog-to --logger-class --max-requests
--max-requests-jitter --name --no-control-socket --no-sendfile --paste --paste-global --paster
--permit-obsolete-folding --permit-unconventional-http-method --permit-unconventional-http-version --pid --preload
--print-config --protocol --proxy-allow-from --proxy-allow-ips --proxy-protocol --pythonpath --reload --reload-engine
--reload-extra-file --reuse-port --root-path --spew --ssl-version --statsd-host --statsd-prefix --strip-header-spaces
--suppress-ragged-eofs --threads --timeout --umask --user --uwsgi-allow-from --websocket-max-message-size
--worker-class --worker-connections --worker-tmp-dir --workers -D -R -b -c -e -g -k -m -n -p -t -u -w
"""
UVICORN_0_54 = """
--access-log --app-dir --backlog --date-header --env-file --factory --fd --forwarded-allow-ips
--h11-max-incomplete-event-size --header --host --http --http2 --interface --lifespan --limit-concurrency
--limit-max-requests --limit-max-requests-jitter --log-config --log-level --loop --no-access-log --no-date-header
--no-proxy-headers --no-server-header --no-use-colors --port --proxy-headers --reload --reload-delay --reload-dir
--reload-exclude --reload-include --reset-contextvars --root-path --server-header --ssl-ca-certs --ssl-cert-reqs
--ssl-certfile --ssl-ciphers --ssl-keyfile --ssl-keyfile-password --ssl-version --timeout-graceful-shutdown
--timeout-keep-alive --timeout-worker-healthcheck --uds --use-colors --version --workers --ws --ws-max-queue
--ws-max-size --ws-per-message-deflate --ws-ping-interval --ws-ping-timeout
"""


class Shell:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._monkeypatch, self._capsys, self._folder = monkeypatch, capsys, folder

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["jumpstart", *words])
        code = run(time.monotonic(), None)
        out, err = self._capsys.readouterr()
        return code, out, err

    def errors(self, *words: str) -> list[str]:
        """What a command says that is refused; all of it begins alike."""
        code, _, err = self(*words)
        assert code == ExitCode.USAGE
        said = [line for line in err.splitlines() if line and not line.startswith(("Usage: ", "Try '"))]
        found = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        assert len(found) == len([line for line in said if not line.startswith(("note: ", "warning: "))])
        return found

    def error(self, *words: str) -> str:
        (found,) = self.errors(*words)
        return found

    def file(self, text: str) -> str:
        path = self._folder / "jumpstart.toml"
        path.write_text(text)
        return str(path)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(monkeypatch, capsys, tmp_path)


# -- other servers' options and files --


def test_every_option_of_gunicorn_and_uvicorn_is_accepted_or_answered_with_advice(shell: Shell) -> None:
    ours = {flag for each in serve.params for flag in (*each.opts, *each.secondary_opts)}
    for flag in sorted({*GUNICORN_27.split(), *UVICORN_0_54.split()} - ours - {"--check-config"}):
        text = shell.error("serve", "shop:app", flag, "1")
        assert text.startswith(f"{flag}: ") and len(text) > len(flag) + 10, text
    assert {"--bind", "-k", "--ws-max-size", "--preload"} <= ours  # what is left out above is known


def test_check_config_is_accepted(shell: Shell) -> None:
    for command in ("serve", "check"):
        code, out, _ = shell(command, "--check-config", "shop:app")
        assert code == 0 and "tenant web: shop:app" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ws-max-size", "5"), "--ws-max-size 5: messages may have 16 MiB"),
        (("--ws-ping-interval", "5"), "--ws-ping-interval 5: 20 s: this cannot be set in this version"),
        (("--control-socket", "x"), "--control-socket: write --admin unix:PATH"),
        (("--proxy-allow-ips", "*"), "--proxy-allow-ips: write --proxy-allow-from"),
        (("--http2",), "--http2: HTTP/1.1 is spoken here"),
    ],
)
def test_advice_says_what_to_do(shell: Shell, words: tuple[str, ...], said: str) -> None:
    assert shell.error("serve", "shop:app", *words).startswith(said)


def test_gunicorns_configuration_file_is_answered_with_the_keys_here(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "gunicorn.conf.py").write_text("workers = 2\n")
    for name in ("gunicorn.conf.py", "none.py", "python:shop.conf"):
        text = shell.error("serve", "shop:app", "-c", name)
        assert text.startswith(f"-c {name}: gunicorn's configuration files, which are Python, are not read; write jump")
        assert "accesslog is access_logfile" in text and "docs/settings.md" in text


def test_gunicorns_settings_are_keys_that_there_are() -> None:
    for name, text in GUNICORN_SETTINGS.items():
        key, _, table = text.partition(" of ")
        section = table.strip("[]") or "tenant"
        assert key in {option.key for option in declared_options() if option.section == section}, name


@pytest.mark.parametrize(
    ("written", "level"),
    [
        *(("INFO", "info"), ("Debug", "debug"), ("warn", "warning"), ("WARNING", "warning"), ("trace", "debug")),
        *(("fatal", "critical"), ("FATAL", "critical"), ("error", "error")),
    ],
)
def test_levels_are_read_as_other_servers_read_them(tmp_path: Path, written: str, level: str) -> None:
    assert load_settings({"server.log_level": written}, {}, cwd=tmp_path).server.log_level == level
    (tmp_path / "jumpstart.toml").write_text(f'[server]\nlog_level = "{written}"\n')
    assert load_settings({}, {}, cwd=tmp_path).server.log_level == level


# -- commands --


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("shop.web:app", "--workers", "2"), "jumpstart serve shop.web:app --workers 2"),
        (("shop.web",), "jumpstart serve shop.web"),
        (("srve", "shop:app"), "jumpstart serve shop:app"),
        (("run", "shop:app"), "jumpstart serve shop:app"),
        (("Status",), "jumpstart status"),
        (("export", "k8s", "--image", "x"), "jumpstart export kubernetes --image x"),
        (("export", "ngnix"), "jumpstart export nginx"),
        (("profile", "shwo", "x"), "jumpstart profile show x"),
        (("keys", "trsut"), "jumpstart keys trust"),
    ],
)
def test_a_command_that_there_is_not_is_answered_with_the_one_that_was_meant(
    shell: Shell, words: tuple[str, ...], meant: str
) -> None:
    assert re.search(f"; did you mean .*{re.escape(meant.removeprefix('jumpstart'))}\\?$", shell.error(*words))


def test_a_command_like_none_is_answered_with_all(shell: Shell) -> None:
    assert shell.error("zzzzz").startswith("there is no command 'zzzzz'; there are serve, build, profile")


def test_an_option_before_the_command_is_told_its_place(shell: Shell) -> None:
    assert (
        shell.error("-w", "2", "serve", "shop:app") == "-w stands before the command: write jumpstart serve TARGET -w"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "kubernetes"), "--image is missing: .* for example: jumpstart export kubernetes --image "),
        (("build", "shop:app"), "-o is missing: .* for example: jumpstart build shop.web:app -o shop.jumpstart"),
        (("profile", "capture"), "-o or --output FILE is missing: The profile to write"),
    ],
)
def test_an_option_that_is_missing_is_explained(shell: Shell, words: tuple[str, ...], said: str) -> None:
    assert re.match(said, shell.error(*words))


# -- the spelling that was typed --


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--timeout", "30s"), "--timeout"),
        (("-t", "30s"), "-t"),
        (("-t30s",), "-t"),
        (("--timeout-keep-alive=5x",), "--timeout-keep-alive"),
        (("--keep-alive", "5x"), "--keep-alive"),
        (("--worker-connections", "x"), "--worker-connections"),
    ],
)
def test_an_error_names_the_option_as_it_was_typed(shell: Shell, words: tuple[str, ...], place: str) -> None:
    assert shell.error("serve", "shop:app", *words).startswith(f"{place}: ")
    _, _, err = shell("check", "shop:app", *words)
    assert err.startswith(f"error: {place}: ")


def test_an_address_that_is_a_port_is_told_so_before_anything_starts(shell: Shell) -> None:
    assert shell.error("serve", "shop:app", "-b", "18010") == (
        "-b 18010: 18010 is read as a host; write :18010, or HOST:18010"
    )
    file = shell.file('[tenants.web]\nbind = "127.0.0.1:80000"\n')
    assert shell.error("check", "shop:app") == f"{file}: [tenants.web] bind 127.0.0.1:80000: a port is at most 65535"


# -- the file --


def test_all_that_is_wrong_in_a_file_is_told_at_once(shell: Shell) -> None:
    file = shell.file(
        'workers = 2\n[app]\nworkers = 2\n[tenant.shop]\nport = 1\n[tenants.web]\ntimeout = "30s"\nkeepalive = 5\n'
        'threads = 0\n[server]\nlog_level = "loud"\nrelaod_dri = "x"\n'
    )
    expected = [
        "'workers' stands above all tables; it belongs under [tenants.web]",
        "there is no table 'tenant'; did you mean [tenants.shop]?",
        "[tenants.web] has no key 'keepalive'; gunicorn's keepalive is keep_alive",
        "[app] has no key 'workers'; it belongs under [tenants.web]",
        "[server] has no key 'relaod_dri'; did you mean 'reload_dir'?",
        "[tenants.web] threads: 0 is not allowed; write a whole number >= 1 and <= 10000, or auto",
        "[tenants.web] timeout: '30s' is not allowed; write a number >= 0 (s)",
        "[server] log_level: 'loud' is not allowed; write one of critical, error, warning, info, debug",
    ]
    for command in ("serve", "check"):
        assert shell.errors(command, "shop:app") == [f"{file}: {text}" for text in expected]


def test_what_is_wrong_in_several_tenants_is_told_at_once_and_each_thing_once(shell: Shell) -> None:
    file = shell.file("[profile]\nmax_age = 0\n[tenants.a]\nport = -1\n[tenants.b]\nworkers = 0\n")
    errors = shell.errors("serve")
    assert [text.partition(": ")[2].partition(":")[0] for text in errors] == [
        *("[tenants.a] port", "[profile] max_age", "[tenants.b] workers")
    ]
    assert all(text.startswith(file) for text in errors)


def test_more_errors_than_a_screen_takes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "jumpstart.toml").write_text("[app]\n" + "".join(f"zzz{number} = 1\n" for number in range(14)))
    with pytest.raises(ConfigError) as caught:
        load_settings({}, {}, cwd=tmp_path)
    assert len(texts_of(caught.value)) == MOST_ERRORS + 1
    assert texts_of(caught.value)[-1] == "and 4 more"


def test_values_that_do_not_go_together_are_named_where_they_stand(shell: Shell, tmp_path: Path) -> None:
    file = shell.file(
        '[tenants.web]\nuds = "/tmp/x"\nport = 80\nssl_keyfile = "none.pem"\nroot_path = "shop"\n'
        '[server]\ncapture_output = true\nadmin = "x:y"\n[profile]\nlru_cache = "shop"\n'
    )
    assert shell.errors("serve", "shop:app") == [
        f"{file}: [tenants.web] port and uds say the address twice; keep one",
        f"{file}: [tenants.web] ssl_keyfile is given without [tenants.web] ssl_certfile",
        f"{file}: [tenants.web] root_path shop: write it as in a URL, with a slash at its start: /shop",
        f"{file}: [tenants.web] ssl_keyfile {tmp_path}/none.pem: no such file",
        f"{file}: [server] capture_output: name a file with [server] error_logfile, or there is nothing to capture it "
        "into",
        f"{file}: [server] admin x:y: write HOST:PORT, [IPV6]:PORT, unix:PATH or fd://NUMBER",
        f"{file}: [profile] lru_cache shop: write MODULE:NAME, wildcards allowed: shop.catalog:*",
    ]
    file = shell.file(f'[tenants.web]\nssl_certfile = "{__file__}"\n')
    texts = shell.errors("serve", "shop:app", "--proxy-protocol", "v2")
    assert texts[0].startswith(f"--proxy-protocol and {file}: [tenants.web] ssl_certfile: with proxy_protocol v2 the ")
    assert texts[1].startswith(f"{file}: [tenants.web] ssl_certfile {__file__}: cannot be used: ")
    assert texts[1].endswith("name its key with [tenants.web] ssl_keyfile")
    file = shell.file('[server]\nuser = "no-such-user"\n')
    assert shell.error("serve", "shop:app") == f"{file}: [server] user no-such-user: there is no such user"


def test_a_socket_that_systemd_did_not_pass_is_named_where_it_is_asked_for(shell: Shell) -> None:
    file = shell.file('[tenants.web]\nbind = "fd://web"\n')
    text = shell.error("serve", "shop:app")
    assert text.startswith(f"{file}: [tenants.web] bind fd://web: the service manager passed no socket of this name")


# -- check --


def test_check_says_one_thing_about_memory() -> None:
    """A share of the RAM is reckoned with and limits nobody; a share of a cgroup's limit does."""
    settings = load_settings({"app.target": "shop:app"}, {}, cwd=Path("/"))
    tenant = Tenant(settings, {}, ("127.0.0.1:8000",))

    def lines(machine: Machine) -> tuple[str, str]:
        text = explain(tenant, machine, 1)
        row = next(line for line in text if line.split()[:1] == ["memory_limit"])
        return " ".join(row.split()), "\n".join(text)

    row, text = lines(Machine(4096 * MIB))
    assert row == 'memory_limit 0: no limit; threads "auto" reckons with its share of the RAM, 3.875 GiB default'
    assert "A worker is not replaced for its memory, whatever it takes" in text
    assert 'Only threads = "auto" reckons with its share of the RAM, (the RAM 4 GiB − 128 MiB reserve) = 3.875' in text
    row, text = lines(Machine(2048 * MIB, "the cgroup's limit", is_limited=True))
    assert row == "memory_limit 0: its share of the cgroup's limit, 1.875 GiB default"
    assert "workers above their share are replaced" in text and "not replaced" not in text
    row, text = lines(Machine(None))
    assert row == "memory_limit 0: no limit default"
    assert "is not replaced for its memory" in text and "RAM" not in text


TWO = '[app]\ntarget = "shop:app"\n[tenants.a]\nport = 8001\n{a}\n[tenants.b]\nport = 8002\n{b}\n'


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ('routes = ["/x"]', 'routes = ["/x/"]', "[tenants.a] and [tenants.b] routes: both have /x"),
        ('routes = ["/"]', "", "[tenants.b] has no routes; write which paths are theirs"),
        ('routes = ["x"]', 'routes = ["/y"]', "[tenants.a] routes: 'x' is not allowed"),
    ],
)
def test_check_warns_of_routes_that_export_refuses(shell: Shell, a: str, b: str, said: str) -> None:
    shell.file(TWO.format(a=a, b=b))
    code, _, err = shell("check")
    assert code == 0 and err.startswith(f"warning: jumpstart export: {said}")
    assert said in shell.error("export", "nginx")


def test_check_says_that_tenants_without_routes_cannot_be_exported(shell: Shell) -> None:
    shell.file(TWO.format(a="", b=""))
    code, out, err = shell("check")
    assert (code, err) == (0, "")
    assert "No tenant has routes, which jumpstart export needs" in out
    shell.file(TWO.format(a='routes = ["/x"]', b='routes = ["/y"]'))
    code, out, err = shell("check")
    assert (code, err) == (0, "") and "No tenant has routes" not in out


def test_check_misses_files_and_folders(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text("x = 1")
    (tmp_path / "here").mkdir()
    words = ("check", "shop:app", "--app-dir", "here")
    for option in ("--app-dir", "--chdir"):
        assert shell.error("check", "shop:app", option, "/nonexist").startswith(f"{option} /nonexist: no such folder")
    for option in ("--ssl-certfile", "--warmup"):
        assert shell.error(*words, option, "none") == f"{option} {tmp_path}/none: no such file"
    for option in ("--uds", "--access-logfile", "--error-logfile", "--pid"):
        (text,) = shell.errors(*words, option, "none/x")
        assert text == f"{option} {tmp_path}/none/x: there is no folder {tmp_path}/none; make it"
    assert shell.errors(*words, "--warmup", "w.toml")[0].startswith("--warmup: ")
    code, _, err = shell(*words, "--profile", "none", "--reload-dir", "none")
    assert code == 0
    assert err.splitlines() == [
        f"warning: --reload-dir {tmp_path}/none: no such folder",
        f"warning: --profile {tmp_path}/none: no such file or folder; it boots without one",
    ]
    assert "it does not start without one" in shell.error(*words, "--profile", "none", "--require-warm")
    assert shell(*words, "--profile", "https://store.example/x", "--pid", "x")[0] == 0


def test_the_default_attribute_is_documented(shell: Shell) -> None:
    _, text, _ = shell("serve", "--help")
    assert "shop.web or mysite.wsgi, means its attribute app, or else application" in " ".join(text.split())
    (target,) = [option for option in declared_options() if (option.section, option.key) == ("app", "target")]
    assert "app, or else application" in target.help
