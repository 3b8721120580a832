"""One reading of command line, environment and file: who wins, and what an error tells the operator."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.cli import settings_of
from jumpstart_server.config import environment, load_settings, paths_of_host, unknown_variables
from jumpstart_server.settings import Option, Settings, allowed_values, declared_options

OPTIONS = {f"{option.section}.{option.key}": option for option in declared_options()}
CHECKED_TOGETHER = (
    *("ssl_certfile", "ssl_keyfile", "warmup", "lru_cache", "root_path", "admin", "chdir", "disable"),
    *("log_config", "capture_output", "uds_permissions", "user", "group"),
)
"""Their last check comes when all sources are merged, and names the flag."""


class Desk:
    """A folder to type commands in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, text: str, name: str = "jumpstart.toml") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    def load(
        self,
        command_line: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        file: str | None = None,
        tenant: str | None = None,
    ) -> Settings:
        return load_settings(command_line or {}, environ or {}, config_file=file, tenant=tenant, cwd=self.folder)

    def refused(self, *args: Any, **kwargs: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            self.load(*args, **kwargs)
        text = str(caught.value)
        assert text and "\n" not in text
        return text


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# -- precedence --


def test_with_nothing_given_the_defaults_hold(desk: Desk) -> None:
    found = desk.load()
    assert (found.tenant_name, found.tenant.workers, found.tenant.bind, found.target) == ("web", 1, (), "")
    assert found.app.app_dir == str(desk.folder)


def test_the_command_line_beats_the_environment_beats_the_file_beats_other_servers_variables(desk: Desk) -> None:
    others = {"WEB_CONCURRENCY": "5"}
    assert desk.load(environ=others).tenant.workers == 5
    desk.file("[tenants.web]\nworkers = 4")
    assert desk.load(environ=others).tenant.workers == 4
    ours = {**others, "JUMPSTART_WORKERS": "3"}
    assert desk.load(environ=ours).tenant.workers == 3
    assert desk.load({"tenant.workers": "2"}, ours).tenant.workers == 2


def test_a_variable_of_another_server_that_is_empty_counts_as_unset(desk: Desk) -> None:
    assert desk.load(environ={"WEB_CONCURRENCY": "", "PORT": ""}).tenant.workers == 1


def test_a_flag_that_is_switched_off_beats_a_file_that_switches_it_on(desk: Desk) -> None:
    desk.file("[profile]\nrequire_warm = true\nwarm_start = true")
    found = desk.load({"profile.require_warm": False}, {"JUMPSTART_WARM_START": "false"})
    assert (found.profile.require_warm, found.profile.warm_start) == (False, False)


def test_a_list_is_replaced_and_not_extended(desk: Desk) -> None:
    desk.file('[profile]\nlru_cache = ["file:*"]')
    assert desk.load().profile.lru_cache == ("file:*",)
    assert desk.load(environ={"JUMPSTART_LRU_CACHE": "env:*"}).profile.lru_cache == ("env:*",)
    assert desk.load({"profile.lru_cache": ("cli:*",)}, {"JUMPSTART_LRU_CACHE": "env:*"}).profile.lru_cache == (
        "cli:*",
    )


def test_an_option_that_click_saw_no_value_for_is_not_given(desk: Desk) -> None:
    desk.file('[tenants.web]\nbind = "127.0.0.1:1"\nworkers = 2')
    found = desk.load({"tenant.bind": (), "tenant.workers": None})
    assert (found.tenant.bind, found.tenant.workers) == (("127.0.0.1:1",), 2)


# -- addresses --


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"tenant.bind": ("127.0.0.1:9",)}, "bind"),
        ({"tenant.port": "9"}, "port"),
        ({"tenant.host": "127.0.0.1"}, "host"),
        ({"tenant.uds": "x.sock"}, "uds"),
        ({"tenant.fd": "3"}, "fd"),
    ],
)
def test_an_address_on_the_command_line_replaces_one_of_the_file(desk: Desk, given: dict[str, Any], key: str) -> None:
    desk.file('[tenants.web]\nbind = "127.0.0.1:8000"')
    tenant = desk.load(given, {"PORT": "5000"}).tenant
    assert getattr(tenant, key) not in ("", (), None)
    assert (tenant.bind == ()) is (key != "bind")


