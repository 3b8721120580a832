"""
Request bodies: most are spooled before the handler runs. Where the client waits for ``100 Continue``, and where the
operator wants it, the handler reads the body from the socket.
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from jumpstart.errors import JumpstartError
from jumpstart_server.connection_settings import DISCARD_BYTES
from jumpstart_server.http1 import BodyData, ParseError, State

if TYPE_CHECKING:
    from jumpstart_server.http1 import RequestHead
    from jumpstart_server.wsgi.connection import Connection


SPOOL_BYTES = 512 * 1024  # of a body in memory; the rest goes to a temporary file
SPOOLS_BYTES = 32 * 1024 * 1024  # of all bodies of a worker in memory; above it, bodies go to files sooner
LEAST_SPOOL_BYTES = 16 * 1024  # of a body in memory in any case: for a form a file would cost more than it saves


class Spools:
    """How much memory all spooled bodies of a server have. From any thread."""

    def __init__(self, limit: int = SPOOLS_BYTES) -> None:
        """*limit* in bytes."""
        self.limit = limit
        self.held = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> bool:
        """So many bytes more, or less; whether they have their limit."""
        with self._lock:
            self.held += count
            return self.held <= self.limit


class Spool(tempfile.SpooledTemporaryFile[bytes]):
    """
    One body: in memory while it is small and there is room, then in a temporary file.

    Attributes:
        is_file: it is in a file by now.
    """

    def __init__(self, spools: Spools) -> None:
        self._spools = spools
        self._held = 0
        self.is_file = False
        super().__init__(SPOOL_BYTES)

    def write(self, data: Any) -> int:
        """As of a file. An OSError says that there is no room on the disk."""
        count = super().write(data)
        if not self.is_file:
            self._held += len(data)
            if not self._spools.add(len(data)) and self._held > LEAST_SPOOL_BYTES:
                self.rollover()
        return count

    def rollover(self) -> None:
        """Go on in a file."""
        super().rollover()
        self.is_file = True
        self._let_go()

    def close(self) -> None:
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, 0
        if held:
            self._spools.add(-held)


class RequestBodyError(JumpstartError, OSError):
    """Raised where an app reads a body that does not come whole, so that it cannot take a part for all of it."""


class BodyReader(io.RawIOBase):
    """
    The raw stream under ``wsgi.input``; `io.BufferedReader` around it gives it a file's semantics.

    Attributes:
        complete: the body has come whole.
        refusal: what was wrong with it, if something was.
        holds_back: the client waits for ``100 Continue``, which nobody has sent.
        is_answered: the response has begun; ``100 Continue`` has no place any more.
    """

    def __init__(self, connection: Connection, head: RequestHead) -> None:
        self._connection = connection
        self._length = head.content_length
        self._pieces: list[bytes] = []
        self._received = 0
        self._thread = 0
        self._over = False
        self._trailers_until = 0.0
        self.complete = False
        self.refusal: ParseError | None = None
        self.holds_back = head.expects_continue
        self.is_answered = False

    def add(self, data: bytes) -> None:
        """A piece that came with the head."""
        self._pieces.append(data)
        self._received += len(data)
        self.holds_back = False

    def begin(self) -> None:
        """The handler runs, on the calling thread."""
        self._thread = threading.get_ident()

    def end(self) -> None:
        """The handler has ended; who kept the stream gets errors."""
        self._over = True
        self._pieces.clear()

    def is_worth_discarding(self) -> bool:
        """Whether what an app has not read is worth reading to keep the connection."""
        if self.complete:
            return True
        if self.holds_back or self.refusal is not None:
            return False  # nobody knows whether the client will send it now (RFC 9110 10.1.1)
        return self._length is None or self._length - self._received <= DISCARD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """
        As of `io.RawIOBase`; 0 at the end of the body.

        Raises:
            RequestBodyError: the client left, is too slow, or sends what is no body.
            RuntimeError: the request is over, or another thread than the handler's reads.
        """
        while not self._pieces:
            if self.complete and not self._over:
                return 0
            self._receive()
        piece = self._pieces[0]
        size = min(len(piece), len(buffer))
        buffer[:size] = piece[:size]
        if size == len(piece):
            del self._pieces[0]
        else:
            self._pieces[0] = piece[size:]
        return size

    def _receive(self) -> None:
        if self._over or threading.get_ident() != self._thread:
            # Another thread could not know that the connection is not another request's by now.
            raise RuntimeError("wsgi.input after the response, or from another thread than the handler's")
        connection = self._connection
        if self.refusal is not None:
            raise RequestBodyError(self.refusal.reason)
        try:
            if self.holds_back:
                self.holds_back = False
                if not self.is_answered:
                    connection.ask_for_body()
            data = connection.wait_for_data()
            self._limit_trailers()
        except TimeoutError:
            self.refusal = ParseError(408, "the body did not arrive in time", b"")
            raise RequestBodyError(self.refusal.reason) from None
        except OSError as error:
            self.refusal = ParseError(400, "the client left in the middle of the body", b"")
            raise RequestBodyError(self.refusal.reason) from error
        parser = connection.parser
        for event in parser.feed(data) if data else parser.eof():
            if isinstance(event, BodyData):
                self._pieces.append(event.data)
                self._received += len(event.data)
            elif isinstance(event, ParseError):
                self.refusal = event
            else:
                self.complete = True
        if not data and not self.complete and self.refusal is None:
            self.refusal = ParseError(400, "the client left in the middle of the body", b"")

    def _limit_trailers(self) -> None:
        """What follows the body has the time of a head, however often a byte of it comes."""
        connection = self._connection
        limit = connection.server.settings.header_timeout
        if not limit or connection.parser.state is not State.TRAILERS:
            return
        now = time.monotonic()
        self._trailers_until = self._trailers_until or now + limit
        if now > self._trailers_until:
            raise TimeoutError
