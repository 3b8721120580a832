"""`wsgi.file_wrapper` on the WSGI engine: by sendfile where that gives the bytes that reading would, else in blocks."""

from __future__ import annotations

import errno
import gzip
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from jumpstart_server.wsgi.files import FileWrapper
from tests.server.raw_http import Client, make_certificate
from tests.server.wsgi_pep_lab import App, Environ, Lab, StartResponse, answering, until

DATA = bytes(range(256)) * 2000  # 512,000


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tls=make_certificate(tmp_path_factory.mktemp("tls"))) as lab:
        yield lab


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest) -> Lab:
    return cast(Lab, request.getfixturevalue("lab" if request.param == "plain" else "tls"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What sendfile was asked for."""
    sizes: list[int] = []
    real = os.sendfile

    def sendfile(out: int, file: int, offset: int, count: int) -> int:
        sizes.append(count)
        return real(out, file, offset, count)

    monkeypatch.setattr(os, "sendfile", sendfile)
    return sizes


class Files:
    """
    An app that answers with a file.

    Attributes:
        files: those that it opened.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        headers: Iterable[tuple[str, str]] = (),
        status: str = "200 OK",
        block: int | None = None,
    ) -> None:
        self.files: list[Any] = []
        self.make = make
        self.headers = list(headers)
        self.status = status
        self.block = block

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        file = self.make()
        self.files.append(file)
        start_response(self.status, self.headers)
        words = (file,) if self.block is None else (file, self.block)
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](*words)
        return wrapped

    def check_closed(self) -> None:
        assert all(file.closed for file in self.files) and self.files


def at(path: Path, position: int) -> Callable[[], Any]:
    def make() -> Any:
        file = path.open("rb")
        file.seek(position)
        return file

    return make


@pytest.mark.parametrize("position", [0, 1, 300_000, len(DATA), len(DATA) + 5])
def test_a_file_is_sent_from_its_position(either: Lab, path: Path, position: int) -> None:
    either.app = app = Files(at(path, position))
    with either.connect() as client:
        for _ in range(2):
            client.get("/")
            response = client.response()
            assert (response.status, response.complete) == (200, True)
            assert response.body == DATA[position:]
            if either is not None and response.get("content-length") is not None:
                assert response.get("content-length") == str(len(DATA[position:]))
    either.wait_idle()
    app.check_closed()


def test_sendfile_is_used_and_gives_the_length(lab: Lab, path: Path, sent: list[int]) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: path.open("rb"),
        lambda: path.open("r+b"),
        lambda: path.open("rb", buffering=0),
        lambda: named(path),
    ]
    for make in makers:
        sent.clear()
        lab.app = app = Files(make)
        response = lab.ask()
        assert (response.body, response.get("content-length")) == (DATA, str(len(DATA)))
        assert sent
        app.check_closed()


def named(path: Path) -> Any:
    """A file of tempfile's, which wraps a real one."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115  closed by the server
    file.write(path.read_bytes())
    file.seek(0)
    return file


def test_over_tls_it_is_read(tls: Lab, path: Path, sent: list[int]) -> None:
    tls.app = app = Files(at(path, 10))
    assert tls.ask().body == DATA[10:]
    assert sent == []
    app.check_closed()


class Upper(io.FileIO):
    """Gives other bytes than its file's."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(-1 if size is None else size).replace(b"a", b"A")


