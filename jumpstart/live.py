"""
`Live`: what `Config` and `Service` have in common, a value that is kept current off the request path.

`upkeep.py` decides when to fetch and what counts, `polling.py` has the one thread that asks it; here are the fetches,
each in a thread of its own, and the first read, the only one that waits.

    construction   nothing is fetched
    first use      a read, or the server's boot in each worker: fetched at once, tried again until `boot_timeout`
    settled        a value has come, or the time is over and the policy has said what stands in for it;
                   from here on no read waits
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from jumpstart import hooks
from jumpstart.context import cold_event
from jumpstart.deadlines import deadline
from jumpstart.errors import SourceUnavailable
from jumpstart.polling import poller
from jumpstart.upkeep import LiveInfo, Origin, Rules, Upkeep

if TYPE_CHECKING:
    import asyncio  # where it is used: a script that has no event loop does not pay for it

logger = logging.getLogger(__name__)

V = TypeVar("V")
Listener = TypeVar("Listener", bound=Callable[[frozenset[str]], Any])

OnDown = Literal["profile", "refuse"]
Snapshot = Literal["value"]

WAIT_SLICE = 0.1  # seconds; a thread that waits in one long call cannot be stopped when its request is out of time
REST_PATIENCE = 1.0  # seconds that fetches under way have to end before workers are forked

_NOTHING: Any = object()


class Live(Generic[V]):
    """
    One source and the last good value of it. Any thread may call any method.

    Subclasses say what a value is: `_check` makes one of an answer, or raises; `_merge` compares it with the last one.

    Attributes:
        name: as it was given.
        snapshot: ``"value"`` where profiles carry the value, None where they carry the name.
        on_down: what a boot does when the source is down.
    """

    kind: ClassVar[str]
    noun: ClassVar[str]

    def __init__(
        self,
        name: str,
        fetch: Callable[[], Any],
        rules: Rules,
        *,
        boot_timeout: float,
        on_down: OnDown,
        default: Any,
        snapshot: Snapshot | None,
    ) -> None:
        for option, seconds in (("ttl", rules.ttl), ("timeout", rules.timeout), ("boot_timeout", boot_timeout)):
            if not 0 < seconds <= 1e9:
                raise ValueError(f"{option} is {seconds!r}; it must be a number of seconds above 0")
        if not callable(fetch):
            raise TypeError(f"{self.noun} {name!r} needs a function that fetches it, got {fetch!r}")
        if on_down not in ("profile", "refuse"):
            raise ValueError(f"on_down is {on_down!r}; it must be 'profile' or 'refuse'")
        if snapshot not in (None, "value"):
            raise ValueError(f"snapshot is {snapshot!r}; it must be 'value' or None")
        if on_down == "refuse" and default is not _NOTHING:
            raise ValueError("on_down='refuse' leaves no use for a default; give one of the two")
        self.name = name
        self.on_down = on_down
        self.snapshot = snapshot
        self._boot_timeout = boot_timeout
        self._default = default
        self._fetch = fetch
        self._lots = random.SystemRandom()  # a fork copies other generators, and all workers would ask at once
        self._lock = threading.Lock()
        self._upkeep: Upkeep[V] = Upkeep(rules)
        self._published: V | None = None
        self._listeners: list[Callable[[frozenset[str]], Any]] = []  # of dependencies; `_callbacks` are the user's
        self._callbacks: list[Callable[[frozenset[str]], Any]] = []
        self._threads: set[threading.Thread] = set()
        self._runner: asyncio.Runner | None = None
        self._settle_at: float | None = None  # monotonic, from the first use
        self._settled = threading.Event()
        self._when_settled: list[Callable[[], None]] = []
        self._is_followed = False  # settled, and polled in this process: reads need not look further
        self._has_answered = False  # the source, as far as this process needs it
        self._is_closed = False
        _register(self)

    # ------------------------------------------------------------------ what subclasses say

    def _check(self, answer: Any) -> V:
        raise NotImplementedError

    def _merge(self, old: V | None, new: V, version: int) -> tuple[V, frozenset[str]]:
        """The value to keep, and which keys differ; none where it is as before."""
        raise NotImplementedError

    def _as_data(self, value: V) -> Any:
        """What a profile carries: JSON types that `_check` understands."""
        raise NotImplementedError

    # ------------------------------------------------------------------ for everybody

    @property
    def age(self) -> float | None:
        """Seconds since the source gave the value, also where it came by way of a profile; None: it never did."""
        return self.info().age_s

    @property
    def is_stale(self) -> bool:
        """Whether the value is older than ``ttl``, or not the source's own answer to this process."""
        with self._lock:
            return self._upkeep.is_stale(time.monotonic())

    def info(self) -> LiveInfo:
        """How current it is. Never waits, never fetches."""
        with self._lock:
            return self._upkeep.info(self.kind, self.name, time.monotonic())

    def on_change(self, callback: Listener) -> Listener:
        """
        Have *callback* called with the names of what has changed, after the change; usable as a decorator.

        It runs in the background thread that has fetched, never in a request. What it raises is logged. The first
        value is no change, unless reads have been without one before.
        """
        self._callbacks.append(callback)
        return callback

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> None:
        """As `on_change`, for what is computed from the values; called before the callbacks."""
        self._listeners.append(listener)

    def refresh(self) -> None:
        """Have it fetched at once, in the background."""
        with self._lock:
            self._upkeep.ask_soon(time.monotonic())
        self._follow()

    async def ready(self) -> None:
        """
        Wait, without blocking the event loop, until reads do not wait any more: `boot_timeout` at most.

        Raises nothing: whether there is a value, `info` and the reads say.
        """
        import asyncio

        self._follow()
        loop = asyncio.get_running_loop()
        came: asyncio.Future[None] = loop.create_future()

        def come() -> None:
            if not came.done():
                came.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # its loop has ended: nobody waits
                loop.call_soon_threadsafe(come)

        with self._lock:
            if self._settled.is_set():
                return
            self._when_settled.append(tell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._until_settled()):
                await came
        self._settle_if_over()

    def close(self) -> None:
        """Fetch no more. Reads go on with the last value, and profiles do without it."""
        self._is_closed = True
        if _registered.get((self.kind, self.name)) is self:
            del _registered[self.kind, self.name]
        poller.drop(self)
        self._close_runner()

    def __del__(self) -> None:
        if hasattr(self, "_runner"):  # its construction has not failed
            self._close_runner()

    def _close_runner(self) -> None:
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    # ------------------------------------------------------------------ reads

    def _current(self) -> V | None:
        """The value; None where there is none. Waits where nothing is settled yet, and never again."""
        if self._is_followed:
            return self._published
        self._follow()
        if not self._settled.is_set() and not poller.suspended and threading.current_thread() not in self._threads:
            cold_event(self.kind, self.name)
            self._wait()
        return self._published

    def _follow(self) -> None:
        """See to it that it is polled in this process."""
        if self._is_closed:
            self._settle()
            return
        with self._lock:
            if self._settle_at is None:
                self._settle_at = time.monotonic() + self._boot_timeout
        poller.add(self)
        self._is_followed = self._settled.is_set() and not poller.suspended

    def _wait(self) -> None:
        left = deadline()
        until = time.monotonic() + min(self._until_settled(), float("inf") if left is None else left)
        while (left := until - time.monotonic()) > 0:
            if self._settled.wait(min(left, WAIT_SLICE)):
                break
        self._settle_if_over()

    def _until_settled(self) -> float:
        return 0.0 if self._settle_at is None else max(self._settle_at - time.monotonic(), 0.0)

    def _settle_if_over(self) -> None:
        if not self._settled.is_set() and self._settle_at is not None and time.monotonic() >= self._settle_at:
            self._settle()

    def _settle(self) -> None:
        """The time for the source's first answer is over: use what stands in for it, and let no read wait again."""
        if self._settled.is_set():
            return
        offers: list[tuple[Any, float, Origin]] = []
        if self.on_down == "profile":
            offered = _offers.get((self.kind, self.name)) if self.snapshot == "value" else None
            if offered is not None:
                offers.append((*offered, Origin.PROFILE))
            if self._default is not _NOTHING:
                offers.append((self._default, -float("inf"), Origin.DEFAULT))
        for answer, since, origin in offers:
            try:
                value = self._check(answer)
            except Exception as reason:
                logger.warning("%s %s: the %s's value is not used: %s", self.noun, self.name, origin, _words(reason))
                continue
            with self._lock:
                value, _ = self._merge(self._upkeep.value, value, self._upkeep.version + 1)
                if self._upkeep.fall_back(value, since, origin):
                    self._published = value
            break
        with self._lock:
            if self._settled.is_set():
                return
            origin, error = self._upkeep.origin, self._upkeep.error or "it has not answered yet"
            self._let_go()
        if not self._is_closed:
            logger.warning("%s %s: its source is down (%s); %s", self.noun, self.name, error, self._stand_in(origin))

    def _let_go(self) -> None:
        """With the lock: reads wait no more."""
        self._settled.set()
        waiting, self._when_settled = self._when_settled, []
        for tell in waiting:
            tell()

    def _stand_in(self, origin: Origin) -> str:
        match origin:
            case Origin.PROFILE:
                return f"the profile's value is used, {self.age or 0:.0f} s old"
            case Origin.DEFAULT:
                return "the default is used"
            case Origin.SOURCE:
                return f"its value of {self.age or 0:.0f} s ago is used"
        return "there is no value to use in its place"

    def _unavailable(self, why: str = "") -> SourceUnavailable:
        why = why or self.info().error or "its source has not answered yet"
        return SourceUnavailable(
            f"{self.noun} {self.name!r} has no value: {why}; mend the source, or give a default or snapshot='value'"
        )

    # ------------------------------------------------------------------ fetches

    def look(self) -> float:
        """For the poller: begin a fetch, or give one up, as the time demands; returns seconds until the next look."""
        begun = None
        with self._lock:
            kept, now = self._upkeep, time.monotonic()
            gave_up = kept.give_up(now, self._lots.random())
            if kept.may_begin(now):
                attempt = kept.begin(now)
                begun = _Fetch(self, attempt)
                self._threads.add(begun)
        if gave_up:
            self._report_failure()
        if begun is not None:
            try:
                begun.start()
            except RuntimeError as error:  # no more threads
                self._failed(begun.attempt, error)
                self._over(begun)
        self._settle_if_over()
        with self._lock:
            now = time.monotonic()
            pause = self._upkeep.next_event() - now
            if not self._settled.is_set() and self._settle_at is not None:
                pause = min(pause, self._settle_at - now)
            return max(pause, 0.0)

    def fetch(self, attempt: int) -> None:
        """In a thread of its own."""
        try:
            value = self._check(self._ask())
        except BaseException as error:  # sys.exit() in a fetch function may not end anything
            self._failed(attempt, error)
            return
        lot = self._lots.random()
        with self._lock:
            kept = self._upkeep
            was_failing, was_read = kept.failures, self._settled.is_set() or kept.version > 0
            value, changed = self._merge(kept.value, value, kept.version + 1)
            if not kept.succeeded(attempt, time.monotonic(), value, changed=bool(changed), lot=lot):
                return
            self._published = value
            self._has_answered = True
            self._let_go()
        if was_failing:
            logger.info("%s %s: its source answers again", self.noun, self.name)
        poller.wake()
        if changed:
            self._tell(self._listeners, changed)
            if was_read:
                self._tell(self._callbacks, self._for_users(changed))

    def _for_users(self, changed: frozenset[str]) -> frozenset[str]:
        return changed

    def _tell(self, listeners: list[Callable[[frozenset[str]], Any]], changed: frozenset[str]) -> None:
        for listener in list(listeners):
            try:
                listener(changed)
            except Exception:
                logger.exception("%s %s: a listener for changes raised", self.noun, self.name)

    def _ask(self) -> Any:
        answer = self._fetch()
        if not inspect.isawaitable(answer):
            return answer
        import asyncio

        # One loop for all fetches of this source, so that clients with connections can be kept between two.
        with self._lock:
            runner, self._runner = self._runner, None
        runner = runner or asyncio.Runner()

        async def limited() -> Any:
            async with asyncio.timeout(self._upkeep.rules.timeout):
                return await answer

        try:
            return runner.run(limited())
        finally:
            with self._lock:
                if self._runner is None and not self._is_closed:
                    runner, self._runner = None, runner
            if runner is not None:
                runner.close()

    def _failed(self, attempt: int, error: BaseException) -> None:
        with self._lock:
            is_news = self._upkeep.failed_with(attempt, time.monotonic(), _words(error), self._lots.random())
        if is_news:
            self._report_failure()

    def _report_failure(self) -> None:
        with self._lock:
            error, origin = self._upkeep.error, self._upkeep.origin
            is_news = self._upkeep.failures == 1 or self._upkeep.is_stuck
        level = logging.WARNING if is_news else logging.DEBUG  # not a line for each try
        stays = "; the last good value stays" if origin is Origin.SOURCE else ""
        logger.log(level, "%s %s: a fetch has failed: %s%s", self.noun, self.name, error, stays)

    def _over(self, thread: _Fetch) -> None:
        with self._lock:
            self._threads.discard(thread)
            self._upkeep.ended(thread.attempt)
        poller.wake()

    # ------------------------------------------------------------------ captures and forks

    def record(self) -> tuple[Any, float] | None:
        """What a profile carries where the value is wanted: its data, and its age in seconds. None: there is none."""
        with self._lock:
            kept = self._upkeep
            if self.snapshot != "value" or kept.value is None or kept.origin is Origin.DEFAULT:
                return None
            value, age = kept.value, kept.age(time.monotonic())
        return self._as_data(value), age

    def rest(self, until: float) -> None:
        """Let fetches under way end, until then on the monotonic clock, and close what they have kept."""
        for thread in list(self._threads):
            thread.join(max(until - time.monotonic(), 0.0))
        self._close_runner()
        self._is_followed = False

    def resume(self) -> None:
        """
        Begin to fetch in a process that is about to serve.

        What stood in for the source, or has grown old in the process that this one was forked from, is no answer here.
        """
        with self._lock:
            now = time.monotonic()
            if self._upkeep.is_stale(now):
                self._upkeep.ask_soon(now)
                self._has_answered = False
                self._settled.clear()
                self._settle_at = None
                self._is_followed = False
        self._follow()

    def forked(self) -> None:
        """This is a copy in another process: no thread, no lock and no loop of the original is of use here."""
        self._lock = threading.Lock()
        settled, self._settled = self._settled.is_set(), threading.Event()
        if settled:
            self._settled.set()
        else:
            self._settle_at = None
        self._when_settled = []
        self._threads = set()
        if self._runner is not None:
            _left_behind.append(self._runner)  # to close it would tell the original's selector
            self._runner = None
        self._upkeep.forked(time.monotonic(), self._lots.random())
        self._is_followed = False


