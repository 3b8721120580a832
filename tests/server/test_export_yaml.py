"""YAML that is written by hand is what a YAML reader reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.export.yaml import Noted, plain, to_yaml

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | texts
notes = st.text("abc #:-\n\t", max_size=30)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.builds(Noted, inner.filter(lambda each: not isinstance(each, Noted)), notes)
    ),
    max_leaves=20,
)


@given(values, notes)
def test_a_reader_gets_the_values_and_not_the_comments(value: Any, head: str) -> None:
    assert yaml.safe_load(to_yaml(value, head=head)) == plain(value)


@pytest.mark.parametrize(
    "text", ["yes", "1", "1e3", "2026-01-01", "0x10", "~", "null", "a: b", "# no", "\x7f", "\u2028", "😀"]
)
def test_texts_stay_texts(text: str) -> None:
    assert yaml.safe_load(to_yaml({text: [text]})) == {text: [text]}


def test_comments_stand_where_one_looks_for_them() -> None:
    document = {
        "a": Noted(1, "one"),
        "b": [Noted({"c": {}}, "first"), {"d": Noted([2], "second"), "e": Noted("x", "y" * 130)}],
    }
    assert to_yaml(document, head="head\nof it").splitlines() == [
        "# head",
        "# of it",
        "a: 1  # one",
        "b:",
        "  # first",
        "  - c: {}",
        "  -",
        "    # second",
        "    d:",
        "      - 2",
        *["    # " + "y" * 112, "    # " + "y" * 18],
        '    e: "x"',
    ]