def test_port_as_platforms_set_it_means_all_addresses(desk: Desk) -> None:
    tenant = desk.load(environ={"PORT": "5000"}).tenant
    assert (tenant.host, tenant.port) == ("0.0.0.0", 5000)
    tenant = desk.load(environ={"JUMPSTART_PORT": "5000"}).tenant
    assert (tenant.host, tenant.port) == ("", 5000)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('bind = "a:1"\nport = 2', ["bind", "port"]),
        ('host = "a"\nuds = "b"', ["host", "uds"]),
        ('fd = 3\nuds = "b"', ["uds", "fd"]),
        ('fd = 0\nbind = "b"', ["bind", "fd"]),
    ],
)
def test_two_addresses_from_one_source_conflict(desk: Desk, lines: str, words: list[str]) -> None:
    path = desk.file(f"[tenants.web]\n{lines}")
    assert desk.refused() == f"{path}: [tenants.web] {' and '.join(words)} say the address twice; keep one"


# -- files --


def test_paths_in_a_file_are_relative_to_it_and_others_to_the_current_folder(desk: Desk) -> None:
    desk.file('[app]\napp_dir = "src"\n[tenants.web]\nprofile = "p.jumpstart"\nuds = "/run/x.sock"', "etc/j.toml")
    for folder in ("etc/src", "lib"):
        (desk.folder / folder).mkdir()
    found = desk.load(file="etc/j.toml")
    assert found.app.app_dir == str(desk.folder / "etc" / "src")
    assert found.tenant.profile == str(desk.folder / "etc" / "p.jumpstart")
    assert found.tenant.uds == "/run/x.sock"
    found = desk.load({"tenant.profile": "p.jumpstart"}, {"JUMPSTART_APP_DIR": "lib"}, file="etc/j.toml")
    assert found.app.app_dir == str(desk.folder / "lib")
    assert found.tenant.profile == str(desk.folder / "p.jumpstart")


