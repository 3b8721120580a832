"""Real servers behind proxies, and on sockets of every kind: group K of the cases, for ASGI and WSGI."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server import Serve, Server, connects, free_port, wait_until, write_app

pytestmark = pytest.mark.slow

ASGI = """
import json, os

async def app(scope, receive, send):
    if scope["type"] != "http":
        raise NotImplementedError
    told = {"client": scope["client"], "scheme": scope["scheme"], "server": scope["server"], "pid": os.getpid()}
    if scope["path"] == "/file":
        open(scope["query_string"].decode(), "w").close()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})
"""
WSGI = """
import json, os

def app(environ, start_response):
    told = {
        "client": [environ["REMOTE_ADDR"], int(environ["REMOTE_PORT"] or 0)] if environ["REMOTE_ADDR"] else None,
        "scheme": environ["wsgi.url_scheme"],
        "server": [environ["SERVER_NAME"], int(environ["SERVER_PORT"])],
        "pid": os.getpid(),
    }
    if environ["PATH_INFO"] == "/file":
        open(environ["QUERY_STRING"], "w").close()
    body = json.dumps(told).encode()
    start_response("200 OK", [("Content-Length", str(len(body))), ("Connection", "close")])
    return [body]
"""
FORWARDED = {"X-Forwarded-For": "6.6.6.6, 192.0.2.7", "X-Forwarded-Proto": "https"}
V1 = b"PROXY TCP4 192.0.2.7 198.51.100.1 56324 443\r\n"
V2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes([192, 0, 2, 7, 198, 51, 100, 1]) + struct.pack("!HH", 56324, 443)
GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@pytest.fixture(params=["asgi", "wsgi"])
def app_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with ``teller:app``, which tells what it is told about the connection, on each engine in turn."""
    return write_app(tmp_path / "app", "teller", ASGI if request.param == "asgi" else WSGI)


@pytest.fixture
def any_app_dir(tmp_path: Path) -> Path:
    """The same for what concerns the sockets alone, whichever engine accepts from them."""
    return write_app(tmp_path / "app", "teller", WSGI)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a socket, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as name:
        yield Path(name)


