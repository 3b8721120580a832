"""PEP 3333 on the WSGI engine: the validator of the standard library, and the environ (150, 151, 156)."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast
from wsgiref.validate import validator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.wsgi_pep_lab import (
    App,
    Environ,
    Lab,
    StartResponse,
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(multiprocess=True) as lab:
        yield lab


# -- under wsgiref's validator --


def read_all(environ: Environ) -> bytes:
    """By every way to read."""
    stream = environ["wsgi.input"]
    return b"".join([stream.read(10), stream.readline(), b"".join(stream), *stream.readlines(), stream.read(1)])


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("kind", ["list", "generator", "write", "file"])
@pytest.mark.parametrize("stream_bodies", [False, True])
def test_the_standard_librarys_validator_has_no_complaint(
    method: str, kind: str, stream_bodies: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    has_body = method in ("POST", "PUT")
    faults: list[BaseException] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = read_all(environ)
        environ["wsgi.errors"].write("")
        environ["wsgi.errors"].writelines([])
        environ["wsgi.errors"].flush()
        write = start_response("200 OK", [("Content-Type", "text/plain"), ("X-Length", str(len(body)))])
        if method == "HEAD":
            return []
        if kind == "write":
            write(b"got ")
            return [body]
        if kind == "generator":
            return (piece for piece in (b"got ", body))
        if kind == "file":
            import io

            wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](io.BytesIO(b"got " + body))
            return wrapped
        return [b"got ", body]

    checked = cast(App, validator(cast(Any, app)))

    def watched(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return checked(environ, start_response)
        except BaseException as error:
            faults.append(error)
            raise

    fields = ["X-A: 1", *(["Content-Type: text/plain"] if has_body else [])]
    body = b"first\nsecond\nthird\nfourth\n" if has_body else None
    with Lab(watched, stream_bodies=stream_bodies) as lab:
        response = lab.ask("/a/b?c=d", *fields, method=method, body=body)
    assert faults == []
    assert response.status == 200 and response.complete
    if method != "HEAD":
        assert response.body == b"got " + (body or b"")
    gc.collect()  # an iterator that was not closed says so as it goes
    assert "without being closed" not in capsys.readouterr().err


# -- environ (150, 151, 156) --


def test_the_environment_has_what_the_pep_asks_for(lab: Lab) -> None:
    environ = lab.environ("/a%20b?x=1&y=%20")
    assert environ["REMOTE_PORT"].isdecimal()
    assert {key: environ[key] for key in environ if key.isupper() and not key.startswith("HTTP_")} == {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/a b",
        "QUERY_STRING": "x=1&y=%20",
        "REQUEST_URI": "/a%20b?x=1&y=%20",
        "RAW_URI": "/a%20b?x=1&y=%20",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": str(lab.address[1]),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "REMOTE_PORT": environ["REMOTE_PORT"],
    }
    assert environ["HTTP_HOST"] == "test"
    assert environ["wsgi.version"] == (1, 0)
    assert environ["wsgi.url_scheme"] == "http"
    assert environ["wsgi.input_terminated"] is True
    assert environ["wsgi.errors"].writable() and callable(environ["wsgi.file_wrapper"])
    assert (environ["wsgi.multithread"], environ["wsgi.multiprocess"], environ["wsgi.run_once"]) == (True, True, False)


def test_an_app_may_do_as_it_likes_with_its_environment(lab: Lab) -> None:
    """It is a dict, of one request only, also where the connection knows the request again."""
    seen: list[Environ] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(dict(environ))
        assert type(environ) is dict
        environ.clear()
        environ["left"] = "behind"
        start_response("200 OK", [])
        return []

    lab.app = app
    with lab.connect() as client:
        for _ in range(3):
            client.get("/same")
            assert client.response().status == 200
    assert [sorted(environ) for environ in seen] == [sorted(seen[0])] * 3
    assert "left" not in seen[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/%E5%C3%B6%2F", b"/\xe5\xc3\xb6/"),
        ("/+%2B%25", b"/++%"),
        ("/a;b=c,d", b"/a;b=c,d"),
        ("/%zz%", b"/%zz%"),  # no escape: as it came
        ("//a//b", b"//a//b"),
        ("/a/../b/./", b"/a/../b/./"),
    ],
)
def test_path_bytes_pass_undamaged(lab: Lab, path: str, expected: bytes) -> None:
    environ = lab.environ(path)
    assert environ["PATH_INFO"].encode("latin-1") == expected
    assert environ["RAW_URI"] == environ["REQUEST_URI"] == path


@settings(max_examples=25)
@given(st.binary(max_size=20).filter(lambda raw: b"\0" not in raw))
def test_any_path_bytes_pass_undamaged(lab: Lab, raw: bytes) -> None:
    quoted = "/" + "".join(f"%{byte:02x}" for byte in raw)
    assert lab.environ(quoted)["PATH_INFO"].encode("latin-1") == b"/" + raw


@pytest.mark.parametrize("path", ["/\xe9", "/caf\xc3\xa9?x", "/?q=\xff"])
def test_raw_bytes_beyond_ascii_are_refused(lab: Lab, path: str) -> None:
    """A URI has none; and never a 500 (a2wsgi)."""
    assert lab.ask(path).status == 400


def test_an_absolute_target_is_its_path(lab: Lab) -> None:
    environ = lab.environ("http://elsewhere.example/a%20b?c")
    assert (environ["PATH_INFO"], environ["QUERY_STRING"], environ["HTTP_HOST"]) == ("/a b", "c", "elsewhere.example")


@pytest.mark.parametrize("path", ["/cart", "/shop", "/shopping", "/shop/cart", "/"])
def test_the_prefix_that_a_proxy_strips_is_the_script_name(path: str) -> None:
    """The path comes without it, so nothing is taken away; as with ASGI, and as PEP 3333 rebuilds the URL."""
    with Lab(script_name="/shop") as lab:
        environ = lab.environ(path)
    assert (environ["SCRIPT_NAME"], environ["PATH_INFO"]) == ("/shop", path)


def test_headers_are_joined_and_those_that_could_pass_for_others_are_dropped(lab: Lab) -> None:
    fields = [
        "X-A: 1",
        "x-a: 2",
        "Cookie: a=1",
        "Cookie: b=2",
        "X_Forwarded_For: evil",
        "X-Forwarded-For: good",
        "X-Latin: \xe9",
        "X-Empty:",
        "Content-Type: text/plain",
        "Proxy: http://evil.example",  # httpoxy: libraries take HTTP_PROXY for the way out
    ]
    environ = lab.environ("/", *fields)
    assert {key: value for key, value in environ.items() if key.startswith("HTTP_")} == {
        "HTTP_HOST": "test",
        "HTTP_X_A": "1,2",
        "HTTP_COOKIE": "a=1; b=2",
        "HTTP_X_FORWARDED_FOR": "good",
        "HTTP_X_LATIN": "\xe9",
        "HTTP_X_EMPTY": "",
    }
    assert environ["CONTENT_TYPE"] == "text/plain"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_protocol_is_the_clients(lab: Lab, version: str) -> None:
    seen: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ["SERVER_PROTOCOL"])
        start_response("200 OK", [])
        return []

    lab.app = app
    with lab.connect() as client:
        client.get("/", version=version)
        client.response()
    assert seen == [f"HTTP/{version}"]


def test_over_a_unix_socket_there_are_still_addresses(tmp_path: Path) -> None:
    """Apps index them; gunicorn gives an empty client too."""
    with Lab(uds=tmp_path / "socket") as lab:
        environ = lab.environ()
    assert (environ["REMOTE_ADDR"], environ["REMOTE_PORT"]) == ("", "")
    assert environ["SERVER_PORT"] == "80" and environ["SERVER_NAME"] == "localhost"
