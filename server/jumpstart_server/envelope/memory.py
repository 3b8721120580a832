"""
How much memory there is and how much a worker takes, and what a worker does about it that takes too much.

`MemoryWatch` decides: it is given readings and says what to do. `MemoryGuard` reads and does it, in the worker's
event loop. The limit is the worker's own (``memory_limit`` against its resident set), or its share of the
cgroup's, which counts only while the cgroup as a whole is short of memory.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from jumpstart_server.envelope.sizing import Allowance, Machine, show_size

logger = logging.getLogger(__name__)

PROC = Path("/proc")
NO_LIMIT = 1 << 60  # cgroup v1 writes "none" as a number near 2⁶³

LOOK_INTERVAL = 0.25  # seconds between two readings, each of which costs some 40 µs
SOFT_PATIENCE = 3.0  # seconds above the soft mark until the worker asks to be replaced
JITTER = 7.0  # seconds more at most, by lot: workers that leak alike are not replaced one right after the other
PEAK_TIME = 10.0  # seconds in which the most requests at once count: a moment says little
COLLECT_PAUSE = 60.0  # seconds between garbage collections of ours; one of a large heap stops everything for a moment
ASK_AGAIN = 30.0  # seconds until it asks once more, where the new one did not come up
LAST_RESORT = 2.5  # times the limit at which nothing more is taken: rather 503 than that the kernel kills all in flight


# ---------------------------------------------------------------------- reading


def rss_of(pid: int | None = None, proc: Path = PROC) -> int | None:
    """Resident set of a process, of this one by default, in bytes; None where the system does not tell."""
    try:
        pages = int((proc / str(pid or "self") / "statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def pss_of(pid: int | None = None, proc: Path = PROC) -> int | None:
    """
    As `rss_of`, with each page that processes share divided among them.

    Costs some milliseconds where a process is large.
    """
    try:
        for line in (proc / str(pid or "self") / "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


class Group(msgspec.Struct, frozen=True):
    """
    The folders of this process's cgroup, the innermost one first, up to the root that can be seen.

    Attributes:
        memory, pids: of the two controllers; empty where there is none.
        v1: the controller's version is 1, with other names for the same things.
    """

    memory: tuple[Path, ...] = ()
    pids: tuple[Path, ...] = ()
    v1: bool = False

    @classmethod
    def find(cls, proc: Path = PROC) -> Group:
        """Of this process; empty where there are no cgroups."""
        try:
            lines = (proc / "self" / "cgroup").read_text().splitlines()
            mounts = (proc / "self" / "mountinfo").read_text().splitlines()
        except OSError:
            return cls()
        paths = {}
        for line in lines:
            _, controllers, path = line.split(":", 2)
            paths.update(dict.fromkeys(controllers.split(","), path))
        memory, memory_v1 = _folders("memory", paths, mounts)
        pids, _ = _folders("pids", paths, mounts)
        return cls(memory, pids, memory_v1)

    def memory_limit(self) -> int | None:
        """The least limit of the group and its parents, in bytes; None without one."""
        limits = [_number(folder / ("memory.limit_in_bytes" if self.v1 else "memory.max")) for folder in self.memory]
        if self.v1 and self.memory:  # with the parents that a container does not see
            limits.append(_field(self.memory[0] / "memory.stat", "hierarchical_memory_limit"))
        return min((limit for limit in limits if limit is not None and limit < NO_LIMIT), default=None)

    def memory_used(self) -> int | None:
        """Bytes that the group takes, without files' pages that the kernel gives up at any time."""
        if not self.memory:
            return None
        folder = self.memory[0]
        used = _number(folder / ("memory.usage_in_bytes" if self.v1 else "memory.current"))
        idle = _field(folder / "memory.stat", "total_inactive_file" if self.v1 else "inactive_file")
        return None if used is None else used - (idle or 0)

    def oom_kills(self) -> int | None:
        """How many processes of the group the kernel has killed for want of memory; None where it does not count."""
        if not self.memory:
            return None
        return _field(self.memory[0] / ("memory.oom_control" if self.v1 else "memory.events"), "oom_kill")

    def tasks_limit(self) -> int | None:
        """Most threads and processes of the group; None without a limit."""
        limits = [_number(folder / "pids.max") for folder in self.pids]
        return min((limit for limit in limits if limit is not None), default=None)