def test_home_folders_are_meant_by_a_tilde(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert desk.load({"tenant.profile": "~/p.jumpstart"}).tenant.profile == "/home/me/p.jumpstart"
    assert "--profile" in desk.refused({"tenant.profile": "~no-such-user-here/p"})


def test_pyproject_is_read_where_there_is_no_jumpstart_toml(desk: Desk) -> None:
    desk.file('[project]\nname = "x"\n[tool.jumpstart.app]\ntarget = "a:b"', "pyproject.toml")
    assert desk.load().target == "a:b"
    desk.file('[app]\ntarget = "c:d"')
    assert desk.load().target == "c:d"


def test_a_pyproject_that_is_not_for_us_is_left_alone(desk: Desk) -> None:
    desk.file('[tool.ruff]\nx = "y"', "pyproject.toml")
    assert desk.load().target == ""
    desk.file("this is no TOML", "pyproject.toml")
    assert desk.load().target == ""


def test_a_pyproject_that_was_named_must_be_for_us(desk: Desk) -> None:
    path = desk.file("[tool.ruff]", "pyproject.toml")
    assert desk.refused(file="pyproject.toml") == f"{path}: has no [tool.jumpstart]"
    desk.file("this is no TOML", "pyproject.toml")
    assert f"{path}: not TOML" in desk.refused(file="pyproject.toml")


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\njumpstart = 3", "[tool]\njumpstart = []"])
def test_a_pyproject_of_another_shape_is_no_crash(desk: Desk, text: str) -> None:
    path = desk.file(text, "pyproject.toml")
    assert str(path) in desk.refused(file="pyproject.toml")


def test_a_file_that_is_missing_or_broken_or_unreadable_is_named(desk: Desk) -> None:
    assert desk.refused(file="no.toml") == "-c no.toml: no such file"
    path = desk.file("[app\n")
    assert f"{path}: not TOML" in desk.refused()
    path.write_bytes(b"\xff\xfe")
    assert f"{path}: cannot be read" in desk.refused()
    (desk.folder / "folder").mkdir()
    assert "folder: cannot be read" in desk.refused(file="folder")


# -- tenants --

TWO = "[app]\ntarget = 'a:b'\n[tenants.web]\nthreads = 5\n[tenants.genai]\ntarget = 'c:d'\nthreads = 9"


def test_the_only_tenant_need_not_be_named(desk: Desk) -> None:
    desk.file("[tenants.genai]\nthreads = 9")
    found = desk.load()
    assert (found.tenant_name, found.tenant.threads) == ("genai", 9)


def test_one_of_several_tenants_must_be_named(desk: Desk) -> None:
    path = desk.file(TWO)
    assert desk.refused() == f"{path}: has 2 tenants (web, genai); name one with --tenant"
    found = desk.load(tenant="genai")
    assert (found.tenant_name, found.tenant.threads, found.target) == ("genai", 9, "c:d")
    assert desk.load(tenant="web").target == "a:b"


def test_a_tenant_that_is_not_there_is_an_error_that_lists_them(desk: Desk) -> None:
    path = desk.file(TWO)
    assert desk.refused(tenant="ml") == f"--tenant ml: {path} has web, genai"
    path.unlink()
    assert "--tenant ml: there is no jumpstart.toml here" in desk.refused(tenant="ml")


def test_tenants_that_are_no_tables_are_an_error(desk: Desk) -> None:
    for text in ("tenants = 3", "[tenants]\nweb = 3", "tenants = [1]"):
        path = desk.file(text)
        assert f"{path}: tenants: write tables" in desk.refused()


def test_the_app_on_the_command_line_is_served_whichever_tenant_is_named(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.file(TWO)
    monkeypatch.chdir(desk.folder)
    monkeypatch.delenv("JUMPSTART_TARGET", raising=False)
    assert settings_of("e:f", None, "genai", {"tenant__workers": "2"}).target == "e:f"
    assert settings_of("e:f", None, "web", {}).target == "e:f"
    assert settings_of(None, None, "genai", {"tenant__workers": "2"}).tenant.workers == 2
    monkeypatch.setenv("JUMPSTART_TARGET", "g:h")
    assert settings_of(None, None, "genai", {}).target == "g:h"
    assert settings_of("e:f", None, "genai", {}).target == "e:f"


# -- what is wrong --


def test_an_unknown_key_is_named_with_what_was_meant(desk: Desk) -> None:
    path = desk.file("[tenants.web]\nworker = 3")
    assert desk.refused() == f"{path}: [tenants.web] has no key 'worker'; did you mean 'workers'?"
    desk.file("[server]\nzzz = 3")
    assert "[server] has no key 'zzz'; allowed are admin, log_level" in desk.refused()


def test_an_unknown_table_is_named_with_those_that_there_are(desk: Desk) -> None:
    for text, words in (
        ("[apps]\ntarget = 'a:b'", "there is no table 'apps'; did you mean [app]?"),
        ("[web]\nworkers = 3", "there is no table 'web'; did you mean [tenants.web]?"),
        ("[zzzzz]", "there is no table 'zzzzz'; allowed are app, profile, server, tenants"),
        ("zzzzz = 3", "there is no table or key 'zzzzz'; allowed are the tables app, profile, server, tenants"),
        ("workers = 3", "'workers' stands above all tables; it belongs under [tenants.web]"),
        ("worker = 3", "there is no key 'worker'; did you mean 'workers'? It belongs under [tenants.web]"),
        ("accesslog = '-'", "'accesslog' stands above all tables; gunicorn's accesslog is access_logfile"),
        ("[tenant]\nworkers = 3", "there is no table 'tenant'; did you mean [tenants.web]?"),
        ("[tenant.shop]\nworkers = 3", "there is no table 'tenant'; did you mean [tenants.shop]?"),
    ):
        path = desk.file(text)
        assert desk.refused() == f"{path}: {words}"


def test_a_section_that_is_no_table_is_an_error(desk: Desk) -> None:
    path = desk.file("app = 'a:b'")
    assert desk.refused() == f"{path}: app must be a table: [app]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.web]\nworkers = 0", ["[tenants.web] workers", "0 is not allowed", ">= 1"]),
        ("[tenants.web]\nport = 70000", ["[tenants.web] port", "70000", "<= 65535"]),
        ("[tenants.web]\nkeep_alive = -1", ["[tenants.web] keep_alive", "(s)", ">= 0"]),
        ("[tenants.web]\nworkers = '3'", ["[tenants.web] workers", "'3'", "write a whole number >= 1 and <= 1024"]),
        ("[tenants.web]\nthreads = true", ["[tenants.web] threads", "True"]),
        ("[tenants.web]\nfork = 'maybe'", ["[tenants.web] fork", "'maybe'", "one of auto, never"]),
        ("[tenants.web]\nbind = [1]", ["[tenants.web] bind", "write text, or a list of texts"]),
        ("[profile]\nmax_age = 0", ["[profile] max_age", "(s)", "> 0"]),
        ("[profile]\nwarm_start = 'yes'", ["[profile] warm_start", "write on or off (true or false)"]),
        ("[app]\ntarget = ''", ["[app] target", "empty"]),
        ("[tenants.web]\nkeep_alive = inf", ["[tenants.web] keep_alive", "(s)", "inf"]),
        ("[tenants.web]\nkeep_alive = nan", ["[tenants.web] keep_alive", "(s)", "nan"]),
    ],
)
def test_a_wrong_value_names_file_key_and_what_is_allowed(desk: Desk, text: str, words: list[str]) -> None:
    path = desk.file(text)
    message = desk.refused()
    for word in (str(path), *words):
        assert word in message


