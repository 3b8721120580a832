"""
The one place that reads the environment and configuration files, and turns them into frozen `Settings`.

Precedence: command line, `JUMPSTART_*` environment, `jumpstart.toml` (or ``[tool.jumpstart]`` in `pyproject.toml`),
defaults. A value that is unknown or out of range is a `ConfigError` that names where it stands and what is allowed; all
that is wrong is told at once (`SeveralErrors`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import math
import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jumpstart.errors import ConfigError
from jumpstart.guard import parse_allowed
from jumpstart.paths import HostPaths, host_paths
from jumpstart_server.access import compile_format
from jumpstart_server.addresses import Address, addresses_of, parse_address, parse_permissions
from jumpstart_server.envelope.sizing import parse_size
from jumpstart_server.envfile import parse_env_file
from jumpstart_server.forwarded import TrustedProxies
from jumpstart_server.logfile import STREAM
from jumpstart_server.privileges import identity_of
from jumpstart_server.problems import GUNICORN_SETTINGS, Errors, Places, advice, keys_of, place_of, unknown_name
from jumpstart_server.settings import (
    BYTES,
    SECTIONS,
    LogConfig,
    Option,
    Settings,
    allowed_values,
    annotated_type,
    declared_options,
)
from jumpstart_server.systemd import ActivatedSocket, activated_sockets, addresses_of_tenant
from jumpstart_warmup.sampling import parse_routes

logger = logging.getLogger(__name__)

DEFAULT_FILES = ("jumpstart.toml", "pyproject.toml")
ADDRESS_KEYS = ("bind", "host", "port", "uds", "fd")
NO_OPTIONS = frozenset({"JUMPSTART_HOME"})
"""Variables of ours that are not options; `paths_of_host` reads this one."""
TEXTS_OF_OWN_FORM: dict[str, Callable[..., object]] = {
    "access_logformat": compile_format,
    "forwarded_allow_ips": TrustedProxies,
    "proxy_allow_from": TrustedProxies,
    "shadow_allow": parse_allowed,
    "shadow_routes": parse_routes,
    "uds_permissions": parse_permissions,
    "umask": parse_permissions,
}
"""Option → what parses it, and raises `ConfigError` with the place that it is given."""
OF_ONE_TENANT = frozenset({"target", "profile", "warmup", *ADDRESS_KEYS})
"""Options that several tenants cannot share."""
FIXED = (*ADDRESS_KEYS, "uds_permissions", "backlog")
"""Options of a tenant whose sockets are bound."""
EVERYWHERE = frozenset({"0.0.0.0", "::"})
COMMAND_LINE, ENVIRONMENT, FILE, OTHER_ENVIRONMENT = range(4)  # sources, strongest first
Sources = dict[str, str]
"""Option (``tenant.workers``) → where its value stands; what is not in it is the default."""
SYNONYMS = {"log_level": {"warn": "warning", "fatal": "critical", "trace": "debug"}}
"""Option → words of logging and of uvicorn → ours."""


@dataclass(frozen=True)
class Typed:
    """A value of the command line and the spelling of its option that was typed."""

    value: Any
    flag: str


@dataclass(frozen=True)
class _Value:
    raw: Any
    place: str  # for the message: "--workers", "JUMPSTART_WORKERS", "jumpstart.toml: [tenants.web] workers"
    rank: int  # of its source; the lowest wins

    @property
    def textual(self) -> bool:
        """It comes from where everything is text."""
        return self.rank != FILE


def environment() -> dict[str, str]:
    """A copy of the process environment; the only read of it."""
    return dict(os.environ)


def paths_of_host(environ: Mapping[str, str]) -> HostPaths:
    """The folders of this host's state, for commands that need no other settings."""
    return host_paths(environ, _home())


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # an arbitrary user id in a container: no $HOME and no entry in the password file
        return Path(tempfile.gettempdir()) / f"jumpstart-{os.geteuid()}"


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each ``JUMPSTART_*`` variable that nobody reads: most probably a slip of the hand."""
    known = {option.env for option in declared_options() if option.flags or option.key == "target"} | NO_OPTIONS
    lines = []
    for name in sorted(environ):
        if name.startswith("JUMPSTART_") and name not in known:
            stem = len("JUMPSTART_")  # which all of them share
            close = difflib.get_close_matches(name[stem:], [each[stem:] for each in known], 1)
            hint = f"; did you mean JUMPSTART_{close[0]}?" if close else ""
            lines.append(f"{name} is set, and no option is called so{hint}")
    return lines


def load_settings(
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    config_file: str | None = None,
    tenant: str | None = None,
    cwd: Path | None = None,
    sources: Sources | None = None,
) -> Settings:
    """
    Merge all sources into settings.

    Args:
        command_line: option key (``tenant.workers``) → value, for what was given; `Typed` where the spelling is known.
        environ: the environment variables.
        config_file: ``-c``; by default jumpstart.toml or pyproject.toml of *cwd*, where there is one.
        tenant: which tenant of the file; not needed when it has one.
        cwd: the current folder.
        sources: is filled with where each value comes from.

    Raises:
        ConfigError: a file, key, value or combination is wrong.
    """
    cwd = cwd or Path.cwd()
    document, file = _read_file(config_file, cwd)
    errors = Errors()
    tenant_name, tables = _tables(document, file, tenant, errors)
    of_env_file = _read_env_file(command_line, environ, tables, file, cwd)
    sockets = activated_sockets(environ, os.getpid())
    environ = {**of_env_file, **environ}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    ranks: dict[str, int] = {}
    places: Sources = {}
    for option in declared_options():
        value = _lookup(option, command_line, environ, tables, file, tenant_name)
        if value is not None:
            with errors.gather():
                values[option.section][option.key] = _convert(option, value, file, cwd)
            ranks[option.key] = value.rank
            places[f"{option.section}.{option.key}"] = value.place
    errors.raise_any()
    if sources is not None:
        sources.update(places)
    _keep_one_address(values["tenant"], ranks)
    _take_activated(
        values["tenant"],
        ranks,
        sockets,
        tenant_name,
        is_alone=len(document.get("tenants", ())) < 2,
        place=places.get("tenant.bind", "--bind"),
    )
    with errors.gather():
        _refuse_idle_permissions(values["tenant"], ranks, Places(places, tenant_name))
    _switch_access_log(values["tenant"], ranks)
    if not values["app"].get("app_dir"):
        values["app"]["app_dir"] = values["app"].get("chdir") or str(cwd)
    hosts = paths_of_host(environ)
    settings = Settings(
        app=SECTIONS["app"](**values["app"]),  # type: ignore[arg-type]  # the table of sections forgets the types
        tenant=SECTIONS["tenant"](**values["tenant"]),  # type: ignore[arg-type]
        profile=SECTIONS["profile"](**values["profile"]),  # type: ignore[arg-type]
        server=SECTIONS["server"](**values["server"]),  # type: ignore[arg-type]
        logging=_read_log_config(values["server"].get("log_config", ""), places.get("server.log_config", "")),
        tenant_name=tenant_name,
        environment=of_env_file,
        home_cache=str(hosts.cache),
        home_state=str(hosts.state),
        home_config=str(hosts.config),
    )
    _check(settings, Places(places, tenant_name), errors)
    errors.raise_any()
    return settings


def load_all(
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    config_file: str | None = None,
    tenant: str | None = None,
    cwd: Path | None = None,
    sources: dict[str, Sources] | None = None,
) -> list[Settings]:
    """
    Settings of every tenant of the file, in its order, or of the one that is named. Arguments as of `load_settings`.

    What the command line and the environment say holds for all of them. *sources* is filled for each tenant, by name.

    Raises:
        ConfigError: as of `load_settings`; or something is given for several tenants that only one can have, or two
            tenants have one address.
    """
    cwd = cwd or Path.cwd()

    def load(name: str | None) -> Settings:
        found: Sources = {}
        settings = load_settings(command_line, environ, config_file=config_file, tenant=name, cwd=cwd, sources=found)
        if sources is not None:
            sources[settings.tenant_name] = found
        return settings

    document, file = _read_file(config_file, cwd)
    tenants = document.get("tenants", {})
    if tenant is not None or not isinstance(tenants, dict) or len(tenants) < 2:
        return [load(tenant)]
    for option in declared_options():
        if option.key in OF_ONE_TENANT:
            # Without a file: what the command line or a variable of ours says.
            value = _lookup(option, command_line, {option.env: environ.get(option.env, "")}, {}, None, "")
            if value is not None:
                names = ", ".join(tenants)
                raise ConfigError(
                    f"{value.place} is for one tenant, and {file} has {names}; "
                    "name one with --tenant, or write it there"
                )
    found = []
    errors = Errors()
    for name in tenants:
        with errors.gather():
            found.append(load(name))
    errors.raise_any()
    _refuse_shared_addresses(found)
    workers = sum(settings.tenant.workers for settings in found)
    return [msgspec.structs.replace(settings, all_workers=workers) for settings in found]


def _refuse_shared_addresses(tenants: Sequence[Settings]) -> None:
    taken: list[tuple[Address, str]] = []
    for settings in tenants:
        own = addresses_of(settings.tenant)
        for address in own:
            for other, name in taken:
                if _is_same(address, other):
                    raise ConfigError(
                        f"[tenants.{name}] and [tenants.{settings.tenant_name}] have one address, {address}; "
                        f"give one of them another: bind"
                    )
        taken += [(address, settings.tenant_name) for address in own]


def _is_same(a: Address, b: Address) -> bool:
    """Whether only one of them can be had; all addresses of a port overlap each of them."""
    if a.path or b.path or a.fd >= 0 or b.fd >= 0:
        return a == b
    hosts = {"127.0.0.1" if address.host == "localhost" else address.host for address in (a, b)}
    return a.port == b.port != 0 and (len(hosts) == 1 or bool(hosts & EVERYWHERE))


def keep_fixed(before: Settings, after: Settings) -> tuple[Settings, list[str]]:
    """
    Return *after* with what a running server cannot change as it was *before*, and a line for each such change. Pure.
    """
    lines = []
    if before.server != after.server or before.logging != after.logging:
        old, new = before.server, after.server
        names = [name for name in new.__struct_fields__ if getattr(old, name) != getattr(new, name)]
        lines.append(f"[server] {', '.join(names) or 'log_config'}: changes with the next start of the server only")
    fixed = {
        name: getattr(before.tenant, name)
        for name in FIXED
        if getattr(before.tenant, name) != getattr(after.tenant, name)
    }
    if fixed:
        lines.append(
            f"[tenants.{after.tenant_name}] {', '.join(fixed)}: changes with the next start of the server only; "
            f"the address stays as it is"
        )
    return (
        msgspec.structs.replace(
            after,
            server=before.server,
            logging=before.logging,
            tenant=msgspec.structs.replace(after.tenant, **fixed),
        ),
        lines,
    )


def configured_tenants(config_file: str | None = None, cwd: Path | None = None) -> tuple[Path, list[str]]:
    """
    Return the file of ``-c``, or the one that is found without, and the names of its tenants in their order.

    None where it names none: then it has one, whose name nobody wrote.

    Raises:
        ConfigError: there is no file, or it cannot be read.
    """
    document, file = _read_file(config_file, cwd or Path.cwd())
    if file is None:
        raise ConfigError("there is no jumpstart.toml here that names the tenants; see -c FILE")
    tenants = document.get("tenants", {})
    return file, list(tenants) if isinstance(tenants, dict) else []


def tenant_names(config_file: str | None, cwd: Path) -> list[str | None]:
    """
    The tenants of the file that `load_settings` would read, in its order; ``[None]`` where it names none.

    Raises:
        ConfigError: as of `load_settings`, for the file.
    """
    document, _ = _read_file(config_file, cwd)
    tenants = document.get("tenants")
    return [*tenants] if isinstance(tenants, dict) and tenants else [None]


def _read_file(config_file: str | None, cwd: Path) -> tuple[dict[str, Any], Path | None]:
    if config_file and (config_file.endswith(".py") or config_file.startswith(("python:", "file:"))):
        samples = ("bind", "workers", "timeout", "accesslog", "errorlog", "wsgi_app")
        shown = ", ".join(f"{name} is {GUNICORN_SETTINGS[name]}" for name in samples)
        raise ConfigError(
            f"-c {config_file}: gunicorn's configuration files, which are Python, are not read; write jumpstart.toml, "
            f"with tables [app], [tenants.web] and [server]: {shown}; docs/settings.md has the others"
        )
    candidates = [cwd / config_file] if config_file else [cwd / name for name in DEFAULT_FILES]
    for path in candidates:
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            if config_file:
                raise ConfigError(f"-c {config_file}: no such file") from None
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            if path.name == "pyproject.toml" and not config_file:
                continue  # another tool's file; not ours to complain about
            raise ConfigError(f"{path}: not TOML: {error}") from None
        if path.name == "pyproject.toml":
            tools = document.get("tool", {})
            ours = tools.get("jumpstart") if isinstance(tools, dict) else None
            if ours is None:
                if config_file:
                    raise ConfigError(f"{path}: has no [tool.jumpstart]")
                continue
            if not isinstance(ours, dict):
                raise ConfigError(f"{path}: tool.jumpstart must be a table: [tool.jumpstart.app]")
            document = ours
        return document, path
    return {}, None


def _tables(
    document: dict[str, Any], file: Path | None, tenant: str | None, errors: Errors
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Pick the tenant and return section → table; unknown tables and keys go to *errors*."""
    tenants = document.get("tenants", {})
    if not isinstance(tenants, dict) or not all(isinstance(table, dict) for table in tenants.values()):
        hint = ""
        if isinstance(tenants, dict) and (keys := [key for key, each in tenants.items() if not isinstance(each, dict)]):
            hint = f"; {', '.join(keys)} stands in none of them"
        raise ConfigError(f"{file}: tenants: write tables, one per tenant: [tenants.web]{hint}")
    if tenant is None:
        if len(tenants) > 1:
            raise ConfigError(f"{file}: has {len(tenants)} tenants ({', '.join(tenants)}); name one with --tenant")
        tenant = next(iter(tenants), "web")
    elif tenant not in tenants:
        if file is None:
            raise ConfigError(
                f"--tenant {tenant}: there is no jumpstart.toml here to name it in, as [tenants.{tenant}]; see -c FILE"
            )
        raise ConfigError(f"--tenant {tenant}: {file} has {', '.join(tenants) or 'no tenants'}")
    tables = {"tenant": tenants.get(tenant, {})}
    for name, table in document.items():
        if name == "tenants":
            continue
        if name not in SECTIONS or name == "tenant":
            errors.add(f"{file}: {unknown_name(name, table, tenant)}")
        elif not isinstance(table, dict):
            errors.add(f"{file}: {name} must be a table: [{name}]")
        else:
            tables[name] = table
    for section, table in tables.items():
        allowed = keys_of(section)
        for key in table:
            if key not in allowed:
                errors.add(f"{file}: {place_of(section, tenant)} has no key {key!r}{advice(key, section, tenant)}")
    return tenant, tables


