"""From bytes to a whole request, by the owner of a connection: handshakes, PROXY headers, heads, bodies."""

from __future__ import annotations

from io import BytesIO

from jumpstart_server.connection_settings import DISCARD_BYTES, LINGER_BYTES
from jumpstart_server.http1 import (
    BodyData,
    Event,
    ParseError,
    ProxyHeaderError,
    RequestEnd,
    RequestHead,
    read_proxy_header,
)
from jumpstart_server.wsgi.body import BodyReader
from jumpstart_server.wsgi.connection import BODY, HEAD, IDLE, LINGERING, PREFACE, TRAILERS, UNREAD, Connection
from jumpstart_server.wsgi.pool import PoolThread
from jumpstart_server.wsgi.running import Runner
from jumpstart_server.wsgi.syscalls import RECV_BYTES
from jumpstart_server.wsgi.table import Setup

KNOWN_BYTES = 2048  # of a request that is remembered, to know it again


class Reader(Runner):
    """Reads requests, and runs those that are whole, or has them wait. What is returned is as of `Runner`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._stream_bodies = setup.stream_bodies

    def _read(self, thread: PoolThread, connection: Connection) -> bool:
        """Read once and act on it. Whether the connection is still the caller's, and to be put back."""
        if connection.parsed:
            events, connection.parsed = connection.parsed, []
            connection.readable = True
            return self._take(thread, connection, events, b"")
        connection.readable = False
        phase = connection.phase
        if phase == PREFACE and connection.is_tls:
            return self._shake_hands(thread, connection)
        try:
            data = connection.receive(thread)
        except OSError:
            self._lost(connection)
            return False
        if data is None:
            return True
        if connection.gone_at:
            connection.readable = True  # the end is behind it, of which no event will tell again
        if phase == IDLE and data == connection.known and data:
            head = connection.known_head
            assert head is not None
            connection.began = now = self._clock()
            if self._queue.size or not thread.runs_handlers:
                connection.head = head
                return self._enqueue(connection)
            environ = connection.known_environ.copy()
            environ["wsgi.input"] = BytesIO()
            return self._run(thread, connection, head, environ, connection.known_key, now)
        if len(data) == RECV_BYTES or connection.is_tls:
            connection.readable = True  # there may be more, of which no event will tell
        if not data:
            return self._client_done(thread, connection)
        if phase == PREFACE:
            return self._read_preface(thread, connection, data)
        if phase == LINGERING:
            connection.received += len(data)
            if connection.received > LINGER_BYTES:
                self._close(connection)
                return False
            return True
        parsed = connection.parser.feed(data)
        if not parsed and phase == HEAD:
            return True  # a few bytes of a client that sends slowly; its deadline stays
        return self._take(thread, connection, parsed, data)

    def _shake_hands(self, thread: PoolThread, connection: Connection) -> bool:
        """TLS; as `_read`. It computes for a millisecond or more, so somebody else waits for events."""
        if thread.runs_handlers:
            self.pool.turn_busy(thread)
        try:
            if connection.shake_hands():
                connection.phase = IDLE
                connection.readable = True  # a request may have come with the last of it
            return True
        except (OSError, ValueError) as error:
            self.refusals.note(connection.peer, f"no TLS: {error}")
            self._close(connection)
            return False

    def _read_preface(self, thread: PoolThread, connection: Connection, data: bytes) -> bool:
        """A PROXY header; as `_read`."""
        connection.preface += data
        try:
            header = read_proxy_header(connection.preface, self.settings.proxy_protocol)
        except ProxyHeaderError as error:
            self.refusals.note(connection.peer, str(error))
            self._close(connection)
            return False
        if header is None:
            return True
        connection.preface = b""
        connection.phase = IDLE
        proxies = self.settings.proxies
        if header.client is not None:
            connection.peer, connection.local = header.client, header.server
            connection.trusted = proxies is not None and proxies.trusts(header.client[0])
        elif not header.is_local:
            connection.trusted = proxies is not None and proxies.trusts("")
        if not header.rest:
            return True
        return self._take(thread, connection, connection.parser.feed(header.rest), b"")

    def _client_done(self, thread: PoolThread, connection: Connection) -> bool:
        """The client sends no more."""
        if connection.phase not in (HEAD, BODY, TRAILERS):
            self._close(connection)
            return False
        events = connection.parser.eof()
        if not events:
            self._close(connection)
            return False
        return self._take(thread, connection, events, b"")

    def _take(self, thread: PoolThread, connection: Connection, events: list[Event], data: bytes) -> bool:
        """Act on what the parser found; as `_read`."""
        if len(events) == 2 and type(events[0]) is RequestHead and type(events[1]) is RequestEnd:  # as most come
            connection.head = events[0]
            connection.began = self._clock()
            return self._whole(thread, connection, data)
        ready = False
        for event in events:
            if isinstance(event, RequestHead):
                connection.head = event
                if connection.phase == IDLE:
                    connection.began = self._clock()
                connection.phase = BODY
                if event.has_body and (self._stream_bodies or event.expects_continue):
                    connection.reader = BodyReader(connection, event)
                    ready = True
            elif isinstance(event, BodyData):
                if connection.phase == UNREAD:
                    connection.received += len(event.data)
                    if connection.received > DISCARD_BYTES:
                        return self._linger(connection)
                elif connection.reader is not None:
                    connection.reader.add(event.data)
                else:
                    try:
                        connection.take_body(event.data)
                    except OSError as error:
                        return self._no_room(connection, error)
            elif isinstance(event, ParseError):
                return self._refuse(connection, event)
            elif connection.phase == UNREAD:
                return self._next(thread, connection)
            else:
                if connection.reader is not None:
                    connection.reader.complete = True
                elif connection.body is not None:
                    try:
                        connection.body.seek(0)  # writes what is left of it
                    except OSError as error:
                        return self._no_room(connection, error)
                ready = True
        if ready:
            return self._whole(thread, connection, data)
        self._await_more(connection)
        return True

    def _whole(self, thread: PoolThread, connection: Connection, data: bytes) -> bool:
        """A request has come whole: run it, or let it wait for a thread."""
        head = connection.head
        assert head is not None
        if self._queue.size or not thread.runs_handlers:
            return self._enqueue(connection)
        key = (head.method, head.path)
        environ = connection.make_environ(head)
        if data == connection.seen:  # for the second time running
            if not head.has_body and _is_worth_knowing(head, connection):
                connection.known = data
                connection.known_head = head
                connection.known_key = key
                connection.known_environ = environ.copy()
        elif len(data) <= KNOWN_BYTES:
            connection.seen = data
        return self._run(thread, connection, head, environ, key, self._clock())


def _is_worth_knowing(head: RequestHead, connection: Connection) -> bool:
    """Whether the bytes just read are this request and nothing else, and one like it may come."""
    if connection.is_tls:
        return False  # there may be another record, of which no event will tell, so each is followed by a look
    return head.keep_alive and head.upgrade is None and not connection.parser.buffered_bytes
