"""
Records live one by one: how much of a profile the same build uses, the next one, and another app on the same framework.

Without replay, so that what is saved is the records' own, and not that of warm-up requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.server import Serve, run_command, write_app
from tests.integration.shop import boot_report, cold_events

pytestmark = pytest.mark.slow

SHOP = """
    import pathlib
    import jinja2
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse
    from starlette.routing import Route

    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "pages"))

    async def index(request):
        import colorsys, prices
        return HTMLResponse(pages.get_template("index.html").render(price=prices.PRICE))

    async def terms(request):
        import words
        return HTMLResponse(pages.get_template("terms.html").render(word=words.WORD))

    async def export(request):
        import starlette.middleware.gzip, starlette.staticfiles, wave
        return PlainTextResponse("export")

    app = Starlette(routes=[Route("/", index), Route("/terms", terms), Route("/export", export)])
"""
BLOG = """
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def index(request):
        import starlette.middleware.gzip, starlette.staticfiles, wave
        return PlainTextResponse("blog")

    async def comments(request):
        import threads_of_ours
        return PlainTextResponse("none")

    app = Starlette(routes=[Route("/", index), Route("/comments", comments)])
"""
REQUESTS = """
[[request]]
path = "/"
[[request]]
path = "/terms"
[[request]]
path = "/export"
"""


@dataclass(frozen=True)
class Used:
    """
    Of one boot.

    Attributes:
        share: of the records that this app has a use for, those that were used.
        dropped: key → reason.
        cold: cold events of the first requests.
    """

    share: float
    dropped: dict[str, str]
    cold: list[str]


def write_shop(folder: Path) -> Path:
    write_app(folder, "shop_site", SHOP)
    write_app(folder, "prices", "PRICE = 40")
    write_app(folder, "words", "WORD = 'terms'")
    (folder / "pages").mkdir()
    (folder / "pages" / "index.html").write_text("<p>{{ price }}</p>")
    (folder / "pages" / "terms.html").write_text("<p>{{ word }}</p>")
    return folder


def boot(serve: Serve, target: str, folder: Path, profile: Path | None, *paths: str) -> Used:
    options = ("--no-warm-start", "--no-replay", *(("--profile", str(profile)) if profile else ()))
    with serve(target, *options, app_dir=folder) as server:
        for path in paths:
            assert server.get(path).status_code == 200
        found = boot_report(server)["sections"]
        dropped = {
            f"{each['recorder']} {record['key']}": record["reason"] for each in found for record in each["dropped"]
        }
        used = Used(server.status()["records_share"] or 0.0, dropped, cold_events(server))
        print(f"{target}: {used.share:.1%} of the records, {len(used.cold)} cold events")
        return used


def test_of_the_same_build_the_next_one_and_another_app(serve: Serve, tmp_path: Path, home: Path) -> None:
    shop, blog = write_shop(tmp_path / "shop"), write_app(tmp_path / "blog", "blog_site", BLOG)
    write_app(blog, "threads_of_ours", "X = 1")
    requests, profile = tmp_path / "warm.toml", tmp_path / "shop.jumpstart"
    requests.write_text(REQUESTS)
    home.mkdir()
    words = ("build", "shop_site:app", "--app-dir", str(shop), "--requests", str(requests), "-o", str(profile))
    done = run_command(*words, home=home)
    assert done.returncode == 0, done.stderr

    def shop_boot(profile: Path | None) -> Used:
        return boot(serve, "shop_site:app", shop, profile, "/", "/terms", "/export")

    cold, same = shop_boot(None), shop_boot(profile)
    assert len(cold.cold) > 10 and same.cold == []
    assert same.share == 1.0 and set(same.dropped.values()) <= {"not-applicable"}

    (shop / "prices.py").write_text("PRICE = 45\n")
    (shop / "pages" / "terms.html").write_text("<b>{{ word }}</b>")
    following = shop_boot(profile)
    stale = {key for key, reason in following.dropped.items() if reason == "stale"}
    assert {key.split()[-1].partition("#")[0] for key in stale} >= {"prices", "terms.html"}
    assert all("words" not in key and "index.html" not in key for key in stale)
    assert 0.9 < following.share < 1.0
    assert len(following.cold) <= len(stale) < len(cold.cold) / 2, following.cold

    blog_cold = boot(serve, "blog_site:app", blog, None, "/", "/comments")
    other = boot(serve, "blog_site:app", blog, profile, "/", "/comments")
    assert 0.3 < other.share < 1.0, other
    assert len(other.cold) < len(blog_cold.cold) / 2, (other.cold, blog_cold.cold)
    assert any("threads_of_ours" in event for event in other.cold), "which no shop has"
