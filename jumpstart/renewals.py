"""
What `jumpstart.cached` does in the background: renewing stale values.

Plain functions are renewed by a few daemon threads, started when there is work and ended when there is none, so that a
process that only imports the app has none. Coroutine functions are renewed on their event loop. Each renewal runs in
an empty context: it belongs to no request, has no deadline, and is nobody's cold event.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from jumpstart.dependencies import Source, Versions

if TYPE_CHECKING:
    from jumpstart.caches import Cache

logger = logging.getLogger(__name__)

THREADS = 4  # at a time; renewals mostly wait for a backend, which they should not flood
QUEUE = 1000  # renewals that wait; what finds no place is renewed when it is asked for
IDLE = 5.0  # seconds until a thread without work ends


class Pool:
    """Up to *threads* daemon threads, started on demand. Any thread may call `submit`."""

    def __init__(self, threads: int = THREADS, queue: int = QUEUE, idle_s: float = IDLE) -> None:
        self._limit = threads
        self._queue = queue
        self._idle_s = idle_s
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """The threads stay in the parent, and what waits is its work."""
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._threads = 0
        self._free = 0

    def submit(self, job: Callable[[], object]) -> bool:
        """Have *job* called by a thread; False when too many wait, or no thread can be started."""
        with self._changed:
            if len(self._jobs) >= self._queue:
                return False
            self._jobs.append(job)
            if self._free >= len(self._jobs):
                self._changed.notify()
                return True
            if self._threads >= self._limit:
                return True  # one that works takes it when it is done
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="jumpstart-renewal", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter ends
            with self._changed:
                self._threads -= 1
                if self._threads or job not in self._jobs:
                    return True
                self._jobs.remove(job)
            return False
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._free += 1
                has_work = self._changed.wait_for(lambda: self._jobs, self._idle_s)
                self._free -= 1
                if not has_work:
                    self._threads -= 1
                    return
                job = self._jobs.popleft()
            try:
                contextvars.Context().run(job)
            except BaseException:  # of the app, sys.exit() too: the next job still wants the thread
                logger.exception("a renewal in the background failed")
            del job  # it may hold an instance


pool = Pool()
os.register_at_fork(after_in_child=pool.reset_after_fork)


# -- values that have changed --

_caches: weakref.WeakKeyDictionary[Source, weakref.WeakSet[Cache]] = weakref.WeakKeyDictionary()
_subscribed: weakref.WeakSet[Source] = weakref.WeakSet()
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def follow(cache: Cache, reads: Versions) -> None:
    """From now on, renew what *cache* holds when one of *reads*, which an entry of it will stand on, changes."""
    sources = {source for source, _ in reads}
    with _lock:
        for source in sources:
            _caches.setdefault(source, weakref.WeakSet()).add(cache)
        new = [source for source in sources if source not in _subscribed]
    for source in new:
        # Not under the lock: a source may hold one of its own while it calls us. Two listeners would do no harm.
        source.subscribe(_listener(weakref.ref(source)))
        with _lock:
            _subscribed.add(source)


def _listener(reference: weakref.ref[Source]) -> Callable[[frozenset[str]], None]:
    def changed(keys: frozenset[str]) -> None:
        source = reference()
        if source is None:
            return
        with _lock:
            caches = list(_caches.get(source, ()))
        for cache in caches:
            for key, stored in cache.outdate(source, keys):
                if not cache.renew(key, stored):
                    cache.renewal_not_begun(stored)

    return changed