class _Fetch(threading.Thread):
    def __init__(self, live: Live[Any], attempt: int) -> None:
        super().__init__(name=f"jumpstart-fetch {live.kind} {live.name}", daemon=True)
        self.attempt = attempt
        self._live = live

    def run(self) -> None:
        try:
            self._live.fetch(self.attempt)
        finally:
            self._live._over(self)


def _words(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"


# ---------------------------------------------------------------------- all of this process

_registered: weakref.WeakValueDictionary[tuple[str, str], Live[Any]] = weakref.WeakValueDictionary()
_all: weakref.WeakSet[Live[Any]] = weakref.WeakSet()  # those too whose name another has taken
_offers: dict[tuple[str, str], tuple[Any, float]] = {}  # what a profile brought: the data, and since when on the clock
_left_behind: list[asyncio.Runner] = []


def _register(live: Live[Any]) -> None:
    _registered[live.kind, live.name] = live
    _all.add(live)
    hooks.on_capture(_suspend)
    hooks.on_restore(_resume)


def registered() -> list[Live[Any]]:
    """Those of this process that can be found by kind and name."""
    return list(_registered.values())


def find(kind: str, name: str) -> Live[Any] | None:
    """The one of that kind and name."""
    return _registered.get((kind, name))


def offer(kind: str, name: str, data: Any, age: float) -> None:
    """Hand in a profile's value, *age* seconds old, for the time when the source should be down."""
    _offers[kind, name] = (data, time.monotonic() - max(age, 0.0))


async def settle_all() -> list[str]:
    """
    Wait until no read waits any more; returns a line on each source that is down, for the report.

    Raises:
        SourceUnavailable: one is down that the boot is to be refused for.
    """
    import asyncio

    await asyncio.gather(*(live.ready() for live in registered()))
    lines = []
    for live in registered():
        info = live.info()
        if not live._has_answered:
            if live.on_down == "refuse":
                raise SourceUnavailable(
                    f"{live.noun} {live.name!r} refuses to start without its source (on_down='refuse'): "
                    f"{info.error or f'no answer within {live._boot_timeout:g} s'}"
                )
            lines.append(f"{live.noun} {live.name}: source down, {live._stand_in(Origin(info.origin))}")
    return lines


def _suspend() -> None:
    """Before workers are forked from this process: no thread may be there, and no event loop."""
    poller.suspend()
    until = time.monotonic() + REST_PATIENCE
    for live in list(_all):
        live.rest(until)


def _resume() -> None:
    """In a process that is about to serve: begin to fetch, so that no request and no start-up has to wait long."""
    poller.resume()
    for live in registered():
        live.resume()


def _after_fork() -> None:
    poller.reset()
    for live in list(_all):
        live.forked()


os.register_at_fork(after_in_child=_after_fork)
