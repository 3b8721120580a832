"""Shadow requests between the workers of a server: who pays for a flag that flips, and who never notices."""

from __future__ import annotations

import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.server import Serve, Server, free_port, in_parallel, wait_until, write_app

pytestmark = pytest.mark.slow

# Behind the flag: a module, a template and a cached value that nothing has touched before.
APP = """
    import asyncio, os, pathlib, time

    import jinja2
    import jumpstart

    HERE = pathlib.Path(os.environ["PLAYGROUND"])
    pages = jinja2.Environment(loader=jinja2.DictLoader({"old.html": "old", "new.html": "new {{ price }}"}))

    @jumpstart.cached(ttl=300)
    def price(region):
        return {"here": 7}[region]

    def page(path, query, name):
        if not jumpstart.is_warmup():
            with open(HERE / f"visits-{name}", "a") as visits:
                visits.write(f"{path}?{query}\\n")
        if path == "/same":
            return pages.get_template("old.html").render() + query
        if path == "/gated":
            with open(HERE / "started", "a") as started:
                started.write(f"{os.getpid()}\\n")
            while not (HERE / "gate").exists():
                time.sleep(0.01)
        if not (HERE / "flag").exists():
            return f"{os.getpid()} {pages.get_template('old.html').render()}"
        import novelty
        return f"{os.getpid()} {pages.get_template('new.html').render(price=novelty.tax(price('here')))}"

    def search(words):
        jumpstart.cold_event("search", words.decode())

    def long_one(query):
        jumpstart.cold_event("long", query)

    def may_end():
        return jumpstart.is_warmup() or (HERE / "end").exists()

    def wait_long():
        yield b"begun"
        while not may_end():
            time.sleep(0.01)

    def wsgi(name):
        def app(environ, start_response):
            if environ["PATH_INFO"] == "/long":
                long_one(environ["QUERY_STRING"])
                start_response("200 OK", [])
                return wait_long()
            if environ["REQUEST_METHOD"] == "POST":
                search(environ["wsgi.input"].read())
            text = page(environ["PATH_INFO"], environ["QUERY_STRING"], name).encode()
            time.sleep(0.05)
            start_response("200 OK", [("Content-Length", str(len(text)))])
            return [text]
        return app

    def asgi(name):
        async def app(scope, receive, send):
            if scope["type"] != "http":
                raise RuntimeError("no lifespan")
            if scope["path"] == "/long":
                long_one(scope["query_string"].decode())
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"begun", "more_body": True})
                while not may_end():
                    await asyncio.sleep(0.01)
                return await send({"type": "http.response.body", "body": b""})
            if scope["method"] == "POST":
                search((await receive())["body"])
            text = page(scope["path"], scope["query_string"].decode(), name).encode()
            await asyncio.sleep(0.05)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": text})
        return app

    wsgi_on, wsgi_off, narrow = wsgi("wsgi_on"), wsgi("wsgi_off"), wsgi("narrow")
    asgi_on, asgi_off = asgi("asgi_on"), asgi("asgi_off")
"""

# Once per worker, whoever has it imported.
NOVELTY = """
import colorsys
import jumpstart

jumpstart.cold_event("novelty", "imported")

def tax(price):
    return price + 1
"""

ON = 'shadow_routes = ["POST /search"]\nshadow_rate = 6000\nshadow_cpu = 1.0\nworkers = 4\nthreads = 2\n'
RANDOM = "shadow = 1.0\n"
OFF = "shadow_cold = false\nworkers = 4\nthreads = 2\n"
NARROW = "threads = 2\nworkers = 2\n"
TENANTS = {"wsgi_on": ON + RANDOM, "wsgi_off": OFF, "asgi_on": ON, "asgi_off": OFF, "narrow": NARROW}


def ask(port: int, path: str = "/page") -> str:
    return raw(port, path).rpartition(b"\r\n")[2].decode()


