"""A client of raw bytes over real sockets, what it waits for, and a certificate: for the tests of both engines."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

T = TypeVar("T")

PATIENCE = 5.0  # seconds after which a test calls it a hang
RESET = struct.pack("ii", 1, 0)


def until(condition: Callable[[], T], timeout: float = PATIENCE) -> T:
    """The first true value of *condition*, polled."""
    give_up = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not within {timeout:g} s"
        time.sleep(0.002)
    return value


@dataclass
class Response:
    status: int
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes
    complete: bool  # it ended as it had promised

    def get(self, name: str) -> str | None:
        return next((value for found, value in self.headers if found == name), None)


class Client:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE)
        self.buffer = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def get(self, path: str, *fields: str, version: str = "1.1", method: str = "GET") -> None:
        lines = [f"{method} {path} HTTP/{version}", "Host: test", *fields, "", ""]
        self.send("\r\n".join(lines).encode())

    def end(self) -> None:
        """Say that no more will come."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Vanish."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()

    def more(self) -> bool:
        """Read some bytes; whether any came. A reset raises."""
        data = self.sock.recv(65536)
        self.buffer += data
        return bool(data)

    def line(self) -> bytes | None:
        while b"\r\n" not in self.buffer:
            if not self.more():
                return None
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line

    def exactly(self, size: int) -> bytes:
        """So many bytes, fewer if the connection ends."""
        while len(self.buffer) < size and self.more():
            pass
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        while self.more():
            pass
        data, self.buffer = self.buffer, b""
        return data

    def head(self) -> tuple[int, list[tuple[str, str]]]:
        first = self.line()
        assert first is not None, "closed without an answer"
        version, status, _ = first.decode().split(" ", 2)
        assert version == "HTTP/1.1"
        fields = []
        while line := self.line():
            name, _, value = line.decode("latin-1").partition(": ")
            fields.append((name.lower(), value))
        return int(status), fields

    def response(self, method: str = "GET") -> Response:
        """The next response, interim ones too."""
        status, fields = self.head()
        named = dict(fields)
        assert not ("content-length" in named and "transfer-encoding" in named)
        if method == "HEAD" or status < 200 or status in (204, 304):
            return Response(status, fields, b"", True)
        if "content-length" in named:
            size = int(named["content-length"])
            body = self.exactly(size)
            return Response(status, fields, body, len(body) == size)
        if named.get("transfer-encoding") == "chunked":
            parts = []
            while (line := self.line()) is not None:
                size = int(line, 16)
                parts.append(self.exactly(size))
                if self.line() is None:
                    break
                if size == 0:
                    return Response(status, fields, b"".join(parts), True)
            return Response(status, fields, b"".join(parts), False)
        return Response(status, fields, self.rest(), True)

    def is_closed(self) -> bool:
        """Wait for the end of the connection; nothing may come before it."""
        try:
            return not self.buffer and not self.more()
        except ConnectionResetError:
            return True


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 that nobody signed, and its key, into *folder*."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    (folder / "cert.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"
