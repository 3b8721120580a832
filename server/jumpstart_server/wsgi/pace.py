"""
Which handlers are quick: a guess from how long they took before.

A handler that answers in microseconds is best run by the thread that waits for the next event: to wake another one
meanwhile costs more than the handler. One that waits for a database must not be. Nobody can tell before it runs; the
same route took a while the last time, or did not. A wrong guess costs little: the keeper (`pool.py`) sees within a few
milliseconds that nobody waits for events, and wakes a thread.
"""

from __future__ import annotations

QUICK = 0.001  # seconds; above it, waking a thread (tens of microseconds) is a small part
DOWN = 0.3  # weight of a shorter time; a handler that waited for the GIL once, and not for its data, is soon forgiven
UP = 0.05  # weight of a longer time
MAX_ROUTES = 1024

Key = tuple[str, bytes]  # method and path


class Paces:
    """Times by method and path; by method and folder, ``/product/``, where a path was never seen. From any thread."""

    def __init__(self) -> None:
        self._seconds: dict[Key, float] = {}

    def is_quick(self, key: Key) -> bool:
        """Whether it will probably be done within a millisecond. What was never seen may take long."""
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds.get(_folder(key))
        return seconds is not None and seconds < QUICK

    def note(self, key: Key, seconds: float) -> None:
        """A request took so long, in seconds, without the time in which its answer was sent."""
        times = self._seconds
        before = times.get(key)
        if before is None:
            folder = _folder(key)
            if len(times) < MAX_ROUTES:
                times[key] = seconds
            elif folder not in times:
                times.clear()  # a scan of made-up paths; the real ones come back
            key, before = folder, times.get(folder, seconds)
        # Two threads may do this at once; one of the two times is lost, and nobody misses it.
        times[key] = before + (seconds - before) * (DOWN if seconds < before else UP)

    def note_overdue(self, key: Key) -> None:
        """A request of this kind takes long just now."""
        self._seconds[key if key in self._seconds else _folder(key)] = 10 * QUICK


def _folder(key: Key) -> Key:
    method, path = key
    return method, path[: path.rfind(b"/") + 1] + b"*"  # no path has a bare star and a folder's name


LONG = 0.05  # seconds
SHORT = 0.005  # Python's default
CALM = 1.0  # seconds without a handler that computes, after which the interval is long again
LAG = 0.004


class SwitchInterval:
    """
    How long a thread may hold the GIL while others ask for it (`sys.setswitchinterval`).

    Each waiting thread asks again after that time. With hundreds of threads that wait and compute little, asking is
    most of what they do: the longer the interval the better. A handler that computes for long keeps all others out for
    as long: the shorter the better. So it is long until somebody computes. The sign of that is that a thread which asks
    for the GIL does not get it while nothing is done: no request ends, no chunk of a stream is sent. (CPU time per
    request is no sign. Where the interval is too short it grows by the switching, and the interval would stay short.)
    """

    def __init__(self) -> None:
        self._short_until = 0.0

    def look(self, now: float, lag_s: float, moved: bool) -> float:
        """
        What the interval should be, in seconds.

        Args:
            lag_s: how long a thread has just waited for the GIL, in seconds.
            moved: whether anything was done meanwhile.
        """
        if lag_s > LAG and not moved:
            self._short_until = now + CALM
        return SHORT if now < self._short_until else LONG