def oom_kills() -> int | None:
    """Of our own cgroup, so far; the difference tells whether a death was one."""
    return Group.find().oom_kills()


def _folders(controller: str, paths: dict[str, str], mounts: list[str]) -> tuple[tuple[Path, ...], bool]:
    """The folders of a controller, innermost first, and whether it is version 1's."""
    v1 = controller in paths
    path = paths.get(controller, paths.get(""))
    if path is None:
        return (), False
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind != ("cgroup" if v1 else "cgroup2") or (v1 and controller not in options.split()[-1].split(",")):
            continue
        root, mount = before.split()[3:5]
        # A container may see its own group as the root of the mount, and its path as the host has it.
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else path
        folder = top = Path(mount)
        if ".." not in inside and (top / inside.lstrip("/")).is_dir():
            folder = top / inside.lstrip("/")
        found = [folder, *folder.parents]
        return tuple(found[: found.index(top) + 1]), v1
    return (), v1


def _number(path: Path) -> int | None:
    """What a file of one number holds; None for ``max``, and where there is none."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int | None:
    """A line of a file of names and numbers."""
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def read_machine(group: Group | None = None) -> Machine:
    """What the cgroup, the RAM and the user's limits allow."""
    group = group or Group.find()
    ram = _ram()
    limit = group.memory_limit()
    tasks = [(group.tasks_limit(), "pids.max"), (_processes_of_user(), "RLIMIT_NPROC")]
    most, source = min(((count, name) for count, name in tasks if count is not None), default=(None, ""))
    if limit is not None and (ram is None or limit < ram):
        return Machine(limit, "the cgroup's limit", is_limited=True, tasks=most, tasks_source=source)
    return Machine(ram, "the RAM", tasks=most, tasks_source=source)


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _processes_of_user() -> int | None:
    import resource  # not on every platform, and only `read_machine` asks

    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return None if limit == resource.RLIM_INFINITY or os.geteuid() == 0 else limit  # which does not hold for root


# ---------------------------------------------------------------------- deciding


class Advice(msgspec.Struct, frozen=True):
    """
    What a worker should do now.

    Attributes:
        collect: collect garbage and read again, since a peak is often that.
        cap: most requests at once; more are answered with 503. None: as many as ever.
        renew: why it should be replaced; "" if it need not.
    """

    collect: bool = False
    cap: int | None = None
    renew: str = ""