def _lookup(
    option: Option,
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    tables: Mapping[str, Mapping[str, Any]],
    file: Path | None,
    tenant: str,
) -> _Value | None:
    given = command_line.get(f"{option.section}.{option.key}")
    flag = option.name_on_command_line
    if isinstance(given, Typed):
        given, flag = given.value, given.flag
    if given is not None and given != ():
        return _Value(given, flag, COMMAND_LINE)
    if environ.get(option.env):  # empty is unset, as for other servers' variables
        return _Value(_from_environment(option, environ[option.env]), option.env, ENVIRONMENT)
    table = tables.get(option.section, {})
    if option.key in table:
        return _Value(table[option.key], f"{file}: {place_of(option.section, tenant)} {option.key}", FILE)
    for name in option.other_env:
        if environ.get(name):
            return _Value(_from_environment(option, environ[name]), name, OTHER_ENVIRONMENT)
    return None


def _keep_one_address(tenant: dict[str, Any], ranks: Mapping[str, int]) -> None:
    """
    An address on the command line replaces one of the file, however each is spelled.

    ``$PORT`` is how platforms say where to listen: on all addresses, as gunicorn has it.
    """
    given = [key for key in ADDRESS_KEYS if key in tenant]
    strongest = min((ranks[key] for key in given), default=0)
    for key in given:
        if ranks[key] > strongest:
            del tenant[key]
    if "port" in tenant and ranks["port"] == OTHER_ENVIRONMENT:
        tenant.setdefault("host", "0.0.0.0")