def pids_of(port: int, count: int) -> set[str]:
    """Ask until *count* workers have answered."""
    seen: set[str] = set()

    def ask_all() -> bool:
        seen.update(text.split()[0] for text in in_parallel(3 * count, lambda _: ask(port)))
        return len(seen) >= count

    wait_until(ask_all, 20, "not all workers answer")
    return seen


def raw(port: int, path: str, body: bytes = b"") -> bytes:
    """A response as it comes, but for the time."""
    with socket.create_connection(("127.0.0.1", port), 15) as sock:
        method, length = ("POST", f"Content-Length: {len(body)}\r\n") if body else ("GET", "")
        sock.sendall(f"{method} {path} HTTP/1.0\r\nHost: here\r\n{length}\r\n".encode() + body)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    return b"\r\n".join(line for line in answer.split(b"\r\n") if not line.lower().startswith(b"date:"))


def test_a_flag_that_flips_is_paid_for_once(serve: Serve, tmp_path: Path, home: Path) -> None:
    """Without shadow requests once per worker; and real requests are answered the same with them and without."""
    current = home.parent / (home.name + "-cwd")
    current.mkdir()
    ports = {name: free_port() for name in TENANTS}
    (current / "jumpstart.toml").write_text(
        "".join(
            f'[tenants.{name}]\ntarget = "flagged:{name}"\nport = {ports[name]}\n{more}'
            for name, more in TENANTS.items()
        )
    )
    folder = write_app(tmp_path / "app", "flagged", APP)
    (folder / "novelty.py").write_text(NOVELTY)
    playground = tmp_path / "playground"
    playground.mkdir()
    with serve("", app_dir=folder, address=(), env={"PLAYGROUND": str(playground)}) as server:
        wait_until(lambda: server.admin("/readyz").text.count("workers ready") == len(TENANTS), 30)

        on = ("wsgi_on", "asgi_on")

        def shadow(name: str) -> dict[str, Any]:
            found: dict[str, Any] = server.status(tenant=name)["shadow"]
            return found

        def cold(name: str) -> int:
            return int(server.status(tenant=name)["routes"]["GET /page"]["cold_requests"])

        def wait_until_quiet(name: str) -> None:
            wait_until(lambda: _is_quiet(shadow(name)), 20, f"{name}: {shadow(name)}")

        def have_met_it(name: str) -> bool:
            # A request from before the flip, drawn at random and run after it, spares even the first real one.
            paid = cold(name) - before[name]
            return paid <= 1 and paid + int(shadow(name)["cold_events"].get("novelty", 0)) == 4

        def are_counted_apart(name: str) -> bool:
            status = server.status(tenant=name)
            return bool(status["warmup_routes"]["GET /page"]["requests"] == status["shadow"]["done"])

        def have_read_the_body(name: str) -> bool:
            return int(shadow(name)["cold_events"].get("search", 0)) >= 3

        def have_met_the_long_one() -> bool:
            return all(int(shadow(name)["cold_events"].get("long", 0)) >= 3 for name in on)

        # Warm with the flag off: each worker, whoever had met it first.
        before: dict[str, int] = {}
        for name in ("wsgi_on", "wsgi_off", "asgi_on", "asgi_off"):
            pids_of(ports[name], 4)
            wait_until_quiet(name)
            before[name] = cold(name)
        assert min(cold("wsgi_off"), cold("asgi_off")) >= 4

        _nothing_runs_without_an_idle_slot(server, ports["narrow"], playground, lambda: shadow("narrow"))

        for name in ("wsgi_on", "asgi_on"):
            assert " new 8" in ask(ports[name])
            wait_until(partial(have_met_it, name), 20, "not all have met it")
            assert all(" new 8" in ask(ports[name]) for _ in pids_of(ports[name], 4))
            assert cold(name) - before[name] in ((0, 1) if name == "wsgi_on" else (1,))
            wait_until_quiet(name)
            assert shadow(name)["failed"] == 0
            assert shadow(name)["cold_events"]["import"] >= 3
            # Nothing of it is taken for traffic.
            status = server.status(tenant=name)
            visits = (playground / f"visits-{name}").read_text().splitlines()
            assert status["requests"] == len(visits)
            wait_until(partial(are_counted_apart, name), 20)
        for name in ("wsgi_off", "asgi_off"):
            pids_of(ports[name], 4)
            assert cold(name) - before[name] >= 4  # more where two came at once
            assert shadow(name)["sent"] == {"cold": 0, "random": 0}

        for interface in ("wsgi", "asgi"):
            pairs = [
                [raw(ports[f"{interface}_{side}"], f"/same?number={number}") for side in ("on", "off")]
                for number in range(5)
            ]
            assert all(on == off and b"old" in on for on, off in pairs), pairs
            for side in ("on", "off"):
                visits = (playground / f"visits-{interface}_{side}").read_text().splitlines()
                assert [line for line in visits if "same" in line] == [f"/same?number={number}" for number in range(5)]

        # A listed route with its body, which the siblings have to have read to meet what it names.
        for name in ("wsgi_on", "asgi_on"):
            raw(ports[name], "/search", b"lamps")
            wait_until(partial(have_read_the_body, name), 20)
            raw(ports[name], "/unlisted", b"lamps")
            wait_until_quiet(name)
            routes = server.status(tenant=name)["warmup_routes"]
            assert routes["POST /search"]["cold_names"] == ["search lamps"]
            assert "POST /unlisted" not in routes

        _a_stream_is_told_of_before_it_ends([ports[name] for name in on], playground, have_met_the_long_one)

        # A new worker has met it all before it is ready.
        had = cold("wsgi_on")
        server.process.send_signal(signal.SIGTTIN)
        states = ["serving"] * 5
        wait_until(lambda: [each["state"] for each in server.status(tenant="wsgi_on")["workers"]] == states, 30)
        pids_of(ports["wsgi_on"], 5)
        assert cold("wsgi_on") == had

        families = {each.name: each for each in text_string_to_metric_families(server.admin("/metrics").text)}
        sent = {
            (sample.labels["tenant"], sample.labels["lane"]): sample.value
            for sample in families["jumpstart_shadow_requests_sent"].samples
        }
        assert sent["asgi_on", "cold"] >= 3
        assert sent["asgi_on", "random"] == 0
        assert sent["wsgi_on", "random"] >= 4


