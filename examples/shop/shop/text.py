"""
Words in, words out: a dozen regular expressions, each compiled when its function first needs it.

`re` keeps what it compiled, so only the first call in a process pays; that is what a warm start can spare the visitor.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape


def slug(words: str) -> str:
    """``"Harbour mug!"`` as it stands in an address: ``"harbour-mug"``."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def search_terms(query: str) -> list[str]:
    """The words of a query, and "quoted phrases" whole; at most eight, in lower case."""
    found = re.findall(r'"([^"]{1,60})"|([\w\u00c0-\u024f]+(?:[\'’-][\w\u00c0-\u024f]+)*)', query)
    return [(phrase or word).strip().lower() for phrase, word in found][:8]


def price_limit(query: str) -> int | None:
    """The limit in a query such as ``"lamp under 25.50"``, in cents."""
    match = re.search(r"\b(?:under|below|less\s+than|<)\s*[€$£¥]?\s*(\d{1,6})(?:[.,](\d{2}))?\b", query, re.IGNORECASE)
    return None if match is None else int(match[1]) * 100 + int(match[2] or 0)


def without_limit(query: str) -> str:
    """The query without what `price_limit` reads."""
    return re.sub(
        r"\b(?:under|below|less\s+than|<)\s*[€$£¥]?\s*\d{1,6}(?:[.,]\d{2})?\b", " ", query, flags=re.IGNORECASE
    )


def marked_up(source: str) -> Markup:
    """Our descriptions' little markup (``*em*``, ``**strong**``, `` `code` ``, ``[text](/page)``) as safe HTML."""
    html = str(escape(source))
    html = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html)
    html = re.sub(r"(?<!\*)\*\*(?!\s)([^*\n]+?)(?<!\s)\*\*(?!\*)", r"<strong>\1</strong>", html)
    html = re.sub(r"(?<!\*)\*(?!\s)([^*\n]+?)(?<!\s)\*(?!\*)", r"<em>\1</em>", html)
    html = re.sub(r"\[([^\]\n]{1,80})\]\((/[A-Za-z0-9/_.-]*)\)", r'<a href="\2">\1</a>', html)
    html = re.sub(r"(\d+(?:\.\d+)?)\s*(ml|cm|m|g|kg)\b(?![^<]*>)", "\\1\u00a0\\2", html)
    return Markup(html)  # escaped first; every tag in it is ours


def plain(source: str) -> str:
    """A description without its markup, for feeds and e-mail."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)|[*`]", r"\1", source)


def first_sentence(source: str) -> str:
    """Up to the first full stop that ends a sentence."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z0-9])", plain(source), maxsplit=1)[0]


def cart_items(cookie: str) -> dict[int, int]:
    """Product ids and quantities from a cart cookie such as ``"3x2.7x1"``; what does not look right is left out."""
    return {int(number): int(count) for number, count in re.findall(r"(?:^|\.)(\d{1,4})x([1-9]\d?)(?=\.|$)", cookie)}


def product_number(typed: str) -> int | None:
    """A product id from ``"7"`` or from a sku such as ``"LAM-0007"``."""
    match = re.fullmatch(r"(?:[A-Z]{3}-)?0*(\d{1,4})", typed.strip(), re.IGNORECASE)
    return None if match is None else int(match[1])


def invoice_year(number: str) -> tuple[int, int] | None:
    """Year and sequence number of an invoice such as ``"2024-00017"``."""
    match = re.fullmatch(r"(20\d{2})-(\d{5})", number)
    return None if match is None else (int(match[1]), int(match[2]))