def _take_activated(
    tenant: dict[str, Any],
    ranks: Mapping[str, int],
    sockets: Sequence[ActivatedSocket],
    name: str,
    *,
    is_alone: bool,
    place: str,
) -> None:
    """Put the sockets of a service manager where the tenant asks for them, or where it has no address of its own."""
    has_address = any(key in tenant and ranks.get(key) not in (None, OTHER_ENVIRONMENT) for key in ADDRESS_KEYS)
    bind = addresses_of_tenant(
        tenant.get("bind", ()), sockets, name, has_address=has_address, is_alone=is_alone, option=place
    )
    if bind and not has_address:
        for key in ADDRESS_KEYS:
            tenant.pop(key, None)  # $PORT
    if bind:
        tenant["bind"] = bind
    taken = {f"fd://{each.descriptor}" for each in sockets} & set(bind)
    if sockets and is_alone and not taken and "fd" not in tenant:
        logger.warning("the service manager passed %d sockets, and an address of another kind is given", len(sockets))


def _refuse_idle_permissions(tenant: Mapping[str, Any], ranks: Mapping[str, int], places: Places) -> None:
    """Those of a file may belong to a socket that the command line has put another address in the place of."""
    has_socket = "uds" in tenant or any(text.startswith("unix:") for text in tenant.get("bind", ()))
    if ranks.get("uds_permissions") == COMMAND_LINE and not has_socket:
        raise ConfigError(
            f"{places.of('uds_permissions')} {tenant['uds_permissions']}: there is no Unix socket of ours; name one "
            "with --uds PATH or --bind unix:PATH, or leave the option out"
        )