@pytest.mark.parametrize(
    ("given", "environ", "words"),
    [
        ({"tenant.workers": "many"}, {}, ["--workers", "'many'"]),
        ({"tenant.keep_alive": "inf"}, {}, ["--keep-alive", "'inf'", "(s)"]),
        ({"tenant.port": "null"}, {}, ["--port", "'null'", "write a whole number >= 0 and <= 65535"]),
        ({}, {"JUMPSTART_WORKERS": "0"}, ["JUMPSTART_WORKERS", "'0'", ">= 1"]),
        ({}, {"PORT": "http"}, ["PORT", "'http'"]),
        ({}, {"JUMPSTART_WARM_START": "perhaps"}, ["JUMPSTART_WARM_START", "'perhaps'"]),
        ({}, {"JUMPSTART_LOG_LEVEL": "loud"}, ["JUMPSTART_LOG_LEVEL", "one of critical, error"]),
        ({"tenant.proxy_protocol": "v3"}, {}, ["--proxy-protocol", "'v3'", "one of off, v1, v2, auto"]),
        ({"tenant.forwarded_allow_ips": "::1,nginx"}, {}, ["--forwarded-allow-ips: 'nginx' is not allowed", "unix:"]),
        ({}, {"FORWARDED_ALLOW_IPS": "10.0.0.1/8"}, ["FORWARDED_ALLOW_IPS: '10.0.0.1/8'", "write 10.0.0.0/8"]),
        ({"tenant.proxy_allow_from": "a"}, {}, ["--proxy-allow-from: 'a' is not allowed"]),
        ({"tenant.uds_permissions": "rw"}, {}, ["--uds-permissions: 'rw'", "octal"]),
        ({"tenant.umask": "18"}, {}, ["--umask: '18'", "octal"]),
    ],
)
def test_a_wrong_text_names_where_it_came_from(
    desk: Desk, given: dict[str, Any], environ: dict[str, str], words: list[str]
) -> None:
    message = desk.refused(given, environ)
    for word in words:
        assert word in message


def test_text_becomes_numbers_and_flags_only_where_everything_is_text(desk: Desk) -> None:
    environ = {"JUMPSTART_WORKERS": "3", "JUMPSTART_KEEP_ALIVE": "1.5", "JUMPSTART_REPLAY": "0", "JUMPSTART_FD": "7"}
    tenant = desk.load(environ=environ).tenant
    assert (tenant.workers, tenant.keep_alive, tenant.replay, tenant.fd) == (3, 1.5, False, 7)


def test_a_list_in_the_environment_is_separated_by_commas(desk: Desk) -> None:
    environ = {"JUMPSTART_BIND": "127.0.0.1:1, unix:/x ,", "JUMPSTART_DISABLE_RECORDER": ""}
    found = desk.load(environ=environ)
    assert found.tenant.bind == ("127.0.0.1:1", "unix:/x")
    assert found.profile.disable == ()


