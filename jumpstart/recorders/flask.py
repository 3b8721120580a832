"""Flask: what it builds lazily on the first request and can build without one. It has no records of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from jumpstart.recorder import Recorder
from jumpstart.recorders._app import instances
from jumpstart.records import Record, Tally

logger = logging.getLogger(__name__)


class FlaskRecorder(Recorder):
    """
    Makes the Jinja environment and sorts the URL map of each Flask app.

    Left alone on purpose: ``app.logger``, which decides on a handler by the logging configuration at its first use (a
    worker may configure logging later), and everything that marks the app as having handled a request, after which
    Flask refuses set-up calls.
    """

    name: ClassVar[str] = "flask"

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        for flask in instances(app, "flask.app", "Flask"):
            for part, build in (("jinja_env", _jinja_env), ("url_map", _url_map)):
                try:
                    build(flask)
                except Exception:  # the user's loader, filters or converters; the first request will tell them
                    logger.warning("flask: %s of %r could not be prepared", part, flask, exc_info=True)


def _jinja_env(flask: Any) -> None:
    _ = flask.jinja_env.lexer  # its regular expressions, shared by all templates


def _url_map(flask: Any) -> None:
    flask.url_map.update()
