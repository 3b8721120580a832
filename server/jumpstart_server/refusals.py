"""What is logged about clients that got no service; both engines have one of these."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from jumpstart_server.access import AccessLog, AccessRecord
from jumpstart_server.http1 import RequestHead

logger = logging.getLogger(__name__)

LINES_PER_SECOND = 10  # about refused requests; noise on an open port must not fill a disk


class Refusals:
    """
    Lines about refused requests, for the error log and the access log, and their number. From any thread.

    Attributes:
        counts: how many there were, by reason: ``queue_full``, ``queue_timeout`` …
    """

    def __init__(self, access: AccessLog | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[str, int] = {}
        self._access = access
        self._clock = clock
        self._lock = threading.Lock()
        self._second = 0
        self._lines = 0
        self._unsaid = 0

    def count(self, reason: str) -> None:
        """One more for this reason; the words are labels of a metric, so there must be few."""
        with self._lock:
            self.counts[reason] = self.counts.get(reason, 0) + 1

    def note(self, client: object, detail: str) -> None:
        """Log why a client got no service: an event of the client's making, so INFO, and not too often."""
        with self._lock:
            second = int(self._clock())
            if second != self._second:
                self._second, self._lines = second, 0
            if self._lines >= LINES_PER_SECOND:
                self._unsaid += 1
                return
            self._lines += 1
            unsaid, self._unsaid = self._unsaid, 0
        logger.info("refused client=%s %s%s", client, detail, f" (and {unsaid} before it)" if unsaid else "")

    def write_line(
        self,
        client: object,
        status: int,
        answer: bytes,
        head: RequestHead | None = None,
        total_s: float = 0.0,
        queue_s: float = 0.0,
    ) -> None:
        """
        Write a line to the access log about a request that did not come as far as the app.

        Args:
            answer: what the client was told, the whole response; empty if nothing.
            head: of the request, if it was understood.
            total_s: how long the request was waited for, in seconds.
            queue_s: how long it waited for a thread, in seconds.
        """
        if self._access is None:
            return
        record = AccessRecord(
            client=host_of(client), status=status, sent=body_size(answer), total_s=total_s, queue_s=queue_s
        )
        if head is not None:
            record.method, record.target, record.http_version = head.method, head.target, head.http_version
            record.request_headers = head.headers
        self._access.write(record)


def body_size(response: bytes) -> int:
    """How many bytes follow the head of a response that begins with it."""
    return len(response) - response.index(b"\r\n\r\n") - 4 if response else 0


def host_of(client: Any) -> str:
    """The host of a pair of host and port; empty where there is none."""
    return str(client[0]) if client else ""
