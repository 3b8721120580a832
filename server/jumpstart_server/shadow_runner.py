"""
Runs a worker's shadow requests in idle moments, one at a time. `jumpstart_warmup.shadow` says when one may run.

An idle moment: the engine has room (no request waits, a slot is free), and the event loop is on time, which it is not
while the interpreter computes for others. WSGI apps are called in a thread of our own, which takes no slot of the pool,
ASGI apps in a task.

That thread is not made nice: one that holds the GIL while it waits for a busy processor makes all others of its process
wait with it. Measured beside two processes that compute: with nice 10 a real thread had its turn 1.7 times as rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from jumpstart_server.envelope.cpu import Measured
from jumpstart_server.envelope.interrupt import Interrupts, Stopping
from jumpstart_server.messages import MetCold, Sampled
from jumpstart_server.settings import TenantSettings
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.inprocess import GuardOf, Outcome, WSGIWarmup, warm_asgi
from jumpstart_warmup.sampling import MAX_EVENTS, Cold, Lookout
from jumpstart_warmup.shadow import MOST_RANDOM, Allowance, Lane, ShadowCounts, ShadowQueue

logger = logging.getLogger(__name__)

GLANCE = 0.005  # seconds of a look at the event loop
PUNCTUAL, NOT_LATE = 0.003, 0.03  # seconds: as late as the loop of a process is that is very idle, that is idle
PAUSE = 0.05  # seconds between looks while nothing may run
FIRST_BREAK, LONGEST_BREAK = 0.5, 16.0  # seconds without random ones, after one found the process busy, and again
BUSY_SHARE = 0.2  # of a core: a process that computes more is kept warm by its real requests
MEASURED_OVER = 0.9  # seconds; samples come each second
REST = 0.01  # seconds after each: requests that came meanwhile go first
PRESS_EACH = 0.05  # seconds between attempts to stop a handler
THREAD_IDLE = 30.0  # seconds after which the thread ends
SAMPLES_INTERVAL = 1.0  # seconds between batches of sampled requests; each wakes threads that compete with handlers
BATCH = 50  # of them; to judge one that is new takes a fifth of a millisecond


class Ran(NamedTuple):
    """One that has ended."""

    outcome: Outcome
    cpu_s: float


class Driver(Protocol):
    """Calls the app, one request at a time."""

    async def run(self, request: WarmRequest) -> Ran:
        """Return when the app is done with it, however long that takes."""

    def close(self) -> None:
        """No more will come."""


class ShadowRunner:
    """One per worker, in its event loop only."""

    def __init__(
        self,
        driver: Driver,
        waiting: ShadowQueue,
        *,
        has_room: Callable[[], bool],
        on_cold: Callable[[Cold], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            on_cold: is told of a request drawn at random that met cold work, which nobody may have met before.
            cpu_clock: seconds on the CPU, of the whole process.
        """
        self._driver = driver
        self._on_cold = on_cold
        self._queue = waiting
        self._has_room = has_room
        self._clock = clock
        self._sleep = sleep
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._break_s = 0.0
        self._break_until = 0.0
        self._cpu_clock = cpu_clock
        self._measured = clock(), cpu_clock()

    def offer(self, request: WarmRequest, lane: Lane, route: str = "") -> None:
        """Run it when there is time."""
        if self._is_over:
            return
        if lane == "random" and self.has_break():
            self._queue.drop("busy")
        elif self._queue.offer(request, lane, self._clock(), route):
            self._came.set()

    def has_break(self) -> bool:
        """
        Whether random ones are not even looked at, since the process is busy: it computes, or was so when last seen.

        Each look wakes the event loop, which takes the GIL from handlers and moves their work to other threads.
        Measured with WSGI hello, of whose requests 8 a second were offered and one was run: 0.070 voluntary switches of
        threads for each request in place of 0.046.
        """
        now = self._clock()
        before, cpu_before = self._measured
        if now - before >= MEASURED_OVER:
            cpu_s = self._cpu_clock()
            self._measured = now, cpu_s
            if cpu_s - cpu_before > BUSY_SHARE * (now - before):
                self._break_until = max(self._break_until, now + MEASURED_OVER)
        return now < self._break_until

    def start(self) -> None:
        """Begin, with what waits already."""
        self._came.set()
        self._task = asyncio.create_task(self._work())

    def stop(self) -> None:
        """The worker drains: what waits is forgotten, what runs is cancelled or left."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
        self._driver.close()

    async def _work(self) -> None:
        while True:
            await self._came.wait()
            while len(self._queue):
                try:
                    await self._look()
                except Exception:
                    logger.exception("internal error in a shadow request")
                    await self._sleep(PAUSE)
            self._came.clear()

    async def _look(self) -> None:
        """Run one, if this is an idle moment."""
        began = self._clock()
        await self._sleep(GLANCE)
        now = self._clock()
        late = now - began - GLANCE
        idle = self._has_room() and late < NOT_LATE
        had_random = self._queue.holds("random")
        item = self._queue.take(now, idle=idle, very_idle=idle and late < PUNCTUAL)
        if item is None:
            if had_random and not self._queue.holds("random"):
                self._break_s = min(max(2 * self._break_s, FIRST_BREAK), LONGEST_BREAK)
                self._break_until = now + self._break_s
            if len(self._queue):
                await self._sleep(PAUSE)
            return
        if item.lane == "random":
            self._break_s = 0.0
        ran = await self._driver.run(item.request)
        outcome = ran.outcome
        if outcome.error is not None:
            logger.debug("shadow request %s: %s", item.request.name, outcome.error)
        self._queue.ran(
            failed=outcome.error is not None, events=list(outcome.events), cpu_s=ran.cpu_s, now=self._clock()
        )
        if item.lane == "random" and outcome.events and not outcome.is_late:
            self._on_cold(Cold(item.request, item.route or item.request.name, outcome.events[:MAX_EVENTS]))
        await self._sleep(REST)


def _not_run(request: WarmRequest) -> Outcome:
    return Outcome(request, None, "it had no time", 0.0, 0, is_late=True)


class Shadows:
    """
    The shadow traffic of one worker, both ways: what it is sent to run, and what it tells of its real requests.

    Attributes:
        lookout: for the observer, once this has begun; None where nothing of real traffic is to be sent again.
    """

    def __init__(self, tenant: TenantSettings) -> None:
        self._queue = ShadowQueue(Allowance(tenant.shadow_rate, tenant.shadow_cpu, time.monotonic()))
        self._tenant = tenant
        self._runner: ShadowRunner | None = None
        self._has_one_thread = False
        self._sampler: asyncio.Task[None] | None = None
        self._rate, self._most = 0.0, 0
        self._lost = 0  # of the samples, as was told
        self.lookout: Lookout | None = None
        self._send: Callable[[MetCold | Sampled], None] = lambda _: None

    def begin(
        self,
        driver: Driver | None,
        *,
        has_room: Callable[[], bool],
        send: Callable[[MetCold | Sampled], None],
    ) -> None:
        """
        The worker serves.

        Args:
            driver: None where nothing may run beside real requests: an app with one thread may be made for one.
            send: to the supervisor.
        """
        loop = asyncio.get_running_loop()
        self._send = send
        if driver is None:
            self._has_one_thread = True
            self._queue.clear("one-thread")
        else:
            tells = self._tenant.shadow_cold and self._tenant.replay
            on_cold = (lambda cold: send(MetCold(cold))) if tells else (lambda _: None)
            self._runner = ShadowRunner(driver, self._queue, has_room=has_room, on_cold=on_cold)
            self._runner.start()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._tell_cold)

        tenant = self._tenant
        routes = tenant.shadow_routes if tenant.replay else ()
        self.lookout = Lookout(routes=routes, wake=wake, tells_cold=tenant.shadow_cold and tenant.replay)
        self.sample(self._rate, self._most)

    def offer(self, request: WarmRequest, lane: Lane, route: str = "") -> None:
        """Run it when there is time; before this has begun, then."""
        if self._has_one_thread:
            self._queue.drop("one-thread")
        elif self._runner is None:
            self._queue.offer(request, lane, time.monotonic(), route)
        else:
            self._runner.offer(request, lane, route)

    def sample(self, rate: float, most: int) -> None:
        """Tell of this share of the real requests from now on, *most* of them in a second."""
        self._rate, self._most = rate, most
        if self.lookout is None:
            return
        self.lookout.rate, self.lookout.most = rate, most
        if rate and self._sampler is None:
            self._sampler = asyncio.create_task(self._tell_samples(self.lookout))

    def _tell_cold(self) -> None:
        if self.lookout is not None:
            for cold in self.lookout.take_cold():
                self._send(MetCold(cold))

    async def _tell_samples(self, lookout: Lookout) -> None:
        while self._rate:
            await asyncio.sleep(SAMPLES_INTERVAL)
            if self._is_for_siblings_only() and self._runner is not None and self._runner.has_break():
                # They have as much to do as this one; nobody else listens.
                lookout.forget_samples()
                continue
            while True:
                samples = lookout.take_samples(BATCH)
                lost, self._lost = lookout.lost - self._lost, lookout.lost
                if samples or lost:
                    self._send(Sampled(samples, lost))
                if len(samples) < BATCH:
                    break
                await asyncio.sleep(0)
        self._sampler = None

    def _is_for_siblings_only(self) -> bool:
        return self._most <= MOST_RANDOM

    def stop(self) -> None:
        """The worker drains. Again and again does no harm."""
        if self._runner is not None:
            self._runner.stop()
        if self._sampler is not None:
            self._sampler.cancel()

    def counts(self) -> ShadowCounts:
        """What became of the requests that it was sent."""
        return self._queue.counts()


class ASGIDriver:
    """Calls an ASGI app in a task. CPU time of sync handlers is counted, that of other tasks that it starts is not."""

    def __init__(
        self, app: Any, state: dict[str, Any], *, timeout_s: float, guard: GuardOf | None, **where: Any
    ) -> None:
        """*where*: as `warm_asgi` takes them: ``server``, ``root_path``."""
        self._app = app
        self._state = state
        self._timeout_s = timeout_s
        self._guard = guard
        self._where = where

    async def run(self, request: WarmRequest) -> Ran:
        """As of `Driver`."""
        cpu_s = 0.0

        async def measured(scope: Any, receive: Any, send: Any) -> None:
            nonlocal cpu_s
            running: Measured[None] = Measured(self._app(scope, receive, send))
            try:
                await running
            finally:
                cpu_s += running.cpu_s

        outcomes: list[Outcome] = []
        await warm_asgi(
            measured,
            [request],
            state=self._state,
            budget_s=self._timeout_s,
            timeout_s=self._timeout_s,
            guard=self._guard,
            on_result=outcomes.append,
            logs=False,
            **self._where,
        )
        outcome = outcomes[0] if outcomes else _not_run(request)
        return Ran(outcome, cpu_s + outcome.thread_cpu_s)

    def close(self) -> None:
        """As of `Driver`."""


class WSGIDriver:
    """
    Calls a WSGI app in a thread of its own, which is kept for a while: what belongs to threads is made once.

    When the time of a handler is over `jumpstart.RequestTimeout` is raised in it, as in a real request.
    """

    def __init__(self, app: Any, *, timeout_s: float, guard: GuardOf | None, **where: Any) -> None:
        """*where*: as `WSGIWarmup` takes them."""
        self._app = app
        self._timeout_s = timeout_s
        self._guard = guard
        self._where = where
        self._jobs: queue.SimpleQueue[Callable[[Interrupts], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    async def run(self, request: WarmRequest) -> Ran:
        """As of `Driver`."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        outcomes: list[Outcome] = []
        warmup = WSGIWarmup(
            self._app,
            [request],
            budget_s=self._timeout_s,
            timeout_s=self._timeout_s,
            guard=self._guard,
            on_result=outcomes.append,
            logs=False,
            **self._where,
        )
        cpu_s = 0.0
        interrupts: Interrupts | None = None

        def job(of_thread: Interrupts) -> None:
            nonlocal cpu_s, interrupts
            interrupts = of_thread
            began = time.thread_time()
            try:
                of_thread.call(warmup, warmup.run)
            except BaseException:  # late, and interrupted outside the app
                logger.debug("shadow request %s was stopped", request.name, exc_info=True)
            cpu_s = time.thread_time() - began
            with contextlib.suppress(RuntimeError):  # long after: the loop has ended
                loop.call_soon_threadsafe(done.set)

        self._give(job)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await done.wait()
        if not done.is_set():
            warmup.leave()
            stopping = Stopping(interrupts, warmup) if interrupts is not None else None
            while not done.is_set():  # one at a time: nothing else is run before it has ended
                if stopping is not None:
                    stopping.press(time.monotonic())
                await asyncio.sleep(PRESS_EACH)
        warmup.leave()
        return Ran(outcomes[0] if outcomes else _not_run(request), cpu_s)

    def _give(self, job: Callable[[Interrupts], None]) -> None:
        with self._lock:
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="jumpstart-shadow", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        interrupts = Interrupts()
        while True:
            try:
                job = self._jobs.get(timeout=THREAD_IDLE)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            if job is None:
                return
            job(interrupts)

    def close(self) -> None:
        """As of `Driver`."""
        self._jobs.put(None)
