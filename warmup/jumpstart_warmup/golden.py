"""
Golden requests: safe ones of the corpus whose answers a seeder has written down, to be asked again of a consumer.

Of an answer only the status and the shape are kept (`shapes.py`). They are asked as warm-up requests are, through the
same drivers and with the same marks, but without ``Accept-Encoding``, since a compressed body shows no shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jumpstart.profile import MAX_GOLDEN, MAX_TEXT, Golden
from jumpstart.recorder import WarmSettings
from jumpstart.records import Record, Tally
from jumpstart_warmup.corpus import CorpusRecorder, WarmRequest
from jumpstart_warmup.middleware import ASGIApp, Receive, Send, StartResponse, WSGIApp
from jumpstart_warmup.routes import Environ, Scope
from jumpstart_warmup.shapes import MAX_BODY, Answer, shape_of

if TYPE_CHECKING:
    from jumpstart_warmup.inprocess import Outcome  # the supervisor, which drives nothing, does without


def golden_requests(corpus: Iterable[Record], limit: int = MAX_GOLDEN) -> list[WarmRequest]:
    """The requests of a corpus section that may be golden, by their traffic; each route has its turn. Pure."""
    recorder = CorpusRecorder(WarmSettings())
    recorder.restore(None, list(corpus), Tally())  # scrubs again, whoever made the section
    found = []
    for request in recorder.requests_for_warmup(limit):
        if len(request.name) <= MAX_TEXT:
            headers = tuple(each for each in request.headers if each[0] != "accept-encoding")
            found.append(msgspec.structs.replace(request, headers=headers))
    return found


def settled(first: Sequence[Answer], second: Sequence[Answer]) -> list[Golden]:
    """
    Of two rounds in the seeder, what can be asked of others: whole answers below 400, the same both times. Pure.

    What differs from one second to the next (a random list, say) tells nothing about a consumer.
    """
    again = {answer.name: answer for answer in second}
    golden = []
    for answer in first:
        other = again.get(answer.name)
        if not answer.shape or answer.status >= 400 or other is None:
            continue
        if (answer.status, answer.shape) == (other.status, other.shape):
            golden.append(Golden(request=answer.name, status=answer.status, shape=answer.shape))
    return golden


class Listener:
    """
    Between driver and app: takes the shape of each response as it passes. For one request at a time.

    `asgi` or `wsgi` is the app for the driver, `heard` its ``on_result``; `answers` is what was heard. Shapes are told
    afterwards, so that what that takes, time and imports, is not taken for the app's.
    """

    def __init__(self) -> None:
        self._heard: list[tuple[Outcome, _Taking, bool]] = []
        self._taking = _Taking()

    def heard(self, outcome: Outcome, *, is_late: bool = False) -> None:
        """Take the outcome of the request that has just ended, or, *is_late*, was left before it had."""
        taking, self._taking = self._taking, _Taking()
        # For a driver, a 500 is an error. Here it is an answer, if it came to its end.
        is_said = outcome.error is None or (taking.has_ended and (outcome.status or 0) >= 500)
        is_answer = outcome.status is not None and is_said and not outcome.is_late and not is_late
        self._heard.append((outcome, taking, is_answer))

    def forget(self) -> None:
        """Take nothing of the request that has just ended."""
        self._taking = _Taking()

    @property
    def answered(self) -> set[str]:
        """Names of the requests that were answered."""
        return {outcome.request.name for outcome, _, is_answer in self._heard if is_answer}

    def answers(self) -> list[Answer]:
        """What was heard; takes some milliseconds for each."""
        return [_answer(outcome, taking if is_answer else None) for outcome, taking, is_answer in self._heard]

    def asgi(self, app: ASGIApp) -> ASGIApp:
        """*app*, listened to."""

        async def listened(scope: Scope, receive: Receive, send: Send) -> None:
            taking = self._taking

            async def take(message: Any) -> None:
                if message["type"] == "http.response.start":
                    pairs = [
                        (name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())
                    ]
                    taking.start(int(message["status"]), pairs)
                elif message["type"] == "http.response.body":
                    taking.take(message.get("body", b""))
                    if not message.get("more_body", False):
                        taking.end()
                await send(message)

            await app(scope, receive, take)

        return listened

    def wsgi(self, app: WSGIApp) -> WSGIApp:
        """*app*, listened to."""

        def listened(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            taking = self._taking

            def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Callable[[bytes], object]:
                taking.start(int(status[:3]), headers)
                write = start_response(status, headers, *more)

                def take(data: bytes) -> object:
                    taking.take(data)
                    return write(data)

                return take

            result = app(environ, start)
            try:
                for chunk in result:
                    taking.take(chunk)
                    yield chunk
                taking.end()
            finally:
                close = getattr(result, "close", None)
                if close is not None:
                    close()

        return listened


def _answer(outcome: Outcome, taking: _Taking | None) -> Answer:
    return Answer(
        name=outcome.request.name,
        weight=outcome.request.weight,
        status=outcome.status or 0,
        shape="" if taking is None else taking.shape(),
        elapsed_s=outcome.elapsed_s,
        cold_events=outcome.cold_events,
    )


class _Taking:
    """What is seen of one response."""

    def __init__(self) -> None:
        self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._body = bytearray()
        self._fits = True
        self.has_ended = False

    def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self._status, self._headers = status, list(headers)

    def take(self, chunk: bytes) -> None:
        if len(self._body) + len(chunk) > MAX_BODY:
            self._fits = False
        elif self._fits:
            self._body += chunk

    def end(self) -> None:
        """Nothing follows; a stream that is left goes on."""
        self.has_ended = True

    def shape(self) -> str:
        return shape_of(self._status, self._headers, bytes(self._body), is_whole=self._fits and self.has_ended)
