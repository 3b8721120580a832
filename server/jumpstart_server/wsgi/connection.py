"""
A connection: its socket, its parser, and what has come of a request.

Ownership. Each connection has one owner or none. One that nobody owns lies in the server's ``idle``; who takes it out
owns it. Only the owner reads, writes, closes, or changes anything here, but for two marks that any thread may set when
an event comes for a connection that another one owns: `readable` and `gone_at`. The owner looks at `readable` after it
has put the connection back, so that no event is lost.

An owner closes; nobody else does. So a descriptor cannot be another connection's while somebody writes to it. When a
request has passed its deadline the keeper writes to a connection that it does not own; `exchange.py` says how it makes
sure that the owner neither writes nor closes meanwhile.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jumpstart_server import forks
from jumpstart_server.http1 import Event, RequestHead, RequestParser
from jumpstart_server.http1.response import CONTINUE
from jumpstart_server.system import reset_at_close, reset_connection
from jumpstart_server.wsgi import syscalls
from jumpstart_server.wsgi.body import BodyReader, Spool
from jumpstart_server.wsgi.environ import Environ, fill
from jumpstart_server.wsgi.timers import GONE, NEVER

if TYPE_CHECKING:
    from jumpstart_server.wsgi.exchange import Exchange
    from jumpstart_server.wsgi.pool import PoolThread
    from jumpstart_server.wsgi.table import Connections

Address = tuple[str, int]

DISCONNECT_GRACE = 0.5  # seconds that a client which sends no more is taken for one that still reads
SENDFILE_BYTES = 1024 * 1024  # at once
NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that cannot
TCP_CLOSE = 7  # linux/tcp_states.h
TCP_CLOSE_STATES = (TCP_CLOSE, 8)  # CLOSE, CLOSE_WAIT
PROBE_TIME = 0.25  # seconds until a client that was probed and has not answered is taken for one that still reads
SOFT = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Phase(enum.IntEnum):
    """What a connection waits for while nobody owns it."""

    PREFACE = 0  # the PROXY line, or the TLS handshake
    IDLE = 1  # the first byte of a request
    HEAD = 2  # the rest of a head
    BODY = 3  # the rest of a body that is spooled
    UNREAD = 4  # the rest of a body whose request is answered
    LINGERING = 5  # the client's close
    TRAILERS = 6  # the rest of what follows a body that is spooled


PREFACE, IDLE, HEAD, BODY, UNREAD, LINGERING, TRAILERS = Phase


class Connection:
    """
    One connection.

    Attributes:
        deadline: of the phase, in seconds of the monotonic clock; `NEVER` while a handler runs.
        peer: address and port of the client, as far as it is known; None over a Unix socket.
        local: address and port that it has connected to; None for those of the socket.
        trusted: the peer may say for whom it speaks.
        readable: an event came while it was owned.
        gone_at: when an event said that the client sends no more; 0.0 if none did.
        head, body, length: of the request that is coming.
        reader: the body, where the handler reads it from the socket.
        exchange: what runs, where there is a *reader*.
        parsed: of the next request, which came behind the last one.
        preface: what has come of a PROXY header.
        began: when it was opened, or the first byte of a request came.
        seen: the bytes that the last request came in, if they were few.
        known: those of a request without a body that came twice running; then `known_head`, `known_key` and
            `known_environ` are what they mean.
        queued_at: when a whole request of its began to wait for a thread.
    """

    __slots__ = (
        "base",
        "began",
        "body",
        "deadline",
        "exchange",
        "fd",
        "fresh",
        "gone_at",
        "head",
        "is_cut",
        "is_left",
        "is_tls",
        "known",
        "known_environ",
        "known_head",
        "known_key",
        "length",
        "local",
        "look_at",
        "parsed",
        "parser",
        "peer",
        "phase",
        "preface",
        "queued_at",
        "readable",
        "reader",
        "received",
        "seen",
        "server",
        "sock",
        "trusted",
    )

    def __init__(
        self, server: Connections, sock: socket.socket, peer: Address | None, now: float, *, tls: bool = False
    ) -> None:
        self.server = server
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.local: Address | None = None
        proxies = server.settings.proxies
        self.trusted = proxies is not None and proxies.trusts(None if peer is None else peer[0])
        self.is_tls = tls
        self.is_cut = False
        self.preface = b""
        self.began = now
        self.reader: BodyReader | None = None
        self.exchange: Exchange | None = None
        self.is_left: Callable[[], bool] = self.has_gone  # made once; a request asks it
        self.parsed: list[Event] = []
        self.parser = RequestParser(server.settings.limits, server.settings.header_map)
        self.phase: Phase = IDLE
        self.fresh = True
        self.deadline = now + (server.settings.header_timeout or NEVER)
        self.look_at = 0.0
        self.readable = False
        self.gone_at = 0.0
        self.base: Environ | None = None
        self.head: RequestHead | None = None
        self.body: Any = None
        self.length = 0
        self.seen = b""
        self.known: bytes | None = None
        self.known_head: RequestHead | None = None
        self.known_environ: Environ = {}
        self.known_key: tuple[str, bytes] = ("", b"")
        self.queued_at = 0.0
        self.received = 0

    # ------------------------------------------------------------------ reading

    def receive(self, thread: PoolThread) -> bytes | None:
        """
        What has come, up to 64 KiB; None if nothing has, empty at the end.

        Raises:
            OSError: the connection is broken.
        """
        if self.server.pool.crowded and not self.is_tls:
            return thread.calls.recv(self.fd)
        try:
            return self.sock.recv(syscalls.RECV_BYTES)
        except SOFT:
            return None

    def has_input(self) -> bool:
        """Whether something has come that nobody has read yet."""
        if self.is_tls:
            return False  # to look would be to decipher
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def wait_for_data(self) -> bytes:
        """
        The next bytes, for a handler that reads its body; empty at the end.

        Raises:
            TimeoutError: none came within the body timeout, or the time of the request is over.
            OSError: the connection is broken.
        """
        exchange = self.exchange
        assert exchange is not None
        exchange.in_receive = True  # and then look at `seized`; the keeper does it the other way round
        try:
            while not exchange.seized:
                try:
                    return self.sock.recv(syscalls.RECV_BYTES)
                except ssl.SSLWantWriteError:
                    self._wait(select.POLLOUT)
                except SOFT:
                    if not _is_ready(self.fd, select.POLLIN, self.server.settings.body_timeout):
                        raise TimeoutError("the body did not arrive in time") from None
        finally:
            exchange.in_receive = False
            if exchange.seized:
                exchange.answer_owed()
        raise TimeoutError("the time of the request is over")

    def ask_for_body(self) -> None:
        """
        Send ``100 Continue``, for a handler that reads its body.

        Raises:
            OSError: the connection is broken, or the time of the request is over.
        """
        exchange = self.exchange
        assert exchange is not None
        exchange.send_interim(CONTINUE)

    def shake_hands(self) -> bool:
        """
        Go on with the TLS handshake; whether it is done.

        Raises:
            OSError: it failed.
        """
        sock = self.sock
        assert isinstance(sock, ssl.SSLSocket)
        while True:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            else:
                return True

    def take_body(self, data: bytes) -> None:
        """Keep a piece of the body, in memory as far as there is room."""
        if self.body is None:
            self.body = Spool(self.server.spools)  # closed by drop_body
        self.body.write(data)
        self.length += len(data)

    def make_environ(self, head: RequestHead) -> Environ:
        """The environ of a request whose body has come, and is rewound."""
        base = self.base
        if base is None:
            base = self.base = self.server.base_environ(self)
        environ = base.copy()
        fill(environ, head)
        if self.trusted:
            self._take_origin(environ, head)
        body = self.body
        if self.reader is not None:
            environ["wsgi.input"] = io.BufferedReader(self.reader, syscalls.RECV_BYTES)
            if head.content_length is not None:
                environ["CONTENT_LENGTH"] = str(head.content_length)
        elif body is not None:
            environ["wsgi.input"] = body
            environ["CONTENT_LENGTH"] = str(self.length)
        else:
            environ["wsgi.input"] = io.BytesIO()
            if head.content_length is not None or head.chunked:
                environ["CONTENT_LENGTH"] = "0"
        return environ

    def _take_origin(self, environ: Environ, head: RequestHead) -> None:
        """What a trusted proxy says about the client."""
        proxies = self.server.settings.proxies
        assert proxies is not None
        scheme = environ["wsgi.url_scheme"]
        client, environ["wsgi.url_scheme"] = proxies.origin(self.peer, scheme, head.headers)
        if client is not None and client != self.peer:
            environ["REMOTE_ADDR"] = client[0]
            environ["REMOTE_PORT"] = str(client[1])

    # ------------------------------------------------------------------ writing, from the thread that owns it

    def may_stay(self) -> bool:
        """Whether the connection may be kept after the response that begins."""
        reader = self.reader
        return self.server.keeps_connections and (reader is None or reader.is_worth_discarding())

    def has_gone(self) -> bool:
        """`RequestContext.has_left`: from any thread of the app's."""
        return bool(self.gone_at) and self.has_left()

    def has_left(self) -> bool:
        """Whether the client, of whom an event said that it sends no more, can be taken for gone."""
        now = time.monotonic()
        if now - self.gone_at < DISCONNECT_GRACE:
            return False
        try:
            if self.is_tls or self.sock.family != socket.AF_UNIX:  # also where requests lie there that nobody has read
                info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
                left = info[0] in TCP_CLOSE_STATES
            else:
                left = self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except SOFT:
            self.gone_at = 0.0  # the event was about a connection that had this descriptor before
            return False
        except OSError:
            return True
        if not left:
            self.gone_at = now  # there is another request before the end
        return left

    def probe(self) -> bool:
        """
        Whether a client that sends no more may still be there. To be called by who may send, before a response.

        One that has closed its sending side only (RFC 9112 9.6) looks like one that has gone until something is sent:
        then one that has gone answers with a reset, in a moment. ``100 Continue`` is skipped by clients of HTTP/1.1.
        """
        if self.is_tls or self.head is None or self.head.http_version != "1.1":
            return False
        try:
            self.sock.send(CONTINUE)
        except SOFT:
            pass
        except OSError:
            return False
        return not self.is_reset()

    def is_reset(self) -> bool:
        """Whether the client has answered with a reset to what was sent to it."""
        if self.sock.family == socket.AF_UNIX:
            return False  # there, a send fails at once
        try:
            return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
        except OSError:
            return True

    def send(self, data: bytes) -> None:
        """
        Send all of *data*; wait for a slow client, as long as it takes something within the write timeout.

        Raises:
            OSError: the client is gone, or takes nothing.
        """
        if self.server.pool.crowded and not self.is_tls and len(data) <= syscalls.RECV_BYTES:
            sent = syscalls.send(self.fd, data)
        else:
            try:
                sent = self.sock.send(data)
            except SOFT:
                sent = 0
        if sent != len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, data: memoryview) -> None:
        while data:
            self._wait(select.POLLOUT)
            try:
                sent = self.sock.send(data)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
                continue
            except SOFT:
                continue
            data = data[sent:]

    def send_file(self, fd: int, position: int, size: int) -> int:
        """
        Send *size* bytes of a file from *position* by sendfile; fewer if it has become shorter. Returns how many.

        Raises:
            OSError: as `send`.
        """
        sent = 0
        while sent < size:
            try:
                count = os.sendfile(self.fd, fd, position + sent, min(size - sent, SENDFILE_BYTES))
            except SOFT:
                self._wait(select.POLLOUT)
                continue
            except OSError as error:
                if error.errno not in NO_SENDFILE:
                    raise
                data = os.pread(fd, min(size - sent, syscalls.RECV_BYTES), position + sent)
                self.send(data)
                count = len(data)
            if not count:
                break
            sent += count
        return sent

    def _wait(self, event: int) -> None:
        """Wait until the socket is ready for *event*."""
        if not _is_ready(self.fd, event, self.server.settings.write_timeout):
            self.reset_on_close()
            raise TimeoutError("the client took nothing in time")

    # ------------------------------------------------------------------ in the place of the owner, who may not send

    def send_last(self, data: bytes) -> None:
        """Send the last thing that is sent here, a few hundred bytes, if the client takes them, and say so."""
        try:
            self.sock.send(data)
        except OSError:
            pass  # it is gone, or takes nothing
        if self.is_tls:
            self.say_goodbye()
        self._shut(socket.SHUT_WR)

    def stop_receiving(self) -> None:
        """Have whoever waits for data find that there is none."""
        self._shut(socket.SHUT_RD)

    def stop_sending(self) -> None:
        """Have whoever waits for the client find that it takes nothing any more; the client sees an end too early."""
        self._shut(socket.SHUT_RDWR)

    def abort(self) -> None:
        """
        Reset the connection, which nobody takes for the end of a body; the descriptor stays the owner's to close.
        """
        self.is_cut = True
        if not reset_connection(self.sock):
            self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        try:
            socket.socket.shutdown(self.sock, how)  # that of `ssl` would go on in plain text
        except OSError:
            pass

    # ------------------------------------------------------------------ the end

    def reset_on_close(self) -> None:
        """Let the close be a reset, which nobody takes for the end of a body; what is not sent yet is lost."""
        self.is_cut = True
        try:
            reset_at_close(self.sock)
        except OSError:
            pass

    def close(self) -> None:
        """The owner's last act, after the server has taken it off its tables."""
        self.deadline = GONE
        self.is_left = _yes
        self.known = None
        self.drop_body()
        if self.is_tls and not self.is_cut:  # a good-bye would say that the body was whole
            self.say_goodbye()
        try:
            # The end also where a child that the app forked has a copy.
            if not self.is_cut or (forks.has_children and not reset_connection(self.sock)):
                self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        try:
            self.sock.close()
        except OSError:
            pass

    def say_goodbye(self) -> None:
        """TLS: tell the client that no more comes, so that it can tell an end from a cut (RFC 8446 6.1)."""
        sock = self.sock
        if isinstance(sock, ssl.SSLSocket):
            try:
                sock.unwrap()
            except (OSError, ValueError):
                pass  # it need not answer, and may be gone

    def drop_body(self) -> None:
        """Let go of the body."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.end()
            self.exchange = None
        body, self.body = self.body, None
        self.length = 0
        if body is not None:
            try:
                body.close()
            except OSError:
                pass  # it could not be written, and nobody wants it


def _yes() -> bool:
    return True


def _is_ready(fd: int, event: int, timeout_s: float) -> bool:
    """Wait up to *timeout_s* seconds, 0 for ever, until the socket is ready for *event*."""
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(timeout_s * 1000 if timeout_s else None))
