"""
A worker: the app's start-up, late restores, warm-up requests, ready, and only then connections.

Here is the process: its channel to the supervisor, what makes it warm, what it learns. Connections and requests are its
engine's (`engine.py`), which calls `become_ready` before it accepts. Control messages are read in the same event loop.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import math
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from jumpstart import hooks
from jumpstart.boot import Booted
from jumpstart.errors import AppShutdownError, ConfigError, JumpstartError
from jumpstart.guard import EffectGuard
from jumpstart.recorder import Purpose
from jumpstart.report import Stopwatch, WarmupReport
from jumpstart.target import Interface
from jumpstart.upkeep import LiveInfo
from jumpstart_server import forks, system
from jumpstart_server.access import AccessLog
from jumpstart_server.driving import AppDriver, on_own_thread
from jumpstart_server.engine import CANCEL_GRACE, Engine
from jumpstart_server.envelope import memory
from jumpstart_server.envelope.sizing import allowance, size_threads
from jumpstart_server.exits import ExitCode, exit_code
from jumpstart_server.heartbeat import BEAT_INTERVAL, offer_stacks
from jumpstart_server.logs import reopen_logs
from jumpstart_server.messages import (
    Accept,
    Ask,
    Beat,
    BootFailed,
    Captured,
    Channel,
    ChannelClosedError,
    Drain,
    Hello,
    LameDuck,
    Learnt,
    Proved,
    Renew,
    Reopen,
    SampleRate,
    Section,
    Shadow,
    ShutdownFailed,
    Start,
    Stats,
    StoppedAccepting,
    WorkerReady,
)
from jumpstart_server.shadow_runner import ASGIDriver, Driver, Shadows, WSGIDriver
from jumpstart_server.warming import WarmupNotes, describe, is_rejected
from jumpstart_warmup.corpus import CorpusRecorder, WarmRequest, read_requests
from jumpstart_warmup.golden import golden_requests
from jumpstart_warmup.inprocess import TIMEOUT_S, Outcome, guard_of
from jumpstart_warmup.middleware import ObservedASGI, ObservedWSGI
from jumpstart_warmup.observe import Observer
from jumpstart_warmup.routes import normalise_path

logger = logging.getLogger(__name__)

LEARN_SHARE = 50  # times its own duration that the next capture waits at least
LEARN_INTERVAL = 2.0  # seconds between looks for something new; cheap when there is nothing
COUNT_INTERVAL = 0.1  # seconds between looks at the number of requests, where it is limited
STATS_INTERVAL = 5.0  # seconds between reports that nobody asked for, which survive a kill -9
REPLAY_LIMIT = 200  # requests of the corpus in one warm-up

FOR_WSGI_WORKERS = ("uvloop", "jumpstart_server.wsgi.engine")
FOR_ASGI_WORKERS = (
    "uvloop",
    "uvicorn.loops.uvloop",
    "jumpstart_server.asgi.server",
    "anyio.to_thread",
    "anyio._backends._asyncio",  # what anyio imports at its first use in an event loop
    "jumpstart_server.asgi.threads",
    "uvicorn.protocols.websockets.auto",
)


def import_what_workers_need(interface: Interface) -> None:
    """Import in the mold, once and shared, what each worker would import by itself."""
    for name in FOR_WSGI_WORKERS if interface == "wsgi" else FOR_ASGI_WORKERS:
        importlib.import_module(name)
    if interface != "wsgi":
        from jumpstart_server.asgi.streams import replace_in_starlette

        replace_in_starlette()


def run(
    control: socket.socket,
    start: Start,
    booted: Booted,
    corpus: CorpusRecorder,
    listeners: list[socket.socket],
    *,
    process: str,
) -> NoReturn:
    """Serve (or build a profile) until told to stop, then end the process with the app's own exit hooks run."""
    code = ExitCode.INTERNAL
    signal.signal(signal.SIGINT, lambda *_: None)  # the supervisor's, whatever the app made of it
    forks.leave_signals_to_children()
    try:
        worker = _Worker(start, booted, corpus, listeners, process)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            code = runner.run(worker.main(control))
    except SystemExit as error:
        code = error.code if isinstance(error.code, ExitCode) else ExitCode.INTERNAL
    except BaseException:
        logger.critical("internal error in worker pid=%d", os.getpid(), exc_info=True)
    sys.exit(code)


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class _Worker:
    """
    One worker process: the app, its statistics, its engine and its channel to the supervisor.
    """

    def __init__(
        self, start: Start, booted: Booted, corpus: CorpusRecorder, listeners: list[socket.socket], process: str
    ) -> None:
        tenant = start.settings.tenant
        self.start = start
        self.settings = start.settings
        self.booted = booted
        self.corpus = corpus
        self.stopwatch: Stopwatch = booted.stopwatch
        self.stopwatch.process = process
        self.observer = Observer(corpus)
        self.may_accept = asyncio.Event()
        self.is_draining = False
        self.channel: Channel  # set by main, before anything uses it
        self._learner: asyncio.Task[None] | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._counter: asyncio.Task[None] | None = None
        self._learnt_at = -1
        self._shadows = Shadows(tenant)
        self._guard = None if tenant.guard == "off" else EffectGuard(tenant.shadow_allow)
        self._captures: set[asyncio.Task[None]] = set()
        self._requests = _warmup_requests(tenant.warmup)
        if booted.interface == "wsgi":
            self.app: Any = ObservedWSGI(booted.app, self.observer)
        else:
            from jumpstart_server.asgi.server import as_asgi3

            self.app = ObservedASGI(as_asgi3(booted.app, booted.interface), self.observer)
        self._driver = AppDriver(self.app, booted.interface, tenant, self._guard)
        self.engine = self._make_engine(listeners)

    def _make_engine(self, listeners: list[socket.socket]) -> Engine:
        tenant = self.settings.tenant
        # Each engine brings what the other does without: uvicorn here, the threads there.
        if self.booted.interface == "wsgi":
            from jumpstart_server.wsgi.engine import WSGIEngine

            return WSGIEngine(
                self.booted.app,
                tenant,
                listeners,
                observer=self.observer,
                access=self._access_log(),
                become_ready=self.become_ready,
                stopped_accepting=lambda: self.channel.send(StoppedAccepting()),
                renew=lambda reason: self.channel.send(Renew(reason)),
            )
        from jumpstart_server.asgi.server import ASGIServer, as_asgi3

        return ASGIServer(
            as_asgi3(self.booted.app, self.booted.interface),
            tenant,
            listeners,
            observer=self.observer,
            access=self._access_log(),
            become_ready=self.become_ready,
            stopped_accepting=lambda: self.channel.send(StoppedAccepting()),
            stopwatch=self.stopwatch,
            renew=lambda reason: self.channel.send(Renew(reason)),
        )

    def _access_log(self) -> AccessLog | None:
        """The command has opened the file once; where that no longer goes, its lines are lost and the requests not."""
        tenant = self.settings.tenant
        if not tenant.access_logfile or self.start.role in ("builder", "prover"):
            return None
        return AccessLog(
            tenant.access_logfile, tenant.access_logformat, tenant=self.settings.tenant_name, must_open=False
        )

    # ------------------------------------------------------------------ from start to end

    async def main(self, control: socket.socket) -> ExitCode:
        self.channel = await Channel.open(control)
        self.channel.send(Hello(os.getpid()))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._drain)
        listening = asyncio.create_task(self._follow_control())
        limit = self.settings.tenant.startup_timeout
        if limit:
            system.dump_stacks_after(max(limit - 0.5, limit / 2))  # says where it is stuck
        try:
            with self.stopwatch.span("on_restore hooks"):
                await hooks.after_restore(self.settings.profile.restore_timeout)
            code = await self._serve()
        except JumpstartError as error:
            # Its start-up failed by itself; doing that once more, cold, would only repeat its side effects.
            code = exit_code(error)
            self.channel.send(BootFailed(exit_code=code, text=str(error)))
        except BaseException:
            code = ExitCode.INTERNAL
            text = f"internal error in worker pid={os.getpid()}\n{traceback.format_exc()}"
            self.channel.send(BootFailed(exit_code=code, text=text, may_be_state=True))
        await self.channel.flush()
        listening.cancel()
        self.channel.close()
        await _cancel_leftovers()
        return code

    async def _serve(self) -> ExitCode:
        failure: AppShutdownError | None = None
        try:
            await self.engine.serve()
        except AppShutdownError as error:
            failure = error
        self._send_stats()
        if self.settings.profile.warm_start and self.engine.started:
            try:
                self.channel.send(Learnt(sections=await self._capture("host")))
            except Exception:
                logger.exception("what this worker learnt is not kept")
        if failure is None:
            return ExitCode.CLEAN
        self.channel.send(ShutdownFailed(text=str(failure)))
        return exit_code(failure)

    async def _follow_control(self) -> None:
        try:
            while True:
                message = await self.channel.receive()
                if isinstance(message, Accept):
                    self.may_accept.set()
                elif isinstance(message, Drain):
                    self._drain(message.patience_s, is_stop=message.is_stop)
                elif isinstance(message, LameDuck):
                    self.engine.lame_duck()
                elif isinstance(message, Reopen):
                    reopen_logs()
                elif isinstance(message, Shadow):
                    self._shadows.offer(message.request, message.lane, message.route)
                elif isinstance(message, SampleRate):
                    self._shadows.sample(message.rate, message.most)
                elif isinstance(message, Ask):
                    try:
                        self._answer(message)
                    except Exception:  # a question is not worth the channel, which carries the orders too
                        logger.exception("cannot answer the supervisor")
        except ChannelClosedError:
            os._exit(ExitCode.INTERNAL)  # the supervisor is gone, and the port with it

    def _drain(self, patience_s: float = 0.0, *, is_stop: bool = True) -> None:
        self.is_draining = True
        self._shadows.stop()
        self.engine.drain(patience_s, is_stop=is_stop)

    def _answer(self, ask: Ask) -> None:
        if ask.capture or ask.golden:
            task = asyncio.create_task(self._capture_for(ask))
            self._captures.add(task)
            task.add_done_callback(self._captures.discard)
        else:
            self._send_stats(ask.number)

    def _send_stats(self, number: int = 0) -> None:
        observed, pool, shadow = self.observer.snapshot(), self.engine.stats(), self._shadows.counts()
        if self._guard is not None:
            shadow = msgspec.structs.replace(shadow, effects=self._guard.refusals())
        self.channel.send(Stats(number=number, observed=observed, pool=pool, shadow=shadow, live=_live()))

    async def _capture_for(self, ask: Ask) -> None:
        sections = await self._capture("ship") if ask.capture else {}
        golden = await self._driver.golden(ask.golden, beside_others=True)
        observed = self.observer.snapshot()
        self.channel.send(Captured(number=ask.number, sections=sections, observed=observed, golden=golden))

    # ------------------------------------------------------------------ before the first connection

    async def become_ready(self, state: dict[str, Any]) -> None:
        """After lifespan start-up: restore, warm up, say so, and wait until the port listens."""
        self._driver.state = state
        if self.start.role == "builder":
            await self._build()
            return
        if self.start.role == "prover":
            await self._prove()
            return
        await self.booted.restore_late()
        with self.stopwatch.span("warm-up requests"):
            warmup = await self._warm_up()
        gc.collect()
        gc.freeze()
        gc.enable()
        system.cancel_dump()
        guard = self._size()
        report = msgspec.structs.replace(self.booted.report(), warmup=warmup)
        self.channel.send(WorkerReady(report=report))
        await self.may_accept.wait()
        self._begin_shadows()
        self._pulse = asyncio.create_task(self._beat(guard))
        if self.settings.tenant.max_requests:
            self._counter = asyncio.create_task(self._count_requests())
        self._learner = asyncio.create_task(self._keep_learning())

    def _begin_shadows(self) -> None:
        tenant = self.settings.tenant
        where: dict[str, Any] = {"server": (tenant.warmup_host, 80), "root_path": tenant.root_path}
        timeout_s = min(TIMEOUT_S, tenant.timeout or TIMEOUT_S)
        guard = None if self._guard is None else guard_of(self._guard)
        driver: Driver | None = None
        if self.booted.interface == "wsgi":
            if tenant.threads != 1:  # an app that has one may be made for one: nothing runs beside it
                driver = WSGIDriver(self.app, timeout_s=timeout_s, guard=guard, **where)
        else:
            driver = ASGIDriver(self.app, self._driver.state, timeout_s=timeout_s, guard=guard, **where)
        self._shadows.begin(driver, has_room=self.engine.has_room, send=self.channel.send)
        self.observer.lookout = self._shadows.lookout

    def _size(self) -> memory.MemoryGuard:
        """Settle how many threads there are, and what memory this worker may take, now that it is warm."""
        tenant = self.settings.tenant
        group = memory.Group.find()
        machine = memory.read_machine(group)
        workers = self.settings.all_workers or tenant.workers
        allowed = allowance(tenant.memory_limit, machine, workers)
        began, rss = time.monotonic(), memory.rss_of() or 0
        if tenant.threads == "auto":
            # Of a share of the cgroup, pages that workers have in common are taken once.
            base = rss if allowed.is_own else memory.pss_of() or rss
            sizing = size_threads(
                allowed,
                machine,
                base=base,
                request_memory=tenant.request_memory,
                max_threads=tenant.max_threads,
                workers=workers,
            )
            self.engine.resize(sizing.threads)
            self.stopwatch.add("threads", began, time.monotonic(), sizing.arithmetic)
            if not sizing.fits:
                logger.error("there is no memory for a request: threads = %s", sizing.arithmetic)
            elif self.start.slot == 0:  # the others come to about the same
                logger.info("threads = %s", sizing.arithmetic)
        return memory.MemoryGuard(
            allowed,
            tenant.memory_soft,
            base=rss,
            shed=self.engine.shed,
            renew=lambda reason: self.channel.send(Renew(reason)),
            group=group,
        )

    async def _beat(self, guard: memory.MemoryGuard) -> None:
        """Tell the supervisor once a second that this event loop is alive, and look after the memory."""
        stacks = offer_stacks()
        next_beat = 0.0
        while not self.is_draining:
            now, rss, in_flight = time.monotonic(), memory.rss_of(), self.engine.in_flight()
            if now >= next_beat and self.engine.is_alive():
                next_beat = now + BEAT_INTERVAL
                self.channel.send(Beat(rss=rss or 0, in_flight=in_flight, stacks=stacks))
                if in_flight:
                    self.observer.look(self.engine.underway())
            try:
                guard.look(now, rss, in_flight)
            except Exception:  # the next look may go better, and the beats go on
                logger.exception("internal error in the watch over the memory")
            await asyncio.sleep(memory.LOOK_INTERVAL)

    async def _warm_up(self) -> WarmupReport:
        recorded = self.corpus.requests_for_warmup(REPLAY_LIMIT)
        may_replay = self.settings.tenant.replay and self.start.replay
        replayed = [each for each in recorded if may_replay and each.name not in self.start.too_slow]
        own = [each for each in self._requests if self.start.replay and each.name not in self.start.too_slow]
        if self.start.too_slow and self.start.slot == 0:  # the others do the same
            logger.warning(
                "warm-up: not sent, since an earlier worker waited for it in vain: %s; a restart, or another "
                "--warmup-budget, sends it again",
                ", ".join(self.start.too_slow),
            )
        notes = WarmupNotes(own, recorded, replayed)
        budget_s = self.settings.tenant.warmup_budget
        recent = [each for each in self.start.recent if self.start.replay and each.name not in self.start.too_slow]
        result = await self._driver.run([*own, *recent, *replayed], budget_s, notes.note, shadows=recent)
        notes.complain(result)
        return notes.report(result, budget_s=budget_s, replay=may_replay)

    async def _build(self) -> None:
        """Run the requests of a file once and send everything that was learnt from them; then end."""
        requests = read_requests(Path(self.start.requests)) if self.start.requests else []

        rejected: list[str] = []

        def count(outcome: Outcome) -> None:
            request = outcome.request
            if is_rejected(outcome):
                rejected.append(describe(outcome))
            if outcome.error is None and outcome.status is not None and outcome.status < 400:
                route = normalise_path(request.path.partition("?")[0])
                self.corpus.observe_request(route, request.method, request.path, request.headers)

        limit = self.settings.tenant.startup_timeout or math.inf
        result = await self._driver.run(requests, limit, count)
        sections = await self._capture("ship")
        observed = self.observer.snapshot()
        corpus = sections.get(CorpusRecorder.name)
        requests = golden_requests(corpus.records) if corpus is not None else []
        golden = await self._driver.golden(requests, beside_others=False)
        self.channel.send(
            Captured(
                number=0,
                sections=sections,
                observed=observed,
                golden=golden,
                failures=[f"{failure.method} {failure.path}: {failure.error}" for failure in result.failed],
                rejected=rejected,
            )
        )
        self._drain()

    async def _prove(self) -> None:
        """Become as ready as a worker does, answer the golden requests, say how that went; then end."""
        await self.booted.restore_late()
        warmup = await self._warm_up()
        gc.collect()
        gc.freeze()
        gc.enable()
        system.cancel_dump()
        answers = await self._driver.answers(self.start.golden)
        self.channel.send(Proved(report=msgspec.structs.replace(self.booted.report(), warmup=warmup), answers=answers))
        self._drain()

    async def _count_requests(self) -> None:
        """Ask to be replaced after so many requests. The system draws the lot: forks share the random numbers."""
        tenant = self.settings.tenant
        limit = tenant.max_requests + random.SystemRandom().randint(0, tenant.max_requests_jitter)
        while (served := self.observer.requests + self.engine.upgraded()) < limit:  # noqa: ASYNC110  # an event is dearer
            await asyncio.sleep(COUNT_INTERVAL)
        self.channel.send(Renew(f"{served} requests (--max-requests {tenant.max_requests})"))

    # ------------------------------------------------------------------ what it learns

    async def _keep_learning(self) -> None:
        """Tell the supervisor what is new, now and then, so that little is lost to a kill -9."""
        last_stats = 0.0
        pause = LEARN_INTERVAL
        while not self.is_draining:
            await asyncio.sleep(pause)
            if self.settings.profile.warm_start and self.observer.changes != self._learnt_at:
                self._learnt_at = self.observer.changes
                began = time.monotonic()
                try:
                    self.channel.send(Learnt(sections=await self._capture("host")))
                except Exception:
                    logger.exception("what this worker learnt is not kept")
                # A capture has its price for requests that run beside it; it may take some hundredth of the time.
                pause = max(LEARN_INTERVAL, LEARN_SHARE * (time.monotonic() - began))
            if time.monotonic() - last_stats >= STATS_INTERVAL:
                last_stats = time.monotonic()
                self._send_stats()

    async def _capture(self, purpose: Purpose) -> dict[str, Section]:
        """Call the app's hooks, then capture."""
        await hooks.before_capture(purpose, self.settings.profile.restore_timeout)
        return await on_own_thread("capture", lambda: self.capture(purpose))

    def capture(self, purpose: Purpose) -> dict[str, Section]:
        """Ask every recorder for what it knows. From any thread."""
        self.observer.settle()  # the corpus is one of them
        recorders = self.booted.recorders
        sections = {}
        for name, records in recorders.capture(purpose).items():
            recorder = recorders.get(name)
            if recorder is not None and records:
                sections[name] = Section(recorder.version, recorder.encoding, records)
        return sections


def _live() -> list[LiveInfo]:
    """Of the app's real-time values, where it has any."""
    if "jumpstart.live" not in sys.modules:
        return []
    from jumpstart import live

    return [each.info() for each in live.registered()]


def _warmup_requests(file: str) -> list[WarmRequest]:
    """The requests of ``--warmup``. The command has checked them; a worker that starts later may find them changed."""
    try:
        return read_requests(Path(file)) if file else []
    except ConfigError as error:
        logger.warning("no warm-up requests: %s", error)
        return []


async def _cancel_leftovers() -> None:
    """End tasks that the app left behind; the runner would wait for them without a limit."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_GRACE)
