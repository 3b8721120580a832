"""Clients that ask at a steady rate while something happens to the server, and what they saw."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter


class Load:
    """
    Two clients of half the rate, as a context manager: one keeps its connection, the other connects anew each time.

    Attributes:
        seen: status, or the exception → how often.
        times: seconds that each request took.
        failed_at: when each began that was not answered with 200, on the monotonic clock.
    """

    def __init__(self, port: int, rate: float, path: str = "/") -> None:
        """Args: rate: requests a second."""
        self.seen: Counter[str] = Counter()
        self.times: list[float] = []
        self.failed_at: list[float] = []
        self._port = port
        self._path = path
        self._pause = 2 / rate
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(kept,)) for kept in (True, False)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self, kept: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        while not self._over.wait(self._pause):
            began = time.monotonic()
            try:
                connection.request("GET", self._path)
                answer = connection.getresponse()
                answer.read()
                self.seen[str(answer.status)] += 1
                if answer.status != 200:
                    self.failed_at.append(began)
            except (OSError, http.client.HTTPException) as error:
                self.seen[repr(error)] += 1
                self.failed_at.append(began)
                connection.close()
            self.times.append(time.monotonic() - began)
            if not kept:
                connection.close()
        connection.close()

    @property
    def failures(self) -> dict[str, int]:
        """What was seen beside 200."""
        return {what: count for what, count in self.seen.items() if what != "200"}
