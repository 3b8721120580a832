"""
One request and its response, as the app sees them: `receive` and `send` of ASGI 3, HTTP spec 2.4.

The head of a response waits for the first piece of the body, as ASGI wants it, so that a short response is one write
and has its Content-Length.

When the client leaves (its side of the connection ends, or the connection breaks):

1. ``receive`` gives ``http.disconnect`` at once, after what is there of a body that came whole. Once the connection is
   broken ``send`` raises `ClientGoneError`.
2. After `DISCONNECT_GRACE` the app is cancelled if nobody can want what it does: the response has begun, or the method
   is a safe one (RFC 9110 9.2.1). A POST that has not begun to answer runs to its end; half a payment is worse than one
   that nobody waits for. What runs after the response, background tasks, is never cancelled.

uvicorn never cancels. But since spec 2.4 frameworks do not listen while they stream, they wait for ``send`` to raise;
so a generator that waits for its next event would keep its database connection until that event comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from jumpstart.context import RequestContext, enter
from jumpstart.errors import JumpstartError
from jumpstart_server.access import AccessRecord
from jumpstart_server.asgi.service import describe
from jumpstart_server.connection_settings import DISCARD_BYTES
from jumpstart_server.http1 import RequestHead, ResponseError, ResponseFramer
from jumpstart_server.refusals import body_size, host_of
from jumpstart_warmup.observe import CLIENT_CLOSED, MARKER_BYTES, Observer, route_of_scope

if TYPE_CHECKING:
    from jumpstart_server.asgi.protocol import JumpstartProtocol

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = dict[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

DISCONNECT_GRACE = 0.5  # seconds from http.disconnect to the app's cancellation; generators are to be closed within 1 s
JOIN_BYTES = 64 * 1024  # up to here head and body are joined for one write
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "REPORT"))
NAMES_WARNED_OF = 64

_CLOSED: Final = "http.disconnect"
_warned_of: set[bytes] = set()


class ClientGoneError(JumpstartError, ConnectionError):
    """Raised by ``send`` when the client has left (ASGI: a subclass of OSError). Nobody needs to mend anything."""


class ASGIMisuseError(JumpstartError, RuntimeError):
    """A message that has no place here, or is none. For the app's author."""


