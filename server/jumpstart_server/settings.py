"""
Every option, declared once: name, type, default, unit and help.

The command line, the ``JUMPSTART_*`` variables, `jumpstart.toml` and the reference in `docs/settings.md` are made from
these declarations; `config.py` fills them in. Values are frozen; building one has no side effect.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from jumpstart.boot import BootSettings
from jumpstart.paths import HostPaths
from jumpstart.recorder import WarmSettings
from jumpstart.target import Interface


def _option(
    help_text: str, *flags: str, unit: str = "", path: bool = False, env: tuple[str, ...] = (), **limits: Any
) -> Meta:
    """
    Describe one option.

    Args:
        help_text: one sentence for ``--help`` and the reference.
        flags: spellings on the command line; the first long one names the environment variable. None: file only.
        unit: of a number.
        path: the value is a path; in a file it is relative to that file's folder.
        env: environment variables of other servers that are honoured too, after ours.
        limits: ``ge``, ``gt``, ``le`` … as msgspec's `Meta` takes them.
    """
    extra = {"flags": flags, "unit": unit, "path": path, "env": env}
    return Meta(description=help_text, extra=extra, **limits)


_Port = Annotated[int, Meta(ge=0, le=65535)]
_Descriptor = Annotated[int, Meta(ge=0)]
_Threads = Annotated[int, Meta(ge=1, le=10_000)]

FIRST_THREADS = 40  # anyio's and Starlette's number, while a worker with --threads auto boots
BYTES = "bytes"  # the unit of sizes, which may be written with a unit of their own: 512MiB


class AppSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[app]``: which app, and how to import it."""

    target: Annotated[
        str,
        _option(
            "The app, as module:attribute or module:factory(). A module alone, as shop.web, means its attribute app, "
            "or else application."
        ),
    ] = ""
    chdir: Annotated[
        str,
        _option(
            "Folder to change to before the app is loaded; by default the processes stay where the command was given.",
            "--chdir",
            path=True,
        ),
    ] = ""
    app_dir: Annotated[
        str,
        _option(
            "Folder that the app is imported from; by default the one of --chdir, else the current one.",
            "--app-dir",
            path=True,
        ),
    ] = ""
    env_file: Annotated[
        str,
        _option(
            "File of NAME=VALUE lines: variables for the app's processes and for these options. Those that are set "
            "already win.",
            "--env-file",
            path=True,
        ),
    ] = ""
    factory: Annotated[bool, _option("The target is a function that returns the app.", "--factory")] = False
    interface: Annotated[
        Literal["auto", "asgi", "asgi3", "asgi2", "wsgi"],
        _option("What the app speaks; auto looks at its signature.", "--interface"),
    ] = "auto"
    name: Annotated[
        str,
        _option(
            "Name of the app in profiles and in the warm-start cache; by default its target and folder. "
            "Give one when each release is deployed to a folder of its own.",
            "--name",
        ),
    ] = ""
    build_id: Annotated[
        str,
        _option(
            "Which build of the app this is, such as a commit's hash; stores of profiles are ordered by it. By default "
            "it is told from the app's sources.",
            "--build-id",
        ),
    ] = ""


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[tenants.NAME]``: an address, its processes, their limits and how they become warm."""

    target: Annotated[str, _option("The tenant's own app; by default the one of [app].")] = ""
    routes: Annotated[
        tuple[str, ...],
        _option(
            'Begins of the paths that are the tenant\'s, such as "/chat/"; "/" is the rest. Used by `jumpstart export` '
            "only, for the proxy in front."
        ),
    ] = ()
    bind: Annotated[
        tuple[str, ...],
        _option(
            "Address: HOST:PORT, [::1]:PORT, unix:PATH, fd://N, or fd://NAME of a socket that systemd passed; "
            "repeatable. Without any address it is what systemd passed, else 0.0.0.0:$PORT where the variable PORT is "
            "set, else 127.0.0.1:8000.",
            "-b",
            "--bind",
        ),
    ] = ()
    host: Annotated[
        str,
        _option("Address to bind, with --port; 127.0.0.1 by default, 0.0.0.0 where $PORT gives the port.", "--host"),
    ] = ""
    uds: Annotated[str, _option("Unix socket to bind.", "--uds", path=True)] = ""
    uds_permissions: Annotated[
        str,
        _option(
            "Who may connect to a Unix socket: its file's permissions, octal; 660 is owner and group. Those of --umask "
            "are taken off.",
            "--uds-permissions",
        ),
    ] = "666"
    umask: Annotated[
        str,
        _option(
            "Permissions, octal, that files made by the app's processes do not get; by default as inherited.",
            "-m",
            "--umask",
        ),
    ] = ""
    fd: Annotated[_Descriptor | None, _option("Inherited socket to serve on.", "--fd")] = None
    port: Annotated[
        _Port | None,
        _option("Port to bind; 8000 by default; 0 takes a free one and prints it.", "--port", env=("PORT",)),
    ] = None
    backlog: Annotated[int, _option("Connections that may wait to be accepted.", "--backlog", ge=1, le=65535)] = 2048
    workers: Annotated[
        int, _option("Worker processes.", "-w", "--workers", env=("WEB_CONCURRENCY",), ge=1, le=1024)
    ] = 1
    threads: Annotated[
        _Threads | Literal["auto"],
        _option(
            "Threads of a worker that run WSGI handlers, and sync code of ASGI apps; started on demand. auto is as "
            "many as the memory holds: (--memory-limit - what a warm worker takes) / --request-memory.",
            "--threads",
        ),
    ] = FIRST_THREADS
    max_threads: Annotated[
        int, _option("Most threads of a worker with --threads auto.", "--max-threads", ge=1, le=10_000)
    ] = 1000
    memory_limit: Annotated[
        int,
        _option(
            "Memory of a worker (RSS), such as 2GiB; one that takes more is replaced, the new one ready first. 0 is no "
            "limit of its own: --threads auto reckons with its share of the cgroup's limit, or of the RAM where there "
            "is none, and a worker above its share is replaced only when a cgroup is short of memory.",
            "--memory-limit",
            unit=BYTES,
            ge=0,
        ),
    ] = 0
    memory_soft: Annotated[
        float,
        _option(
            "Share of the memory limit above which a worker runs no more requests at once than it does, and is "
            "replaced when that lasts.",
            "--memory-soft",
            gt=0,
            le=1,
        ),
    ] = 0.85
    request_memory: Annotated[
        int,
        _option(
            "Memory that a request takes while it runs, for --threads auto; 0 is 1MiB.",
            "--request-memory",
            unit=BYTES,
            ge=0,
        ),
    ] = 0
    timeout: Annotated[
        float,
        _option(
            "How long a request may take in all, from when its handler is called; then its client gets 504, or a "
            "broken stream, and the handler is stopped. WebSockets, and ASGI background tasks after the response, have "
            "no limit. 0 is for ever.",
            "-t",
            "--timeout",
            unit="s",
            ge=0,
        ),
    ] = 30
    timeout_extension: Annotated[
        float,
        _option(
            "How much longer than --timeout handlers may make a request with jumpstart.extend_deadline().",
            "--timeout-extension",
            unit="s",
            ge=0,
        ),
    ] = 0
    first_byte_timeout: Annotated[
        float,
        _option(
            "How long a handler may take until the first byte of its response; then 504. 0 is as long as --timeout.",
            "--first-byte-timeout",
            unit="s",
            ge=0,
        ),
    ] = 0
    idle_timeout: Annotated[
        float,
        _option(
            "How long a response that has begun may pause, between two chunks of a stream; then it is broken off. 0 is "
            "as long as --timeout.",
            "--idle-timeout",
            unit="s",
            ge=0,
        ),
    ] = 0
    on_deadline: Annotated[
        Literal["interrupt", "sever"],
        _option(
            "How the thread of a handler is stopped whose request is over its time, or whose client has left: "
            "interrupt raises jumpstart.RequestTimeout at its next bytecode; sever also shuts down the socket that it "
            "waits on. Not for handlers that share one connection, as over HTTP/2 or gRPC.",
            "--on-deadline",
        ),
    ] = "interrupt"
    max_overruns: Annotated[
        int,
        _option(
            "Threads of a worker that may run on although their requests were stopped; at more the worker is replaced.",
            "--max-overruns",
            ge=0,
        ),
    ] = 16
    queue: Annotated[
        int,
        _option(
            "Requests of a worker that may wait for their turn: WSGI's for a thread, ASGI's beyond "
            "--limit-concurrency; more are answered with 503.",
            "--queue",
            ge=0,
        ),
    ] = 1000
    limit_concurrency: Annotated[
        int,
        _option(
            "Requests to an ASGI app that may run at once in a worker; the others wait in the queue. Open WebSockets "
            "count, idle connections do not. 0 is as many as come.",
            "--limit-concurrency",
            "--worker-connections",
            ge=0,
        ),
    ] = 0
    queue_timeout: Annotated[
        float,
        _option(
            "How long a request may wait for its turn before it is answered with 503, without having started; 0 is for "
            "ever. When the oldest has waited for half of it, and those who come would have to, the newest are served "
            "first and may wait for half of it only.",
            "--queue-timeout",
            unit="s",
            ge=0,
        ),
    ] = 10
    stream_bodies: Annotated[
        bool,
        _option(
            "Start WSGI handlers when a request's head has come, and let them read its body from the socket, instead "
            "of when the body has come whole.",
            "--stream-bodies",
        ),
    ] = False
    keep_alive: Annotated[
        float, _option("How long an idle connection is kept.", "--keep-alive", "--timeout-keep-alive", unit="s", ge=0)
    ] = 75
    header_timeout: Annotated[
        float,
        _option(
            "How long a request's head may take from its first byte, or from the connection's begin; 0 is for ever.",
            "--header-timeout",
            unit="s",
            ge=0,
        ),
    ] = 10
    body_timeout: Annotated[
        float,
        _option(
            "How long a request's body may pause while it is awaited; 0 is for ever.", "--body-timeout", unit="s", ge=0
        ),
    ] = 30
    write_timeout: Annotated[
        float,
        _option(
            "How long a client may take nothing of what waits for it; 0 is for ever.", "--write-timeout", unit="s", ge=0
        ),
    ] = 30
    limit_request_line: Annotated[
        int, _option("Longest request line; 0 is 1 MiB.", "--limit-request-line", unit=BYTES, ge=0)
    ] = 4094
    limit_request_fields: Annotated[
        int, _option("Most header fields of a request; 0 is 32768.", "--limit-request-fields", ge=0)
    ] = 100
    limit_request_field_size: Annotated[
        int,
        _option(
            "Longest header field of a request; 0 is 1 MiB.",
            "--limit-request-field_size",
            "--limit-request-field-size",
            unit=BYTES,
            ge=0,
        ),
    ] = 8190
    limit_request_body: Annotated[
        int, _option("Longest body of a request; 0 is no limit.", "--limit-request-body", unit=BYTES, ge=0)
    ] = 0
    header_map: Annotated[
        Literal["drop", "refuse", "dangerous"],
        _option(
            "Header names with an underscore, which WSGI cannot tell from those with a hyphen: drop them, refuse the "
            "request, or take them.",
            "--header-map",
        ),
    ] = "drop"
    startup_timeout: Annotated[
        float, _option("How long a process may take to be ready; 0 is for ever.", "--startup-timeout", unit="s", ge=0)
    ] = 120
    worker_healthcheck_timeout: Annotated[
        float,
        _option(
            "How long a worker's event loop may give no sign of life, while the worker does not compute either, until "
            "it is replaced. One that computes is never killed for it. 0 is for ever.",
            "--worker-healthcheck-timeout",
            "--timeout-worker-healthcheck",
            unit="s",
            ge=0,
        ),
    ] = 30
    graceful_timeout: Annotated[
        float,
        _option(
            "How long requests in flight may take to end when the server stops.",
            "--graceful-timeout",
            "--timeout-graceful-shutdown",
            unit="s",
            ge=0,
        ),
    ] = 30
    drain_delay: Annotated[
        float,
        _option(
            "How long the server goes on accepting after SIGTERM, not ready for whoever asks /readyz, and answering "
            "with Connection: close, before it drains: time for load balancers to look elsewhere.",
            "--drain-delay",
            unit="s",
            ge=0,
        ),
    ] = 0
    max_requests: Annotated[
        int,
        _option(
            "Requests after which a worker is replaced, the new one ready first; 0 is never.",
            "--max-requests",
            "--limit-max-requests",
            ge=0,
        ),
    ] = 0
    max_requests_jitter: Annotated[
        int,
        _option(
            "Up to so many requests more, by lot, so that workers are not replaced all at once.",
            "--max-requests-jitter",
            "--limit-max-requests-jitter",
            ge=0,
        ),
    ] = 0
    crash_limit: Annotated[
        int,
        _option(
            "Failures of a worker in a row, while no worker has served for ten seconds, after which the tenant is "
            "given up; 0 is never.",
            "--crash-limit",
            ge=0,
        ),
    ] = 8
    lifespan: Annotated[
        Literal["auto", "on", "off"],
        _option(
            "ASGI lifespan: auto goes on without it where the app does not support it, on ends the "
            "boot there. A start-up that the app reports as failed ends the boot either way.",
            "--lifespan",
        ),
    ] = "auto"
    root_path: Annotated[str, _option("Path prefix that a proxy strips (SCRIPT_NAME).", "--root-path")] = ""
    access_logfile: Annotated[
        str,
        _option(
            "File of the access log; - is standard output. SIGUSR1 opens it anew. Without one there is no access log.",
            "--access-logfile",
            path=True,
        ),
    ] = ""
    access_logformat: Annotated[
        str,
        _option(
            "Format of the access log: combined, json (an object per line), or a text with gunicorn's atoms, such as "
            "%(h)s and %({x-request-id}i)s. Given without --access-logfile, the log goes to standard output.",
            "--access-logformat",
        ),
    ] = "combined"
    access_log: Annotated[
        bool,
        _option(
            "Whether there is an access log; on standard output where --access-logfile names no file.",
            "--access-log",
        ),
    ] = False
    proxy_headers: Annotated[
        bool, _option("Take client address and scheme from a trusted proxy's headers.", "--proxy-headers")
    ] = True
    forwarded_allow_ips: Annotated[
        str,
        _option(
            "Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed: addresses, networks, unix: (whoever "
            "connects over a Unix socket) or * (everybody), with commas between them.",
            "--forwarded-allow-ips",
            env=("FORWARDED_ALLOW_IPS",),
        ),
    ] = "127.0.0.1,::1,unix:"
    proxy_protocol: Annotated[
        Literal["off", "v1", "v2", "auto"],
        _option(
            "HAProxy's PROXY protocol: the version of the header that every connection begins with; auto takes both. "
            "A connection without it is refused.",
            "--proxy-protocol",
        ),
    ] = "off"
    proxy_allow_from: Annotated[
        str,
        _option(
            "Who may connect where --proxy-protocol is on; written like --forwarded-allow-ips.", "--proxy-allow-from"
        ),
    ] = "127.0.0.1,::1,unix:"
    ssl_certfile: Annotated[str, _option("TLS certificate.", "--ssl-certfile", "--certfile", path=True)] = ""
    ssl_keyfile: Annotated[str, _option("TLS private key.", "--ssl-keyfile", "--keyfile", path=True)] = ""
    fork: Annotated[
        Literal["auto", "never"],
        _option("Fork workers from the warmed mold where the audit finds that safe, or always spawn them.", "--fork"),
    ] = "auto"
    profile: Annotated[
        str,
        _option(
            "Profile to boot from: a file, or a store of profiles, which is a folder or a URL (s3://…, https://…).",
            "--profile",
            path=True,
        ),
    ] = ""
    warmup: Annotated[
        str, _option("TOML file of requests that every worker runs before it is ready.", "--warmup", path=True)
    ] = ""
    warmup_budget: Annotated[
        float, _option("Time for warm-up requests of a worker; the rest is skipped.", "--warmup-budget", unit="s", ge=0)
    ] = 10
    warmup_host: Annotated[
        str,
        _option(
            "Host header of warm-up requests that bring none; name one of the app's own where it checks (Django's "
            "ALLOWED_HOSTS).",
            "--warmup-host",
        ),
    ] = "localhost"
    replay: Annotated[
        bool,
        _option(
            "Replay recorded requests (GET and HEAD only, without cookies) in workers before they are ready. Without "
            "it nothing of real traffic is sent again, so that there are no shadow requests either, and no proof of a "
            "profile.",
            "--replay",
        ),
    ] = True
    first_calls: Annotated[
        bool,
        _option(
            "Count the functions that run for the first time inside a request, and name them (Python 3.12 and later). "
            "Costs a little once per function, at boot above all.",
            "--first-calls",
        ),
    ] = False
    shadow_cold: Annotated[
        bool,
        _option(
            "Send a request that met cold work in one worker to the other workers as a shadow request (GET and HEAD "
            "only, without cookies; and shadow_routes), once, so that it is cold once and not once per worker.",
            "--shadow-cold",
        ),
    ] = True
    shadow: Annotated[
        float,
        _option(
            "Share of the requests, taken at random, that are sent to another worker as shadow requests; 0.01 is one "
            "of a hundred. At most 8 of a worker in a second.",
            "--shadow",
            ge=0,
            le=1,
        ),
    ] = 0
    shadow_routes: Annotated[
        tuple[str, ...],
        _option(
            "Route with another method than GET and HEAD that may be sent again as a shadow request, with its body of "
            "up to 64 KiB: 'POST /search'; repeatable.",
            "--shadow-route",
        ),
    ] = ()
    shadow_rate: Annotated[
        int, _option("Shadow requests that a worker may run in a minute.", "--shadow-rate", ge=0)
    ] = 120
    shadow_cpu: Annotated[
        float,
        _option(
            "Share of a core that shadow requests of a worker may take; 0 is none at all. Five seconds are saved up "
            "for cold work.",
            "--shadow-cpu",
            ge=0,
            le=1,
        ),
    ] = 0.02

    guard: Annotated[
        Literal["shadow", "all", "off"],
        _option(
            "Which requests may do nothing to others (connect, write files, start processes, change rows): shadow "
            "requests, all that are made by this server (warm-up requests too), or off.",
            "--guard",
        ),
    ] = "shadow"
    shadow_allow: Annotated[
        tuple[str, ...],
        _option(
            "Address that guarded requests may speak to all the same: host:port, host:*, a network, unix:/path; or "
            "file:/folder that they may write to; repeatable.",
            "--shadow-allow",
        ),
    ] = ()

    @property
    def first_threads(self) -> int:
        """How many threads a worker begins with; what ``auto`` comes to is known when it is warm."""
        return FIRST_THREADS if self.threads == "auto" else self.threads


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[profile]``: what is recorded, what is trusted, and what happens when it cannot be used."""

    warm_start: Annotated[
        bool, _option("Keep what workers learn in a cache on this host, for the next start.", "--warm-start")
    ] = True
    trust: Annotated[
        Literal["signed", "data-only", "any"],
        _option(
            "Use profiles by trusted keys (signed); others too, without code and pickles (data-only); or all, whoever "
            "made them (any), which runs their code.",
            "--trust",
        ),
    ] = "signed"
    max_age: Annotated[float, _option("Refuse profiles older than this.", "--profile-max-age", unit="s", gt=0)] = 86_400
    fetch_timeout: Annotated[
        float,
        _option(
            "How long a store of profiles may take; then what was fetched before is used.",
            "--profile-fetch-timeout",
            unit="s",
            gt=0,
        ),
    ] = 10
    require_warm: Annotated[
        bool, _option("Refuse to start (exit 4) when a profile or cache was refused or gave nothing.", "--require-warm")
    ] = False
    restore_timeout: Annotated[
        float,
        _option("Time to restore records in a process; the rest is dropped.", "--restore-timeout", unit="s", ge=0),
    ] = 30
    lru_cache: Annotated[
        tuple[str, ...],
        _option("functools.lru_cache functions to record, as MODULE:NAME with wildcards; repeatable.", "--lru-cache"),
    ] = ()
    bytecode: Annotated[
        bool, _option("Put bytecode into profile files, for hosts without __pycache__.", "--bytecode")
    ] = True
    disable: Annotated[
        tuple[str, ...],
        _option(
            "Recorder to switch off, by name; repeatable. A name that is unknown is an error.", "--disable-recorder"
        ),
    ] = ()
    seed: Annotated[
        bool,
        _option(
            "Seed: after so many real requests and so much time make a profile, prove it, and publish it in the store.",
            "--seed",
        ),
    ] = False
    seed_requests: Annotated[
        int, _option("Real requests that a seeder has seen before it makes a profile.", "--seed-requests", ge=1)
    ] = 1000
    seed_after: Annotated[
        float, _option("Time that a seeder has served before it makes a profile.", "--seed-after", unit="s", ge=0)
    ] = 600
    publish: Annotated[
        str,
        _option(
            "Store that a seeder publishes in: a folder or a URL; by default the store that --profile names.",
            "--publish",
            path=True,
        ),
    ] = ""
    prove_coverage: Annotated[
        float,
        _option(
            "Share of a profile's golden requests that must run without cold work, or it is not proven.",
            "--prove-coverage",
            ge=0,
            le=1,
        ),
    ] = 0.8
    prove_used: Annotated[
        float,
        _option("Share of a profile's records that must be used, or it is not proven.", "--prove-used", ge=0, le=1),
    ] = 0.5
    prove_requests: Annotated[
        int,
        _option("Real requests that a profile's seeder must have seen, or it is not proven.", "--prove-requests", ge=0),
    ] = 100
    prove_routes: Annotated[
        int, _option("Routes that a profile's seeder must have seen, or it is not proven.", "--prove-routes", ge=0)
    ] = 1


class HostSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[server]``: what belongs to the process and not to a tenant."""

    admin: Annotated[
        str,
        _option("Admin address: auto (a Unix socket in the state folder), unix:PATH, HOST:PORT or off.", "--admin"),
    ] = "auto"
    log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"],
        _option(
            "Least severe level logged, in any case; warn, fatal and trace (debug) are understood too.", "--log-level"
        ),
    ] = "info"
    error_logfile: Annotated[
        str,
        _option(
            "File of the server's own log; - is standard error. SIGUSR1 opens it anew.",
            "--error-logfile",
            "--log-file",
            path=True,
        ),
    ] = "-"
    capture_output: Annotated[
        bool,
        _option("Let what the app writes to standard output and error go to --error-logfile too.", "--capture-output"),
    ] = False
    log_config: Annotated[
        str,
        _option(
            "Configuration for Python's logging, applied in each process: a file .ini, .conf, .json or .yaml.",
            "--log-config",
            path=True,
        ),
    ] = ""
    pid: Annotated[
        str,
        _option(
            "File for the server's process id, while it runs; written when the addresses are bound.",
            "-p",
            "--pid",
            path=True,
        ),
    ] = ""
    user: Annotated[
        str,
        _option(
            "User, by name or number, that the app's processes become before they import the app; the server itself "
            "stays root.",
            "-u",
            "--user",
        ),
    ] = ""
    group: Annotated[
        str,
        _option(
            "Group, by name or number, of the app's processes; by default the main one of --user.", "-g", "--group"
        ),
    ] = ""
    reload: Annotated[
        bool,
        _option(
            "For development: when a source file changes, start new workers, which take over when they are ready.",
            "--reload",
        ),
    ] = False
    reload_dir: Annotated[
        tuple[str, ...],
        _option("Folder to watch with --reload, by default the app's; repeatable.", "--reload-dir", path=True),
    ] = ()
    reload_include: Annotated[
        tuple[str, ...],
        _option("Files to watch with --reload beside *.py, with wildcards; repeatable.", "--reload-include"),
    ] = ()
    reload_exclude: Annotated[
        tuple[str, ...],
        _option("Files and folders not to watch with --reload, with wildcards; repeatable.", "--reload-exclude"),
    ] = ()
    reload_delay: Annotated[
        float, _option("Time between two looks at the files with --reload.", "--reload-delay", unit="s", gt=0)
    ] = 0.25


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the file of ``--log-config`` holds.

    Attributes:
        path: of the file, for messages.
        ini: its text, for `logging.config.fileConfig`; empty where there is a *document*.
        document: for `logging.config.dictConfig`.
    """

    path: str
    ini: str = ""
    document: dict[str, Any] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """
    All settings of one tenant's server, from one reading of command line, environment and file.

    Attributes:
        all_workers: of all tenants that are served together, which share the memory; 0: of this one only.
        environment: variables of ``--env-file`` that were not set already, for the processes that run the app.
    """

    app: AppSettings
    tenant: TenantSettings
    profile: ProfileSettings
    server: HostSettings
    logging: LogConfig | None = None
    tenant_name: str = "web"
    all_workers: int = 0
    environment: dict[str, str] = {}
    home_cache: str = ""
    home_state: str = ""
    home_config: str = ""

    @property
    def target(self) -> str:
        return self.tenant.target or self.app.target

    @property
    def interface(self) -> Interface | None:
        """The interface that the user named, or None to look at the app."""
        names: dict[str, Interface | None] = {
            "auto": None,
            "asgi3": "asgi",
            "asgi": "asgi",
            "asgi2": "asgi2",
            "wsgi": "wsgi",
        }
        return names[self.app.interface]

    @property
    def warm(self) -> WarmSettings:
        profile = self.profile
        return WarmSettings(
            lru_cache=profile.lru_cache, bytecode=profile.bytecode, disabled=profile.disable, app_dir=self.app.app_dir
        )


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "app": AppSettings,
    "tenant": TenantSettings,
    "profile": ProfileSettings,
    "server": HostSettings,
}


