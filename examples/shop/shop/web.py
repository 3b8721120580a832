"""
The shop on Starlette: ``jumpstart serve shop.web:app --app-dir examples/shop``.

Pages are plain functions, which Starlette runs in threads, since what they wait for blocks. Handlers that read a body,
stream, or await are coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.templating import Jinja2Templates

from . import catalog, model, pages, remote

templates = Jinja2Templates(directory=Path(__file__).with_name("templates"))


def home(request: Request) -> Response:
    return html(request, pages.home(region(request)))


def products(request: Request) -> Response:
    return html(request, pages.products(region(request), request.query_params.get("kind")))


def product(request: Request) -> Response:
    return html(request, pages.product(region(request), request.path_params["id"]))


def search(request: Request) -> Response:
    return html(request, pages.search(region(request), request.query_params.get("q", "")))


def cart(request: Request) -> Response:
    return html(request, pages.cart(region(request), request.cookies.get("cart", "")))


async def add_to_cart(request: Request) -> Response:
    form = parse_qs((await request.body()).decode(errors="replace"))
    typed, count = (form.get(name, [""])[0] for name in ("product", "count"))
    response = RedirectResponse("/cart", status_code=303)
    response.set_cookie("cart", pages.add_to_cart(request.cookies.get("cart", ""), typed, count), httponly=True)
    return response


def invoice(request: Request) -> Response:
    number = request.path_params["id"]
    if request.query_params.get("format") == "mail":
        return download(pages.invoice_mail(region(request), number))
    return html(request, pages.invoice(region(request), number))


def report(request: Request) -> Response:
    return html(request, pages.report(region(request)))


def export(request: Request) -> Response:
    return download(pages.export(region(request), zipped=request.query_params.get("format") == "zip"))


def about(request: Request) -> Response:
    return html(request, pages.about())


async def prices(request: Request) -> Response:
    source = await remote.find("prices")
    return JSONResponse(await run_in_threadpool(pages.price_list, request.path_params["region"], source))


async def chat(request: Request) -> Response:
    asked = request.query_params
    try:
        prompt = model.read_prompt(asked.get("q"), asked.get("n"), asked.get("delay_ms"))
    except model.BadPromptError as error:
        return PlainTextResponse(f"{error}\n", status_code=400)

    async def tokens() -> AsyncIterator[str]:
        for event in model.events(prompt):
            await asyncio.sleep(prompt.delay_s)
            yield event

    return StreamingResponse(tokens(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


def not_found(request: Request, error: Exception) -> Response:
    return html(request, pages.not_found(str(error)), status=404)


def unavailable(request: Request, error: Exception) -> Response:
    return html(request, pages.unavailable(str(error)), status=503)


def region(request: Request) -> str:
    return request.query_params.get("region", catalog.DEFAULT_REGION)


def html(request: Request, page: pages.Page, status: int = 200) -> Response:
    return templates.TemplateResponse(request, page.template, page.context, status_code=status)


def download(file: pages.Download) -> Response:
    disposition = {"Content-Disposition": f'attachment; filename="{file.file_name}"'}
    return Response(file.body, media_type=file.content_type, headers=disposition)


app = Starlette(
    routes=[
        Route("/", home),
        Route("/products", products),
        Route("/products/{id}", product),
        Route("/search", search),
        Route("/cart", cart, methods=["GET"]),
        Route("/cart", add_to_cart, methods=["POST"]),
        Route("/invoice/{id}", invoice),
        Route("/report", report),
        Route("/export.csv", export),
        Route("/about", about),
        Route("/api/prices/{region}", prices),
        Route("/chat", chat),
        Route("/healthz", healthz),
    ],
    exception_handlers={pages.NotFoundError: not_found, remote.BackendError: unavailable},
)
