"""What a server does while nothing goes wrong, and how it says what the user got wrong."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import ipaddress
import os
import re
import shutil
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.integration import commands
from tests.integration.server import (
    APPS,
    COMMAND,
    TRACEBACK,
    Serve,
    Server,
    clean_environment,
    connects,
    free_port,
    in_parallel,
    wait_until,
    working_folder,
    write_app,
)

pytestmark = pytest.mark.slow

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"
BROKEN = APPS / "broken"
BOTH = pytest.mark.parametrize(
    ("target", "folder"), [("wsgi_app:app", WSGI), ("asgi_app:app", ASGI)], ids=["wsgi", "asgi"]
)

# ---------------------------------------------------------------------- the app: which, from where, what it speaks


@pytest.mark.parametrize(
    ("target", "folder", "thread"),
    [("wsgi_app:app", WSGI, r"jumpstart-\d GET /thread"), ("asgi_app:app", ASGI, "MainThread")],
    ids=["wsgi", "asgi"],
)
def test_wsgi_and_asgi_are_told_apart(serve: Serve, target: str, folder: Path, thread: str) -> None:
    with serve(target, app_dir=folder) as server:
        assert server.get("/").text == "hello\n"
        assert re.fullmatch(thread, server.get("/thread").text)
        assert server.get("/else").status_code == 404
        server.wait_for_line(rf"ready in \d+\.\d+ s · 1 × {target[:4].upper()}, forked")


UNCLEAR = """
    async def speak_asgi(receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"asgi"})

    def app(*words):
        if len(words) == 3:
            return speak_asgi(*words[1:])
        words[1]("200 OK", [])
        return [b"wsgi"]

    class two:
        def __init__(self, scope):
            self.scope = scope

        async def __call__(self, receive, send):
            await speak_asgi(receive, send)
"""


def test_the_user_can_say_what_the_app_speaks(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "unclear", UNCLEAR)
    for interface in ("wsgi", "asgi"):
        with serve("unclear:app", "--interface", interface, "--lifespan", "off", app_dir=folder) as server:
            assert server.get("/").text == interface
    with serve("unclear:app", app_dir=folder, wait=False) as server:
        assert server.wait() == 2
        assert "cannot tell WSGI from ASGI by its signature; say --interface asgi or --interface wsgi" in server.stderr


def test_an_asgi_2_app(serve: Serve, tmp_path: Path) -> None:
    with serve("unclear:two", app_dir=write_app(tmp_path / "app", "unclear", UNCLEAR)) as server:
        assert server.get("/").text == "asgi"


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("several:make('called')", (), "called"),
        ("several:make", ("--factory",), "made"),
        ("several:holder.held", (), "held"),
        ("several", (), "default"),
    ],
)
def test_ways_to_name_an_app(serve: Serve, tmp_path: Path, target: str, options: tuple[str, ...], says: str) -> None:
    several = """
        import types

        def make(says="made"):
            def app(environ, start_response):
                start_response("200 OK", [("Content-Length", str(len(says)))])
                return [says.encode()]
            return app

        application = make("default")
        holder = types.SimpleNamespace(held=make("held"))
    """
    with serve(target, *options, app_dir=write_app(tmp_path / "app", "several", several)) as server:
        assert server.get("/").text == says


HELLO = """
    def app(environ, start_response):
        start_response("200 OK", [("Content-Length", "5")])
        return [b"hello"]
