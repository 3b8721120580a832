"""
What is wrong with a configuration, in words: where values stand, what was probably meant, all of it at once. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jumpstart.errors import ConfigError
from jumpstart_server.settings import SECTIONS, declared_options

MOST_ERRORS = 10  # told at once; the others show when these are mended
GUNICORN_SETTINGS = {
    "wsgi_app": "target of [app]",
    "chdir": "chdir of [app]",
    "pythonpath": "app_dir of [app]",
    "raw_env": "env_file of [app]",
    "bind": "bind",
    "backlog": "backlog",
    "workers": "workers",
    "threads": "threads",
    "worker_connections": "limit_concurrency",
    "timeout": "timeout",
    "graceful_timeout": "graceful_timeout",
    "keepalive": "keep_alive",
    "max_requests": "max_requests",
    "max_requests_jitter": "max_requests_jitter",
    "limit_request_line": "limit_request_line",
    "limit_request_fields": "limit_request_fields",
    "limit_request_field_size": "limit_request_field_size",
    "header_map": "header_map",
    "umask": "umask",
    "root_path": "root_path",
    "forwarded_allow_ips": "forwarded_allow_ips",
    "proxy_protocol": "proxy_protocol",
    "proxy_allow_ips": "proxy_allow_from",
    "certfile": "ssl_certfile",
    "keyfile": "ssl_keyfile",
    "accesslog": "access_logfile",
    "access_log_format": "access_logformat",
    "errorlog": "error_logfile of [server]",
    "loglevel": "log_level of [server]",
    "logconfig": "log_config of [server]",
    "capture_output": "capture_output of [server]",
    "pidfile": "pid of [server]",
    "user": "user of [server]",
    "group": "group of [server]",
    "reload": "reload of [server]",
    "reload_extra_files": "reload_include of [server]",
}
"""Setting of gunicorn.conf.py → key that it is here, of ``[tenants.NAME]`` where no other table is named."""


class SeveralErrors(ConfigError):
    """
    More than one thing is wrong.

    Attributes:
        texts: a line for each.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__("\n".join(texts))
        self.texts = tuple(texts)


def texts_of(error: ConfigError) -> tuple[str, ...]:
    """What an error says, a text for each thing that is wrong."""
    return error.texts if isinstance(error, SeveralErrors) else (str(error),)


class Errors:
    """Gathers what is wrong, so that all of it is told at once."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Go on after an error of the block."""
        try:
            yield
        except ConfigError as error:
            self._texts += texts_of(error)

    def raise_any(self) -> None:
        """
        Raises:
            ConfigError: something was wrong.
        """
        texts = list(dict.fromkeys(self._texts))
        if len(texts) == 1:
            raise ConfigError(texts[0])
        if texts:
            more = [f"and {len(texts) - MOST_ERRORS} more"] if len(texts) > MOST_ERRORS else []
            raise SeveralErrors([*texts[:MOST_ERRORS], *more])


def place_of(section: str, tenant: str) -> str:
    return f"[tenants.{tenant}]" if section == "tenant" else f"[{section}]"


@dataclass(frozen=True)
class Places:
    """Where values stand, for messages about several of them."""

    sources: Mapping[str, str]  # option (``tenant.workers``) → where its value stands
    tenant: str

    def of(self, key: str) -> str:
        """``--uds``, ``JUMPSTART_UDS`` or ``/srv/jumpstart.toml: [tenants.web] uds``."""
        option = next(option for option in declared_options() if option.key == key and option.flags)
        return self.sources.get(f"{option.section}.{key}", option.name_on_command_line)

    def like(self, key: str, given: str) -> str:
        """A key that is missing, as it would be written beside *given*."""
        option = next(option for option in declared_options() if option.key == key and option.flags)
        place = self.of(given)
        if place.startswith("-"):
            return option.name_on_command_line
        return option.env if "[" not in place else f"{place_of(option.section, self.tenant)} {key}"

    def together(self, *keys: str) -> str:
        """All of them; what they share, a file and a table, once."""
        places = [self.of(key) for key in keys]
        head, bracket, _ = places[0].rpartition("] ")
        shared = head + bracket
        if not bracket or not all(place.startswith(shared) for place in places):
            return " and ".join(places)
        return shared + " and ".join(place.removeprefix(shared) for place in places)


def keys_of(section: str) -> list[str]:
    return [option.key for option in declared_options() if option.section == section]


def advice(key: str, section: str, tenant: str) -> str:
    """Where an unknown key belongs, or what it was meant to be, or else what there is."""
    for other in SECTIONS:
        if key in keys_of(other):
            return f"; it belongs under {place_of(other, tenant)}"
    allowed = keys_of(section)
    if key in GUNICORN_SETTINGS:
        return f"; gunicorn's {key} is {GUNICORN_SETTINGS[key]}"
    if close := difflib.get_close_matches(key, allowed, 1):
        return f"; did you mean {close[0]!r}?"
    for other in SECTIONS:
        if close := difflib.get_close_matches(key, keys_of(other), 1, 0.8):
            return f"; did you mean {close[0]!r} of {place_of(other, tenant)}?"
    return f"; allowed are {', '.join(allowed)}"


def unknown_name(name: str, value: Any, tenant: str) -> str:
    """What to say of a table or key at the top of a file that there is not."""
    tables = [*(section for section in SECTIONS if section != "tenant"), "tenants"]
    if isinstance(value, dict):
        close = "tenants" if name == "tenant" else next(iter(difflib.get_close_matches(name, tables, 1)), "")
        if not close and value and set(value) <= set(keys_of("tenant")):
            close, value = "tenants", {name: value}
        if close == "tenants":
            inner = next((each for each, table in value.items() if isinstance(table, dict)), tenant)
            hint = f"; did you mean [tenants.{inner}]?"
        else:
            hint = f"; did you mean [{close}]?" if close else ""
        return f"there is no table {name!r}{hint or '; allowed are ' + ', '.join(tables)}"
    owners = [place_of(section, tenant) for section in SECTIONS if name in keys_of(section)]
    if owners:
        return f"{name!r} stands above all tables; it belongs under {' or '.join(owners)}"
    every = [key for section in SECTIONS for key in keys_of(section)]
    if name in GUNICORN_SETTINGS:
        return f"{name!r} stands above all tables; gunicorn's {name} is {GUNICORN_SETTINGS[name]}"
    close = next(iter(difflib.get_close_matches(name, every, 1)), "")
    if close:
        owner = next(section for section in SECTIONS if close in keys_of(section))
        return f"there is no key {name!r}; did you mean {close!r}? It belongs under {place_of(owner, tenant)}"
    return f"there is no table or key {name!r}; allowed are the tables {', '.join(tables)}"
