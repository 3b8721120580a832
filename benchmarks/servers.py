"""
The servers under test: their command lines.

Each gets one worker process, the threads that a scenario asks for, uvloop and httptools where it has the choice, no
access log, and limits on connections that no scenario reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

APPS = Path(__file__).parent / "apps"
BACKLOG = 4096
CONNECTIONS = 16384  # more than the crowd has
KEEP_ALIVE = 75  # seconds


@dataclass(frozen=True)
class Launch:
    """What a server is asked to serve."""

    interface: str  # wsgi or asgi
    app: str  # module:attribute, in apps/
    port: int
    threads: int
    programs: Path  # the folder of the environment's programs

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Server:
    name: str
    interfaces: tuple[str, ...]
    command: Callable[[Launch], list[str]]
    fixed_threads: str = ""  # why the number of threads for WSGI apps cannot be chosen


def jumpstart(launch: Launch) -> list[str]:
    return [
        str(launch.programs / "jumpstart"),
        *("serve", launch.app, "--app-dir", str(APPS), "--bind", launch.address, "--workers", "1"),
        *("--threads", str(launch.threads), "--backlog", str(BACKLOG), "--admin", "off"),
    ]


def tenants_toml(
    app: str, tenants: dict[str, tuple[int, int]], options: Mapping[str, object] | None = None, *, admin: str = "off"
) -> str:
    """
    The jumpstart.toml of several tenants, name → port and threads; otherwise as `jumpstart` has it.

    *options*: more of each tenant, or others.
    """
    lines = [f'[app]\ntarget = "{app}"\napp_dir = "{APPS}"\n\n[server]\nadmin = "{admin}"\n']
    usual: dict[str, object] = {"workers": 1, "backlog": BACKLOG, "timeout": 600}
    for name, (port, threads) in tenants.items():
        lines.append(f'[tenants.{name}]\nbind = "127.0.0.1:{port}"')
        own = {**usual, "threads": threads, **(options or {})}
        lines += [f"{key} = {str(value).lower()}" for key, value in own.items()]
        lines.append("")
    return "\n".join(lines)


def gunicorn(launch: Launch) -> list[str]:
    return [
        str(launch.programs / "gunicorn"),
        *("-k", "gthread", "-w", "1", "--threads", str(launch.threads), "-b", launch.address),
        *("--backlog", str(BACKLOG), "--worker-connections", str(CONNECTIONS), "--keep-alive", str(KEEP_ALIVE)),
        *("-t", "120", "--log-level", "error", "--no-control-socket", launch.app),
    ]


def uvicorn(launch: Launch) -> list[str]:
    return [
        str(launch.programs / "uvicorn"),
        *("--host", "127.0.0.1", "--port", str(launch.port), "--workers", "1", "--backlog", str(BACKLOG)),
        *("--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "error"),
        *("--timeout-keep-alive", str(KEEP_ALIVE)),
        # WSGI as uvicorn's own documentation has it: a2wsgi around the app.
        "on_a_pool:app" if launch.interface == "wsgi" else launch.app,
    ]


def granian(launch: Launch) -> list[str]:
    return [
        str(launch.programs / "granian"),
        *("--interface", launch.interface, "--host", "127.0.0.1", "--port", str(launch.port), "--workers", "1"),
        *(("--blocking-threads", str(launch.threads)) if launch.interface == "wsgi" else ("--loop", "uvloop")),
        *("--backlog", str(BACKLOG), "--backpressure", str(CONNECTIONS), "--http", "1", "--no-ws"),
        *("--log-level", "error", launch.app),
    ]


def waitress(launch: Launch) -> list[str]:
    return [
        str(launch.programs / "waitress-serve"),
        *("--host=127.0.0.1", f"--port={launch.port}", f"--threads={launch.threads}", f"--backlog={BACKLOG}"),
        *(f"--connection-limit={CONNECTIONS}", "--asyncore-use-poll", "--no-log-socket-errors", launch.app),
    ]


def hypercorn(launch: Launch) -> list[str]:
    return [
        str(launch.programs / "hypercorn"),
        *("-k", "uvloop", "-w", "1", "-b", launch.address, "--backlog", str(BACKLOG)),
        *("--log-level", "error", "--keep-alive", str(KEEP_ALIVE), f"{launch.interface}:{launch.app}"),
    ]


SERVERS = {
    server.name: server
    for server in (
        Server("jumpstart", ("wsgi", "asgi"), jumpstart),
        Server("gunicorn", ("wsgi",), gunicorn),
        Server("uvicorn", ("asgi", "wsgi"), uvicorn),
        Server("granian", ("wsgi", "asgi"), granian),
        Server("waitress", ("wsgi",), waitress),
        Server(
            "hypercorn",
            ("asgi", "wsgi"),
            hypercorn,
            fixed_threads="no option of hypercorn sets how many threads run WSGI handlers",
        ),
    )
}
LABELS = {("gunicorn", "wsgi"): "gunicorn (gthread)", ("uvicorn", "wsgi"): "uvicorn with a2wsgi"}


def label(name: str, interface: str) -> str:
    """What tables call it."""
    return LABELS.get((name, interface), name)
