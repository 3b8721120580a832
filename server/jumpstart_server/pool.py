"""
The thread pool that runs WSGI handlers.

Threads are started on demand up to a limit, share one queue, and keep the platform's stack size: smaller stacks save no
memory and turn deep recursion into a crash. Threads are daemons; `close` ends them when their work is done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)


class ThreadPool:
    """
    Runs callables on up to *size* threads.

    Attributes:
        size: the limit.
        threads: how many were started and live.
        busy: how many run something now.
    """

    def __init__(self, size: int, name: str = "jumpstart") -> None:
        self.size = size
        self.threads = 0
        self.busy = 0
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._pending = 0  # submitted and not finished
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """
        Run *work* on a thread of the pool as soon as one is free. Any thread may call this.

        *work* handles its own errors; one that escapes is logged and costs no thread.

        Raises:
            RuntimeError: the pool was closed, or the system has no thread to give and the pool has none.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the thread pool is closed")
            if self._pending >= self.threads and self.threads < self.size:
                self._start_thread()
            # Under the lock, so that it stands before the marks that `close` puts behind all work.
            self._pending += 1
            self._queue.put(work)

    def close(self, timeout_s: float = 0.0) -> None:
        """End all threads after the work that is queued; wait for that up to *timeout_s* seconds in all."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            count = self.threads
        for _ in range(count):
            self._queue.put(None)
        if timeout_s:
            with self._ended:
                self._ended.wait_for(lambda: self.threads == 0, timeout_s)

    def _start_thread(self) -> None:
        number = self.threads + 1
        try:
            threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()
        except RuntimeError:
            logger.exception("cannot start thread %d of %d", number, self.size)
            if not self.threads:
                raise
            return  # those that live go on
        self.threads = number

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            with self._lock:
                self.busy += 1
            try:
                work()
            except BaseException:
                logger.exception("a handler's error escaped into the thread pool")
            finally:
                del work  # nothing of a request outlives it
                with self._lock:
                    self.busy -= 1
                    self._pending -= 1
        with self._ended:
            self.threads -= 1
            self._ended.notify_all()