class MemoryWatch:
    """
    The rules for one worker.

    Above the soft mark it takes hardly more requests at once than it has just had: where a flood of them fills the
    memory, that ends it. A leak goes on, so when it lasts the worker asks to be replaced; above the limit it asks at
    once. No request fails by that. Only at `LAST_RESORT` times the limit, where replacing came too late, it takes
    nothing more.
    """

    def __init__(self, limit: int, soft: float, *, base: int, jitter: float = 0.0) -> None:
        """
        Args:
            limit: in bytes.
            soft: share of it that is the soft mark; where the worker takes that much without any request, the mark is
                raised to the middle between that and the limit.
            base: bytes that the worker takes without any request, less than *limit*.
            jitter: 0 … 1, by lot.
        """
        self.limit = limit
        self.soft_mark = int(limit * soft) if base < limit * soft else (base + limit) // 2
        self._patience = SOFT_PATIENCE + jitter * JITTER
        self._above_since: float | None = None
        self._cap = 0
        self._in_flight: deque[int] = deque(maxlen=round(PEAK_TIME / LOOK_INTERVAL))
        self._collected_at = float("-inf")
        self._asked_at = float("-inf")

    def sample(self, now: float, rss: int, in_flight: int) -> Advice:
        """
        Judge a reading; one each `LOOK_INTERVAL`.

        Args:
            now: seconds on the monotonic clock.
            rss: bytes.
            in_flight: requests that run.
        """
        self._in_flight.append(in_flight)
        if rss <= self.soft_mark:
            self._above_since = None
            return Advice()
        if self._above_since is None:
            self._above_since = now
            peak = max(self._in_flight)
            self._cap = peak + max(2, peak // 4)
        cap = self._cap if rss <= self.limit * LAST_RESORT else 0
        if now - self._collected_at >= COLLECT_PAUSE:
            self._collected_at = now
            return Advice(collect=True, cap=cap)
        over = rss > self.limit
        lasted = now - self._above_since
        if not over and lasted < self._patience:
            return Advice(cap=cap)
        if now - self._asked_at < ASK_AGAIN:
            return Advice(cap=cap)
        self._asked_at = now
        mark = f"its limit of {show_size(self.limit)}"
        if not over:
            mark = f"{show_size(self.soft_mark)} for {lasted:.0f} s, with a limit of {show_size(self.limit)}"
        return Advice(cap=cap, renew=f"memory: it takes {show_size(rss)}, above {mark}")


# ---------------------------------------------------------------------- doing


class MemoryGuard:
    """The rules applied to this process. For the worker's event loop; `look` is called each `LOOK_INTERVAL`."""

    def __init__(
        self,
        allowed: Allowance,
        soft: float,
        *,
        base: int,
        shed: Callable[[int | None, str], None],
        renew: Callable[[str], None],
        group: Group | None = None,
    ) -> None:
        """
        Args:
            base: what this worker takes now that it is warm.
            shed: take at most so many requests at once, for this reason; None lifts that.
            renew: ask to be replaced.
            group: of a worker without a limit of its own: the cgroup that must be short of memory too.
        """
        self._shed = shed
        self._renew = renew
        self._group = group if not allowed.is_own else None
        self._soft = soft
        self._cap: int | None = None
        self._watch: MemoryWatch | None = None
        if allowed.size is None or (not allowed.is_own and (group is None or group.memory_limit() is None)):
            return
        if base >= allowed.size:
            logger.error(
                "a warm worker takes %s of memory without any request, and its limit is %s (%s): the limit is not "
                "enforced; raise it",
                *(show_size(base), show_size(allowed.size), allowed.text),
            )
            return
        lot = random.SystemRandom().random()  # a fork has its mold's random numbers
        self._watch = MemoryWatch(allowed.size, soft, base=base, jitter=lot)

    def look(self, now: float, rss: int | None, in_flight: int) -> None:
        """Act on how much memory this process takes now."""
        if self._watch is None or rss is None:
            return
        advice = Advice()
        if self._group is None or rss <= self._watch.soft_mark or self._is_short(self._group):
            advice = self._watch.sample(now, rss, in_flight)
            if advice.collect:
                free_garbage()
                after = rss_of() or rss
                logger.info("memory: %s, %s after a collection of garbage", show_size(rss), show_size(after))
                advice = self._watch.sample(now, after, in_flight)
        if advice.cap != self._cap:
            self._cap = advice.cap
            if advice.cap is None:
                logger.info("memory: %s; as many requests at once as ever", show_size(rss))
            else:
                what = f"more than {advice.cap} requests at once are" if advice.cap else "every request is"
                logger.warning("memory: %s; %s answered with 503", show_size(rss), what)
            self._shed(advice.cap, "the worker is short of memory")
        if advice.renew:
            self._renew(advice.renew)

    def _is_short(self, group: Group) -> bool:
        used, limit = group.memory_used(), group.memory_limit()
        return used is not None and limit is not None and used > limit * self._soft


def free_garbage() -> None:
    """Collect garbage, and have the C library give back what it holds free. May take a moment, with the GIL held."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # which musl does not have
        if trim is not None:
            trim(0)