def test_a_list_of_one_may_be_written_without_brackets(desk: Desk) -> None:
    desk.file('[tenants.web]\nbind = "127.0.0.1:1"')
    assert desk.load().tenant.bind == ("127.0.0.1:1",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tenant.ssl_keyfile": __file__}, "--ssl-keyfile is given without --ssl-certfile"),
        ({"tenant.ssl_certfile": "none.pem"}, "--ssl-certfile"),
        ({"tenant.warmup": "none.toml"}, "--warmup"),
        ({"profile.lru_cache": ("shop",)}, "--lru-cache shop: write MODULE:NAME"),
        ({"tenant.root_path": "shop"}, "--root-path shop: "),
        ({"tenant.root_path": "/shöp"}, "--root-path /shöp: "),
    ],
)
def test_combinations_that_cannot_work_are_refused(desk: Desk, given: dict[str, Any], words: str) -> None:
    assert words in desk.refused(given)


def test_a_slash_at_the_end_of_the_root_path_is_no_part_of_it(desk: Desk) -> None:
    assert desk.load({"tenant.root_path": "/shop/"}).tenant.root_path == "/shop"
    assert desk.load({"tenant.root_path": "/"}).tenant.root_path == ""


def test_no_error_speaks_in_types(desk: Desk) -> None:
    for option in OPTIONS.values():
        words = allowed_values(option)
        assert not {"int", "float", "bool", "str", "null"} & set(re.split(r"\W+", words)), words
        assert not {"|", "`"} & set(words), words
        assert option.type is str or words != "text"
    assert allowed_values(OPTIONS["tenant.keep_alive"]) == "a number >= 0"


# -- folders --


def test_chdir_is_an_option_of_its_own_and_the_apps_folder_by_default(desk: Desk) -> None:
    (desk.folder / "site").mkdir()
    found = desk.load({"app.chdir": "site"})
    assert (found.app.chdir, found.app.app_dir) == (str(desk.folder / "site"),) * 2
    (desk.folder / "src").mkdir()
    found = desk.load({"app.chdir": "site", "app.app_dir": "src"})
    assert found.app.app_dir == str(desk.folder / "src")
    assert (desk.load().app.chdir, desk.load().app.app_dir) == ("", str(desk.folder))


def test_a_folder_to_change_to_must_be_there(desk: Desk) -> None:
    assert "--chdir" in desk.refused({"app.chdir": "none"})
    desk.file("", "file")
    assert "--chdir" in desk.refused({"app.chdir": "file"})


# -- slips of the hand --


def test_a_variable_that_is_no_option_is_named_with_what_was_meant() -> None:
    assert unknown_variables({"JUMPSTART_HOME": "/x", "JUMPSTART_WORKERS": "2", "WORKER": "2"}) == []
    (line,) = unknown_variables({"JUMPSTART_WORKER": "2"})
    assert line == "JUMPSTART_WORKER is set, and no option is called so; did you mean JUMPSTART_WORKERS?"
    (line,) = unknown_variables({"JUMPSTART_ZZZZZZZZZZ": "2"})
    assert "did you mean" not in line
    assert all(unknown_variables({option.env: "1"}) == [] for option in OPTIONS.values() if option.flags)


def test_a_recorder_that_nobody_knows_is_an_error_that_lists_those_that_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = desk.refused({"profile.disable": ("regexp",)})
    assert "--disable-recorder regexp: unknown; did you mean 'regex'?" in text
    assert "bytecode, cached, config, corpus, django" in text
    assert desk.load({"profile.disable": ("regex", "jinja-bytecode", "corpus")}).profile.disable[0] == "regex"


