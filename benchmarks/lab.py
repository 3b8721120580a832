"""What scenarios measure with: servers to start, load to put on them, and meters."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import machine
from benchmarks.figures import percentile
from benchmarks.load import wrk
from benchmarks.processes import Failure, Process, RunningServer, Tool, Upstream, environment, free_port
from benchmarks.servers import SERVERS, tenants_toml

TOOL_S = 30.0  # what a load generator may take beyond the time that it loads
LAB_S = 24 * 3600.0  # the upstream ends by itself after this, should we be killed


@dataclass(frozen=True)
class Traffic:
    """What a closed loop of requests gave."""

    generator: str
    rate: float  # answers with status 200 in a second
    requests: int
    p50_s: float | None
    p99_s: float | None
    failures: int
    cpu_s: float  # of the load generators


class Meter:
    """CPU and memory of a server, and CPU that others used, between its making and `read`."""

    def __init__(self, watched: Process, upstream: Process | None = None) -> None:
        self._watched, self._upstream = watched, upstream
        self._cpu_s = watched.cpu_s()
        self._upstream_s = upstream.cpu_s() if upstream else 0.0
        self._own_s = time.process_time()
        self._busy_s = machine.busy_s()
        self._begun = time.monotonic()

    def read(self, load_s: float) -> dict[str, Any]:
        """The figures that all samples have; *load_s* is what load generators used."""
        wall = time.monotonic() - self._begun
        busy = machine.busy_s() - self._busy_s
        tree = self._watched.tree()
        server = machine.cpu_s(tree) - self._cpu_s
        upstream = self._upstream.cpu_s() - self._upstream_s if self._upstream else 0.0
        own = time.process_time() - self._own_s
        return {
            "wall_s": wall,
            "cpu_s": server,
            "server_cores": server / wall,
            "load_cores": load_s / wall,
            "upstream_cores": upstream / wall,
            "others_cores": max(0.0, busy - server - upstream - load_s - own) / wall,
            "pss_mib": machine.pss_kib(tree) / 1024,
            "threads": machine.threads(tree),
        }


class Lab:
    """One run's means. As a context manager it ends its upstream."""

    def __init__(self, programs: Path, *, quick: bool = False, seconds: float | None = None) -> None:
        self.quick = quick
        self.wrk = wrk.path()
        self._programs = programs
        self._seconds = seconds
        self._upstream: Upstream | None = None

    def seconds(self, full: float) -> float:
        """How long to load, where *full* is right for a measurement."""
        if self._seconds is not None:
            return self._seconds
        return max(1.0, 0.4 * full) if self.quick else full

    @property
    def upstream(self) -> Upstream:
        """Started when it is first asked for."""
        if self._upstream is None:
            self._upstream = Upstream(LAB_S)
        return self._upstream

    @contextlib.contextmanager
    def serve(self, name: str, interface: str, app: str, threads: int, **environ: str) -> Iterator[RunningServer]:
        """The server *name*, up and answering."""
        with RunningServer(SERVERS[name], interface, app, threads, self._programs, environ) as server:
            server.wait_until_ready()
            yield server

    @contextlib.contextmanager
    def serve_tenants(
        self,
        app: str,
        threads: dict[str, int],
        options: Mapping[str, object] | None = None,
        *,
        admin: str = "off",
        **environ: str,
    ) -> Iterator[tuple[RunningServer, dict[str, int]]]:
        """Jumpstart with several tenants, up and answering, and the port of each. *options*: as of `tenants_toml`."""
        ports = {tenant: free_port() for tenant in threads}
        first = next(iter(ports.values()))
        bound = {tenant: (ports[tenant], count) for tenant, count in threads.items()}
        config = tenants_toml(app, bound, options, admin=admin)
        server = RunningServer(SERVERS["jumpstart"], "wsgi", app, 0, self._programs, environ, config=config, port=first)
        with server:
            for port in ports.values():
                server.wait_until_ready(port)
            yield server, ports

    def tool(self, name: str, limit_s: float, **options: Any) -> dict[str, Any]:
        """What one run of a load generator gave."""
        with Tool(name, options, limit_s + TOOL_S) as tool:
            return tool.finish()

    def traffic(
        self, port: int, path: str, connections: int, seconds: float, *, vary: bool = False, own: bool = False
    ) -> Traffic:
        """
        Each connection asks again as soon as it has its answer.

        wrk does it where it is installed. With *vary* (no two requests are the same) or *own* it is always ours.
        """
        if self.wrk and not vary and not own:
            return self._wrk(self.wrk, port, path, connections, seconds)
        got = self.tool(
            "closed_loop", seconds, port=port, path=path, connections=connections, seconds=seconds, vary=vary
        )
        latencies = [value / 1e6 for value in got["latencies_us"]]
        return Traffic(
            generator="own",
            rate=got["rate"],
            requests=len(latencies),
            p50_s=percentile(latencies, 0.5),
            p99_s=percentile(latencies, 0.99),
            failures=got["failures"],
            cpu_s=got["cpu_s"],
        )

    def _wrk(self, program: str, port: int, path: str, connections: int, seconds: float) -> Traffic:
        command = wrk.command(program, port, path, connections, seconds)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryFile() as output:
            with Process(command, environment(), machine.ROOT, stdout=output, stderr=output) as process:
                try:
                    process.child.wait(seconds + TOOL_S)
                except subprocess.TimeoutExpired:
                    raise Failure("wrk did not end") from None
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            output.seek(0)
            try:
                got = wrk.read(output.read().decode(errors="replace"))
            except ValueError as error:
                raise Failure(str(error)) from None
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Traffic(generator="wrk", cpu_s=used, **got)

    def wait_for_quiet(self, cores: float, limit_s: float) -> None:
        """Until others use fewer than *cores*, but no longer than *limit_s*."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            busy, begun = machine.busy_s(), time.monotonic()
            time.sleep(0.5)
            if (machine.busy_s() - busy) / (time.monotonic() - begun) < cores:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._upstream is not None:
            self._upstream.end()
