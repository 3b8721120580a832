"""
What each page shows, without a web framework: `shop.web` (Starlette) and `shop.flask_web` put HTTP around it.

The slow parts of a first visit are here, as in many apps: modules that only one page needs are imported by that page,
configuration and service addresses are fetched (`shop.remote`), a price list is computed (`shop.catalog`).
Every function may raise `shop.remote.BackendError`, and `NotFoundError` where it says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from . import catalog, remote, text
from .catalog import BY_ID, PRODUCTS, REGIONS, Product, Region


class NotFoundError(Exception):
    """There is no such product, region or invoice; the message is for the visitor."""


class Page(NamedTuple):
    template: str
    context: dict[str, Any]


class Download(NamedTuple):
    body: bytes
    content_type: str
    file_name: str


def home(region_code: str) -> Page:
    import calendar
    import heapq

    region, prices = _region(region_code)
    cheapest = heapq.nsmallest(4, PRODUCTS, key=lambda product: (prices[product.id], product.id))
    open_days = list(calendar.day_name)[:6]
    return _page("home.html", region, "recommendations", cards=_cards(cheapest), prices=prices, open_days=open_days)


def products(region_code: str, kind: str | None = None) -> Page:
    import itertools
    from fractions import Fraction

    region, prices = _region(region_code)
    shown = [product for product in PRODUCTS if kind is None or product.kind == kind]
    if not shown:
        raise NotFoundError(f"We sell no {kind}s.")
    groups = [(name, _cards(group)) for name, group in itertools.groupby(shown, key=lambda product: product.kind)]
    cents = [prices[each.id] for each in shown]
    spread = Fraction(min(cents), max(cents)).limit_denominator(20)
    return _page("products.html", region, "stock", groups=groups, spread=spread, prices=prices)


def product(region_code: str, typed: str) -> Page:
    """Raises NotFoundError."""
    import colorsys
    import textwrap

    found = _product(typed)
    region, prices = _region(region_code)
    red, green, blue = (int(found.colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    return _page(
        "product.html",
        region,
        "reviews",
        product=found,
        description=text.marked_up(found.description),
        summary=textwrap.shorten(text.plain(found.description), 60, placeholder=" …"),
        tint=f"hsl({hue * 360:.0f} {saturation * 100:.0f}% {90 + lightness * 5:.0f}%)",
        related=_cards(BY_ID[number] for number in catalog.related(found.id)),
        prices=prices,
    )


def search(region_code: str, query: str) -> Page:
    import contextlib
    import difflib
    import sqlite3
    import unicodedata

    region, prices = _region(region_code)
    limit = text.price_limit(query)
    folded = unicodedata.normalize("NFKD", text.without_limit(query))
    terms = text.search_terms(folded)
    known = sorted({word.lower() for each in PRODUCTS for word in each.name.split()})
    close = {term: difflib.get_close_matches(term, known, n=1, cutoff=0.7) for term in terms}
    wanted = [close[term][0] if close[term] else term for term in terms]
    with contextlib.closing(sqlite3.connect(":memory:")) as index:
        index.execute("CREATE TABLE product (id INTEGER PRIMARY KEY, words TEXT, cents INTEGER)")
        rows = [(each.id, f"{each.name} {text.plain(each.description)}", prices[each.id]) for each in PRODUCTS]
        index.executemany("INSERT INTO product VALUES (?, ?, ?)", rows)
        conditions = ["words LIKE '%' || ? || '%'"] * len(wanted) + ["cents <= ?"]
        arguments = [*wanted, 10**9 if limit is None else limit]
        statement = f"SELECT id FROM product WHERE {' AND '.join(conditions)} ORDER BY id"
        found = [BY_ID[number] for (number,) in index.execute(statement, arguments)] if wanted else []
    corrected = " ".join(wanted) if wanted != terms else None
    return _page(
        "search.html",
        region,
        "search",
        query=query,
        corrected=corrected,
        cards=_cards(found),
        prices=prices,
        limit=limit,
    )


def cart(region_code: str, cookie: str) -> Page:
    import operator
    from functools import reduce

    region, prices = _region(region_code)
    items = {number: count for number, count in text.cart_items(cookie).items() if number in BY_ID}
    lines = [(BY_ID[number], count, prices[number] * count) for number, count in items.items()]
    total = reduce(operator.add, (cents for _, _, cents in lines), 0)
    shop = remote.settings()
    shipping = 0 if not lines or total >= shop.free_shipping_cents else shop.shipping_cents
    return _page("cart.html", region, "checkout", lines=lines, total=total, shipping=shipping, prices=prices)


def add_to_cart(cookie: str, typed: str, count: str) -> str:
    """The cart cookie with *count* more of a product; between 1 and 99 of each. Raises NotFoundError."""
    found = _product(typed)
    more = int(count) if count.isascii() and count.isdigit() and len(count) < 3 else 1
    items = text.cart_items(cookie)
    items[found.id] = min(99, max(1, items.get(found.id, 0) + more))
    return ".".join(f"{number}x{many}" for number, many in sorted(items.items()))


def invoice(region_code: str, number: str) -> Page:
    """Raises NotFoundError."""
    region, prices = _region(region_code)
    document = _invoice(region, number)
    return _page("invoice.html", region, "billing", document=document, xml=_invoice_xml(document), prices=prices)


def invoice_mail(region_code: str, number: str) -> Download:
    """The invoice as an e-mail with the XML attached. Raises NotFoundError."""
    from email.mime.application import MIMEApplication
    from email.mime.multipart import MIMEMultipart
    from email.mime.text import MIMEText
    from email.policy import SMTP

    region, _ = _region(region_code)
    document = _invoice(region, number)
    mail = MIMEMultipart(boundary=f"invoice-{number}", policy=SMTP)  # fixed: the same invoice is the same mail
    mail["Subject"] = f"Your invoice {number}"
    mail["From"] = "Billing <billing@shop.example>"
    mail["To"] = "customer@example.com"
    mail.attach(MIMEText(f"Thank you for your order. Total: {region.symbol}{document['total']}\n", _charset="utf-8"))
    attachment = MIMEApplication(_invoice_xml(document).encode(), "xml")
    attachment.add_header("Content-Disposition", "attachment", filename=f"invoice-{number}.xml")
    mail.attach(attachment)
    return Download(mail.as_bytes(), "message/rfc822", f"invoice-{number}.eml")


def report(region_code: str) -> Page:
    import statistics
    from decimal import ROUND_HALF_EVEN, Decimal

    region, prices = _region(region_code)
    rows = []
    for kind in catalog.KINDS:
        of_kind = [each for each in PRODUCTS if each.kind == kind]
        cents = [prices[each.id] for each in of_kind]
        margins = [Decimal(prices[each.id] - each.cost_cents) / Decimal(prices[each.id]) for each in of_kind]
        margin = (statistics.mean(margins) * 100).quantize(Decimal("0.1"), ROUND_HALF_EVEN)
        rows.append((kind, len(of_kind), statistics.median(cents), statistics.pstdev(cents), margin))
    return _page("report.html", region, "warehouse", rows=rows, prices=prices)


def export(region_code: str, zipped: bool) -> Download:
    """The price list as CSV, or that in a ZIP archive."""
    import csv
    import io

    region, prices = _region(region_code)
    sheet = io.StringIO()
    writer = csv.writer(sheet)
    writer.writerow(["sku", "name", "slug", "price", "currency", "summary"])
    for each in PRODUCTS:
        price = f"{prices[each.id] / 100:.2f}"
        summary = text.first_sentence(each.description)
        writer.writerow([each.sku, each.name, text.slug(each.name), price, region.symbol, summary])
    content = sheet.getvalue().encode()
    if not zipped:
        return Download(content, "text/csv; charset=utf-8", f"prices-{region.code}.csv")

    import zipfile

    archive = io.BytesIO()
    entry = zipfile.ZipInfo(f"prices-{region.code}.csv", date_time=(2024, 1, 1, 0, 0, 0))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer_of_zip:
        writer_of_zip.writestr(entry, content)
    return Download(archive.getvalue(), "application/zip", f"prices-{region.code}.zip")


def about() -> Page:
    import configparser
    import platform

    colophon = configparser.ConfigParser()
    colophon.read_string(f"[made with]\nlanguage = Python {platform.python_version()}\nstyle = plain CSS\n")
    made_with = list(colophon["made with"].items())
    return _page("about.html", REGIONS[catalog.DEFAULT_REGION], "directory", made_with=made_with)


def price_list(region_code: str, source: str) -> dict[str, Any]:
    """The prices for other programs. Raises NotFoundError."""
    region, prices = _region(region_code)
    listed = [{"sku": each.sku, "cents": prices[each.id]} for each in PRODUCTS]
    return {"region": region.code, "currency": region.symbol, "source": source, "prices": listed}


def not_found(message: str) -> Page:
    return Page("error.html", {"heading": "Not found", "message": message})


def unavailable(message: str) -> Page:
    return Page("error.html", {"heading": "Closed for a moment", "message": message})


def _page(template: str, region: Region, service: str, **context: Any) -> Page:
    everywhere = {
        "shop": remote.settings(),
        "region": region,
        "regions": REGIONS,
        "service": remote.address_of(service),
    }
    return Page(template, everywhere | context)


def _cards(shown: Iterable[Product]) -> list[tuple[Product, str]]:
    return [(each, text.first_sentence(each.description)) for each in shown]


def _region(code: str) -> tuple[Region, Any]:
    try:
        return REGIONS[code], catalog.prices(code)
    except KeyError:
        raise NotFoundError(f"We do not deliver to {code!r}.") from None


def _product(typed: str) -> Product:
    number = text.product_number(typed)
    if number is None or number not in BY_ID:
        raise NotFoundError(f"We sell nothing with the number {typed!r}.")
    return BY_ID[number]


def _invoice(region: Region, number: str) -> dict[str, Any]:
    import datetime
    from decimal import Decimal

    year_and_sequence = text.invoice_year(number)
    if year_and_sequence is None:
        raise NotFoundError(f"There is no invoice {number!r}; they look like 2024-00017.")
    year, sequence = year_and_sequence
    prices = catalog.prices(region.code)
    bought = [PRODUCTS[(sequence * step) % len(PRODUCTS)] for step in (1, 5, 11)]
    net = sum((Decimal(prices[each.id]) / 100 for each in bought), Decimal())
    tax = (net * region.tax_percent / 100).quantize(Decimal("0.01"))
    date = datetime.date(year, 1, 1) + datetime.timedelta(days=sequence % 365)
    return {"number": number, "date": date.isoformat(), "lines": bought, "net": net, "tax": tax, "total": net + tax}


def _invoice_xml(document: dict[str, Any]) -> str:
    from xml.etree import ElementTree

    root = ElementTree.Element("invoice", number=document["number"], date=document["date"])
    for each in document["lines"]:
        ElementTree.SubElement(root, "line", sku=each.sku).text = each.name
    for name in ("net", "tax", "total"):
        ElementTree.SubElement(root, name).text = str(document[name])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode")
