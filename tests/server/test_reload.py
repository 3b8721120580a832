"""Which files count for ``--reload``, and what has changed between two looks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.reload import Patterns, changes, describe, scan, watch

stamps = st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 3), st.integers(0, 3)))


@given(stamps, stamps)
def test_a_change_is_what_differs(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    found = changes(before, after)
    assert found == sorted(set(found))
    for path in "abcdef":
        assert (path in found) == (before.get(path) != after.get(path))


@pytest.mark.parametrize(
    ("include", "exclude", "path", "counts"),
    [
        ((), (), "app.py", True),
        ((), (), "shop/web.py", True),
        ((), (), "page.html", False),
        (("*.html",), (), "templates/page.html", True),
        (("templates/*",), (), "templates/page.txt", True),
        ((), ("shop/*",), "shop/web.py", False),
        ((), ("*.py",), "app.py", False),
        (("*.html",), ("*.py",), "page.html", True),
        ((), (), ".hidden.py", False),
    ],
)
def test_which_files_count(include: tuple[str, ...], exclude: tuple[str, ...], path: str, counts: bool) -> None:
    assert Patterns.of(include, exclude).counts(path) is counts


def test_folders_that_are_excluded_are_not_looked_into(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "sub/__pycache__/c.py", ".git/d.py", "build/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    found = scan([str(tmp_path), str(tmp_path / "nowhere")], Patterns.of((), ("build/",)))
    assert sorted(os.path.relpath(path, tmp_path) for path in found) == ["a.py", "sub/b.py"]


def test_a_log_line_names_the_first_few() -> None:
    assert describe(["/x/app/a.py"], ["/x/app"]) == "a.py"
    assert describe(["/x/app/a.py", "/y/b.py"], ["/x/app"]) == "a.py, /y/b.py"
    assert describe([f"/x/{n}.py" for n in range(5)], ["/x"]) == "0.py, 1.py, 2.py and 2 more"


def test_files_that_are_written_one_after_the_other_are_one_change(tmp_path: Path) -> None:
    async def main() -> list[str]:
        seen = watch([str(tmp_path)], Patterns.of((), ()), 0.05)
        first = asyncio.ensure_future(anext(seen))
        for number in range(6):
            await asyncio.sleep(0.02)
            (tmp_path / f"{number}.py").write_text("x")
        found = await asyncio.wait_for(first, 10)
        await seen.aclose()
        return found

    (tmp_path / "old.py").touch()
    assert [Path(path).name for path in asyncio.run(main())] == [f"{number}.py" for number in range(6)]
