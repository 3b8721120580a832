"""What `jumpstart export` writes for nginx and Envoy, with the real ones in front of two tenants."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import websockets.sync.client

from tests.integration.server import Server, connects, free_port, run_command, wait_until, write_app
from tests.server.export_lab import find_envoy, find_nginx, nginx_main

pytestmark = pytest.mark.slow

WEB = """
import hashlib, json, time

def app(environ, start_response):
    if environ["PATH_INFO"] == "/slow":
        for _ in range(600):
            time.sleep(0.1)
    body, digest, size = environ["wsgi.input"], hashlib.sha256(), 0
    while piece := body.read(65536):
        digest.update(piece)
        size += len(piece)
    told = {
        "tenant": "web", "path": environ["PATH_INFO"], "script": environ["SCRIPT_NAME"], "size": size,
        "sha256": digest.hexdigest(), "client": environ["REMOTE_ADDR"], "scheme": environ["wsgi.url_scheme"],
        "headers": {name[5:].lower(): value for name, value in environ.items() if name.startswith("HTTP_")},
    }
    text = json.dumps(told).encode()
    start_response("200 OK", [("Content-Length", str(len(text))), ("Content-Type", "application/json")])
    return [text]
"""
GENAI = """
import asyncio, json, os, pathlib

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        raise NotImplementedError
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        message = await receive()
        await send({"type": "websocket.send", "text": message["text"].upper()})
        await send({"type": "websocket.close"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"].endswith("/stream"):
        folder = pathlib.Path(os.environ["STREAM_GATES"])
        for number in range(3):
            await send({"type": "http.response.body", "body": b"token %d\\n" % number, "more_body": True})
            while not (folder / str(number)).exists():
                await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"end\\n"})
        return
    told = {"tenant": "genai", "path": scope["path"], "client": scope["client"][0], "scheme": scope["scheme"]}
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})
"""
FORGED = {
    "X-Forwarded-For": "6.6.6.6",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "evil.example",
    "X-Real-IP": "6.6.6.6",
    "Forwarded": "for=6.6.6.6",
    "X-Forwarded-Ssl": "on",
    "Proxy": "http://6.6.6.6",
    "X-Jumpstart-Warmup": "1",
}
CLIENT = "127.0.0.2"  # an address of the loopback that no tenant trusts as a proxy


@dataclass(frozen=True)
class Tenants:
    """
    Both at work in one server: ``web`` (WSGI, on a port), ``genai`` (ASGI, on a Unix socket).

    Attributes:
        web: the URL of ``web`` itself.
    """

    server: Server
    config: Path
    gates: Path
    web: str


@dataclass(frozen=True)
class Proxy:
    """nginx or Envoy before them, with what was exported for it."""

    name: str
    port: int
    tenants: Tenants

    def client(self) -> httpx.Client:
        """From `CLIENT`, with connections that stay."""
        return httpx.Client(
            transport=httpx.HTTPTransport(local_address=CLIENT, verify=False),
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=20,
        )


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    write_app(folder, "shop_web", WEB)
    write_app(folder, "shop_genai", GENAI)
    gates = folder / "gates"
    gates.mkdir()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as short:
        config = folder / "jumpstart.toml"
        config.write_text(
            f"""
            [server]
            admin = "127.0.0.1:{free_port()}"
            [tenants.web]
            target = "shop_web:app"
            bind = "127.0.0.1:{port}"
            timeout = 1
            limit_request_body = {4 << 20}
            [tenants.genai]
            target = "shop_genai:app"
            bind = "unix:{short}/genai.sock"
            timeout = 120
            idle_timeout = 60
            routes = ["/chat/", "/v1/"]
            """
        )
        server = Server(
            "",
            *("-c", str(config)),
            app_dir=folder,
            home=folder / "home",
            log=folder / "log",
            env={"STREAM_GATES": str(gates)},
            address=(),
        )
        with server:
            wait_until(lambda: server.stderr.count("Listening at: ") == 2, 30, f"both are served\n{server.stderr}")
            yield Tenants(server, config, gates, f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def started(kind: str, config: Path, folder: Path) -> Iterator[int]:
    """The proxy with what is exported of *config* for it; its port."""
    port = free_port()
    file = folder / {"nginx": "jumpstart.conf", "envoy": "envoy.yaml"}[kind]
    done = run_command(
        *("export", kind, "-c", str(config), "--listen", f"127.0.0.1:{port}", "-o", str(file)), home=folder
    )
    assert (done.returncode, done.stderr) == (0, "")  # no warning: the tenants believe a proxy on this host
    if kind == "nginx":
        words = [find_nginx(), "-p", str(folder), "-c", str(nginx_main(folder, file)), "-g", "daemon off;"]
    else:
        words = [find_envoy(), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: connects(port) or process.poll() is not None, 20, f"{kind} listens")
        assert process.poll() is None, (folder / "log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(20)
        print((folder / "log").read_text())


@pytest.fixture(scope="module", params=["nginx", "envoy"])
def proxy(
    request: pytest.FixtureRequest, tenants: Tenants, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    with started(request.param, tenants.config, tmp_path_factory.mktemp(request.param)) as port:
        yield Proxy(request.param, port, tenants)


@dataclass
class BreakingServer:
    """It reads a request, and closes without an answer."""

    port: int
    requests: list[bytes]


@contextlib.contextmanager
def breaking_server() -> Iterator[BreakingServer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = BreakingServer(listener.getsockname()[1], [])

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # shut down
                with connection:
                    if data := connection.recv(65536):
                        found.requests.append(data)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield found
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def boots(server: Server) -> int:
    """How many generations have become ready, of both tenants."""
    return server.stderr.count("ready in ")


def test_requests_go_to_the_tenant_of_their_path(proxy: Proxy) -> None:
    with proxy.client() as client:
        for path in ("/chat", "/chat/", "/chat/x/y?z=1", "/v1/models"):
            told = client.get(path).json()
            assert (told["tenant"], told["path"]) == ("genai", path.partition("?")[0])
        for path in ("/", "/chatter", "/v10/x", "/shop/chat/"):
            told = client.get(path).json()
            assert (told["tenant"], told["path"], told["script"]) == ("web", path, "")


def test_the_client_is_who_connected_whatever_it_says(proxy: Proxy) -> None:
    with proxy.client() as client:
        told = client.get("/", headers=FORGED).json()
        assert (told["client"], told["scheme"]) == (CLIENT, "http")
        headers = told["headers"]
        host = f"127.0.0.1:{proxy.port}"
        assert headers["host"] == headers["x_forwarded_host"] == host
        assert headers["x_forwarded_for"] == headers["x_real_ip"] == CLIENT
        assert headers["x_forwarded_proto"] == "http"
        assert not {"forwarded", "x_forwarded_ssl", "proxy", "x_jumpstart_warmup"} & set(headers)
        assert "6.6.6.6" not in str(told) and "evil" not in str(told)
        told = client.get("/v1/x", headers=FORGED).json()
        assert (told["client"], told["scheme"]) == (CLIENT, "http")


def test_a_stream_arrives_token_by_token(proxy: Proxy) -> None:
    gates = proxy.tenants.gates
    try:
        with proxy.client() as client, client.stream("GET", "/chat/stream") as response:
            lines = response.iter_lines()
            for number in range(3):
                assert next(lines) == f"token {number}"  # the next one is not even made yet
                (gates / str(number)).touch()
            assert list(lines) == ["end"]
    finally:
        for gate in gates.iterdir():
            gate.unlink()


def test_the_504_is_ours(proxy: Proxy) -> None:
    with proxy.client() as client:
        response = client.get("/slow")
        assert response.status_code == 504
        # As a client of the tenant itself gets it: no page of the proxy's.
        assert response.text == httpx.get(f"{proxy.tenants.web}/slow", trust_env=False, timeout=20).text
        assert client.get("/").status_code == 200


def test_uploads_and_their_limit(proxy: Proxy) -> None:
    data = os.urandom(3 << 20)
    with proxy.client() as client:
        told = client.post("/", content=data).json()
        assert (told["size"], told["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        told = client.post("/", content=iter([data[: 1 << 20], data[1 << 20 :]])).json()  # chunked
        assert (told["size"], told["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert client.post("/", content=bytes(5 << 20)).status_code == 413


def test_websockets_pass(proxy: Proxy) -> None:
    url = f"ws://127.0.0.1:{proxy.port}/chat/socket"
    with websockets.sync.client.connect(url, proxy=None) as connection:
        connection.send("hello")
        assert connection.recv(10) == "HELLO"


def test_the_health_page_is_that_of_the_admin_pages(proxy: Proxy) -> None:
    def is_healthy() -> bool:
        with proxy.client() as client:
            return client.get("/healthz").status_code == 200

    wait_until(is_healthy, 20, "healthy")  # Envoy says so when it has asked once


def test_a_client_of_http_1_0_that_names_no_host(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), 10) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        status = {"nginx": 200, "envoy": 426}[proxy.name]  # Envoy serves HTTP/1.1 unless it is told otherwise
        assert client.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_roll_is_not_noticed_behind_a_proxy(proxy: Proxy) -> None:
    server = proxy.tenants.server
    stop = threading.Event()

    def ask(number: int) -> list[int]:
        statuses = []
        with proxy.client() as client:
            while not stop.is_set():
                response = client.post("/", content=b"x") if number % 2 else client.get("/v1/x")
                statuses.append(response.status_code)
        return statuses

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            before = boots(server)
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: boots(server) == before + 2, 30, f"both tenants have rolled\n{server.stderr}")
        finally:
            stop.set()
        statuses = [status for each in asking for status in each.result(30)]
    assert len(statuses) > 50 and set(statuses) == {200}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_was_sent_is_sent_again_only_when_it_may_be(proxy: Proxy, tmp_path: Path, method: str) -> None:
    with breaking_server() as one, breaking_server() as two:
        config = tmp_path / "jumpstart.toml"
        config.write_text(
            f'[app]\ntarget = "a:b"\n[tenants.web]\nbind = ["127.0.0.1:{one.port}", "127.0.0.1:{two.port}"]'
        )
        with started(proxy.name, config, tmp_path) as port:
            response = httpx.request(method, f"http://127.0.0.1:{port}/", trust_env=False, timeout=20)
        assert response.status_code in (502, 503)
        requests = [*one.requests, *two.requests]
    assert len(requests) == (2 if (proxy.name, method) == ("nginx", "GET") else 1)
    assert {each.partition(b" ")[0].decode() for each in requests} == {method}


def test_the_root_path_is_stripped(proxy: Proxy, tmp_path: Path) -> None:
    config = tmp_path / "jumpstart.toml"
    text = proxy.tenants.config.read_text().replace(
        "[tenants.web]", '[tenants.web]\nroutes = ["/shop.a/"]\nroot_path = "/shop.a"'
    )
    config.write_text(text)
    with started(proxy.name, config, tmp_path) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            for path, seen in (("/shop.a", "/"), ("/shop.a/", "/"), ("/shop.a/x/shop.a/%C3%A4?q=1", "/x/shop.a/ä")):
                told = client.get(path).json()
                assert told["path"].encode("latin-1").decode() == seen
            assert client.get("/shopXa/").status_code == client.get("/").status_code == 404
            assert client.get("/chat/x").json()["tenant"] == "genai"
