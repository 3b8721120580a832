"""Reads HTTP/1.1 responses out of bytes as they arrive. No I/O."""

from __future__ import annotations

MAX_HEAD_BYTES = 65536
_LINE_LIMIT = 64  # bytes of a chunk's size line; servers send no extensions that long


class BadResponse(Exception):
    """These bytes are no response."""


class ResponseReader:
    """
    One response.

    Bodies end by Content-Length, by the last chunk, or with the connection: `end` says that it has closed.
    """

    __slots__ = ("_buffer", "_chunked", "_left", "_state", "body_bytes", "close", "complete", "status")

    def __init__(self) -> None:
        self.status = 0
        self.body_bytes = 0
        self.complete = False
        self.close = False  # the server will close the connection after this response
        self._buffer = b""
        self._chunked = False
        self._left = 0  # bytes of the body, or of the chunk
        self._state = _HEAD

    def feed(self, data: bytes) -> bytes:
        """
        Take what was received; give back the part of the body that was in it.

        Raises:
            BadResponse: it is malformed, or there are bytes after its end.
        """
        if self._state == _HEAD:
            data = self._buffer + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise BadResponse("the head does not end")
                self._buffer = data
                return b""
            self._buffer = b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._chunked:
            body = self._read_chunks(data)
        elif self._state == _UNTIL_CLOSE:
            body = data
        else:
            body = data
            self._left -= len(data)
            if self._left < 0:
                raise BadResponse(f"{-self._left} bytes after the end")
            self.complete = not self._left
        self.body_bytes += len(body)
        return body

    def end(self) -> None:
        """The server closed the connection. `complete` says whether this was the response's end."""
        if self._state == _UNTIL_CLOSE:
            self.complete = True

    def _read_head(self, head: bytes) -> None:
        line, _, rest = head.partition(b"\r\n")
        if line[:7] != b"HTTP/1." or not line[9:12].isdigit():
            raise BadResponse(f"no status line: {line[:40]!r}")
        self.status = int(line[9:12])
        length = None
        old = line[:8] == b"HTTP/1.0"
        self.close = old
        for field in rest.split(b"\r\n"):
            name, _, value = field.partition(b":")
            name, value = name.strip().lower(), value.strip().lower()
            if name == b"content-length":
                if not value.isdigit():
                    raise BadResponse(f"Content-Length: {value!r}")
                length = int(value)
            elif name == b"transfer-encoding" and value == b"chunked":
                self._chunked = True
            elif name == b"connection":
                self.close = value == b"close" or (old and value != b"keep-alive")
        if self._chunked:
            self._state = _SIZE
        elif length is not None:
            self._state, self._left = _LENGTH, length
        else:
            self._state, self.close = _UNTIL_CLOSE, True

    def _read_chunks(self, data: bytes) -> bytes:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        body: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self.complete:
                raise BadResponse(f"{size - at} bytes after the end")
            if self._state == _CHUNK:
                part = data[at : at + self._left]
                body.append(part)
                at += len(part)
                self._left -= len(part)
                if not self._left:
                    self._state = _CHUNK_END
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > _LINE_LIMIT:
                    raise BadResponse("a chunk's size line does not end")
                self._buffer = data[at:]
                break
            line, at = data[at:end], end + 2
            if self._state == _SIZE:
                try:
                    self._left = int(line.partition(b";")[0], 16)
                except ValueError:
                    raise BadResponse(f"a chunk of size {line[:20]!r}") from None
                self._state = _CHUNK if self._left else _TRAILER
            elif self._state == _CHUNK_END:
                if line:
                    raise BadResponse("a chunk is longer than it said")
                self._state = _SIZE
            else:  # trailer fields, until an empty line
                self.complete = not line
        return body[0] if len(body) == 1 else b"".join(body)


_HEAD, _LENGTH, _UNTIL_CLOSE, _SIZE, _CHUNK, _CHUNK_END, _TRAILER = range(7)
