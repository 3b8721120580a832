"""Apps that fork: what becomes of their children, and of the worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.server import Serve, write_app

FORKING = """
    import multiprocessing, time

    def child_ends_with():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(20)
        return str(child.exitcode).encode()

    def wsgi(environ, start_response):
        start_response("200 OK", [])
        return [child_ends_with() if environ["PATH_INFO"] == "/fork" else b"hello"]

    async def asgi(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            body = child_ends_with() if scope["path"] == "/fork" else b"hello"
            await send({"type": "http.response.body", "body": body})
"""


@pytest.mark.parametrize("interface", ["wsgi", "asgi"])
def test_a_signal_to_a_child_of_the_app_is_the_childs(serve: Serve, tmp_path: Path, interface: str) -> None:
    """The worker's event loop would hear of it, and drain."""
    folder = write_app(tmp_path / "app", "forking", FORKING)
    with serve(f"forking:{interface}", app_dir=folder) as server:
        before = server.worker_pids()
        for _ in range(3):
            assert server.get("/fork").text == "-15"
            assert server.get("/").text == "hello"
        assert server.worker_pids() == before


def test_a_body_whose_last_bytes_find_no_room_is_507(serve: Serve, tmp_path: Path) -> None:
    """They are written when the handler is about to read."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        def app(environ, start_response):
            start_response("200 OK", [])
            return [str(len(environ["wsgi.input"].read())).encode()]
    """
    folder = write_app(tmp_path / "app", "full", code)
    with serve("full:app", app_dir=folder) as server:
        for beyond in (1, 100, 4096, 9000):
            answer = server.request("POST", "/", content=b"x" * ((1 << 20) + beyond))
            assert answer.status_code == 507
        assert server.get("/").text == "0"