"""
# Names that an app may well have, each of a module that we, uvicorn or the standard library have too.
NAMES = ["logging", "queue", "profile", "config", "worker", "mold", "settings", "messages", "admin", "warmup", "stat"]


@pytest.mark.parametrize(("name", "fork"), [("server", "auto"), ("app", "never"), ("supervisor", "auto")])
def test_an_app_may_be_called_what_it_likes(serve: Serve, tmp_path: Path, name: str, fork: str) -> None:
    folder = write_app(tmp_path / "app", name, HELLO)
    for neighbour in NAMES:
        write_app(folder, neighbour, f"print('the app\\'s {neighbour}.py was imported in place of another')\n")
    with serve(f"{name}:app", "--fork", fork, app_dir=folder) as server:
        assert server.get("/").text == "hello"
        assert server.status()["ready"]
        assert "was imported" not in server.stderr


def test_the_current_folder_is_the_app_folder(serve: Serve, home: Path) -> None:
    current = working_folder(home)
    write_app(current, "server", HELLO)
    write_app(current, "logging", "raise RuntimeError('this is not the logging that you meant')\n")
    with serve("server:app") as server:
        assert server.get("/").text == "hello"


# ---------------------------------------------------------------------- addresses


def test_a_unix_socket(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with serve("wsgi_app:app", app_dir=WSGI, address=("--uds", str(path))) as server:
        assert server.url == f"unix:{path}"
        assert server.get("/").text == "hello\n"
        assert "SERVER_NAME=''" not in server.get("/environ").text

        with serve("wsgi_app:app", app_dir=WSGI, address=("--bind", f"unix:{path}"), wait=False) as second:
            assert second.wait() == 5
            assert f"error: unix:{path} is in use by process {server.pid}" in second.stderr
        assert server.get("/").text == "hello\n"
    assert not path.exists()


def test_what_is_not_a_socket_is_left_alone(serve: Serve, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    with serve("wsgi_app:app", app_dir=WSGI, address=("--uds", str(precious)), wait=False) as server:
        assert server.wait() == 2
        assert "something that is not a socket lies there" in server.stderr
    assert precious.read_text() == "data"


def test_an_inherited_socket(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        address = ("--fd", str(number))
        with serve("asgi_app:app", "-w", "2", app_dir=ASGI, address=address, pass_fds=(number,)) as server:
            assert server.port == listener.getsockname()[1]
            assert server.get("/").text == "hello\n"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_and_several_addresses(serve: Serve) -> None:
    with serve("asgi_app:app", app_dir=ASGI, address=("-b", "[::1]:0", "-b", "127.0.0.1:0")) as server:
        assert [url.rpartition(":")[0] for url in server.urls] == ["http://[::1]", "http://127.0.0.1"]
        for url in server.urls:
            assert httpx.get(url, trust_env=False, verify=False).text == "hello\n"


def test_a_port_in_use_when_it_binds(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with serve("asgi_app:app", app_dir=ASGI, address=("--port", str(port)), wait=False) as server:
            assert server.wait() == 5
            assert server.stderr == f"error: 127.0.0.1:{port} is in use by another process\n"


SLOW_START = """
    import asyncio, os, pathlib

    gate = pathlib.Path(os.environ["GATE"])

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            while not gate.exists():
                await asyncio.sleep(0.01)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"up"})
