"""Large bodies and endless answers in Django, in one file: ``django_transfers:app``."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path

BLOCK = bytes(64 * 1024)
pushed: queue.Queue[str] = queue.Queue()
produced = 0  # bytes of the last download


def upload(request: HttpRequest) -> HttpResponse:
    size, zeros = 0, True
    while block := request.read(len(BLOCK)):
        size += len(block)
        zeros = zeros and block == BLOCK[: len(block)]
    return JsonResponse({"size": size, "zeros": zeros})


def download(request: HttpRequest, size: int) -> StreamingHttpResponse:
    def produce() -> Iterator[bytes]:
        global produced
        produced = 0
        while produced < size:
            produced += len(BLOCK)
            yield BLOCK

    return StreamingHttpResponse(
        produce(), content_type="application/octet-stream", headers={"Content-Length": str(size)}
    )


def show_produced(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(produced))


def file(request: HttpRequest) -> FileResponse:
    return FileResponse(Path(request.GET["path"]).open("rb"))


def events(request: HttpRequest) -> StreamingHttpResponse:
    def produce() -> Iterator[str]:
        while (word := pushed.get(timeout=60)) != "end":
            yield f"data: {word}\n\n"

    return StreamingHttpResponse(produce(), content_type="text/event-stream")


def push(request: HttpRequest, word: str) -> HttpResponse:
    pushed.put(word)
    return HttpResponse("pushed")


urlpatterns: list[Any] = [
    path("upload", upload),
    path("download/<int:size>", download),
    path("produced", show_produced),
    path("file", file),
    path("events", events),
    path("push/<word>", push),
]
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="for a test", DEBUG=False)
django.setup()
app = get_wsgi_application()