class Exchange:
    """
    One request and its response.

    Attributes:
        body_complete: the request has come whole.
        client: as in the scope.
        unread_bytes: of the body, that have come and that the app has not taken.
        complete: the response is done, and the connection no longer this exchange's.
        task: runs the app.
    """

    __slots__ = (
        "_access",
        "_app_began",
        "_began",
        "_body_bytes",
        "_chunks",
        "_connection",
        "_end_taken",
        "_expects_continue",
        "_finished",
        "_framer",
        "_head",
        "_headers",
        "_left",
        "_lost",
        "_started",
        "_status",
        "_waiters",
        "body_complete",
        "client",
        "complete",
        "task",
        "unread_bytes",
    )

    task: asyncio.Task[None]
    client: object
    _began: float  # on the monotonic clock; with an access log only
    _app_began: float | None

    def __init__(self, connection: JumpstartProtocol, head: RequestHead, body_complete: bool) -> None:
        self._connection = connection
        self._head = head
        self._framer = ResponseFramer(head.method, head.http_version, head.keep_alive)
        self.body_complete = body_complete
        self._end_taken = False
        self._chunks: list[bytes] | None = None
        self._body_bytes = 0  # that have come, taken or not
        self.unread_bytes = 0
        self._expects_continue = head.expects_continue
        self._waiters: list[asyncio.Future[None]] | None = None
        self._left = False  # the client sends no more; it may still read
        self._lost = False  # the connection is broken, or no longer ours
        self._started = False
        self._finished = 0.0  # when the app's response was complete, on the monotonic clock
        self.complete = False
        self._access = connection.service.access  # None when the line is written, too
        self._app_began = None
        if self._access is not None:
            self._began = time.monotonic()

    async def run(self, app: App, scope: Scope) -> None:
        """The task: run the app, and see to it that its client gets an answer or a close."""
        observer = self._connection.service.observer
        began = time.monotonic()
        self._app_began = began
        cancelled: object = False
        if observer is not None:
            context = RequestContext()
            enter(context)
        try:
            await app(scope, self.receive, self.send)
        except GeneratorExit:
            raise  # the loop is gone
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError) and self.task.cancelling()
            if not cancelled:
                self._report(error)
            if not self.complete and not self._lost:
                # The loop of a server that stops ends soon: no time to linger.
                self._give_answer(503 if cancelled else 500, linger=not cancelled)
            if cancelled:
                raise  # whoever cancelled a task wants to see it cancelled
        else:
            if not self.complete and not self._lost:
                what = "completing its response" if self._started else "starting a response"
                logger.error("the app returned without %s: %s", what, describe(self._head))
                self._give_answer(500)
        finally:
            self._connection.tasks.discard(self.task)
            if observer is not None:
                self._count(observer, context, scope, began, bool(cancelled))

    def _count(self, observer: Observer, context: RequestContext, scope: Scope, began: float, cancelled: bool) -> None:
        """Put the request into the books, now that the app is done with it; its latency ended with its last byte."""
        head = self._head
        if self._finished:  # what fails after the answer (a background task) did not fail the request
            status = self._framer.status
        else:
            status = CLIENT_CLOSED if cancelled or self._left or self._lost else 500
        evidence = True
        for field in head.headers:  # a plain loop takes half the time of any() with a generator
            if field[0] == MARKER_BYTES:
                evidence = False
        observer.count(
            context,
            method=head.method,
            target=head.origin_form,
            headers=head.headers,
            status=status,
            elapsed_s=(self._finished or time.monotonic()) - began,
            evidence=evidence,
            rule=route_of_scope(scope, self._connection.service.root_path, status) if "route" in scope else None,
        )

    def _report(self, error: BaseException) -> None:
        link: BaseException | None = error
        while link is not None:
            if isinstance(link, ClientGoneError):
                logger.debug("the client left: %s", describe(self._head))
                return
            link = link.__cause__ or link.__context__
        logger.error("exception in the app: %s", describe(self._head), exc_info=error)

    def _give_answer(self, status: int, *, linger: bool = True) -> None:
        """An error page in place of the response; where that has begun, a cut that the client can tell from an end."""
        self.complete = True
        self._answer_or_cut(status, "", linger)

    def _answer_or_cut(self, status: int, reason: str, linger: bool) -> None:
        if self._framer.head_sent:
            self._log(status)
            self._framer.abort()
            self._connection.cut(reset=self._framer.ends_with_close, linger=linger)
        else:
            answer = self._connection.answer_and_close(status, reason, self._head.method, linger=linger)
            self._log(status, answer)

    # ------------------------------------------------------------------ what the connection tells

    def refuse(self, status: int, reason: str) -> None:
        """Answer in place of the app, which finds the client gone; close."""
        self._answer_or_cut(status, reason, linger=True)
        self.client_left(lost=True)

    def take_body(self, data: bytes) -> None:
        """More of the body has come."""
        self._body_bytes += len(data)
        self.unread_bytes += len(data)
        if self._chunks is None:
            self._chunks = [data]
        else:
            self._chunks.append(data)
        if self._waiters:
            self._wake()

    def take_end(self) -> None:
        """The body has come whole."""
        self.body_complete = True
        if self._waiters:
            self._wake()

    def client_left(self, *, lost: bool) -> None:
        """The client has closed its side, or (*lost*) the connection is broken."""
        if self.complete:
            return
        if lost:
            self._log(CLIENT_CLOSED)
        first = not self._left
        self._left = True
        self._lost = self._lost or lost
        self._wake()
        if first or lost:
            self._connection.loop.call_later(DISCONNECT_GRACE, self._end_of_grace)

    def _end_of_grace(self) -> None:
        if self.complete or self.task.done():
            return
        if self._started or self._head.method in SAFE_METHODS:
            self._lost = True
            self._log(CLIENT_CLOSED)
            self._connection.abort(self)
            self.task.cancel("the client left")

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, None
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    # ------------------------------------------------------------------ what the app calls

    async def receive(self) -> Message:
        """ASGI's ``receive``."""
        while True:
            if self._lost or self.complete:
                return {"type": _CLOSED}
            if self._chunks or (self.body_complete and not self._end_taken):
                return self._next_piece()
            if self._left:
                return {"type": _CLOSED}
            if self._expects_continue:
                self._expects_continue = False
                if not self._framer.head_sent and not self._body_bytes:
                    self._connection.go_on(self._framer.interim(100))
            waiter = self._connection.loop.create_future()
            if self._waiters is None:
                self._waiters = [waiter]
            else:
                self._waiters.append(waiter)
            await waiter

    def _next_piece(self) -> Message:
        chunks = self._chunks
        more = not self.body_complete
        self._end_taken = not more
        if chunks is None:
            return {"type": "http.request", "body": b"", "more_body": more}
        self._chunks = None
        self.unread_bytes = 0
        self._connection.body_taken()
        return {
            "type": "http.request",
            "body": chunks[0] if len(chunks) == 1 else b"".join(chunks),
            "more_body": more,
        }

    async def send(self, message: Message) -> None:
        """
        ASGI's ``send``. It waits while the client is too slow to take what was sent before.

        Raises:
            ClientGoneError: the client has left.
            ASGIMisuseError: the message has no place here, or a value of the wrong type.
            ResponseError: status or headers that would break the message.
        """
        if self._lost:
            raise ClientGoneError("the client has left")
        kind = message["type"]
        if kind == "http.response.body":
            if not self._started or self.complete:
                raise self._misplaced(kind)
            body = message.get("body", b"")
            if type(body) is not bytes:
                body = _as_bytes(body)
            more = message.get("more_body", False)
            connection = self._connection
            if connection.write_paused:
                await self._writable()
            framer = self._framer
            if framer.head_sent:
                if body:
                    for piece in framer.body(body):
                        connection.write(piece)
            else:
                self._send_head(body, more)
            if not more:
                self._end()
            elif connection.write_paused:
                await self._writable()
        elif kind == "http.response.start":
            if self._started:
                raise self._misplaced(kind)
            status = message["status"]
            if not isinstance(status, int):
                raise ASGIMisuseError(f"the status must be int, not {type(status).__name__}")
            self._status: int = status
            self._headers: Any = message.get("headers", ())
            self._started = True
        else:
            raise self._misplaced(kind)

    def _send_head(self, body: bytes, more: bool) -> None:
        connection = self._connection
        framer = self._framer
        service = connection.service
        if connection.is_last or not (self.body_complete or self._may_discard()):
            framer.must_close = True
        try:
            head = framer.head(
                self._status,
                self._headers,
                body_length=None if more else len(body),
                defaults=service.defaults(),
                keep_alive_timeout_s=service.told_keep_alive_s,
            )
        except ResponseError:
            self._started = False
            raise
        except (TypeError, ValueError, AttributeError) as error:
            self._started = False
            raise ASGIMisuseError(f"headers must be pairs of bytes, not {self._headers!r:.200}: {error}") from error
        if framer.dropped_fields:
            _warn_of_dropped(framer.dropped_fields)
        if not body:
            connection.write(head)
        elif len(body) <= JOIN_BYTES:
            connection.write(b"".join((head, *framer.body(body))))
        else:
            connection.write(head)
            for piece in framer.body(body):
                connection.write(piece)

    def _may_discard(self) -> bool:
        """Whether what is left of a body that the app did not read is worth reading to keep the connection."""
        if self._expects_continue and not self._body_bytes:
            return False  # nobody knows whether the client will send it now (RFC 9110 10.1.1)
        length = self._head.content_length
        return length is None or length - self._body_bytes <= DISCARD_BYTES

    def _end(self) -> None:
        framer = self._framer
        last = framer.end()
        connection = self._connection
        if last:
            connection.write(last)
        self.complete = True
        self._finished = time.monotonic()
        if self._access is not None:
            self._log(framer.status)
        if framer.surplus_bytes:
            logger.error(
                "the app sent %d bytes beyond its Content-Length, which were cut: %s",
                *(framer.surplus_bytes, describe(self._head)),
            )
        if framer.is_incomplete:
            logger.error("the app sent fewer bytes than its Content-Length: %s", describe(self._head))
            connection.cut()
        else:
            connection.response_done(self, framer.must_close)
        if self._waiters:
            self._wake()

    def _log(self, status: int, answer: bytes | None = None) -> None:
        """
        Write the line of this request to the access log, once, when its outcome is known.

        Args:
            answer: a whole response of our own that has taken the place of the app's.
        """
        access, self._access = self._access, None
        if access is None:
            return
        now = time.monotonic()
        total_s = now - self._began
        app_s = 0.0 if self._app_began is None else now - self._app_began
        head = self._head
        if answer is not None:
            sent = body_size(answer)
        elif status == CLIENT_CLOSED:
            sent = max(self._framer.sent_bytes - self._connection.unsent_bytes(), 0)
        else:
            sent = self._framer.sent_bytes
        access.write(
            AccessRecord(
                client=host_of(self.client),
                method=head.method,
                target=head.target,
                http_version=head.http_version,
                status=status,
                sent=sent,
                total_s=total_s,
                queue_s=total_s - app_s,
                app_s=app_s,
                request_headers=head.headers,
                response_headers=self._headers if self._started and answer is None else (),
            )
        )

    async def _writable(self) -> None:
        await self._connection.wait_writable()
        if self._lost:
            raise ClientGoneError("the client has left")

    def _misplaced(self, kind: object) -> ASGIMisuseError:
        if self.complete:
            return ASGIMisuseError(f"{kind!r} after the response was complete")
        wanted = "http.response.body" if self._started else "http.response.start"
        return ASGIMisuseError(f"{kind!r} where {wanted!r} was expected")


def _as_bytes(body: object) -> bytes:
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    raise ASGIMisuseError(f"the body must be bytes, not {type(body).__name__}")


def _warn_of_dropped(names: tuple[bytes, ...]) -> None:
    for name in names:
        name = name.lower()
        if name not in _warned_of and len(_warned_of) < NAMES_WARNED_OF:
            _warned_of.add(name)
            logger.warning("the app's header %s is the server's to set; it is left out", name.decode("latin-1"))
