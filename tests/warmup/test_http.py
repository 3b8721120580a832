"""Warming another host over HTTP: against real servers, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from jumpstart.errors import ConfigError
from jumpstart_warmup import http, settle
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.http import Progress, warm_host


class App:
    """Answers slowly the first times, then at once; keeps what it was asked."""

    def __init__(
        self, slow_requests: int = 0, status: Callable[[int], int] = lambda count: 200, slow_s: float = 0.05
    ) -> None:
        self.count = 0
        self.slow_requests = slow_requests
        self.slow_s = slow_s
        self.status = status
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.count += 1
        count = self.count
        self.scopes.append(scope)
        self.bodies.append((await receive())["body"])
        if count <= self.slow_requests:
            await asyncio.sleep(self.slow_s)
        headers = [(b"set-cookie", b"a=b")]
        await send({"type": "http.response.start", "status": self.status(count), "headers": headers})
        if scope["path"] == "/endless":
            for _ in range(200):  # a second is longer than any limit here
                await send({"type": "http.response.body", "body": b"x" * 10, "more_body": True})
                await asyncio.sleep(0.005)
        await send({"type": "http.response.body", "body": b"x"})


@contextlib.contextmanager
def serve(app: Any, **options: Any) -> Iterator[str]:
    config = uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=1, **options)
    server = uvicorn.Server(config)
    listener = None
    if "uds" not in options:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener] if listener else None})
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}" if listener else f"unix:{options['uds']}"
    finally:
        server.should_exit = True
        thread.join(10)
        if listener is not None:
            listener.close()
        assert not thread.is_alive()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
def test_a_host_that_gets_faster_is_warm_when_it_has_settled() -> None:
    app = App(slow_requests=8, slow_s=0.6)  # a busy machine takes a tenth of a second for any
    told: list[Progress] = []
    requests = [
        WarmRequest(path="/a?x=%2F", repeat=3),
        WarmRequest("POST", "/b", (("content-type", "a/b"),), b"abc", expect_status=200),
    ]
    with serve(app) as url:
        warmth = warm_host(url + "/api/", requests, budget_s=20, progress=told.append)
    assert warmth.warm, warmth.reason
    assert warmth.rounds >= 5
    assert warmth.reason.startswith(f"settled after {warmth.rounds} rounds: ")
    assert warmth.first_ms is not None and warmth.settled_ms is not None
    assert warmth.first_ms > 600 > warmth.settled_ms
    assert [row.path for row in warmth.requests] == ["/a?x=%2F", "/b"]
    assert all(row.status == 200 and row.error is None for row in warmth.requests)
    assert all(row.first_ms and row.last_ms and row.first_ms > row.last_ms for row in warmth.requests)
    assert app.count == 4 * warmth.rounds
    assert [each.rounds for each in told] == list(range(1, warmth.rounds + 1))
    assert told[-1].errors == 0 and told[-1].p50_ms is not None and told[-1].reason == warmth.reason
    for scope in app.scopes:
        headers = dict(scope["headers"])
        assert headers[b"x-jumpstart-warmup"] == b"1"
        assert b"cookie" not in headers
        assert scope["raw_path"] in (b"/api/a", b"/api/b")
    assert app.bodies.count(b"abc") == warmth.rounds


@pytest.mark.slow
def test_a_host_that_answers_500_is_not_warm() -> None:
    with serve(App(status=lambda count: 500)) as url:
        warmth = warm_host(url, [WarmRequest(path="/x", expect_status=200)], budget_s=0.8)
    assert not warmth.warm
    assert "GET /x answered 500, expected 200" in warmth.reason
    assert "budget of 0.8 s" in warmth.reason
    assert warmth.requests[0].status == 500


@pytest.mark.slow
@pytest.mark.usefixtures("noise_is_no_matter")
def test_a_host_that_fails_at_first_gets_its_time() -> None:
    with serve(App(status=lambda count: 503 if count <= 2 else 200)) as url:
        warmth = warm_host(url, [WarmRequest()], budget_s=20)
    assert warmth.warm, warmth.reason


@pytest.mark.slow
def test_a_host_that_is_not_there_is_reported_within_the_budget() -> None:
    told: list[Progress] = []
    begun = time.monotonic()
    warmth = warm_host(f"http://127.0.0.1:{free_port()}", [WarmRequest()], budget_s=0.5, progress=told.append)
    assert time.monotonic() - begun < 5
    assert not warmth.warm
    assert "connection refused" in warmth.reason
    assert warmth.rounds == 0
    assert told and "connection refused" in told[0].reason


@pytest.mark.slow
@pytest.mark.usefixtures("noise_is_no_matter")
def test_a_host_that_boots_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    app = App()
    with contextlib.ExitStack() as stack:

        def start_when_refused(progress: Progress) -> None:
            if not path.exists() and progress.rounds == 0:
                assert "connection refused" in progress.reason
                stack.enter_context(serve(app, uds=str(path)))

        warmth = warm_host(f"unix:{path}", [WarmRequest()], budget_s=20, progress=start_when_refused)
    assert warmth.warm, warmth.reason


@pytest.fixture
def noise_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Latencies agree, however busy this machine is: for tests whose promise is not about when a host has settled.

    With one request in a round its median is one latency, of a stream the first byte's, and three in a row that lie
    within a millisecond of the best are a matter of luck here.
    """
    monkeypatch.setattr(settle, "P50_FLOOR_S", 60.0)
    monkeypatch.setattr(settle, "P95_FLOOR_S", 60.0)