GROUPS: dict[str, tuple[str, ...]] = {
    "App": (),
    "Address": ("bind", "host", "port", "uds", "uds_permissions", "fd", "backlog", "routes"),
    "Processes": (
        *("workers", "threads", "max_threads", "memory_limit", "memory_soft", "request_memory", "fork", "umask"),
        *("startup_timeout", "graceful_timeout", "worker_healthcheck_timeout", "lifespan"),
        *("drain_delay", "max_requests", "max_requests_jitter", "crash_limit"),
    ),
    "Envelope of a request": (),
    "HTTP limits": (
        *("keep_alive", "header_timeout", "body_timeout", "write_timeout", "limit_request_line"),
        *("limit_request_fields", "limit_request_field_size", "limit_request_body", "header_map", "stream_bodies"),
    ),
    "TLS and proxies": (
        *("ssl_certfile", "ssl_keyfile", "proxy_headers", "forwarded_allow_ips", "proxy_protocol", "proxy_allow_from"),
        "root_path",
    ),
    "Warm boot": ("profile", "warmup", "warmup_budget", "warmup_host", "replay", "first_calls"),
    "Shadow requests": ("shadow_cold", "shadow", "shadow_routes", "shadow_rate", "shadow_cpu", "guard", "shadow_allow"),
    "Logs": (
        *("access_logfile", "access_logformat", "access_log", "log_level", "error_logfile", "capture_output"),
        "log_config",
    ),
    "Host": (),
}
"""Heading in ``--help`` and in the reference → keys; those of no heading are under their section's, `GROUP_OF_REST`."""
GROUP_OF_REST = {"app": "App", "tenant": "Envelope of a request", "profile": "Warm boot", "server": "Host"}


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One declared option, as the command line and the documentation see it."""

    section: str
    key: str
    type: Any
    default: Any
    help: str
    flags: tuple[str, ...]
    unit: str
    path: bool
    other_env: tuple[str, ...]

    @property
    def is_flag(self) -> bool:
        return self.type is bool

    @property
    def many(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(get_args(self.type)) if get_origin(self.type) is Literal else ()

    @property
    def group(self) -> str:
        """The heading that it is shown under, one of `GROUPS`."""
        found = (title for title, keys in GROUPS.items() if self.key in keys)
        return next(found, GROUP_OF_REST[self.section])

    @property
    def name_on_command_line(self) -> str:
        """Its first long flag; TARGET of the app."""
        return next((flag for flag in self.flags if flag.startswith("--")), "TARGET")

    @property
    def env(self) -> str:
        """Its environment variable: ``JUMPSTART_`` and the name of its first long flag."""
        long = next((flag for flag in self.flags if flag.startswith("--")), "--" + self.key)
        return "JUMPSTART_" + long[2:].replace("-", "_").upper()


@functools.cache
def declared_options() -> list[Option]:
    """All options in the order of their declaration."""
    found = []
    for section, struct in SECTIONS.items():
        hints = _hints(struct)
        for field in msgspec.structs.fields(struct):
            kind, meta = get_args(hints[field.name])[:2]
            extra = meta.extra
            found.append(
                Option(
                    section=section,
                    key=field.name,
                    type=kind,
                    default=field.default,
                    help=meta.description,
                    flags=extra["flags"],
                    unit=extra["unit"],
                    path=extra["path"],
                    other_env=extra["env"],
                )
            )
    return found


def annotated_type(option: Option) -> Any:
    """The option's type with its limits, for conversion of one value."""
    return _hints(SECTIONS[option.section])[option.key]


