"""The same shop on Flask: ``jumpstart serve shop.flask_web:app --app-dir examples/shop``."""

from __future__ import annotations

import time
from collections.abc import Iterator

from flask import Flask, Response, jsonify, redirect, render_template, request
from werkzeug.wrappers import Response as AnyResponse

from . import catalog, model, pages, remote

app = Flask(__name__)


@app.get("/")
def home() -> str:
    return html(pages.home(region()))


@app.get("/products")
def products() -> str:
    return html(pages.products(region(), request.args.get("kind")))


@app.get("/products/<id>")
def product(id: str) -> str:
    return html(pages.product(region(), id))


@app.get("/search")
def search() -> str:
    return html(pages.search(region(), request.args.get("q", "")))


@app.get("/cart")
def cart() -> str:
    return html(pages.cart(region(), request.cookies.get("cart", "")))


@app.post("/cart")
def add_to_cart() -> AnyResponse:
    typed, count = (request.form.get(name, "") for name in ("product", "count"))
    response = redirect("/cart", code=303)
    response.set_cookie("cart", pages.add_to_cart(request.cookies.get("cart", ""), typed, count), httponly=True)
    return response


@app.get("/invoice/<id>")
def invoice(id: str) -> str | Response:
    if request.args.get("format") == "mail":
        return download(pages.invoice_mail(region(), id))
    return html(pages.invoice(region(), id))


@app.get("/report")
def report() -> str:
    return html(pages.report(region()))


@app.get("/export.csv")
def export() -> Response:
    return download(pages.export(region(), zipped=request.args.get("format") == "zip"))


@app.get("/about")
def about() -> str:
    return html(pages.about())


@app.get("/api/prices/<region>")
def prices(region: str) -> Response:
    return jsonify(pages.price_list(region, remote.address_of("prices")))


@app.get("/chat")
def chat() -> Response:
    try:
        prompt = model.read_prompt(*(request.args.get(name) for name in ("q", "n", "delay_ms")))
    except model.BadPromptError as error:
        return Response(f"{error}\n", status=400, mimetype="text/plain")

    def tokens() -> Iterator[str]:
        for event in model.events(prompt):
            time.sleep(prompt.delay_s)
            yield event

    return Response(tokens(), mimetype="text/event-stream", headers={"Cache-Control": "no-store"})


@app.get("/healthz")
def healthz() -> Response:
    return Response("ok\n", mimetype="text/plain")


@app.errorhandler(pages.NotFoundError)
def not_found(error: pages.NotFoundError) -> tuple[str, int]:
    return html(pages.not_found(str(error))), 404


@app.errorhandler(remote.BackendError)
def unavailable(error: remote.BackendError) -> tuple[str, int]:
    return html(pages.unavailable(str(error))), 503


def region() -> str:
    return request.args.get("region", catalog.DEFAULT_REGION)


def html(page: pages.Page) -> str:
    return render_template(page.template, **page.context)


def download(file: pages.Download) -> Response:
    disposition = {"Content-Disposition": f'attachment; filename="{file.file_name}"'}
    return Response(file.body, content_type=file.content_type, headers=disposition)