class Spelled:
    """The least that the PEP asks for: `read`; no `close`, no descriptor."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        return self._file.read(size)


class Lying(Spelled):
    """Has a descriptor that says nothing about what it reads."""

    closed = False

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(data)
        self._real = path.open("rb")

    def fileno(self) -> int:
        return self._real.fileno()

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        self._real.close()
        self.closed = True


def test_what_is_no_plain_file_is_read(either: Lab, path: Path, sent: list[int]) -> None:
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(b"packed" * 1000))
    spooled = tempfile.SpooledTemporaryFile(10)  # noqa: SIM115  closed by the server
    spooled.write(b"spooled" * 1000)
    spooled.seek(0)
    path.write_bytes(b"banana")
    cases: list[tuple[Callable[[], Any], bytes]] = [
        (lambda: io.BytesIO(DATA), DATA),
        (lambda: gzip.open(packed), b"packed" * 1000),  # noqa: SIM115
        (lambda: io.BufferedReader(cast(Any, gzip.open(packed))), b"packed" * 1000),  # noqa: SIM115
        (lambda: Upper(path), b"bAnAnA"),
        (lambda: io.BufferedReader(Upper(path)), b"banana"),  # readinto is not changed
        (lambda: Spelled(DATA), DATA),
        (lambda: Lying(DATA, path), DATA),
        (lambda: spooled, b"spooled" * 1000),
    ]
    for make, data in cases:
        either.app = app = Files(make)
        response = either.ask()
        assert (response.status, response.body, response.complete) == (200, data, True)
        for file in app.files:
            assert getattr(file, "closed", True)
    assert sent == []


@pytest.mark.parametrize("block", [1, 7, 8192])
def test_the_block_size_is_the_apps(lab: Lab, block: int) -> None:
    sizes: list[int] = []

    class Counting(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            sizes.append(size or 0)
            return super().read(size)

    lab.app = Files(lambda: Counting(b"x" * 20), block=block)
    assert lab.ask().body == b"x" * 20
    assert set(sizes) == {block}


def test_a_pipe_is_read(lab: Lab, sent: list[int]) -> None:
    def make() -> Any:
        ours, theirs = os.pipe()
        os.write(theirs, b"through a pipe")
        os.close(theirs)
        return os.fdopen(ours, "rb")

    lab.app = app = Files(make)
    assert lab.ask().body == b"through a pipe"
    assert sent == []
    app.check_closed()


def test_a_file_that_the_kernel_makes_up_is_read(lab: Lab) -> None:
    """Its size is 0."""
    lab.app = app = Files(at(Path("/proc/self/status"), 0))
    assert lab.ask().body.startswith(b"Name:")
    app.check_closed()


def test_an_empty_file_is_an_answer(either: Lab, path: Path) -> None:
    path.write_bytes(b"")
    either.app = app = Files(at(path, 0))
    response = either.ask()
    assert (response.body, response.get("content-length"), response.complete) == (b"", "0", True)
    app.check_closed()


def test_text_files_are_refused(either: Lab, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(b"text")
    for make in (lambda: path.open("r"), lambda: io.StringIO("text")):
        either.app = app = Files(make)
        assert either.ask().status == 500
        app.check_closed()
    assert "the app gave str, WSGI asks for bytes" in caplog.text


def test_a_file_that_was_closed_is_a_mistake(either: Lab, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        file = path.open("rb")
        file.close()
        return file

    either.app = Files(make)
    assert either.ask().status == 500
    assert "ValueError" in caplog.text


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_shorter_content_length_gives_a_part_and_no_complaint(
    either: Lab, path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """PEP 3333: to the end of the file, or until Content-Length bytes have been written."""
    make = at(path, 100) if kind == "file" else lambda: io.BytesIO(DATA[100:])
    either.app = app = Files(make, [("Content-Length", "100000")], "206 Partial Content")
    with either.connect() as client:
        for _ in range(2):
            client.get("/")
            response = client.response()
            assert (response.status, response.body) == (206, DATA[100:100_100])
    either.wait_idle()
    app.check_closed()
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_longer_content_length_closes_the_connection(
    either: Lab, path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = at(path, 0) if kind == "file" else lambda: io.BytesIO(DATA)
    either.app = Files(make, [("Content-Length", str(len(DATA) + 1))])
    with either.connect() as client:
        client.get("/")
        response = client.response()
        assert response.body == DATA and not response.complete
    either.wait_idle()
    assert "fewer bytes than its Content-Length" in caplog.text


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("method_and_status", [("HEAD", "200 OK"), ("GET", "304 Not Modified"), ("GET", "204 x")])
def test_where_there_is_no_body_nothing_is_sent(
    either: Lab, path: Path, kind: str, method_and_status: tuple[str, str], sent: list[int]
) -> None:
    method, status = method_and_status
    make = at(path, 0) if kind == "file" else lambda: io.BytesIO(DATA)
    either.app = app = Files(make, status=status)
    with either.connect() as client:
        for _ in range(2):
            client.get("/", method=method)
            assert client.response(method).status == int(status[:3])
        either.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next"
    assert sent == []
    either.wait_idle()
    app.check_closed()


def test_head_says_how_long_the_file_is(lab: Lab, path: Path) -> None:
    lab.app = Files(at(path, 12))
    assert lab.ask(method="HEAD").get("content-length") == str(len(DATA) - 12)


def test_http_1_0_gets_a_file(lab: Lab, path: Path) -> None:
    lab.app = Files(at(path, 0))
    with lab.connect() as client:
        client.get("/", version="1.0")
        assert client.response().body == DATA


def test_after_write_it_comes_behind(either: Lab, path: Path) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"before ")
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](path.open("rb"))
        return wrapped

    either.app = app
    response = either.ask()
    assert response.body == b"before " + DATA and response.complete


def test_a_file_before_start_response_is_a_mistake(either: Lab, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened: list[Any] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        opened.append(path.open("rb"))
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](opened[0])
        return wrapped

    either.app = app
    assert either.ask().status == 500
    assert opened[0].closed
    assert "before it called start_response" in caplog.text


def test_a_file_that_becomes_shorter_is_cut_and_logged(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client can tell, since the head has said how long it was."""
    size = 64 * 1024 * 1024
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)  # holes: no disk
    lab.app = app = Files(at(path, 0))
    with lab.connect(receive_buffer=4096) as client:
        client.get("/")
        status, fields = client.head()
        assert (status, dict(fields)["content-length"]) == (200, str(size))
        os.truncate(path, 1000)
        rest = client.rest()
        assert 0 < len(rest) < size
    lab.wait_idle()
    app.check_closed()
    assert "a file became shorter while it was sent: GET /" in caplog.text


def test_a_client_that_leaves_while_a_file_is_sent(
    either: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    either.app = app = Files(at(path, 0))
    client: Client = either.connect(receive_buffer=4096)
    client.get("/")
    assert client.head()[0] == 200
    client.reset()
    until(lambda: app.files[0].closed)
    either.wait_idle()
    assert caplog.text == ""


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_without_sendfile_is_read(
    lab: Lab, path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*words: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "sendfile", refuse)
    lab.app = app = Files(at(path, 1000))
    assert lab.ask().body == DATA[1000:]
    app.check_closed()


def test_the_wrapper_is_an_iterable_of_blocks_for_anybody(path: Path) -> None:
    """Middleware may iterate it, and closes it."""
    with path.open("rb") as file:
        wrapper = FileWrapper(file, 100_000)
        assert b"".join(wrapper) == DATA
        assert [len(block) for block in FileWrapper(io.BytesIO(DATA), 300_000)] == [300_000, 212_000]
        wrapper.close()
        assert file.closed
    assert not hasattr(FileWrapper(Spelled(b"")), "close")


def test_middleware_between_server_and_file(lab: Lab, path: Path) -> None:
    app = Files(at(path, 0))

    def upper(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        wrapped = app(environ, start_response)
        try:
            yield from wrapped
        finally:
            wrapped.close()  # type: ignore[attr-defined]

    lab.app = cast(App, upper)
    assert lab.ask().body == DATA
    app.check_closed()