def test_plug_ins_may_call_their_recorders_as_they_like(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry_point = importlib.metadata.EntryPoint("good", "good:Good", "jumpstart.recorders")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry_point])
    assert desk.load({"profile.disable": ("good",)}).profile.disable == ("good",)
    assert caplog.text == ""
    desk.load({"profile.disable": ("its-own-name",)})
    assert "--disable-recorder its-own-name: unknown" in caplog.text


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("fl_app.py", "fl_app:app"),
        ("fl_app.py:site", "fl_app:site"),
        ("src/fl_app.py", "fl_app:app --app-dir src"),
    ],
)
def test_a_file_as_the_app_is_answered_with_the_module(target: str, meant: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        settings_of(target, None, None, {})
    assert caught.value.message.endswith(f": {meant}")


# -- the host --


def test_the_hosts_folders_follow_the_environment(desk: Desk) -> None:
    found = desk.load(environ={"JUMPSTART_HOME": "/srv/j"})
    assert (found.home_cache, found.home_state, found.home_config) == ("/srv/j/cache", "/srv/j/state", "/srv/j/config")
    assert paths_of_host({"JUMPSTART_HOME": "/srv/j"}).cache == Path("/srv/j/cache")


def test_a_user_without_a_home_boots_all_the_same(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under an arbitrary user id: no $HOME, and no entry in the password file."""
    import pwd

    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert desk.load(environ={"JUMPSTART_HOME": "/srv/j"}).home_cache == "/srv/j/cache"
    found = desk.load()
    for folder in (found.home_cache, found.home_state, found.home_config):
        assert Path(folder).is_absolute() and str(os.geteuid()) in folder


def test_the_environment_is_a_copy() -> None:
    copy = environment()
    copy["JUMPSTART_TEST_ONLY"] = "1"
    assert "JUMPSTART_TEST_ONLY" not in os.environ


# -- anything at all --

characters = st.characters(exclude_categories=["Cs"])
words = st.text(characters, max_size=30) | st.sampled_from(
    ["0", "1", "-1", "1e3", "inf", "nan", "null", "None", "true", "~", "~x", "/", "a:b", "auto", "off", "\x00", "[", ""]
)
leaves = (
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_subnormal=False)
    | st.datetimes()
    | st.dates()
    | st.times()
    | words
)
toml_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)


def as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(character):08X}" for character in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(key)} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    return repr(value)


def finite(settings: Settings) -> bool:
    parts = (settings.app, settings.tenant, settings.profile, settings.server)
    values = [getattr(part, name) for part in parts for name in part.__struct_fields__]
    return all(math.isfinite(value) for value in values if isinstance(value, float))


@pytest.mark.slow
@given(st.sampled_from(sorted(OPTIONS)), toml_values)
@example("tenant.keep_alive", math.inf)
@example("app.app_dir", "~no-such-user")
@example("app.app_dir", "\x00")
def test_any_value_in_a_file_gives_settings_or_an_error_that_names_file_and_key(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    option = OPTIONS[name]
    folder = tmp_path_factory.getbasetemp() / "any-value"
    folder.mkdir(exist_ok=True)
    path = folder / "jumpstart.toml"
    table = "tenants.web" if option.section == "tenant" else option.section
    path.write_text(f"[{table}]\n{option.key} = {as_toml(value)}\n", "utf-8")
    try:
        found = load_settings({}, {}, cwd=folder)
    except ConfigError as error:
        text = str(error)
    else:
        assert finite(found)
        return
    assert option.key in text or any(flag in text for flag in option.flags)
    if option.key not in CHECKED_TOGETHER:
        assert str(path) in text and f"[{table}]" in text


@pytest.mark.slow
@given(st.sampled_from(sorted(OPTIONS)), words, st.booleans())
@example("tenant.uds", "~no-such-user", False)
@example("tenant.keep_alive", "inf", True)
def test_any_text_on_the_command_line_or_in_the_environment_gives_settings_or_an_error_that_names_it(
    name: str, text: str, in_environment: bool
) -> None:
    option: Option = OPTIONS[name]
    folder = Path("/nonexistent")
    try:
        if in_environment:
            found = load_settings({}, {option.env: text}, cwd=folder)
        else:
            found = load_settings({name: (text,) if option.many else text}, {}, cwd=folder)
    except ConfigError as error:
        message = str(error)
    else:
        assert finite(found)
        return
    assert any(word in message for word in (option.env, *option.flags, "TARGET"))


# -- logs --


@pytest.mark.parametrize(
    ("line", "environ", "file", "expected"),
    [
        ({}, {}, "", ""),
        ({"access_log": True}, {}, "", "-"),
        ({"access_log": False}, {}, "", ""),
        ({"access_logfile": "a.log"}, {}, "", "a.log"),
        ({"access_logfile": "-"}, {}, "", "-"),
        ({"access_log": True, "access_logfile": "a.log"}, {}, "", "a.log"),
        ({"access_log": False, "access_logfile": "a.log"}, {}, "", ""),
        ({"access_log": False}, {}, "access_logfile = 'a.log'", ""),
        ({"access_log": True}, {}, "access_logfile = 'a.log'", "a.log"),
        ({"access_logfile": "a.log"}, {}, "access_log = false", "a.log"),
        ({}, {"JUMPSTART_ACCESS_LOG": "1"}, "", "-"),
        ({}, {"JUMPSTART_ACCESS_LOGFILE": "a.log"}, "access_log = false", "a.log"),
        ({}, {"JUMPSTART_ACCESS_LOG": "false"}, "access_logfile = 'a.log'", ""),
        ({}, {}, "access_log = true", "-"),
    ],
)
def test_the_access_log_has_one_file_or_none(
    desk: Desk, line: dict[str, Any], environ: dict[str, str], file: str, expected: str
) -> None:
    desk.file(f"[tenants.web]\n{file}")
    tenant = desk.load({f"tenant.{name}": value for name, value in line.items()}, environ).tenant
    assert tenant.access_logfile == (str(desk.folder / expected) if expected not in ("", "-") else expected)
    assert tenant.access_log == bool(expected)


def test_log_files_are_relative_to_their_config_file_and_streams_are_not(desk: Desk) -> None:
    path = desk.file("[server]\nerror_logfile = 'e.log'\n[tenants.web]\naccess_logfile = '-'", "etc/jumpstart.toml")
    found = desk.load(file=str(path))
    assert (found.server.error_logfile, found.tenant.access_logfile) == (str(desk.folder / "etc" / "e.log"), "-")
    assert desk.load().server.error_logfile == "-"


def test_a_format_of_the_access_log_is_read_at_once(desk: Desk) -> None:
    assert "JUMPSTART_ACCESS_LOGFORMAT: unknown atom %(z)s; allowed are h, l, u" in desk.refused(
        environ={"JUMPSTART_ACCESS_LOGFORMAT": "%(h)s %(z)s"}
    )
    assert desk.load({"tenant.access_logformat": "json"}).tenant.access_logformat == "json"


def test_capturing_wants_a_file(desk: Desk) -> None:
    assert "--capture-output: name a file with --error-logfile" in desk.refused({"server.capture_output": True})


def test_a_log_configuration_is_read_and_not_applied(desk: Desk) -> None:
    desk.file('{"version": 1}', "log.json")
    found = desk.load({"server.log_config": "log.json"}).logging
    assert found is not None and (found.document, found.ini) == ({"version": 1}, "")
    text = "[loggers]\nkeys=root\n"
    for name in ("log.ini", "log.conf", "log"):
        desk.file(text, name)
        found = desk.load({"server.log_config": name}).logging
        assert found is not None and (found.document, found.ini, found.path) == ({}, text, str(desk.folder / name))
    assert desk.load().logging is None


def test_a_log_configuration_in_yaml_needs_pyyaml(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.file("version: 1", "log.yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "log.yaml: YAML needs PyYAML: pip install pyyaml, or write JSON" in desk.refused(
        {"server.log_config": "log.yaml"}
    )

    class YAML:  # as far as it is asked
        class YAMLError(Exception):
            pass

        @staticmethod
        def safe_load(text: str) -> object:
            if text == "version: 1":
                return {"version": 1}
            raise YAML.YAMLError("line 1:\n what is this")

    monkeypatch.setitem(sys.modules, "yaml", YAML)
    found = desk.load({"server.log_config": "log.yaml"}).logging
    assert found is not None and found.document == {"version": 1}
    desk.file("?", "log.yml")
    assert "log.yml: not YAML: line 1: what is this" in desk.refused({"server.log_config": "log.yml"})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("log.json", "{", "log.json: not JSON: "),
        ("log.json", "[]", "log.json: must hold one object"),
        ("log.ini", "no section", "log.ini: not an .ini file: File contains no section headers."),
        ("absent.ini", None, "absent.ini: cannot be read: "),
    ],
)
def test_a_log_configuration_that_is_wrong_is_named(desk: Desk, name: str, text: str | None, said: str) -> None:
    if text is not None:
        desk.file(text, name)
    assert said in desk.refused({"server.log_config": name})
