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
        """A request took so long, in seconds, from the call of the app to its last byte."""
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


def _folder(key: Key) -> Key:
    method, path = key
    return method, path[: path.rfind(b"/") + 1] + b"*"  # no path has a bare star and a folder's name


def switch_interval(cpu_per_step_s: float) -> float:
    """
    How long, in seconds, a thread may hold the GIL while others ask for it (`sys.setswitchinterval`).

    Each waiting thread asks again after that time. With hundreds of threads that wait and compute little, asking is
    most of what they do, and the longer the interval the better: 50 ms served 1.3 to 2 times as much as Python's 5 ms.
    A handler that computes for long keeps all others out for as long, so the more a step computes, the shorter.

    Args:
        cpu_per_step_s: CPU time of the process, divided by what it did in it: requests and chunks of streams.
    """
    if cpu_per_step_s <= 0.0005:
        return 0.05
    return max(0.005, 0.05 * 0.0005 / cpu_per_step_s)