def _switch_access_log(tenant: dict[str, Any], ranks: Mapping[str, int]) -> None:
    """
    Make one of ``--access-log`` (uvicorn's switch) and ``--access-logfile`` (gunicorn's name): the file, or none.

    A name or a format is reason enough for a log; a switch that is off beats those of its own source and of weaker
    ones.
    """
    switch = tenant.get("access_log")
    strongest = min(ranks.get(key, OTHER_ENVIRONMENT) for key in ("access_logfile", "access_logformat"))
    if switch is False and ranks["access_log"] <= strongest:
        tenant["access_logfile"] = ""
    elif switch or "access_logformat" in tenant:
        tenant["access_logfile"] = tenant.get("access_logfile") or STREAM
    tenant["access_log"] = bool(tenant.get("access_logfile"))


def _read_env_file(
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    tables: Mapping[str, Mapping[str, Any]],
    file: Path | None,
    cwd: Path,
) -> dict[str, str]:
    """The variables of ``--env-file`` that are not set already."""
    option = next(option for option in declared_options() if option.key == "env_file")
    value = _lookup(option, command_line, environ, tables, file, "")
    path = _convert(option, value, file, cwd) if value is not None else ""
    if value is None or not path:
        return {}
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{value.place} {path}: cannot be read: {reason}") from None
    found = parse_env_file(text, f"{value.place} {path}")
    return {name: text for name, text in found.items() if name not in environ}


