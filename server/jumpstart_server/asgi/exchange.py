"""
One request and its response, as the app sees them: `receive` and `send` of ASGI 3, HTTP spec 2.4.

The head of a response waits for the first piece of the body, as ASGI wants it, so that a short response is one write
and has its Content-Length.

When the client leaves (its side of the connection ends, or the connection breaks):

1. ``receive`` gives ``http.disconnect`` at once, after what is there of a body that came whole. Once the connection is
   broken ``send`` raises `ClientGoneError`.
2. After `DISCONNECT_GRACE` the app is cancelled if nobody can want what it does: the response has begun, or the method
   is a safe one (RFC 9110 9.2.1). A POST that has not begun to answer runs to its end; half a payment is worse than one
   that nobody waits for, but for who chose ``--on-deadline sever``. What runs after the response, background tasks, is
   never cancelled.

When the time is over (`deadlines.py` looks), the client gets 504, or where the response has begun a break that
it can tell from an end, at once; then the app is cancelled. The time that the client takes to send its body does not
count, and the clock stops with the response's last byte.

When the server stops, streams are told: ``receive`` gives ``http.disconnect`` in a response that has begun. When others
take this process's place they are told shortly before ``--graceful-timeout`` is over: until then they may end by
themselves. What has not begun to answer is left alone.

uvicorn never cancels. But since spec 2.4 frameworks do not listen while they stream, they wait for ``send`` to raise;
so a generator that waits for its next event would keep its database connection until that event comes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from jumpstart.context import RequestContext, enter
from jumpstart.errors import JumpstartError
from jumpstart_server import forks
from jumpstart_server.access import AccessRecord
from jumpstart_server.app_faults import warn_of_dropped
from jumpstart_server.asgi.service import describe
from jumpstart_server.connection_settings import DISCARD_BYTES
from jumpstart_server.envelope.cpu import Measured
from jumpstart_server.http1 import RequestHead, ResponseError, ResponseFramer
from jumpstart_server.refusals import body_size, host_of
from jumpstart_warmup.middleware import MARKER_BYTES
from jumpstart_warmup.observe import CLIENT_CLOSED, Observer
from jumpstart_warmup.routes import route_of_scope
from jumpstart_warmup.sampling import MAX_BODY, UnderWay
from jumpstart_warmup.targets import is_probe

if TYPE_CHECKING:
    from jumpstart_server.asgi.protocol import JumpstartProtocol

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DISCONNECT_GRACE = 0.5  # seconds from http.disconnect to the app's cancellation; generators are to be closed within 1 s
JOIN_BYTES = 64 * 1024  # up to here head and body are joined for one write
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "REPORT"))
DEPARTURES = frozenset(("ClientDisconnect", "ClientDisconnected", "RequestAborted"))  # Starlette's, Quart's, Django's
NEVER = math.inf

_CLOSED: Final = "http.disconnect"


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
        scope: what the app will be called with, until it is.
        unread_bytes: of the body, that have come and that the app has not taken.
        complete: the response is done, and the connection no longer this exchange's.
        connection: that the request came over.
        context: of the request, from when the app is called.
        due: when to call `look_at_the_clock`, in seconds of the monotonic clock.
        task: runs the app; None while the request waits for its turn.
    """

    __slots__ = (
        "_access",
        "_app_began",
        "_began",
        "_body_bytes",
        "_chunks",
        "_end_taken",
        "_expects_continue",
        "_finished",
        "_first_byte_by",
        "_framer",
        "_head",
        "_headers",
        "_kept",
        "_left",
        "_lost",
        "_measured",
        "_moved",
        "_outcome",
        "_started",
        "_status",
        "_told",
        "_waiters",
        "_was_counted",
        "body_complete",
        "client",
        "complete",
        "connection",
        "context",
        "due",
        "scope",
        "task",
        "unread_bytes",
    )

    client: object
    context: RequestContext
    scope: Scope | None
    _began: float  # on the monotonic clock; with an access log only
    _app_began: float | None
    _kept: list[bytes] | None  # the body of a request that may be repeated; unset where none has come
    _first_byte_by: float  # on the monotonic clock; with such a limit only
    _moved: float  # when the last piece of the response was written; with an idle_timeout only

    def __init__(self, connection: JumpstartProtocol, head: RequestHead, body_complete: bool) -> None:
        self.connection = connection
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
        self._told = False  # the app knows that nobody waits for it
        self._started = False
        self._outcome = 0  # the status that the request came to, where its response did not become complete
        self._was_counted = False
        self.due = NEVER
        self.task: asyncio.Task[None] | None = None
        self._finished = 0.0  # when the app's response was complete, on the monotonic clock
        self.complete = False
        self._access = connection.service.access  # None when the line is written, too
        self._app_began = None
        self._measured: Measured[None] | None = None  # where this request is one of the sample
        if self._access is not None:
            self._began = time.monotonic()

    def turn_away(self, reason: str, retry_after_s: int) -> None:
        """It will not be this request's turn."""
        self.complete = True
        answer = self.connection.answer_and_close(503, reason, self._head.method, retry_after=retry_after_s)
        self._log(503, answer)

    async def run(self, app: App, scope: Scope) -> None:
        """The task: run the app, and see to it that its client gets an answer or a close."""
        service = self.connection.service
        self._app_began = began = time.monotonic()
        self.due = expires = began + service.timeout
        context = RequestContext(expires=expires, latest=began + service.longest, has_left=self._is_given_up)
        self.context = context
        if service.first_byte_timeout:
            self._first_byte_by = began + service.first_byte_timeout
            self.due = min(expires, self._first_byte_by)
        enter(context)
        if service.deadlines.is_asleep:
            service.deadlines.watch()
        cancelled: object = False
        sampler = service.sampler
        sampler.left -= 1
        try:
            running = app(scope, self.receive, self.send)
            if sampler.left and (sampler.is_full or self._head.path in sampler.known):
                await running
            elif isinstance(running, Coroutine):
                sampler.take(self._head.path)
                self._measured = measured = Measured(running)
                await measured
            else:
                sampler.take(self._head.path)
                await running
        except BaseException as error:
            if forks.in_child:
                forks.end_child(error)
            if isinstance(error, GeneratorExit) and not self._is_running():
                raise  # the loop is gone
            cancelled = isinstance(error, asyncio.CancelledError) and self._current_task().cancelling()
            departure = not cancelled and self._is_of_departure(error)
            if departure:
                logger.debug("the client left: %s", describe(self._head))
            elif not cancelled:
                logger.error("exception in the app: %s", describe(self._head), exc_info=error)
            if not self.complete and not self._lost:
                if departure:
                    self._break_off()
                else:
                    # The loop of a server that stops ends soon: no time to linger.
                    self._give_answer(503 if cancelled else 500, linger=not cancelled)
            if cancelled:
                raise  # whoever cancelled a task wants to see it cancelled
        else:
            if forks.in_child:
                forks.end_child()
            if not self.complete and not self._lost:
                self._returned_early()
        finally:
            self.connection.tasks.discard(self.task)
            context.has_left = None  # no cycle through this exchange and its task
            context.expires = NEVER
            if service.observer is not None and not self._was_counted:
                self._count(service.observer, scope, bool(cancelled))
            self.scope = None
            if service.deadlines.orphans:
                service.deadlines.orphans.discard(self)
            gate = service.gate
            if not gate.is_unlimited and gate.queue.size:
                gate.look(time.monotonic())

    def _current_task(self) -> asyncio.Task[None]:
        assert self.task is not None, "the task runs"
        return self.task

    def _is_running(self) -> bool:
        """False when the coroutine is closed from outside: by the collector, after its loop."""
        try:
            return asyncio.current_task() is self.task
        except RuntimeError:
            return False

    def _is_given_up(self) -> bool:
        """Whether nobody waits for the response any more, or the server, which ends, should not have to."""
        return self._left or self._lost or self._is_to_end()

    def _is_to_end(self) -> bool:
        """Whether this is a stream, and streams are to end."""
        return self.connection.service.ends_streams and self._started and not self.complete

    def _count(self, observer: Observer, scope: Scope, cancelled: bool) -> None:
        """Put the request into the books, once: when the app is done with it, or was stopped."""
        self._was_counted = True
        head = self._head
        if self._finished:  # what fails after the answer (a background task) did not fail the request
            status = self._framer.status
        else:
            status = self._outcome or (CLIENT_CLOSED if cancelled or self._left or self._lost else 500)
        evidence = True
        for field in head.headers:  # a plain loop takes half the time of any() with a generator
            name = field[0]
            if name == MARKER_BYTES or (name == b"user-agent" and is_probe(field[1])):
                evidence = False
        assert self._app_began is not None
        observer.count(
            self.context,
            method=head.method,
            target=head.origin_form,
            headers=head.headers,
            status=status,
            elapsed_s=(self._finished or time.monotonic()) - self._app_began,
            evidence=evidence,
            rule=route_of_scope(scope, self.connection.service.root_path, status) if "route" in scope else None,
            cpu_s=-1.0 if self._measured is None else self._measured.cpu_s,
            body=self._body_to_keep() if self._body_bytes else b"",
        )

    def underway(self) -> UnderWay | None:
        """As of `Engine`."""
        scope = self.scope
        if self.task is None or scope is None or not self._started or self.complete:
            return None
        context, head = self.context, self._head
        if not (context.events or context.imports):
            return None
        rule = route_of_scope(scope, self.connection.service.root_path, self._status) if "route" in scope else None
        return UnderWay(context, head.method, head.origin_form, head.headers, self._status, rule)

    def _body_to_keep(self) -> bytes | None:
        kept: list[bytes] | None = getattr(self, "_kept", None)
        return None if kept is None or not self.body_complete else b"".join(kept)

    def _is_of_departure(self, error: BaseException) -> bool:
        """Whether the app raised it because it was told that nobody waits for it."""
        seen: set[int] = set()
        links: list[BaseException | None] = [error]
        while links:
            link = links.pop()
            if link is None or id(link) in seen:
                continue
            seen.add(id(link))
            if isinstance(link, ClientGoneError) or (self._told and type(link).__name__ in DEPARTURES):
                return True
            links += (link.__cause__, link.__context__)
            if isinstance(link, BaseExceptionGroup):
                links += link.exceptions
        return False

    def _returned_early(self) -> None:
        if self._told:
            logger.debug("the app has ended, since nobody waits for it: %s", describe(self._head))
            self._break_off()
            return
        what = "completing its response" if self._started else "starting a response"
        logger.error("the app returned without %s: %s", what, describe(self._head))
        self._give_answer(500)

    def _break_off(self) -> None:
        """The app has ended as it was told to, in the middle of things: close, so that it does not look like an end."""
        self.complete = True
        if self._framer.head_sent:
            self._log(CLIENT_CLOSED if self._left else 503)
            self._framer.abort()
            self.connection.cut(reset=self._framer.ends_with_close)
        else:
            self._log(CLIENT_CLOSED)
            self.connection.cut()

    def _give_answer(self, status: int, *, reason: str = "", linger: bool = True) -> None:
        """An error page in place of the response; where that has begun, a cut that the client can tell from an end."""
        self.complete = True
        self._answer_or_cut(status, reason, linger)

    def _answer_or_cut(self, status: int, reason: str, linger: bool) -> None:
        if self._framer.head_sent:
            self._log(status)
            self._framer.abort()
            self.connection.cut(reset=self._framer.ends_with_close, linger=linger)
        else:
            answer = self.connection.answer_and_close(status, reason, self._head.method, linger=linger)
            self._log(status, answer)

    # ------------------------------------------------------------------ time

    def describe(self, now: float) -> str:
        """Method, path and age, for a log line. *now*: on the monotonic clock."""
        return f"{describe(self._head)} after {now - (self._app_began or now):.1f} s"

    def look_at_the_clock(self, now: float) -> None:
        """`due` has come: stop the app if its time is over, else set `due` anew. *now*: on the monotonic clock."""
        if self.complete:
            self.due = NEVER
            return
        if self._awaits_client():
            self.due = now  # each time; it is not the app that takes long
            return
        context = self.context
        limits = self.connection.service.limits
        self.due = context.expires
        if now >= context.expires:
            self._stop(now, "timeout", limits.timeout)
        elif not self._framer.head_sent:
            if not limits.first_byte_timeout:
                return
            self.due = min(self.due, self._first_byte_by)
            if now >= self._first_byte_by:
                self._stop(now, "first_byte_timeout", limits.first_byte_timeout)
        elif limits.idle_timeout:
            idle_by = self._moved + limits.idle_timeout
            self.due = min(self.due, idle_by)
            if now >= idle_by:
                self._stop(now, "idle_timeout", limits.idle_timeout)

    def _awaits_client(self) -> bool:
        """Whether the app waits for more of the body, and nothing else is in its way."""
        if self._waiters is None or self.body_complete or self._left:
            return False
        return not all(waiter.done() for waiter in self._waiters)

    def _stop(self, now: float, option: str, limit_s: float) -> None:
        """The time is over: the client has its answer at once, and nothing waits for the app."""
        task = self._current_task()
        service = self.connection.service
        deadlines = service.deadlines
        logger.error(
            "timeout: %s is over its %s of %g s after %.2f s, and is stopped\n%s",
            *(describe(self._head), option, limit_s, now - (self._app_began or now), deadlines.stacks(self, task)),
        )
        self.due = NEVER
        self.context.is_stopped = True
        self._told = True
        self._give_answer(504, reason="the request took too long")
        self._lost = True  # so that what the app still sends raises
        if service.observer is not None and self.scope is not None:
            self._count(service.observer, self.scope, cancelled=True)
        self._wake()
        deadlines.stop(self, task, "the request took too long")

    # ------------------------------------------------------------------ what the connection asks and tells

    @property
    def has_begun(self) -> bool:
        """The app has begun to answer."""
        return self._started

    def refuse(self, status: int, reason: str) -> None:
        """Answer in place of the app, which finds the client gone; close."""
        self._answer_or_cut(status, reason, linger=True)
        self.client_left(lost=True)

    def take_body(self, data: bytes) -> None:
        """More of the body has come."""
        observer = self.connection.service.observer
        if observer is not None and observer.lookout is not None and self._head.method in observer.lookout.methods:
            self._keep(data)
        self._body_bytes += len(data)
        self.unread_bytes += len(data)
        if self._chunks is None:
            self._chunks = [data]
        else:
            self._chunks.append(data)
        if self._waiters:
            self._wake()

    def _keep(self, data: bytes) -> None:
        """Keep a copy of the body for who may repeat the request, if it is short."""
        if not self._body_bytes:
            self._kept = []
        if self._body_bytes + len(data) > MAX_BODY:
            self._kept = None
        kept = getattr(self, "_kept", None)
        if kept is not None:
            kept.append(data)

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
            if self.task is None:
                self.complete = True
                self.connection.service.gate.queue.withdraw(self)
                return
            self.connection.service.deadlines.orphans.add(self)
        first = not self._left
        self._left = True
        self._lost = self._lost or lost
        self._wake()
        if first or lost:
            self.connection.loop.call_later(DISCONNECT_GRACE, self._end_of_grace)

    def _end_of_grace(self) -> None:
        task = self.task
        if self.complete or (task is not None and task.done()):
            return
        if task is None:  # it has not begun, so it need not
            self.connection.abort(self)
            self.client_left(lost=True)
        elif self._started or self._head.method in SAFE_METHODS or self.connection.service.may_sever:
            self._lost = True
            self._log(CLIENT_CLOSED)
            self.connection.abort(self)
            self.connection.service.deadlines.orphans.add(self)
            self.connection.service.deadlines.stop_for_nobody(self, task)

    def end_stream(self) -> None:
        """Tell the app, if it streams."""
        if self._is_to_end():
            self._wake()

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
                self._told = True
                return {"type": _CLOSED}
            if self._chunks or (self.body_complete and not self._end_taken):
                return self._next_piece()
            if self._left or (self._started and self._is_to_end()):
                self._told = True
                return {"type": _CLOSED}
            if self._expects_continue:
                self._expects_continue = False
                if not self._framer.head_sent and not self._body_bytes:
                    self.connection.go_on(self._framer.interim(100))
            waiter = self.connection.loop.create_future()
            if self._waiters is None:
                self._waiters = [waiter]
            else:
                self._waiters.append(waiter)
            if self.body_complete:
                await waiter
            else:
                began = time.monotonic()
                try:
                    await waiter
                finally:
                    self._give_time_back(time.monotonic() - began)

    def _give_time_back(self, seconds: float) -> None:
        """The client has taken so long to send a piece of its body."""
        self.context.expires += seconds
        self.context.latest += seconds
        if self.connection.service.first_byte_timeout:
            self._first_byte_by += seconds

    def _next_piece(self) -> Message:
        chunks = self._chunks
        more = not self.body_complete
        self._end_taken = not more
        if chunks is None:
            return {"type": "http.request", "body": b"", "more_body": more}
        self._chunks = None
        self.unread_bytes = 0
        self.connection.body_taken()
        return {
            "type": "http.request",
            "body": chunks[0] if len(chunks) == 1 else b"".join(chunks),
            "more_body": more,
        }

    async def send(self, message: Message) -> None:
        """
        ASGI's ``send``. It waits while the client is too slow to take what was sent before.

        Raises:
            ClientGoneError: the client has left, or the request's time is over.
            ASGIMisuseError: the message has no place here, or a value of the wrong type.
            ResponseError: status or headers that would break the message.
        """
        if forks.in_child:
            forks.end_child()
        if self._lost:
            raise self._gone()
        kind = message["type"]
        if kind == "http.response.body":
            if not self._started or self.complete:
                raise self._misplaced(kind)
            body = message.get("body", b"")
            if type(body) is not bytes:
                body = _as_bytes(body)
            more = message.get("more_body", False)
            connection = self.connection
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
            else:
                if connection.write_paused:
                    await self._writable()
                limit = connection.service.idle_timeout
                if limit:
                    self._moved = time.monotonic()
                    self.due = min(self.due, self._moved + limit)
        elif kind == "http.response.start":
            if self._started:
                raise self._misplaced(kind)
            status = message["status"]
            if not isinstance(status, int):
                raise ASGIMisuseError(f"the status must be int, not {type(status).__name__}")
            self._status: int = status
            self._headers: Any = message.get("headers", ())
            self._started = True
            if self.connection.service.ends_streams:
                self.end_stream()
        else:
            raise self._misplaced(kind)

    def _send_head(self, body: bytes, more: bool) -> None:
        connection = self.connection
        framer = self._framer
        service = connection.service
        if connection.is_last or service.is_lame or not (self.body_complete or self._may_discard()):
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
            warn_of_dropped(framer.dropped_fields)
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
        connection = self.connection
        if last:
            connection.write(last)
        self.complete = True
        self._finished = time.monotonic()
        self.due = self.context.expires = NEVER  # what follows, background tasks, has no limit
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
        self._outcome = self._outcome or status
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
            sent = max(self._framer.sent_bytes - self.connection.unsent_bytes(), 0)
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
        await self.connection.wait_writable()
        if self._lost:
            raise self._gone()

    def _gone(self) -> ClientGoneError:
        if self.task is not None and self.context.is_stopped:
            return ClientGoneError("the request's time is over, and its client has been told")
        return ClientGoneError("the client has left")

    def _misplaced(self, kind: object) -> ASGIMisuseError:
        if self.complete:
            return ASGIMisuseError(f"{kind!r} after the response was complete")
        wanted = "http.response.body" if self._started else "http.response.start"
        return ASGIMisuseError(f"{kind!r} where {wanted!r} was expected")


def _as_bytes(body: object) -> bytes:
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    raise ASGIMisuseError(f"the body must be bytes, not {type(body).__name__}")
