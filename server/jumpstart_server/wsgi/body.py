"""A request body that is read while the handler runs: for `Expect: 100-continue`, and where the operator wants it."""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING

from jumpstart.errors import JumpstartError
from jumpstart_server.connection_settings import DISCARD_BYTES
from jumpstart_server.http1 import BodyData, ParseError
from jumpstart_server.http1.response import CONTINUE

if TYPE_CHECKING:
    from jumpstart_server.http1 import RequestHead
    from jumpstart_server.wsgi.connection import Connection


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
                    connection.send(CONTINUE)
            data = connection.wait_for_data()
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