def _read_log_config(path: str, place: str) -> LogConfig | None:
    """What the file of ``--log-config`` holds; the processes apply it."""
    if not path:
        return None
    import configparser  # few need it

    try:
        text = Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place} {path}: cannot be read: {error}") from None
    kind = Path(path).suffix.lower()
    try:
        if kind == ".json":
            document = msgspec.json.decode(text)
        elif kind in (".yaml", ".yml"):
            document = _parse_yaml(text, path, place)
        else:
            configparser.ConfigParser().read_string(text)
            return LogConfig(path=path, ini=text or "\n")
    except (msgspec.DecodeError, configparser.Error, ValueError) as error:
        what = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}.get(kind, "an .ini file")
        raise ConfigError(f"{place} {path}: not {what}: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{place} {path}: must hold one object, as logging.config.dictConfig takes it")
    return LogConfig(path=path, document=document)


def _parse_yaml(text: str, path: str, place: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError(f"{place} {path}: YAML needs PyYAML: pip install pyyaml, or write JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _from_environment(option: Option, text: str) -> Any:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if option.many else text


def _convert(option: Option, value: _Value, file: Path | None, cwd: Path) -> Any:
    raw = value.raw
    if option.many and isinstance(raw, str):
        raw = [raw]  # bind = "127.0.0.1:8000" reads better than a list of one
    if option.key == "target" and not value.textual and raw == "":
        raise ConfigError(f"{value.place}: empty")
    if option.choices and isinstance(raw, str):
        word = SYNONYMS.get(option.key, {}).get(raw.lower(), raw.lower())
        raw = word if word in option.choices else raw
    if option.unit == BYTES:
        raw = parse_size(raw, option=value.place)
    try:
        converted = msgspec.convert(raw, annotated_type(option), strict=not value.textual)
        if converted is None or (isinstance(converted, float) and not math.isfinite(converted)):
            raise msgspec.ValidationError("not a finite number")  # msgspec takes the texts "null" and "inf"
    except msgspec.ValidationError:
        unit = f" ({option.unit})" if option.unit else ""
        raise ConfigError(f"{value.place}: {raw!r} is not allowed; write {allowed_values(option)}{unit}") from None
    if option.key == "bind":
        for text in converted:
            if not text.startswith("fd://"):  # may be a name, which `addresses_of_tenant` knows
                parse_address(text, option=value.place)
    if option.key in TEXTS_OF_OWN_FORM and (converted or option.key == "access_logformat"):
        TEXTS_OF_OWN_FORM[option.key](converted, option=value.place)
    if option.key == "root_path":
        return converted.rstrip("/")
    may_be_url = option.key in ("profile", "publish")
    if option.path and converted and converted != STREAM and not (may_be_url and "://" in converted):
        base = cwd if value.textual or file is None else file.parent
        try:
            if option.many:
                return tuple(str((base / Path(each).expanduser()).absolute()) for each in converted)
            return str((base / Path(converted).expanduser()).absolute())
        except RuntimeError as error:  # ~nobody
            raise ConfigError(f"{value.place}: {raw!r} is not allowed: {error}") from None
    return converted


def _check(settings: Settings, places: Places, errors: Errors) -> None:
    """Look at values together, and at the files and folders that they name."""
    tenant = settings.tenant
    ways = {
        "bind": bool(tenant.bind),
        "host": bool(tenant.host),
        "port": tenant.port is not None and not tenant.host,  # with a host it is one address
        "uds": bool(tenant.uds),
        "fd": tenant.fd is not None,
    }
    given = [key for key, is_given in ways.items() if is_given]
    if len(given) > 1:
        number = {2: "twice", 3: "three times"}.get(len(given), f"{len(given)} times")
        errors.add(f"{places.together(*given)} say the address {number}; keep one")
    with errors.gather():  # complain before anything is started
        user, group = places.of("user"), places.of("group")
        identity_of(settings.server.user, settings.server.group, options=(user, group))
    if tenant.ssl_keyfile and not tenant.ssl_certfile:
        errors.add(f"{places.of('ssl_keyfile')} is given without {places.like('ssl_certfile', 'ssl_keyfile')}")
    if tenant.ssl_certfile and tenant.proxy_protocol != "off":
        errors.add(
            f"{places.together('proxy_protocol', 'ssl_certfile')}: with proxy_protocol {tenant.proxy_protocol} the "
            "PROXY header comes before TLS begins, where this version cannot read it; let the proxy end TLS, or leave "
            "one of the two out"
        )
    root = tenant.root_path
    if root and not (root.isascii() and root.startswith("/")):
        errors.add(f"{places.of('root_path')} {root}: write it as in a URL, with a slash at its start: /shop")
    if settings.profile.seed and not settings.profile.publish and not tenant.profile:
        errors.add(f"{places.of('seed')}: where to? Name a store with {places.like('publish', 'seed')}")
    for key in ("chdir", "app_dir"):
        folder = getattr(settings.app, key)
        if f"app.{key}" in places.sources and folder and not (Path(folder).is_dir() and os.access(folder, os.X_OK)):
            errors.add(f"{places.of(key)} {folder}: no such folder, or it may not be entered")
    missing = False
    for key in ("ssl_certfile", "ssl_keyfile", "warmup"):
        path = getattr(tenant, key)
        if path and not Path(path).is_file():
            errors.add(f"{places.of(key)} {path}: no such file")
            missing = missing or key != "warmup"
    if tenant.ssl_certfile and not missing:
        from jumpstart_server.tls import server_context

        with errors.gather():
            options = (places.of("ssl_certfile"), places.like("ssl_keyfile", "ssl_certfile"))
            server_context(tenant.ssl_certfile, tenant.ssl_keyfile, options=options)
    if settings.server.capture_output and settings.server.error_logfile == STREAM:
        errors.add(
            f"{places.of('capture_output')}: name a file with {places.like('error_logfile', 'capture_output')}, or "
            "there is nothing to capture it into"
        )
    if settings.server.admin not in ("auto", "off"):
        with errors.gather():
            parse_address(settings.server.admin, option=places.of("admin"))
    for pattern in settings.profile.lru_cache:
        if ":" not in pattern:
            errors.add(f"{places.of('lru_cache')} {pattern}: write MODULE:NAME, wildcards allowed: shop.catalog:*")
    if settings.profile.disable:
        with errors.gather():
            _check_recorders(settings.profile.disable, places.of("disable"))


def _check_recorders(names: Sequence[str], place: str) -> None:
    """Unknown names are errors. Costs the import of all recorders, so only where one is switched off."""
    from jumpstart.recorders import BUILT_IN, GROUP

    known = {"corpus"}  # the recorded requests; the server adds that one by itself
    for target in BUILT_IN:
        module, _, name = target.partition(":")
        known.add(getattr(importlib.import_module(module), name).name)
    plug_ins = {entry_point.name for entry_point in importlib.metadata.entry_points(group=GROUP)}
    known |= plug_ins
    for name in names:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        text = f"{place} {name}: unknown; {hint}known are {', '.join(sorted(known))}"
        if plug_ins:
            # A plug-in may call its recorder otherwise than its entry point; only the app's processes import it.
            logger.warning("%s, and what plug-ins call theirs", text)
        else:
            raise ConfigError(text)