def told(server: Server, path: str = "/", **headers: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get(path, headers=headers).json()
    return found


def ask(server: Server, data: bytes) -> bytes:
    """What comes back on a connection of its own, up to its end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            while piece := sock.recv(65536):
                answer += piece
        return answer


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------- headers of proxies


def test_178_the_headers_of_a_trusted_proxy_and_no_other_header(serve: Serve, app_dir: Path) -> None:
    with serve("teller:app", app_dir=app_dir) as server:
        found = told(server, **FORWARDED)
        assert (found["client"], found["scheme"]) == (["192.0.2.7", 0], "https")
        found = told(server)
        assert (found["client"][0], found["scheme"]) == ("127.0.0.1", "http")
        assert told(server, **{"X-Forwarded-For": "garbage"})["client"][0] == "127.0.0.1"
        for header in (V1, V2):  # without the option it is a bad request
            assert ask(server, header + GET).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("options", [("--no-proxy-headers",), ("--forwarded-allow-ips", "10.0.0.0/8")])
def test_headers_of_others_are_theirs_alone(serve: Serve, app_dir: Path, options: tuple[str, ...]) -> None:
    with serve("teller:app", *options, app_dir=app_dir) as server:
        found = told(server, **FORWARDED)
        assert (found["client"][0], found["scheme"]) == ("127.0.0.1", "http")


@pytest.mark.parametrize(
    ("options", "client", "scheme"),
    [
        ((), ["192.0.2.7", 0], "https"),
        (("--forwarded-allow-ips", "127.0.0.1,::1"), None, "http"),
    ],
)
def test_176_headers_over_a_unix_socket(
    serve: Serve, app_dir: Path, folder: Path, options: tuple[str, ...], client: Any, scheme: str
) -> None:
    with serve("teller:app", *options, app_dir=app_dir, address=("--uds", str(folder / "s"))) as server:
        found = told(server, **FORWARDED)
        assert (found["client"], found["scheme"]) == (client, scheme)


# ---------------------------------------------------------------------- PROXY protocol


def test_the_proxy_protocol(serve: Serve, app_dir: Path) -> None:
    with serve("teller:app", "--proxy-protocol", "auto", "-w", "2", app_dir=app_dir) as server:
        for header in (V1, V2):
            head, _, body = ask(server, header + GET).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            found = json.loads(body)
            assert (found["client"], found["server"]) == (["192.0.2.7", 56324], ["198.51.100.1", 443])
        assert ask(server, GET) == b""
        server.wait_for_line("refused client=.* no PROXY header")


def test_the_proxy_protocol_is_for_those_who_are_named(serve: Serve, any_app_dir: Path) -> None:
    options = ("--proxy-protocol", "v2", "--proxy-allow-from", "10.0.0.0/8")
    with serve("teller:app", *options, app_dir=any_app_dir) as server:
        assert ask(server, V2 + GET) == b""
        server.wait_for_line(r"refused client=.*\(--proxy-allow-from\)")


# ---------------------------------------------------------------------- Unix sockets


@pytest.mark.parametrize(
    ("options", "mode", "file_mode"),
    [
        ((), 0o666, None),
        (("--uds-permissions", "660"), 0o660, None),
        (("--umask", "027"), 0o640, 0o640),
        (("-m", "077", "--uds-permissions", "0o777"), 0o700, 0o600),
    ],
)
def test_173_permissions(
    serve: Serve, any_app_dir: Path, folder: Path, options: tuple[str, ...], mode: int, file_mode: int | None
) -> None:
    path = folder / "s"
    with serve("teller:app", "-w", "2", *options, app_dir=any_app_dir, address=("--bind", f"unix:{path}")) as server:
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert told(server, f"/file?{folder}/made")["scheme"] == "http"
        if file_mode is not None:
            assert stat.S_IMODE((folder / "made").stat().st_mode) == file_mode
    assert not path.exists()


def test_173_a_link_is_neither_followed_nor_removed(serve: Serve, any_app_dir: Path, folder: Path) -> None:
    there = folder / "there"
    there.write_text("precious")
    link = folder / "s"
    link.symlink_to(there)
    with serve("teller:app", app_dir=any_app_dir, address=("--uds", str(link)), wait=False) as server:
        assert server.wait() == 2
        assert "something that is not a socket lies there" in server.stderr
    assert link.is_symlink()
    assert there.read_text() == "precious"


def test_a_server_that_stops_leaves_the_socket_of_its_successor(serve: Serve, any_app_dir: Path, folder: Path) -> None:
    path = folder / "s"
    with serve("teller:app", app_dir=any_app_dir, address=("--uds", str(path))) as first:
        path.unlink()  # as an operator's script does
        with serve("teller:app", app_dir=any_app_dir, address=("--uds", str(path))) as second:
            assert first.stop() == 0
            assert path.is_socket()
            assert told(second)["scheme"] == "http"
        assert not path.exists()


# ---------------------------------------------------------------------- IPv6


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(("workers", "address"), [("1", ("--host", "::", "--port", "0")), ("2", ("--bind", "[::]:0"))])
def test_175_all_addresses_are_of_both_families_for_any_number_of_workers(
    serve: Serve, tmp_path: Path, workers: str, address: tuple[str, ...]
) -> None:
    app_dir = write_app(tmp_path / "app", "teller", ASGI)
    with serve("teller:app", "-w", workers, app_dir=app_dir, address=address) as server:
        assert server.url.startswith("http://[::]:")
        for host in ("127.0.0.1", "[::1]"):
            # The loopback is trusted by default, also where a socket for both families shows it as ::ffff:127.0.0.1.
            found = httpx.get(f"http://{host}:{server.port}/", headers=FORWARDED, trust_env=False).json()
            assert (found["client"], found["scheme"]) == (["192.0.2.7", 0], "https")


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_175_one_address_of_ipv6(serve: Serve, any_app_dir: Path) -> None:
    with serve("teller:app", app_dir=any_app_dir, address=("--bind", "[::1]:0")) as server:
        assert server.url.startswith("http://[::1]:")
        assert told(server)["client"][0] == "::1"
        assert not connects(server.port)


# ---------------------------------------------------------------------- wrong settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--forwarded-allow-ips", "127.0.0.1,nginx"),
            "--forwarded-allow-ips: 'nginx' is not allowed; write addresses",
        ),
        (("--proxy-allow-from", "10.0.0.1/8"), "write 10.0.0.0/8 for the network"),
        (("--proxy-protocol", "v3"), "write one of off, v1, v2, auto"),
        (("--proxy-protocol", "v1", "--ssl-certfile", __file__), "and --ssl-certfile"),
        (("--uds-permissions", "rw"), "--uds-permissions: 'rw' is not allowed; write three octal digits"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(
    serve: Serve, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    app_dir = write_app(tmp_path / "app", "teller", ASGI)
    with serve("teller:app", *options, app_dir=app_dir, wait=False) as server:
        assert server.wait() == 2
        assert words in server.stderr


# ---------------------------------------------------------------------- a real proxy

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[str]:
    """nginx before *upstream*; gives its URL."""
    port = free_port()
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration = folder / "nginx.conf"
    configuration.write_text(
        f"""
        daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
        events {{}}
        http {{
            access_log off;
            {places}
            upstream app {{ server {upstream}; keepalive 4; }}
            server {{
                listen 127.0.0.1:{port};
                location / {{
                    proxy_pass http://app;
                    proxy_http_version 1.1;
                    proxy_set_header Connection "";
                    proxy_set_header Host $http_host;
                    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
                    proxy_set_header X-Forwarded-Proto https;
                }}
            }}
        }}
        """
    )
    assert NGINX is not None
    with (folder / "nginx.log").open("wb") as log:
        words = [NGINX, "-p", str(folder), "-e", "stderr", "-c", str(configuration)]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: connects(port) or process.poll() is not None, why="nginx listens")
        assert process.poll() is None, (folder / "nginx.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
@pytest.mark.parametrize("kind", ["tcp", "uds"])
def test_behind_nginx_the_app_sees_the_client_and_not_what_it_claims(
    serve: Serve, app_dir: Path, folder: Path, kind: str
) -> None:
    address = ("--port", "0") if kind == "tcp" else ("--uds", str(folder / "s"))
    trust = ("--forwarded-allow-ips", "127.0.0.1" if kind == "tcp" else "unix:")
    with serve("teller:app", *trust, app_dir=app_dir, address=address) as server:
        upstream = f"127.0.0.1:{server.port}" if kind == "tcp" else server.url
        with nginx(folder, upstream) as url, httpx.Client(base_url=url, trust_env=False) as client:
            for claim in ({}, FORWARDED, {"X_Forwarded_For": "6.6.6.6"}, {"Forwarded": "for=6.6.6.6;proto=http"}):
                found = client.get("/", headers=claim).json()
                # Over TCP 127.0.0.1 is trusted, so what the client claims counts: it is on the proxies' own host.
                mine = ["192.0.2.7", 0] if kind == "tcp" and claim is FORWARDED else ["127.0.0.1", 0]
                assert (found["client"], found["scheme"]) == (mine, "https")