"""


def test_a_port_that_another_server_takes_while_the_app_boots(serve: Serve, tmp_path: Path) -> None:
    """Both hold the address without listening; the first to be ready has it, the other says so and goes."""
    port, gate = free_port(), tmp_path / "gate"
    folder = write_app(tmp_path / "app", "slow", SLOW_START)
    address = ("--port", str(port))
    env = {"GATE": str(gate)}
    with (
        serve("slow:app", "-w", "2", app_dir=folder, address=address, env=env, wait=False) as slow,
        serve("asgi_app:app", app_dir=ASGI, address=address) as quick,
    ):
        wait_until(lambda: "booting" in slow.admin("/readyz").text, why="the slow one is at its start-up")
        gate.touch()
        assert slow.wait() == 5
        assert f"cannot listen on http://127.0.0.1:{port}: Address already in use" in slow.stderr
        assert TRACEBACK not in slow.stderr
        assert quick.get("/").text == "hello\n"


# ---------------------------------------------------------------------- nothing is accepted before it is ready


def test_the_port_does_not_listen_before_a_worker_is_ready(serve: Serve, tmp_path: Path) -> None:
    port, gate = free_port(), tmp_path / "gate"
    folder = write_app(tmp_path / "app", "slow", SLOW_START)
    options = ("-w", "2")
    env = {"GATE": str(gate)}
    with serve("slow:app", *options, app_dir=folder, address=("--port", str(port)), env=env, wait=False) as server:
        wait_until(lambda: server.admin("/readyz").text.count("booting") == 2, why="both are at their start-up")
        answer = server.admin("/readyz")
        assert answer.status_code == 503
        assert answer.text == "no worker is ready: worker 0 is booting, worker 1 is booting\n"
        assert server.admin("/livez").status_code == 200
        assert not server.status()["ready"]
        assert server.status()["waiting_for"] == "worker 0 is booting, worker 1 is booting"
        assert not connects(port)

        gate.touch()
        server.wait_ready()
        assert server.admin("/readyz").status_code == 200
        assert server.get("/").text == "up"
        wait_until(lambda: server.admin("/readyz").text == "2 workers ready\n", why="both are ready")


def test_a_slow_import_is_named_as_the_reason(serve: Serve, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = """
    import os, pathlib, time

    while not pathlib.Path(os.environ["GATE"]).exists():
        time.sleep(0.01)
    """
    folder = write_app(tmp_path / "app", "slow", slow + HELLO)
    port = free_port()
    env = {"GATE": str(gate)}
    with serve("slow:app", app_dir=folder, address=("--port", str(port)), env=env, wait=False) as server:
        answer = wait_until(lambda: server.admin("/readyz"), why="the admin pages are there while the app is imported")
        assert (answer.status_code, answer.text) == (503, "no worker is ready: the app is being imported\n")
        assert not connects(port)
        gate.touch()
        server.wait_ready()
        assert server.get("/").text == "hello"


def test_warm_up_requests_run_before_and_are_told_apart(serve: Serve, tmp_path: Path) -> None:
    counting = """
        from jumpstart import is_warmup

        seen = []

        def app(environ, start_response):
            seen.append(f"{environ['PATH_INFO']} {is_warmup()}")
            start_response("200 OK", [])
            return [", ".join(seen).encode()]
    """
    warm = tmp_path / "warm.toml"
    warm.write_text('[[request]]\npath = "/one"\nrepeat = 2\n')
    folder = write_app(tmp_path / "app", "counting", counting)
    with serve("counting:app", "--warmup", str(warm), app_dir=folder) as server:
        assert server.get("/two").text == "/one True, /one True, /two False"
        status = server.status(requests=1)
        assert status["requests"] == 1
        assert [stats["requests"] for stats in status["warmup_routes"].values()] == [2]


# ---------------------------------------------------------------------- HTTP


@BOTH
def test_bodies_and_streams(serve: Serve, target: str, folder: Path) -> None:
    megabytes = os.urandom(1 << 20) * 24
    with serve(target, app_dir=folder) as server, server.client() as client:
        assert client.get("/warmup").text == "False"
        assert client.post("/echo", content=b"").content == b""
        assert client.post("/echo", content=b"body").content == b"body"
        assert client.post("/echo", content=megabytes).content == megabytes
        pieces = [megabytes[start : start + 70_000] for start in range(0, 1 << 20, 70_000)]
        assert client.post("/echo", content=iter(pieces)).content == b"".join(pieces)
        assert client.get("/stream/0").text == ""
        assert client.get("/stream/200").text == "".join(f"chunk {number}\n" for number in range(200))


@BOTH
def test_a_stream_is_sent_as_it_is_produced(serve: Serve, target: str, folder: Path) -> None:
    with serve(target, app_dir=folder) as server, server.client() as client:
        with client.stream("GET", "/stream/5?delay=0.1") as answer:
            times = [(time.monotonic(), chunk) for chunk in answer.iter_raw()]
        assert [chunk for _, chunk in times if chunk] == [f"chunk {number}\n".encode() for number in range(5)]
        assert times[-1][0] - times[0][0] > 0.25


@BOTH
def test_head_and_keep_alive(serve: Serve, target: str, folder: Path) -> None:
    with serve(target, app_dir=folder) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        with contextlib.closing(connection):
            connection.connect()
            own_end = connection.sock.getsockname()
            for _ in range(3):
                connection.request("HEAD", "/")
                answer = connection.getresponse()
                assert (answer.status, answer.getheader("Content-Length"), answer.read()) == (200, "6", b"")
                connection.request("GET", "/")
                assert connection.getresponse().read() == b"hello\n"
                connection.request("POST", "/echo", b"x" * 9000)
                assert connection.getresponse().read() == b"x" * 9000
            assert connection.sock.getsockname() == own_end


@BOTH
def test_a_handler_that_raises_costs_its_request_only(serve: Serve, target: str, folder: Path) -> None:
    with serve(target, app_dir=folder) as server:
        assert server.get("/crash").status_code == 500
        assert server.get("/").text == "hello\n"
        assert server.status()["restarts"] == 0
        assert server.stderr.count("RuntimeError: crashed on purpose") == 1
        assert server.stderr.count(TRACEBACK) == 1


def test_tls(serve: Serve, tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with serve("wsgi_app:app", *options, app_dir=WSGI) as server:
        assert server.url.startswith("https://")
        assert server.get("/").text == "hello\n"
        assert "wsgi.url_scheme='https'" in server.get("/environ").text


def make_certificate(folder: Path) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    key_file, certificate_file = folder / "key.pem", folder / "certificate.pem"
    encoding = serialization.Encoding.PEM
    private_format, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(encoding, private_format, no_password))
    certificate_file.write_bytes(certificate.public_bytes(encoding))
    return key_file, certificate_file


# ---------------------------------------------------------------------- threads


def seconds_of(server: Server, count: int, path: str) -> float:
    """How long *count* requests take that are sent at once."""
    began = time.monotonic()
    answers = in_parallel(count, lambda _: server.get(path))
    assert [answer.status_code for answer in answers] == [200] * count
    return time.monotonic() - began


def test_wsgi_handlers_run_on_as_many_threads_as_asked(serve: Serve) -> None:
    with serve("wsgi_app:app", "--threads", "16", app_dir=WSGI) as server:
        wait_until(lambda: server.status()["workers"][0]["threads"] == 1, why="the others are started on demand")
        assert int(server.get("/threads").text) < 6  # one that waits for the next request, and ours
        assert seconds_of(server, 16, "/sleep?s=1") < 1.9
        assert server.status()["workers"][0]["threads"] == 16
        assert seconds_of(server, 32, "/sleep?s=0.3") >= 0.6
        assert server.status()["workers"][0]["threads"] == 16
        wait_until(lambda: server.status()["workers"][0]["busy"] == 0, why="all threads are free again")


SYNC_UNDER_ASGI = """
    import asyncio, time
    import anyio.to_thread

    async def app(scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError
        if scope["path"] == "/anyio":  # how Starlette and FastAPI run `def` endpoints
            await anyio.to_thread.run_sync(time.sleep, 1)
        else:
            await asyncio.to_thread(time.sleep, 1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
"""


def test_sync_code_of_asgi_apps_gets_the_threads(serve: Serve, tmp_path: Path) -> None:
    """anyio's own limit is 40, and asyncio's four more than there are processors."""
    folder = write_app(tmp_path / "app", "sync", SYNC_UNDER_ASGI)
    with serve("sync:app", "--threads", "50", app_dir=folder) as server:
        assert seconds_of(server, 50, "/anyio") < 1.9
        assert seconds_of(server, 50, "/asyncio") < 1.9


# ---------------------------------------------------------------------- lifespan


def test_lifespan_runs_once_in_each_worker_and_not_in_the_mold(serve: Serve) -> None:
    with serve("asgi_app:app", "-w", "2", app_dir=ASGI) as server, server.client() as client:
        assert client.get("/started").text == client.get("/pid").text


def test_lifespan_off(serve: Serve) -> None:
    with serve("asgi_app:app", "--lifespan", "off", app_dir=ASGI) as server:
        assert server.get("/started").text == ""


def test_an_app_that_knows_no_lifespan(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "sync", SYNC_UNDER_ASGI)
    with serve("sync:app", app_dir=folder) as server:
        assert server.get("/").status_code == 200
        assert TRACEBACK not in server.stderr
    with serve("sync:app", "--lifespan", "on", "-w", "4", app_dir=folder, wait=False) as server:
        assert server.wait() == 3
        assert server.stderr.count("\nNotImplementedError") == 1


# ---------------------------------------------------------------------- what the user got wrong: exit code 2


@pytest.mark.parametrize(
    ("words", "env", "file", "says"),
    [
        ((), {}, "", "which app? Give TARGET as module:attribute, or [app] target in jumpstart.toml"),
        (("a:b", "--wrokers", "2"), {}, "", "--wrokers"),
        (("a:b", "-w", "0"), {}, "", "-w: '0' is not allowed"),
        (("a:b", "--workers", "two"), {}, "", "--workers: 'two' is not allowed"),
        (("a:b",), {"JUMPSTART_THREADS": "-1"}, "", "JUMPSTART_THREADS: '-1' is not allowed"),
        (("a:b",), {"PORT": "http"}, "", "PORT: 'http' is not allowed"),
        (("a:b",), {}, "[tenants.web]\nworkrs = 2\n", "jumpstart.toml: [tenants.web] has no key 'workrs'; did"),
        (("a:b",), {}, "[tenants.web]\nworkers = '2'\n", "jumpstart.toml: [tenants.web] workers: '2' is not allowed"),
        (("a:b",), {}, "[server]\nlog_level = 'loud'\n", "one of critical, error, warning, info, debug"),
        (("a:b",), {}, "[servr]\n", "jumpstart.toml: there is no table 'servr'; did you mean [server]?"),
        (("a:b",), {}, "workers = \n", "jumpstart.toml: not TOML"),
        (("a:b", "--port", "1", "--uds", "x"), {}, "", "--port and --uds say the address twice; keep one"),
        (("a:b", "--bind", "1.2.3.4:http"), {}, "", "write HOST:PORT, [IPV6]:PORT, unix:PATH or fd://NUMBER"),
        (("a:b", "--warmup", "none.toml"), {}, "", "none.toml: no such file"),
        (("a:b", "-c", "none.toml"), {}, "", "-c none.toml: no such file"),
        (("a/b.py:app", "--port", "0"), {}, "", "is a file; write its module and the app's name in it: b:app"),
        (("a:b+c", "--port", "0"), {}, "", "is neither an attribute (app, pkg.app) nor a call with literal arguments"),
        (("a:b", "--port", "0", "--app-dir", "none"), {}, "", "none: no such folder"),
        (("a:b", "--host", "no.such.host.invalid"), {}, "", "cannot serve on no.such.host.invalid:8000"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_place_and_the_remedy(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], file: str, says: str
) -> None:
    if file:
        (tmp_path / "jumpstart.toml").write_text(file)
    done = commands.run(COMMAND, ("serve", *words), clean_environment(tmp_path, **env), tmp_path, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert TRACEBACK not in done.stderr


# ---------------------------------------------------------------------- apps that cannot boot: exit code 3


@pytest.mark.parametrize(
    ("target", "fork", "says", "tracebacks"),
    [
        ("raises:app", "auto", "RuntimeError: the database password is missing", 1),
        ("raises:app", "never", "RuntimeError: the database password is missing", 1),
        ("exits:app", "auto", "exits called sys.exit(7) at import", 1),
        ("no_app:app", "auto", "module no_app has no app", 0),
        ("nowhere:app", "auto", "no module named 'nowhere' for target 'nowhere:app'", 0),
        ("startup_fails:app", "auto", "no database (failed on purpose)", 0),
        ("startup_fails:app", "never", "no database (failed on purpose)", 0),
        ("startup_fails:raising", "auto", "no database (raised on purpose)", 0),
    ],
)
def test_an_app_that_cannot_boot_says_why_once(
    serve: Serve, target: str, fork: str, says: str, tracebacks: int
) -> None:
    with serve(target, "-w", "4", "--fork", fork, app_dir=BROKEN, wait=False) as server:
        assert server.wait() == 3
        assert server.stderr.count(says) == 1
        assert server.stderr.count(TRACEBACK) == tracebacks
        assert "Listening" not in server.stderr


def test_an_app_that_broke_since_its_last_start_says_why_once(serve: Serve, tmp_path: Path) -> None:
    """Warm state is there, so the boot is tried without it too; that is no second traceback."""
    lazy = """
        def app(environ, start_response):
            import colorsys
            start_response("200 OK", [("Content-Length", "5")])
            return [b"hello"]
    """
    folder = write_app(tmp_path / "app", "site_of_ours", lazy)
    with serve("site_of_ours:app", app_dir=folder) as server:
        assert server.get("/").text == "hello"
    write_app(folder, "site_of_ours", "raise RuntimeError('broken since')\n")
    with serve("site_of_ours:app", "-w", "2", app_dir=folder, wait=False) as server:
        assert server.wait() == 3
        assert "trying once more cold: importing site_of_ours failed" in server.stderr
        assert server.stderr.count(TRACEBACK) == 1
        assert server.stderr.count("RuntimeError: broken since") == 1


def test_a_syntax_error(serve: Serve, tmp_path: Path) -> None:
    shutil.copy(BROKEN / "syntax_error.py.txt", tmp_path / "syntax_error.py")
    with serve("syntax_error:app", "-w", "4", app_dir=tmp_path, wait=False) as server:
        assert server.wait() == 3
        assert server.stderr.count("SyntaxError: expected ':'") == 1
        assert "def app(environ, start_response)" in server.stderr


@pytest.mark.parametrize("fork", ["auto", "never"])
def test_a_start_up_that_hangs_ends_at_its_time(serve: Serve, fork: str) -> None:
    options = ("-w", "4", "--startup-timeout", "2.5", "--fork", fork)
    began = time.monotonic()
    with serve("startup_fails:hanging", *options, app_dir=BROKEN, wait=False) as server:
        assert server.wait() == 3
        assert time.monotonic() - began < 12
        assert server.stderr.count("was not ready within --startup-timeout 2.5 s") == 1


def test_an_import_that_hangs_ends_at_its_time_and_says_where_it_stood(serve: Serve, tmp_path: Path) -> None:
    stuck = "import time\n\ndef wait_for_ever():\n    time.sleep(3600)\n\nwait_for_ever()\n"
    folder = write_app(tmp_path / "app", "stuck", stuck)
    with serve("stuck:app", "--startup-timeout", "4", app_dir=folder, wait=False) as server:
        assert server.wait() == 3
        assert server.stderr.count("the app was not imported within --startup-timeout 4 s") == 1
        assert server.stderr.count("gen=1: the app is still being imported after 2 s") == 1
        assert "in wait_for_ever" in server.stderr