def allowed_values(option: Option) -> str:
    """What the option takes, in words for an error."""
    words: str
    if option.is_flag:
        return "on or off (true or false)"
    if option.choices:
        return f"one of {', '.join(option.choices)}"
    if option.many:
        return "text, or a list of texts"
    kinds = {option.type, *get_args(option.type)}
    kinds |= {get_args(kind)[0] for kind in kinds if get_origin(kind) is Annotated}
    if option.unit == BYTES:
        words = "a size such as 512MiB or 2GiB, or a whole number"
    elif int in kinds:
        words = "a whole number"
    elif float in kinds:
        words = "a number"
    else:
        return "text"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(meta, name):g}"
        for meta in _metas(annotated_type(option))
        for name, sign in signs.items()
        if getattr(meta, name) is not None
    ]
    named = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return ", or ".join([f"{words} {' and '.join(limits)}".rstrip(), *named])


def _metas(kind: Any) -> list[Meta]:
    """The annotations of a type, those of the members of a union too."""
    own = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta)]
    inner = get_args(kind)[:1] if own else get_args(kind)
    return own + [meta for each in inner for meta in _metas(each)]


@functools.cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def boot_settings(settings: Settings, *, cold: bool = False) -> BootSettings:
    """What the ground floor needs of the settings; *cold* boots from nothing, to learn everything."""
    paths = HostPaths(Path(settings.home_cache), Path(settings.home_state), Path(settings.home_config))
    profile = settings.profile
    return BootSettings(
        target=settings.target,
        app_dir=settings.app.app_dir,
        factory=settings.app.factory,
        interface=settings.interface,
        name=settings.app.name,
        tenant=settings.tenant_name,
        profile="" if cold else settings.tenant.profile,
        build=settings.app.build_id,
        copies=str(paths.profiles),
        fetch_timeout_s=profile.fetch_timeout,
        ledger=str(paths.ledger),
        trust=profile.trust,
        max_age_s=profile.max_age,
        warm_start=str(paths.warm_start) if profile.warm_start and not cold else "",
        keys=str(paths.keys),
        require_warm=profile.require_warm and not cold,
        restore_timeout_s=profile.restore_timeout,
        warm=settings.warm,
    )
