"""A page from the database, one that imports lazily, one that translates, and one for each way to be asynchronous."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from .models import Note


def home(request: HttpRequest) -> Any:
    return render(request, "pages/home.html", {"notes": Note.objects.all()})


def note(request: HttpRequest, id: int) -> Any:
    return render(request, "pages/note.html", {"note": get_object_or_404(Note, id=id)})


def lazy(request: HttpRequest) -> Any:
    import decimal
    import statistics

    return JsonResponse({"mean": str(statistics.mean([decimal.Decimal(1), decimal.Decimal(2)]))})


def language(request: HttpRequest) -> Any:
    return JsonResponse({"language": get_language(), "yes": _("yes"), "monday": _("Monday")})


async def on_loop(request: HttpRequest) -> Any:
    return JsonResponse({"notes": await Note.objects.acount()})


def stream(request: HttpRequest, count: int) -> Any:
    return StreamingHttpResponse((f"line {number}\n" for number in range(count)), content_type="text/plain")


def crash(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("crashed on purpose")
