"""
Options of gunicorn and uvicorn that are none of ours: what hands type first, and what is meant by it here.

A few are accepted, with a line that says what they come to; the others are refused with one that says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from jumpstart_server.cli import say
from jumpstart_server.settings import declared_options

F = TypeVar("F", bound=Callable[..., Any])

PREFIX = "foreign_"  # of the names of their parameters
THREADS = "a worker runs --threads requests at once; WSGI and ASGI are told apart by themselves"
NO_GREEN_THREADS = "there are no green threads here; give --threads, which are started on demand and may be a thousand"
LIMITS = "see --limit-request-line, --limit-request-fields and --limit-request-field_size"
NO_HTTP2 = "HTTP/1.1 is spoken here; let a proxy in front speak HTTP/2 to clients"
NO_DIRTY = "there are no such workers here; run long work in a queue of its own, or in a tenant with a longer --timeout"
NO_LENIENCE = "requests are read strictly, for a proxy in front may read them otherwise; mend the client"
WEBSOCKETS = "this cannot be set in this version; leave the option out"
PROXY_ENDS_TLS = "not in this version; let a proxy in front check it"


@dataclass(frozen=True)
class Accepted:
    """
    An option that is taken and does nothing.

    Attributes:
        values: value → what it comes to; empty for a switch.
        any_value: what any other value comes to; empty where it is refused.
        refusal: what to do in place of another value.
    """

    flags: tuple[str, ...]
    note: str = ""
    values: Mapping[str, str] | None = None
    any_value: str = ""
    refusal: str = ""


ACCEPTED = (
    Accepted(
        ("-k", "--worker-class"),
        values=dict.fromkeys(
            (
                *("sync", "gthread", "asgi", "uvicorn.workers.UvicornWorker", "uvicorn_worker.UvicornWorker"),
                *("uvicorn.workers.UvicornH11Worker", "uvicorn_worker.UvicornH11Worker"),
            ),
            THREADS,
        ),
        refusal=NO_GREEN_THREADS,
    ),
    Accepted(
        ("--preload",), "it is always so: one process imports the app, and workers are forked from it (see --fork)"
    ),
    Accepted(("--worker-tmp-dir",), any_value="workers keep no heartbeat file"),
    Accepted(("--reuse-port",), "the workers of a server share its socket; a second server cannot have the port too"),
    Accepted(
        ("--loop", "--asgi-loop"),
        values={"auto": "it is uvloop", "uvloop": "it always is"},
        refusal="ASGI apps run on uvloop; leave the option out",
    ),
    Accepted(
        ("--http", "--http-parser"),
        values={"auto": "it is httptools, with checks of our own", "httptools": "it always is, with checks of our own"},
        refusal="there is one HTTP/1.1 parser, httptools with checks of our own; leave the option out",
    ),
    Accepted(
        ("--ws",),
        values={"auto": "it is websockets", "websockets": "it always is", "websockets-sansio": "it is websockets"},
        refusal="WebSockets are served with websockets; leave the option out",
    ),
    Accepted(("--ws-max-size",), values={"16777216": "it is so"}, refusal=f"messages may have 16 MiB: {WEBSOCKETS}"),
    Accepted(
        ("--ws-max-queue",),
        values={"32": "it is so, or less"},
        refusal=f"the app reads messages as they come: {WEBSOCKETS}",
    ),
    Accepted(("--ws-ping-interval",), values=dict.fromkeys(("20", "20.0"), "it is so"), refusal=f"20 s: {WEBSOCKETS}"),
    Accepted(("--ws-ping-timeout",), values=dict.fromkeys(("20", "20.0"), "it is so"), refusal=f"20 s: {WEBSOCKETS}"),
    Accepted(
        ("--ws-per-message-deflate",),
        values=dict.fromkeys(("true", "True", "1"), "it is so"),
        refusal=f"messages are compressed where the client offers it: {WEBSOCKETS}",
    ),
    Accepted(("--initgroups",), "the app's processes always get the groups of --user"),
    Accepted(("--no-control-socket",), "commands come over --admin; --admin off is none"),
    Accepted(("--use-colors",), "lines have no colours"),
    Accepted(("--no-use-colors",), "lines never have colours"),
    Accepted(("--no-server-header",), "none is sent but the app's own"),
    Accepted(("--reset-contextvars",), "every request has a context of its own"),
)

REFUSED: dict[str, str] = {
    "-D": "the server stays in the foreground; let systemd run it (Type=notify), or another service manager",
    "-e": "set the variable before the command, or name a file of them with --env-file",
    "-n": "the name that ps shows cannot be set; --name names the app in profiles",
    "--asgi-lifespan": "write --lifespan",
    "--ca-certs": PROXY_ENDS_TLS,
    "--cert-reqs": PROXY_ENDS_TLS,
    "--ciphers": PROXY_ENDS_TLS,
    "--config-file": "write -c FILE",
    "--asgi-disconnect-grace-period": "an app hears at once that its client has left, and is cancelled; leave it out",
    "--casefold-http-method": NO_LENIENCE,
    "--control-socket": "write --admin unix:PATH; jumpstart status reads it",
    "--control-socket-mode": "the admin socket is for its user alone; see --admin",
    "--dirty-app": NO_DIRTY,
    "--dirty-graceful-timeout": NO_DIRTY,
    "--dirty-threads": NO_DIRTY,
    "--dirty-timeout": NO_DIRTY,
    "--dirty-workers": NO_DIRTY,
    "--do-handshake-on-connect": "handshakes have the time of --header-timeout; leave the option out",
    "--enable-backlog-metric": "let Prometheus read /metrics at --admin",
    "--enable-stdio-inheritance": "standard output and error are inherited; --capture-output sends them to a file",
    "--http-protocols": NO_HTTP2,
    "--http2": NO_HTTP2,
    "--http2-cleartext": NO_HTTP2,
    "--http2-initial-window-size": NO_HTTP2,
    "--http2-max-concurrent-streams": NO_HTTP2,
    "--http2-max-frame-size": NO_HTTP2,
    "--http2-max-header-list-size": NO_HTTP2,
    "--log-syslog-facility": "name a handler of logging in the file of --log-config",
    "--log-syslog-prefix": "name a handler of logging in the file of --log-config",
    "--permit-obsolete-folding": NO_LENIENCE,
    "--permit-unconventional-http-method": NO_LENIENCE,
    "--permit-unconventional-http-version": NO_LENIENCE,
    "--protocol": "HTTP is spoken, and not uwsgi; let the proxy pass requests on as HTTP",
    "--proxy-allow-ips": "write --proxy-allow-from",
    "--reload-extra-file": "write --reload-include PATTERN, and --reload-dir FOLDER where it lies elsewhere",
    "--strip-header-spaces": NO_LENIENCE,
    "--suppress-ragged-eofs": "a TLS connection that ends early is closed; leave the option out",
    "--uwsgi-allow-from": "HTTP is spoken, and not uwsgi; see --forwarded-allow-ips",
    "--version": "write jumpstart --version",
    "--websocket-max-message-size": f"messages may have 16 MiB: {WEBSOCKETS}",
    "--date-header": "Date is always sent, as HTTP asks for it",
    "--disable-redirect-access-to-syslog": "there is no syslog; see --access-logfile and --log-config",
    "--forwarder-headers": "of a trusted proxy X-Forwarded-For and -Proto are taken; for SCRIPT_NAME give --root-path",
    "--h11-max-incomplete-event-size": LIMITS,
    "--header": "let the app, or the proxy in front, add response headers",
    "--log-config-json": "write --log-config FILE.json",
    "--log-syslog": "name a handler of logging in the file of --log-config",
    "--log-syslog-to": "name a handler of logging in the file of --log-config",
    "--logger-class": "name handlers of logging in the file of --log-config",
    "--no-access-logfile": "write --no-access-log",
    "--no-date-header": "Date is always sent, as HTTP asks for it",
    "--no-sendfile": "files are always sent by the kernel where the app hands over one",
    "--paste": "name the app as module:attribute, and give PasteDeploy's loadapp there",
    "--print-config": "run jumpstart check, which takes the same options",
    "--proxy-protocol-from": "write --proxy-allow-from",
    "--pythonpath": "write --app-dir FOLDER, or set PYTHONPATH before the command",
    "--reload-engine": "files are looked at in turns; see --reload-delay",
    "--server-header": "none is sent but the app's own",
    "--spew": "use a tracer such as py-spy",
    "--ssl-ca-certs": PROXY_ENDS_TLS,
    "--ssl-cert-reqs": PROXY_ENDS_TLS,
    "--ssl-ciphers": PROXY_ENDS_TLS,
    "--ssl-keyfile-password": "keep the key unencrypted, readable by the server's user only (--ssl-keyfile)",
    "--ssl-version": "TLS 1.2 and newer are spoken, as Python has it",
    "--statsd-host": "let Prometheus read /metrics at --admin",
    "--statsd-prefix": "let Prometheus read /metrics at --admin",
}
for _alias, _flag in {
    "--daemon": "-D",
    "--env": "-e",
    "--proc-name": "-n",
    "--no-reload-engine": "--reload-engine",
    "--paster": "--paste",
    "--paste-global": "--paste",
    "-R": "--enable-stdio-inheritance",
    "--dogstatsd-tags": "--statsd-host",
}.items():
    REFUSED[_alias] = REFUSED[_flag]


def foreign_options(command: F) -> F:
    """Add the accepted options to a command, hidden, except those that have become our own."""
    ours = {flag for option in declared_options() for flag in option.flags}
    for each in ACCEPTED:
        flags = [flag for flag in each.flags if flag not in ours]
        if flags:
            command = _click_option(each, flags)(command)
    return command


def _click_option(each: Accepted, flags: list[str]) -> Callable[[F], F]:
    is_switch = each.values is None and not each.any_value
    long = next(flag for flag in flags if flag.startswith("--"))

    def take(ctx: click.Context, parameter: click.Parameter, value: str | bool | None) -> None:
        if value is None or value is False or ctx.resilient_parsing:
            return
        shown = long if is_switch else f"{long} {value}"
        meaning = each.note if is_switch else (each.values or {}).get(str(value), each.any_value)
        if not meaning:
            raise click.UsageError(f"{shown}: {each.refusal}", ctx)
        say.note(f"{shown}: {meaning}")

    name = PREFIX + long.strip("-").replace("-", "_")
    return click.option(*flags, name, hidden=True, expose_value=False, callback=take, is_flag=is_switch, default=None)


def explain(error: click.NoSuchOption) -> click.UsageError:
    """What to say of an option that does not exist: what to do in its place, or what was probably meant, or neither."""
    flag = error.option_name
    advice = REFUSED.get(flag)
    if advice is not None and _takes_settings(error.ctx):
        return click.UsageError(f"{flag}: {advice}", error.ctx)
    if isinstance(error.ctx.command if error.ctx else None, click.Group):
        ours = {name for option in declared_options() for name in option.flags}
        if flag in ours | set(REFUSED) | {name for each in ACCEPTED for name in each.flags} | {"-c", "--config"}:
            return click.UsageError(f"{flag} stands before the command: write jumpstart serve TARGET {flag}", error.ctx)
    known = [each for each in _flags_of(error.ctx) if each.startswith("--")]
    close = difflib.get_close_matches(flag, known, 1, 0.85) if flag.startswith("--") else []
    hint = f"; did you mean {close[0]}?" if close else ""
    return click.UsageError(f"there is no option {flag}{hint}", error.ctx)


def _takes_settings(ctx: click.Context | None) -> bool:
    """Whether the command is one that `foreign_options` were added to."""
    return ctx is not None and any((each.name or "").startswith(PREFIX) for each in ctx.command.params)


def _flags_of(ctx: click.Context | None) -> list[str]:
    parameters = ctx.command.params if ctx is not None else []
    return [
        flag for each in parameters for flag in (*each.opts, *each.secondary_opts) if not getattr(each, "hidden", 0)
    ]
