"""SQLAlchemy: mappers are configured before the first request, and a failed attempt breaks nothing."""

from __future__ import annotations

from pathlib import Path

from tests.jumpstart.apps_warm import boot

APP = """
from sqlalchemy import ForeignKey, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

class Base(DeclarativeBase):
    pass

class Author(Base):
    __tablename__ = "author"
    id: Mapped[int] = mapped_column(primary_key=True)
    books: Mapped[list["Book"]] = relationship(back_populates="author")

LATE

engine = create_engine("sqlite://")

def app(environ, start_response):
    import more
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Author(id=1, books=[more.Book(id=2)]))
        session.flush()
        found = session.scalars(select(more.Book)).one()
        body = f"{found.author.id} {found.id}"
    engine.dispose()
    start_response("200 OK", [])
    return [body.encode()]
"""
MORE = """
import shop
from shop import Base, ForeignKey, Mapped, mapped_column, relationship

class Book(Base):
    __tablename__ = "book"
    id: Mapped[int] = mapped_column(primary_key=True)
    author_id: Mapped[int] = mapped_column(ForeignKey("author.id"))
    author: Mapped["shop.Author"] = relationship(back_populates="books")
"""


def test_mappers_are_configured_before_the_first_request(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP.replace("LATE", "import more"))
    (tmp_path / "more.py").write_text(MORE)
    cold = boot(tmp_path, "shop:app", ["/", "/"], recorders=["sqlalchemy"], restore=False)
    assert cold.cold("mappers") == ["configure"]
    warm = boot(tmp_path, "shop:app", ["/"], recorders=["sqlalchemy"])
    assert warm.cold("mappers") == []
    assert warm.responses == cold.responses[:1] == [(200, "1 2")]
    assert (warm.threads, warm.loops) == (1, 0)


def test_classes_that_the_first_request_imports_are_configured_then(tmp_path: Path) -> None:
    """Warming meets a relationship to a class that is not there yet; SQLAlchemy would never try again by itself."""
    (tmp_path / "shop.py").write_text(APP.replace("LATE", ""))
    (tmp_path / "more.py").write_text(MORE)
    warm = boot(tmp_path, "shop:app", ["/", "/"], recorders=["sqlalchemy"])
    assert warm.responses == [(200, "1 2")] * 2
    assert warm.cold("mappers") == ["configure"]