_NOT_SENT = ("known", "alone")


def _is_quiet(shadow: dict[str, Any]) -> bool:
    ended = shadow["done"] + sum(count for reason, count in shadow["dropped"].items() if reason not in _NOT_SENT)
    return not shadow["waiting"] and ended >= sum(shadow["sent"].values())


def _a_stream_is_told_of_before_it_ends(ports: list[int], playground: Path, met: Callable[[], bool]) -> None:
    streams = [threading.Thread(target=raw, args=(port, "/long?page=7")) for port in ports]
    for stream in streams:
        stream.start()
    try:
        wait_until(met, 20, "the siblings are not told of a stream")
        assert all(stream.is_alive() for stream in streams)
    finally:
        (playground / "end").touch()
        for stream in streams:
            stream.join(20)


def _nothing_runs_without_an_idle_slot(
    server: Server, port: int, playground: Path, shadow: Callable[[], dict[str, Any]]
) -> None:
    started = playground / "started"
    gated = [threading.Thread(target=ask, args=(port, "/gated")) for _ in range(3)]
    for thread in gated:
        thread.start()
    try:
        # Of three requests two are at the same worker, whose threads are all busy then.
        wait_until(lambda: started.exists() and max(Counter(started.read_text().split()).values()) == 2)
        (playground / "flag").touch()
        assert " new 8" in ask(port)  # by the other worker, which has a thread free
        wait_until(lambda: shadow()["waiting"] == 1, 10)
        for _ in range(20):
            ask(port)
        assert (shadow()["done"], shadow()["waiting"]) == (0, 1)
    finally:
        (playground / "gate").touch()
        for thread in gated:
            thread.join(20)
    wait_until(lambda: shadow()["done"] >= 1, 20)
