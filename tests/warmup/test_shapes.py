"""A shape is the same for answers of the same structure, differs where the structure does, and holds no content."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_warmup.shapes import MAX_BODY, shape_of

JSON = [("Content-Type", "application/json")]
HTML = [("content-type", "text/html; charset=utf-8")]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def of_json(value: object) -> str:
    return shape_of(200, JSON, json.dumps(value).encode())


def of_html(text: str) -> str:
    return shape_of(200, HTML, text.encode())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"id": 1, "name": "a"}, {"name": "b", "id": 2}),
        ([{"id": 1}], [{"id": 2}, {"id": 3}]),
        ({"price": 1}, {"price": 1.5}),
        ({"2024-01-05": 1, "2024-01-06": 2}, {"2025-07-01": 9}),
        ({"1001": {"n": 1}}, {"2002": {"n": 2}, "3003": {"n": 3}}),
    ],
)
def test_other_values_of_the_same_structure_have_the_same_shape(one: object, two: object) -> None:
    assert of_json(one) == of_json(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"id": 1}, {"id": "1"}),
        ({"id": 1}, {"id": None}),
        ({"id": 1}, {"id": 1, "error": "x"}),
        ([], {}),
        ([1], ["a"]),
        ({"a": {"b": 1}}, {"a": {"c": 1}}),
        (True, 1),
        ([], [1]),
    ],
)
def test_another_structure_has_another_shape(one: object, two: object) -> None:
    assert of_json(one) != of_json(two)


def test_pages_are_told_by_their_tags() -> None:
    page = "<html><body><h1>Shop</h1><ul><li>a<br></li></ul></body></html>"
    assert of_html(page) == of_html(page.replace("Shop", "Laden").replace("<li>a<br></li>", "<li>a<br><li>b<br></li>"))
    assert of_html(page) != of_html(page.replace("<ul>", "<p>Sorry</p><ul>"))
    assert of_html(page) != of_html("<html><body><h1>Shop</h1></body></html>")


def test_status_type_and_place_count_and_other_headers_do_not() -> None:
    assert shape_of(200, JSON, b"{}") != shape_of(201, JSON, b"{}")
    assert shape_of(200, JSON, b"{}") != shape_of(200, [("Content-Type", "text/plain")], b"{}")
    assert shape_of(200, JSON, b"{}") == shape_of(200, [*JSON, ("Set-Cookie", "a=b"), ("Date", "x")], b"{}")
    assert shape_of(302, [("Location", "/cart/7?x=1")], b"") == shape_of(302, [("location", "/cart/8")], b"")
    assert shape_of(302, [("Location", "/cart/7")], b"") != shape_of(302, [("Location", "/login")], b"")
    assert shape_of(200, [], b"a") == shape_of(200, [], b"b" * 1000) != shape_of(200, [], b"")


def test_a_long_body_is_only_long() -> None:
    assert shape_of(200, JSON, b"[" + b" " * MAX_BODY + b"]") == shape_of(200, JSON, b"{", is_whole=False)


@given(VALUES)
def test_every_json_has_a_shape_and_always_the_same(value: object) -> None:
    assert of_json(value) == of_json(json.loads(json.dumps(value)))


@given(st.binary(max_size=200), st.sampled_from([JSON, HTML, []]))
def test_whatever_an_app_sends_has_a_shape(body: bytes, headers: list[tuple[str, str]]) -> None:
    assert len(shape_of(200, headers, body)) == 32


def test_deep_nesting_ends() -> None:
    assert shape_of(200, JSON, b"[" * 100_000) == shape_of(200, JSON, b"{")
    assert of_html("<div>" * 100_000)


def test_what_an_app_compresses_by_itself_is_not_looked_into() -> None:
    def shape(body: bytes, coding: str = "gzip") -> str:
        return shape_of(200, [("Content-Type", "text/html"), ("Content-Encoding", coding)], body)

    page = b"<p>" * 9
    assert shape(gzip.compress(page, mtime=1)) == shape(gzip.compress(page, mtime=0x3C613E3C))  # <a><
    assert len({shape(b"x"), shape(b"x", "br"), shape(b""), shape(page, "identity")}) == 4
    assert shape(page, "identity") == shape_of(200, [("Content-Type", "text/html")], page)
