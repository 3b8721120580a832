"""
A connection: bytes in, one exchange at a time, bytes out.

    IDLE ──> HEAD ──> ACTIVE ──> (UNREAD ──>) IDLE
     │        │         │  │         │
     │        └────┬────┘  │         │
     │             v       v         │
     │         LINGERING ──> CLOSING ──> CLOSED
     └───> LEAVING ─────────────^

One timer per connection, which is set again only when it rings: a request moves deadlines, which are numbers.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
import socket
from typing import Any, cast
from urllib.parse import unquote

from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from jumpstart_server import forks
from jumpstart_server.asgi.exchange import Exchange
from jumpstart_server.asgi.service import Service
from jumpstart_server.asgi.websocket import without_departures
from jumpstart_server.connection_settings import DISCARD_BYTES, LINGER_BYTES, LINGER_TIME
from jumpstart_server.http1 import (
    BodyData,
    Event,
    ParseError,
    RequestEnd,
    RequestHead,
    RequestParser,
    State,
    error_response,
)
from jumpstart_server.system import reset_at_close, reset_connection

logger = logging.getLogger(__name__)

NEVER = float("inf")
HIGH_WATER_BYTES = 64 * 1024  # of a body that the app has not taken; then reading pauses
SECOND_LOOK = 0.05  # seconds between the decision to close an idle connection and the close; see `_expired`


class Phase(enum.IntEnum):
    """What happens on a connection. Up to HEAD it waits for a request."""

    IDLE = 0  # between requests, or before the first
    LEAVING = 1  # idle, and about to be closed
    HEAD = 2  # part of a head has come
    ACTIVE = 3  # an exchange has the connection
    UNREAD = 4  # the response is complete; the rest of the request is dropped
    LINGERING = 5  # the last answer is sent; what still comes is dropped
    CLOSING = 6  # what is written is being flushed
    CLOSED = 7


IDLE, LEAVING, HEAD, ACTIVE, UNREAD, LINGERING, CLOSING, CLOSED = Phase


class JumpstartProtocol(asyncio.Protocol):
    """
    uvicorn's HTTP protocol class: ``uvicorn.Config(app, http=JumpstartProtocol)``.

    Limits and times are those of ``config.jumpstart``, a `ConnectionSettings`; uvicorn's own (``limit_concurrency``,
    ``timeout_keep_alive``, ``h11_max_incomplete_event_size``) and its access log are not used.

    Attributes:
        service: what the server's connections share.
        tasks: uvicorn's set of the tasks that it waits for before it stops.
        exchange: has the connection, until its response is complete.
        is_draining: the server ends.
        is_last: the response in hand is the last one of this connection.
        write_paused: the client is too slow; see `wait_writable`.
    """

    __slots__ = (
        "_app_state",
        "_client",
        "_config",
        "_context",
        "_create_task",
        "_deadline",
        "_eof",
        "_fresh",
        "_parser",
        "_phase",
        "_proxies",
        "_read_paused",
        "_received",
        "_rings_at",
        "_scheme",
        "_server",
        "_server_state",
        "_settings",
        "_timer",
        "_unsent",
        "_write_deadline",
        "_writers",
        "exchange",
        "is_draining",
        "is_last",
        "loop",
        "service",
        "tasks",
        "transport",
        "write",
        "write_paused",
    )

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Args: as uvicorn passes them."""
        if not config.loaded:
            config.load()
        service: Service | None = getattr(server_state, "jumpstart", None)
        if service is None:
            service = server_state.jumpstart = Service(config, server_state)
        self.service = service
        self.loop = loop = _loop or asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = server_state.tasks
        self.is_last = not service.settings.keep_alive
        self.write_paused = False
        self._settings = service.settings
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        # Where no factory of the app's makes tasks: to number each costs as much as to make one.
        self._create_task = loop.create_task if loop.get_task_factory() is not None else None
        self._parser = RequestParser(self._settings.limits, self._settings.header_map)
        self._phase: Phase = IDLE
        self.exchange: Exchange | None = None
        self._deadline = NEVER
        self._write_deadline = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = NEVER
        self._fresh = True  # no request has come whole yet
        self._eof = False
        self.is_draining = False
        self._read_paused = False
        self._received = 0  # bytes, while they are dropped
        self._unsent = 0  # bytes, when the write deadline was set
        self._writers: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.write = transport.write
        self._server = get_local_addr(transport)
        self._client = get_remote_addr(transport)
        self._scheme = "https" if is_ssl(transport) else "http"
        self._trust(self._peer_host())
        # Each request's task runs in a copy of this, wherever it is started from: asyncio calls data_received in the
        # context of whoever resumed reading last, which may be an app's (python/cpython#140947).
        self._context = contextvars.copy_context()
        self._server_state.connections.add(self)
        if self._settings.header_timeout:
            self._set_deadline(self.loop.time() + self._settings.header_timeout)

    def _peer_host(self) -> str | None:
        """As `TrustedProxies.trusts` takes it. A client that has left already has no address either."""
        if self._client is not None:
            return self._client[0]
        sock = self.transport.get_extra_info("socket")
        return None if sock is not None and sock.family == socket.AF_UNIX else ""

    def _trust(self, host: str | None) -> None:
        """Remember whether the peer is a proxy whose headers say who its clients are."""
        proxies = self._settings.proxies
        self._proxies = proxies if proxies is not None and proxies.trusts(host) else None

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase <= UNREAD:
            events = self._parser.feed(data)
            if events:
                self._take(events)
            elif phase <= LEAVING:
                self._head_begun()
            elif phase == ACTIVE and not self._parser.wants_data:
                self._pause_reading()
        elif phase == LINGERING:
            self._received += len(data)
            if self._received > LINGER_BYTES:
                self._close()

    def eof_received(self) -> bool:
        """The client sends no more. It may still read, so the answers that it waits for are sent. TLS closes anyhow."""
        self._eof = True
        phase = self._phase
        if phase <= UNREAD:
            events = self._parser.eof()
            exchange = self.exchange
            if exchange is not None:
                # Half a body is nothing that could be answered, unless it is answered already.
                is_cut = not exchange.body_complete and not exchange.has_begun
                exchange.client_left(lost=is_cut)
                if is_cut:
                    self._close()
                return self.transport.can_write_eof()
            if events and phase != UNREAD:
                self._take(events)
                return self.transport.can_write_eof()
        elif phase == CLOSING:
            return self.transport.can_write_eof()
        self._close()
        return self.transport.can_write_eof()  # to keep it open, which TLS cannot

    def connection_lost(self, exc: Exception | None) -> None:
        if forks.has_children and not forks.in_child:
            self._shut_down()
        self._phase = CLOSED
        self._server_state.connections.discard(self)
        self._deadline = self._write_deadline = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left(lost=True)
        self._wake_writers()

    def _shut_down(self) -> None:
        """End the connection for the app's children too, which may have a copy of it."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            forks.shut_down(sock.fileno())

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._settings.write_timeout:
            self._unsent = self.transport.get_write_buffer_size()
            self._write_deadline = self.loop.time() + self._settings.write_timeout
            self._wake_timer(self._write_deadline)

    def resume_writing(self) -> None:
        self.write_paused = False
        self._write_deadline = NEVER
        self._wake_writers()

    def _wake_writers(self) -> None:
        for writer in self._writers:
            if not writer.done():
                writer.set_result(None)
        self._writers.clear()

    # ------------------------------------------------------------------ what uvicorn's server calls

    def shutdown(self) -> None:
        """Drain: close when idle; else after the response in hand. What was pipelined behind it is not begun."""
        self.is_last = self.is_draining = True
        if not self.service.spares_streams and not self.service.ends_streams:
            self.service.end_streams()
        if self._phase <= LEAVING:
            self._leave()
        elif self._phase == UNREAD:
            self._linger()

    # ------------------------------------------------------------------ requests

    def _take(self, events: list[Event]) -> None:
        """Act on what the parser found."""
        head = events[0]
        last = events[-1]
        if type(last) is ParseError:
            self._refuse(last)
            return
        if type(head) is RequestHead:
            complete = type(last) is RequestEnd
            if complete and head.upgrade is not None and self._is_websocket(head):
                if self.service.gate.is_full:
                    self._shed(head)
                else:
                    self._upgrade(head)
                return
            self._begin(head, complete)
            if len(events) == 1 + complete:
                return
        exchange = self.exchange
        for event in events:
            if type(event) is BodyData:
                if exchange is None:
                    self._drop_body(len(event.data))
                else:
                    exchange.take_body(event.data)
                    self._await_body()
            elif type(event) is RequestEnd:
                self._deadline = NEVER
                if exchange is not None:
                    exchange.take_end()
                elif self._phase == UNREAD:
                    self._next()
        if exchange is not None and not exchange.body_complete and exchange.unread_bytes > HIGH_WATER_BYTES:
            self._pause_reading()

    def _begin(self, head: RequestHead, complete: bool) -> None:
        exchange = Exchange(self, head, complete)
        self.exchange = exchange
        self._phase = ACTIVE
        self._deadline = NEVER
        self._fresh = False
        self._server_state.total_requests += 1
        if not complete and not head.expects_continue:
            self._await_body()
        path = head.path.decode("ascii")
        if "%" in path:
            path = unquote(path)
        root_path = self.service.root_path
        client, scheme = self._client, self._scheme
        if self._proxies is not None:
            client, scheme = self._proxies.origin(client, scheme, head.headers)
        exchange.client = client
        exchange.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": head.http_version,
            "server": self._server,
            "client": client,
            "scheme": scheme,
            "method": head.method,
            "root_path": root_path,
            "path": root_path + path if root_path else path,
            "raw_path": head.path,
            "query_string": head.query,
            "headers": head.headers,
            "state": self._app_state.copy(),
        }
        if self.service.gate.is_open:
            self.start(exchange)
        else:
            self.service.gate.enter(exchange)
        if self._eof:
            exchange.client_left(lost=False)

    def start(self, exchange: Exchange) -> None:
        """Call the app."""
        scope = exchange.scope
        assert scope is not None
        running = exchange.run(self.service.app, scope)
        if self._create_task is None:
            task = asyncio.Task(running, loop=self.loop, name="request", context=self._context.copy())
        else:
            task = self._create_task(running, context=self._context.copy())
        exchange.task = task
        self.tasks.add(task)  # discarded by the task itself: a done callback costs a turn of the loop

    def _is_websocket(self, head: RequestHead) -> bool:
        return (
            self.service.websocket is not None
            and head.method == "GET"
            and not head.has_body
            and head.upgrade is not None
            and head.upgrade.lower() == b"websocket"
            and not self.is_draining
        )

    def _upgrade(self, head: RequestHead) -> None:
        """Hand the connection over to uvicorn's WebSocket protocol, with the request as if it had just come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._phase = CLOSED
        self.service.upgraded += 1
        self._server_state.connections.discard(self)
        request = [head.method.encode(), b" ", head.target, b" HTTP/1.1\r\n"]
        for name, value in head.headers:
            request += (name, b": ", value, b"\r\n")
        request += (b"\r\n", self._parser.take_rest())
        protocol = self.service.websocket(
            config=self._config, server_state=self._server_state, app_state=self._app_state
        )
        protocol.app = without_departures(protocol.app)
        self.transport.set_protocol(protocol)
        client, scheme = self._client, self._scheme
        if self._proxies is not None:
            client, scheme = self._proxies.origin(client, scheme, head.headers)

        if self.service.access is not None:
            protocol.begin_line(self.service.access, head, client)

        def hand_over() -> None:
            protocol.connection_made(self.transport)
            # What it found on the socket, and we know better; its scope is made of these, with the first bytes.
            protocol.client, protocol.server, protocol.scheme = client, self._server, scheme.replace("http", "ws")
            protocol.data_received(b"".join(request))

        self._context.copy().run(hand_over)

    def _head_begun(self) -> None:
        """Some bytes of a request have come, and not its whole head."""
        if self._parser.is_idle:
            return  # empty lines
        if self._settings.header_timeout and not (self._fresh and self._phase == IDLE):
            self._set_deadline(self.loop.time() + self._settings.header_timeout)
        self._phase = HEAD

    def response_done(self, exchange: Exchange, must_close: bool) -> None:
        """The exchange has written all of its response."""
        self.exchange = None
        if must_close:
            if exchange.body_complete and self._parser.state is State.CLOSED:
                self._close()  # as the client wanted it
            else:
                self._linger()
        elif exchange.body_complete:
            self._next()
            if self.is_draining and self._phase == IDLE:
                self._leave()  # its client was promised another request before the drain began
        elif self.is_draining:
            self._linger()
        elif self._eof:
            self._close()
        else:
            self._phase = UNREAD
            self._received = exchange.unread_bytes
            self._resume_reading()
            self._await_body()

    def _next(self) -> None:
        """The request is answered: go on to the one that has come meanwhile, or wait for one."""
        events = self._parser.resume()
        self._phase = IDLE
        if events:
            self._take(events)
        elif self._parser.is_idle:
            self._set_deadline(self.loop.time() + self._settings.keep_alive)
        elif self._eof or self._parser.state is State.CLOSED:
            self._close()
        else:
            self._head_begun()
        if self._read_paused and self._parser.wants_data:
            self._resume_reading()

    def _drop_body(self, size: int) -> None:
        """More of a body whose request is answered already."""
        self._received += size
        if self._received > DISCARD_BYTES:
            self._linger()
        else:
            self._await_body()

    # ------------------------------------------------------------------ what the exchange calls

    def go_on(self, interim: bytes) -> None:
        """The app wants the body that the client holds back: tell it."""
        self.write(interim)
        self._await_body()

    def body_taken(self) -> None:
        """The app has taken all there was of the body."""
        if self._read_paused:
            self._resume_reading()
            self._await_body()

    async def wait_writable(self) -> None:
        """Wait until the client has taken some of what was written, or has left."""
        while self.write_paused and self._phase != CLOSED:
            writer = self.loop.create_future()
            self._writers.append(writer)
            await writer

    def answer_and_close(
        self, status: int, reason: str, method: str = "GET", *, linger: bool = True, retry_after: int = 0
    ) -> bytes:
        """Give an answer of our own, the last one, and return it."""
        self.exchange = None
        headers = [(b"Retry-After", b"%d" % retry_after)] if retry_after else []
        answer = error_response(status, reason, method=method, headers=headers, defaults=self.service.defaults())
        self.write(answer)
        if linger:
            self._linger()
        else:
            self._close()
        return answer

    def cut(self, *, reset: bool = False, linger: bool = True) -> None:
        """Close in the middle of a response, after what is written; by *reset* where a close looks like its end."""
        self.exchange = None
        if reset:
            self._abort(reset=True)
        elif linger:
            self._linger()
        else:
            self._close()

    def abort(self, exchange: Exchange) -> None:
        """Close at once, if the connection is still that exchange's."""
        if self.exchange is exchange:
            self._abort()

    def _abort(self, *, reset: bool = False) -> None:
        """Close at once; what is written and not sent is lost."""
        self.exchange = None
        if self._phase == CLOSED:
            return
        if reset:
            sock = self.transport.get_extra_info("socket")
            if sock is not None:
                reset_at_close(sock)
                if forks.has_children:
                    reset_connection(sock)  # a child may have a copy, and then a close alone does nothing
        self._phase = CLOSING
        self._deadline = NEVER
        self.transport.abort()

    # ------------------------------------------------------------------ ends

    def _refuse(self, error: ParseError) -> None:
        self.service.refusals.note(self._client, error.detail)
        if self.exchange is not None:
            self.exchange.refuse(error.status, error.reason)
        elif self._phase == UNREAD:
            self._linger()
        else:
            head = error.head
            answer = self.answer_and_close(error.status, error.reason, "GET" if head is None else head.method)
            self.service.refusals.write_line(self._client_of(head), error.status, answer, head)

    def _shed(self, head: RequestHead) -> None:
        """No more WebSockets just now."""
        answer = self.answer_and_close(503, "too many requests run", head.method, retry_after=1)
        self.service.refusals.write_line(self._client_of(head), 503, answer, head)

    def _linger(self) -> None:
        """
        Close our side, and drop what the client still sends until it closes its own.

        A close with unread bytes in the socket is a reset, which may destroy the answer on its way (RFC 9112 9.6).
        """
        if self._eof or not self.transport.can_write_eof() or self.transport.is_closing():
            self._close()  # TLS waits for the peer's farewell by itself
            return
        self._phase = LINGERING
        self._received = 0
        self.transport.write_eof()
        self._resume_reading()
        self._unsent = self.transport.get_write_buffer_size()
        self._set_deadline(self.loop.time() + LINGER_TIME)

    def _close(self) -> None:
        """Close when what is written has been sent."""
        self._phase = CLOSING
        self.exchange = None
        self._unsent = self.transport.get_write_buffer_size()
        self.transport.close()
        self._set_deadline(self.loop.time() + (self._settings.write_timeout or NEVER))

    def _leave(self) -> None:
        self._phase = LEAVING
        patience = self.service.patience_s if self.is_draining else 0.0
        self._set_deadline(self.loop.time() + max(SECOND_LOOK, patience))

    # ------------------------------------------------------------------ reading

    def _pause_reading(self) -> None:
        if not self._read_paused and not self._eof:
            self._read_paused = True
            self._deadline = NEVER
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            if not self.transport.is_closing():
                self._context.copy().run(self.transport.resume_reading)

    def _await_body(self) -> None:
        if self._settings.body_timeout and not self._read_paused:
            self._set_deadline(self.loop.time() + self._settings.body_timeout)

    # ------------------------------------------------------------------ time

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._rings_at > deadline:
            self._wake_timer(deadline)

    def _wake_timer(self, when: float) -> None:
        """Let the timer ring at *when* or before."""
        if self._rings_at > when:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = when
            self._timer = self.loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._rings_at = NEVER
        now = self.loop.time()
        if now >= self._write_deadline:
            if self._is_stalled():
                self._give_up_writing()
                return
            self._write_deadline = now + self._settings.write_timeout
        if now >= self._deadline:
            self._deadline = NEVER
            self._expired()
        wake = min(self._deadline, self._write_deadline)
        if self._phase != CLOSED:
            self._wake_timer(wake)

    def _expired(self) -> None:
        """The time for what the phase waits for is over."""
        phase = self._phase
        if phase == IDLE:
            # Timers ring before sockets are read: after a turn of the loop that took long, a request may wait there.
            self._leave()
        elif phase == LEAVING or (phase == LINGERING and not self._is_unsent()):
            self._close()
        elif phase in (HEAD, ACTIVE):
            what = "head" if phase == HEAD else "body"
            self.service.refusals.note(self._client, f"408 the {what} of the request did not arrive in time")
            if self.exchange is not None:
                self.exchange.refuse(408, "the body did not arrive in time")
            else:
                answer = self.answer_and_close(408, "the head did not arrive in time")
                self.service.refusals.write_line(self._client, 408, answer, total_s=self._settings.header_timeout)
        elif phase == UNREAD:
            self._linger()
        elif phase in (LINGERING, CLOSING):
            if self._is_stalled():
                self._give_up_writing()
            else:
                self._deadline = self.loop.time() + (self._settings.write_timeout or LINGER_TIME)

    def _client_of(self, head: RequestHead | None) -> object:
        """Who sent a request that no exchange takes."""
        if head is None or self._proxies is None:
            return self._client
        return self._proxies.origin(self._client, self._scheme, head.headers)[0]

    def unsent_bytes(self) -> int:
        """How much of what was written waits for the client to take it."""
        return self.transport.get_write_buffer_size()

    def _is_unsent(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def _is_stalled(self) -> bool:
        """Whether the client has taken nothing since the last look."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        return self._unsent >= before

    def _give_up_writing(self) -> None:
        exchange = self.exchange
        self.service.refusals.note(self._client, f"took nothing of {self._unsent} bytes in time; the connection is cut")
        if exchange is not None:
            exchange.client_left(lost=True)
        self._abort(reset=True)