@pytest.mark.slow
@pytest.mark.usefixtures("noise_is_no_matter")
def test_an_endless_stream_is_left_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_LIMIT_S", 0.3)
    with serve(App()) as url:
        warmth = warm_host(url, [WarmRequest(path="/endless")], budget_s=20)
    assert warmth.warm, warmth.reason
    assert warmth.rounds == settle.WINDOW
    assert warmth.settled_ms is not None and warmth.settled_ms < 300, "of the first byte, not of what was read of it"


@pytest.mark.slow
@pytest.mark.usefixtures("noise_is_no_matter")
def test_a_long_body_is_left_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_LIMIT_BYTES", 15)
    with serve(App()) as url:
        warmth = warm_host(url, [WarmRequest(path="/endless")], budget_s=20)
    assert warmth.warm, warmth.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget_s", "timeout_s", "words"), [(0.5, 0.2, "longer than 0.2 s"), (0.3, 30, "longer than the budget's last 0.")]
)
def test_a_host_that_hangs_ends_by_the_timeout_or_by_the_budget(budget_s: float, timeout_s: float, words: str) -> None:
    with socket.socket() as listener:  # accepts in the kernel, never answers
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        begun = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        warmth = warm_host(url, [WarmRequest()] * 9, budget_s=budget_s, timeout_s=timeout_s)
        assert time.monotonic() - begun < budget_s + 1
    assert not warmth.warm
    assert warmth.requests[0].error is not None
    assert words in warmth.requests[0].error


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A host that says *answer* to everything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def run() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if connection.recv(9999) == b"stop":
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with socket.create_connection(listener.getsockname()) as last:
                last.sendall(b"stop")
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    "header", [b"Location: http://\xff\xfe[::bad", b"Location: http://x:y/", b"Location: ", b"Set-Cookie: \xff=\x80"]
)
def test_broken_headers_that_nobody_needs_are_no_errors(header: bytes) -> None:
    with answering(b"HTTP/1.1 302 Found\r\n%b\r\nContent-Length: 0\r\n\r\n" % header) as url:
        warmth = warm_host(url, [WarmRequest()], budget_s=20)
    assert warmth.warm, warmth.reason
    assert warmth.requests[0].status == 302


@pytest.mark.slow
def test_what_is_said_about_errors_can_be_encoded() -> None:
    with answering(b"\xff\xfe\r\n\r\n") as url:
        warmth = warm_host(url, [WarmRequest()], budget_s=0.2)
    assert warmth.requests[0].error is not None
    warmth.requests[0].error.encode()
    warmth = warm_host("unix:/nowhere/\udcff", [WarmRequest()], budget_s=0.2)
    assert warmth.url == "unix:/nowhere/\\udcff"
    assert "connection refused" in warmth.reason or "cannot connect" in warmth.reason
    warmth.reason.encode()


@pytest.mark.slow
def test_a_host_that_speaks_no_tls_is_given_up_at_once() -> None:
    with serve(App()) as url:
        begun = time.monotonic()
        warmth = warm_host(url.replace("http:", "https:"), [WarmRequest()], budget_s=30, verify=False)
        assert time.monotonic() - begun < 10
    assert not warmth.warm
    assert "TLS" in warmth.reason


@pytest.mark.parametrize("url", ["", "shop:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1", "unix:"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="unix:/path"):
        warm_host(url, [WarmRequest()], budget_s=1)


def test_no_requests_and_no_certificates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        warm_host("http://x", [], budget_s=1)
    with pytest.raises(ConfigError, match="certificates"):
        warm_host("https://x", [WarmRequest()], budget_s=1, verify=tmp_path / "none.pem")
