"""
Flask, Jinja2 and SQLAlchemy: ``flask_site:app``; ``flask_site:create_app`` is a factory.

The database is sqlite at FLASK_APP_DB, in memory when that is not set.
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, abort, jsonify, render_template, request
from flask.typing import ResponseReturnValue
from sqlalchemy import ForeignKey, StaticPool, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship


class Base(DeclarativeBase):
    pass


class Author(Base):
    __tablename__ = "author"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    books: Mapped[list[Book]] = relationship(back_populates="author", order_by="Book.title")


class Book(Base):
    __tablename__ = "book"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]
    author_id: Mapped[int] = mapped_column(ForeignKey("author.id"))
    author: Mapped[Author] = relationship(back_populates="books")


BOOKS = {"Ada": ["Notes", "Engines"], "Grace": ["Compilers"], "Alan": ["Machines", "Morphogenesis"]}


def create_app() -> Flask:
    site = Flask(__name__)
    path = os.environ.get("FLASK_APP_DB")
    if path:
        engine = create_engine(f"sqlite:///{path}")
    else:  # one connection for all threads, or each would see an empty database of its own
        engine = create_engine("sqlite://", connect_args={"check_same_thread": False}, poolclass=StaticPool)
    site.extensions["engine"] = engine  # so that a test can close what it opened
    filled = False

    def session() -> Session:
        nonlocal filled
        if not filled:
            fill(engine)
            filled = True
        return Session(engine)

    @site.get("/")
    def home() -> str:
        with session() as db:
            return render_template("home.html", authors=db.scalars(select(Author).order_by(Author.name)).all())

    @site.get("/books/<int:id>")
    def book(id: int) -> str:
        with session() as db:
            found = db.get(Book, id)
            if found is None:
                abort(404)
            return render_template("book.html", book=found)

    @site.get("/lazy")
    def lazy() -> ResponseReturnValue:
        import fractions
        import statistics

        return jsonify(mean=str(statistics.mean([fractions.Fraction(1, 3), fractions.Fraction(2, 3)])))

    @site.post("/echo")
    def echo() -> ResponseReturnValue:
        return request.get_data(), 200, {"Content-Type": "application/octet-stream"}

    @site.get("/crash")
    def crash() -> ResponseReturnValue:
        raise RuntimeError("crashed on purpose")

    return site


def fill(engine: Any) -> None:
    """Make the tables and the same few rows, once."""
    Base.metadata.create_all(engine)
    with Session(engine) as db:
        if db.scalar(select(Author.id).limit(1)) is None:
            for name, titles in BOOKS.items():
                db.add(Author(name=name, books=[Book(title=title) for title in titles]))
            db.commit()


app = create_app()
