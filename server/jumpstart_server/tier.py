"""
A tenant at work: its sockets, its generations, and at each moment as many workers as it should have.

    current   the generation that new workers are started in
    rolling   the next one, which boots beside it until all of its workers are ready
    others    what is left of earlier ones: workers that drain, or serve on although their mold has died

Whatever happens changes what there is; `_reconcile` then starts what is missing. No worker is ended before another is
ready in its place: that holds for rolls (`roll`) and for single workers (`renew`). The rules are in `lifecycle.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jumpstart.errors import JumpstartError
from jumpstart.records import Reason
from jumpstart.report import BootReport, Refusal, Span
from jumpstart_server.envelope.memory import oom_kills
from jumpstart_server.envelope.sizing import show_size
from jumpstart_server.exits import ExitCode, exit_code
from jumpstart_server.generation import KILL_GRACE, PATIENCE, Generation, Log, died
from jumpstart_server.heartbeat import Pulse, Watched, Watchman
from jumpstart_server.learning import Learning
from jumpstart_server.lifecycle import Event, Restarts, State, Verdict, Worker, after_boot_failure, is_hopeless
from jumpstart_server.messages import (
    Accept,
    Beat,
    BootFailed,
    Captured,
    LameDuck,
    Learnt,
    Message,
    MetCold,
    Renew,
    Sampled,
    ShutdownFailed,
    Stats,
    StoppedAccepting,
    WorkerReady,
)
from jumpstart_server.processes import Launcher, Member, Mold
from jumpstart_server.profile_watch import ProfileWatch
from jumpstart_server.questions import Capture, Questions
from jumpstart_server.seeding import Seeding
from jumpstart_server.settings import Settings, boot_settings
from jumpstart_server.shadowing import Shadowing
from jumpstart_server.sockets import TenantSockets
from jumpstart_server.worker_renewals import Renewals
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.coverage import Coverage
from jumpstart_warmup.observe import ObserverSnapshot

logger = logging.getLogger(__name__)

SAVE_DELAY = 1.0  # seconds between a worker's report of something new and its writing to disk
MOST_WORKERS = 1024  # as of --workers


class _Label(logging.LoggerAdapter[logging.Logger]):
    """Names the tenant in each line."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self.extra is not None
        return f"tenant={self.extra['tenant']} {msg}", kwargs


@dataclass(frozen=True)
class Roll:
    """
    What became of the last roll.

    Attributes:
        generation: that was to serve.
        outcome: ``running``, ``done``, ``failed`` or ``abandoned`` for a newer one.
        why: it failed; the first line.
    """

    generation: int
    outcome: str
    why: str = ""


class Tier:
    """
    One tenant. For the event loop's thread only.

    Attributes:
        settings: of the generation that serves.
        is_alone: no other tenant runs.
        too_slow: warm-up requests that workers have waited for in vain; no other worker is to.
        members: its workers, of all generations.
        boot, mold_report: how the current generation came up.
        is_up: it was ready, since it was started or started over.
        ready_after_s: from the command's start to its first ready worker.
        restarts: workers that were replaced after they died.
        seeding: what it publishes.
        shadowing: its shadow traffic.
        last_roll: None when there was none.
        given_up: why nothing of it runs; empty while it does.
        stopping: it drains, or has ended.
        shutdown_failed: the app's own shut-down did, in a worker, when the server stopped.
    """

    def __init__(
        self,
        settings: Settings,
        launcher: Launcher,
        *,
        is_alone: bool,
        on_given_up: Callable[[Tier, ExitCode], None],
        on_ready: Callable[[], None],
    ) -> None:
        """
        Args:
            is_alone: no other tenant runs; log lines need not name it then.
            on_given_up: called when the tenant cannot be served and nothing of it serves any more.
            on_ready: called when its first worker accepts, and when a roll has ended.
        """
        self.settings = settings
        self.is_alone = is_alone
        self.log: Log = logger
        if not is_alone:
            self.log = _Label(logger, {"tenant": settings.tenant_name.replace("%", "%%")})
        self.learning = Learning(boot_settings(settings))
        self.profiles = ProfileWatch(launcher.spawn_task)
        self.current: Generation | None = None
        self.rolling: Generation | None = None
        self.boot: BootReport | None = None
        self.mold_report: BootReport | None = None
        self.ready_after_s: float | None = None
        self.restarts = 0
        self.too_slow: list[str] = []
        self.last_roll: Roll | None = None
        self.given_up = ""
        self.stopping = False
        self.shutdown_failed = False
        self._launcher = launcher
        self._on_given_up = on_given_up
        self._on_ready = on_ready
        self._sockets: TenantSockets | None = None
        self._questions = Questions()
        self.coverage = Coverage()
        self.seeding = Seeding(self, launcher)
        self.shadowing = Shadowing(self._wakeful)
        self._generations: list[Generation] = []
        self._number = 0
        self._size = settings.tenant.workers
        self._slot_restarts: dict[int, Restarts] = {}
        self._mold_restarts = Restarts()
        self._pausing: set[int] = set()  # slots whose next worker waits for its time
        self._renewals = Renewals(launcher.spawn_task, self._reconcile)
        self._save_planned = False
        self._own_refusals: list[Refusal] = []
        self._last_complaint = ""
        self.is_up = False
        self._boot_began = launcher.started
        self._oom_kills = oom_kills()

    # ------------------------------------------------------------------ begin and end

    def open(self) -> None:
        """
        Bind the addresses.

        Raises:
            AddressInUseError, ConfigError: one cannot be bound.
        """
        self._sockets = TenantSockets(self.settings)

    def start(self) -> None:
        """Boot the first generation."""
        self._begin(cold=False)

    def stop(self, *, at_once: bool = False) -> float:
        """
        Drain everything; return how many seconds that may take.

        With ``--drain-delay`` it is not ready from now on and serves on for that long. *at_once* waits for no request.
        """
        tenant = self.settings.tenant
        delay = 0.0 if at_once or self.stopping or not self.accepting else tenant.drain_delay
        self.stopping = True
        self._abandon_roll("the server stops")
        self.profiles.end()
        self.seeding.end()
        self.shadowing.end()
        if delay:
            self.log.info("not ready from now on; draining in %g s", delay)
            for member in self.accepting:
                member.send(LameDuck())
            asyncio.get_running_loop().call_later(delay, self._wind_down)
        else:
            self._wind_down(KILL_GRACE / 2 if at_once else None)
        return delay + KILL_GRACE + (0.0 if at_once else tenant.graceful_timeout)

    def close(self) -> None:
        """Close the sockets; the last thing to do."""
        self._close_sockets()
        self.profiles.leave()

    def _wind_down(self, limit_s: float | None = None) -> None:
        if self._sockets is not None and not self.accepting:
            self._close_sockets()
        elif self._sockets is not None:
            self._sockets.take_no_more()
            # Ours stay open while workers take the connections that wait, or the last one to close would reset them;
            # not longer, since what connects then would never be accepted.
            asyncio.get_running_loop().call_later(KILL_GRACE, self._close, self._sockets)
        for generation in self._generations:
            generation.is_over = True
            generation.end_mold()
            for member in list(generation.members):
                generation.drain(member, limit_s, is_stop=True)

    def _close_sockets(self) -> None:
        if self._sockets is not None:
            self._close(self._sockets)
            self._sockets = None

    def _close(self, sockets: TenantSockets) -> None:
        for path in sockets.close():
            self.log.warning("cannot remove %s", path)

    def _give_up(self, code: ExitCode, text: str) -> None:
        if self.stopping:
            return
        self.log.error("%s", text)
        self.given_up = text.partition("\n")[0]
        self.stopping = True
        self._wind_down()
        self._on_given_up(self, code)

    def hang_up(self, pid: int) -> None:
        """A process has ended; see `Generation.hang_up`."""
        for generation in self._generations:
            generation.hang_up(pid)

    def reopen_logs(self) -> None:
        for generation in self._generations:
            generation.reopen_logs()

    # ------------------------------------------------------------------ generations

    def _begin(self, *, cold: bool) -> None:
        """Start a generation that becomes the current one at once; there is none better."""
        began = time.monotonic() if self.is_up else self._boot_began
        generation = self.current = self._new_generation(self.settings, self.learning, began, cold=cold)
        try:
            generation.start()
        except OSError as error:
            generation.discard()
            self._start_mold_later(f"cannot start a process: {error}")

    def _new_generation(self, settings: Settings, learning: Learning, began: float, *, cold: bool) -> Generation:
        self._number += 1
        if _warmup_of(settings) != _warmup_of(self.settings):
            self.too_slow = []
        self.profiles.begin(boot_settings(settings))
        self._generations = [each for each in self._generations if each.members or not each.is_over]
        generation = Generation(self._number, settings, learning, self._launcher, self, began=began, cold=cold)
        self._generations.append(generation)
        return generation

    def roll(self, settings: Settings) -> None:
        """
        Replace all workers by those of a new generation, with new *settings*; the old ones serve until it is ready.

        A roll that is under way is abandoned. Where nothing serves, it is a start.
        """
        if self.stopping and not self.given_up:
            return
        self._abandon_roll("a newer one begins")
        self._own_refusals.clear()
        if not self.accepting:
            self._start_over(settings)
            return
        learning = self.learning
        if learning.settings != boot_settings(settings):
            learning = Learning(boot_settings(settings))
        generation = self._new_generation(settings, learning, time.monotonic(), cold=False)
        self._roll_to(generation)

    def _roll_to(self, generation: Generation) -> None:
        self.log.info(
            "%s boots %s; what is there serves on until it is ready", generation.label, generation.settings.target
        )
        self.rolling = generation
        self.last_roll = Roll(generation.number, "running")
        try:
            generation.start()
        except OSError as error:
            self.boot_failed(generation, BootFailed(exit_code=ExitCode.APP, text=f"cannot start a process: {error}"))

    def _start_over(self, settings: Settings) -> None:
        for generation in self._generations:
            if not generation.is_over:
                generation.discard()
        self.settings = settings
        self.too_slow = []
        self.learning = Learning(boot_settings(settings))
        self._forget_failures()
        if self.given_up:
            self.is_up = self.stopping = False
            self.given_up = ""
        self._boot_began = time.monotonic()
        if self._sockets is None:
            try:
                self.open()
            except JumpstartError as error:
                self._give_up(exit_code(error), str(error))
                return
        self._begin(cold=False)

    def _forget_failures(self) -> None:
        self._size = self.settings.tenant.workers
        self._slot_restarts.clear()
        self._mold_restarts = Restarts()
        self._renewals.clear()
        self._pausing.clear()
        self._last_complaint = ""

    def _abandon_roll(self, why: str) -> None:
        if self.rolling is not None:
            self.log.info("the roll to %s is abandoned: %s", self.rolling.label, why)
            self.last_roll = Roll(self.rolling.number, "abandoned", why)
            self.rolling.discard()
            self.profiles.end(self.rolling.number)
            self.rolling = None

    def _switch(self, new: Generation) -> None:
        """All workers of the next generation are ready: they accept, and the others drain."""
        old = [each for each in self._generations if each is not new and not each.is_over]
        self.current, self.rolling = new, None
        self.settings = new.settings
        self.learning = new.learning
        if new.cold:
            self.learning.forget()
        self._forget_failures()
        self.boot, self.mold_report = new.boot, new.mold_report
        for member in list(new.members):
            self._accept(new, member)
        self.last_roll = Roll(new.number, "done")
        self.log.info(
            "%s serves, ready in %.2f s · %d × %s, %s · %s; what was there before drains",
            *(new.label, time.monotonic() - new.began, *self._headline(new)),
        )
        for generation in old:
            generation.retire()
        self._on_ready()

    def mold_ready(self, generation: Generation) -> None:
        """As of `Owner`."""
        if generation is self.rolling:
            for slot in range(generation.settings.tenant.workers):
                try:
                    generation.start_worker(slot)
                except OSError as error:
                    text = f"cannot start worker {slot}: {error}"
                    self.boot_failed(generation, BootFailed(exit_code=ExitCode.APP, text=text))
                    return
        elif generation is self.current:
            self._mold_restarts = Restarts()
            self.mold_report = generation.mold_report
            self._reconcile()

    def mold_gone(self, generation: Generation, mold: Mold, status: str) -> None:
        """As of `Owner`."""
        if generation is self.rolling:
            self.boot_failed(generation, died(f"the mold of {generation.label} ended ({status}) before all was ready"))
        elif generation is self.current and not self.stopping:
            served = time.monotonic() - generation.began
            self._mold_restarts, delay = self._mold_restarts.after_exit(served)
            self.log.warning(
                "mold pid=%d gen=%d is gone (%s); its workers serve on, another starts in %.1f s",
                *(mold.pid, generation.number, status, delay),
            )
            self.profiles.failed(generation.number, cold=generation.cold)
            self._launcher.spawn_task(self._begin_later(delay))

    def _start_mold_later(self, why: str) -> None:
        self._mold_restarts, delay = self._mold_restarts.after_exit(None)
        if not self.accepting and self._is_hopeless(self._mold_restarts):
            self._end_attempts(self._mold_restarts)
            return
        self.log.error("%s; again in %.1f s", why, delay)
        self._launcher.spawn_task(self._begin_later(delay))

    async def _begin_later(self, delay: float) -> None:
        current = self.current
        await asyncio.sleep(delay)
        if not self.stopping and self.current is current:
            self._begin(cold=False)

    def boot_failed(self, generation: Generation, failure: BootFailed, member: Member | None = None) -> None:
        """As of `Owner`."""
        if generation.is_over or (self.stopping and generation is not self.rolling):
            return
        in_roll = generation is self.rolling
        may_take_another = False
        if failure.may_be_state:
            may_take_another = self.profiles.failed(generation.number, cold=generation.cold).may_take_another
        verdict = after_boot_failure(
            may_try_cold=failure.may_be_state
            and not generation.cold
            and (may_take_another or not generation.settings.profile.require_warm)
            and generation.learning.has_state(),
            in_roll=in_roll,
            was_ready=self.is_up,
        )
        if verdict is Verdict.COLD:
            self._try_again(generation, failure.text, cold=not may_take_another)
        elif verdict is Verdict.KEEP:
            self.log.error(
                "the roll to %s has failed, the server goes on as before: %s", generation.label, failure.text
            )
            self.last_roll = Roll(generation.number, "failed", failure.text.partition("\n")[0])
            self.rolling = None
            generation.discard()
            self._reconcile()
            self._on_ready()
        elif verdict is Verdict.GIVE_UP:
            self._give_up(ExitCode(failure.exit_code), failure.text)
        else:
            text = failure.text
            known, self._last_complaint = self._last_complaint == text, text
            self.log.error("%s", text.partition("\n")[0] if known else text)
            if member is None:  # of a worker the end is still to come
                generation.is_over = True
                self._start_mold_later("there is no mold")

    def _try_again(self, generation: Generation, text: str, *, cold: bool) -> None:
        """Boot once more, with another profile or without warm state: nothing warm may keep an app from booting."""
        # The first line only: an app that fails cold as well says so with its traceback once, then.
        how = "once more cold" if cold else "with another profile"
        self.log.warning("booting warm failed, trying %s: %s", how, text.partition("\n")[0])
        self._own_refusals.append(Refusal("warm state", Reason.FAILED, f"the boot with it failed: {text}"))
        generation.discard()
        if generation is self.rolling:
            self._roll_to(self._new_generation(generation.settings, generation.learning, generation.began, cold=cold))
        else:
            self._begin(cold=cold)

    def _leave_profile(self, generation: Generation) -> None:
        """A worker died. Where its generation was not healthy for a while before, no other is to have its profile."""
        failure = self.profiles.failed(generation.number, cold=generation.cold)
        if failure.had_profile and generation is self.current:
            how = "another profile" if failure.may_take_another else "none"
            self.log.warning("%s is young and had loaded a profile; the next one loads %s", generation.label, how)
            generation.is_over = True
            generation.end_mold()
            self._begin(cold=False)

    # ------------------------------------------------------------------ workers: as many as there should be

    def _reconcile(self) -> None:
        """Start what is missing, drain what is too much, and replace the next one that is to be renewed."""
        generation = self.current
        if self.stopping or generation is None or not generation.can_start:
            return
        for slot in range(self._size):
            if slot not in self._pausing and not self._holders(slot):
                self._start_worker(generation, slot)
        for each in self._generations:
            for member in [] if each.is_over or each is self.rolling else list(each.members):
                if member.worker.slot >= self._size:
                    each.drain(member, patience_s=PATIENCE)
        following = self._renewals.next(self.members) if self.rolling is None else None
        if following is not None:
            member, reason = following
            self.log.info("%s is renewed: %s", member.name, reason)
            self._start_worker(generation, member.worker.slot, member)

    def _holders(self, slot: int) -> list[Member]:
        """The workers of a slot that serve or are to; but for those of a roll, which have their time yet to come."""
        return [
            member
            for generation in self._generations
            if not generation.is_over and generation is not self.rolling
            for member in generation.members
            if member.worker.slot == slot and member.worker.state is not State.DRAINING
        ]

    def _start_worker(self, generation: Generation, slot: int, replaces: Member | None = None) -> None:
        try:
            generation.start_worker(slot, replaces)
        except OSError as error:  # no descriptor or process to be had; those that serve go on
            self._slot_restarts[slot], delay = self._restarts_of(slot).after_exit(None)
            self.log.error("cannot start worker=%d: %s; again in %.1f s", slot, error, delay)
            self._start_later(slot, delay)

    def _start_later(self, slot: int, delay: float) -> None:
        self._pausing.add(slot)
        self._launcher.spawn_task(self._start_after(slot, delay))

    async def _start_after(self, slot: int, delay: float) -> None:
        await asyncio.sleep(delay)
        self._pausing.discard(slot)
        self._reconcile()

    def _restarts_of(self, slot: int) -> Restarts:
        return self._slot_restarts.get(slot, Restarts())

    def may_replay(self, slot: int) -> bool:
        """As of `Owner`. Requests that killed two workers in a row before they were ready are not tried again."""
        return self._restarts_of(slot).failures < 2

    def resize(self, change: int) -> None:
        """Have *change* workers more, or less; at least one."""
        size = min(max(1, self._size + change), MOST_WORKERS)
        if self.stopping or size == self._size:
            self.log.warning("%s already; it stays so", count(self._size, "worker"))
            return
        self.log.info("%s from now on", count(size, "worker"))
        self._size = size
        self._reconcile()

    # ------------------------------------------------------------------ renewal of single workers

    def renew(self, member: Member, reason: str) -> None:
        """
        Replace a worker that serves, the new one ready first.

        One at a time; one that was replaced young is followed by a pause. Asking again changes nothing.
        """
        if not self.stopping and self._renewals.ask(member, reason):
            self._reconcile()

    def _renewed(self, new: Member, old: Member) -> None:
        """The new worker accepts; the old one may go."""
        self._renewals.done(old)
        generation = self._generation_of(old)
        if generation is not None and old.is_accepting:
            generation.drain(old, KILL_GRACE if old.is_hung else None, PATIENCE)

    # ------------------------------------------------------------------ what workers say

    def worker_said(self, generation: Generation, member: Member, message: Message) -> None:
        """As of `Owner`."""
        worker = member.worker
        if isinstance(message, WorkerReady):
            self._worker_ready(generation, member, message)
        elif isinstance(message, StoppedAccepting):
            member.stopped_accepting = True
            if self.stopping and all(
                each.stopped_accepting for each in self.members if each.worker.state is State.DRAINING
            ):
                self._close_sockets()
        elif isinstance(message, Stats):
            before = member.stats.observed if member.stats is not None else None
            self.coverage.add(before, message.observed, time.monotonic())
            member.stats = message
            member.answer(message.number, message)
        elif isinstance(message, Captured):
            member.answer(message.number, message)
        elif isinstance(message, Learnt):
            generation.learning.learnt((worker.generation, worker.slot, worker.pid or 0), message.sections)
            self._save_soon(generation.learning)
        elif isinstance(message, Beat):
            member.pulse.beat(time.monotonic(), message)
            member.memory.add(message.in_flight, message.rss)
            member.is_hung = False  # it lives, and may drain in order
        elif isinstance(message, Renew):
            self.renew(member, message.reason)
        elif isinstance(message, MetCold):
            self.shadowing.met(member, message, time.monotonic())
        elif isinstance(message, Sampled):
            self.shadowing.sampled(member, message)
        elif isinstance(message, ShutdownFailed):
            self._shutdown_failed(member, message)

    def _worker_ready(self, generation: Generation, member: Member, message: WorkerReady) -> None:
        generation.advance(member, Event.READY)
        member.report = message.report
        generation.learning.dropped(message.report)
        generation.boot = generation.boot or message.report
        if message.report.warmup is not None:
            self.too_slow = list(dict.fromkeys([*self.too_slow, *message.report.warmup.too_slow]))
        if member.worker.state is not State.READY:
            return  # it drains
        if generation is not self.rolling:
            self._accept(generation, member)
        elif len([each for each in generation.members if each.worker.state is State.READY]) == (
            generation.settings.tenant.workers
        ):
            self._switch(generation)

    def _accept(self, generation: Generation, member: Member) -> None:
        if not self._listen():
            return
        member.send(Accept())
        generation.advance(member, Event.ACCEPT)
        member.pulse = Pulse(generation.settings.tenant.worker_healthcheck_timeout, time.monotonic())
        self.profiles.accepts(generation.number)
        self.shadowing.accepts(member, generation.settings.tenant)
        if not self.is_up:
            self._first_ready(generation)
        self.log.info("%s ready", member.name)
        if member.replaces is not None:
            self._renewed(member, member.replaces)
            member.replaces = None
        self._reconcile()

    def _first_ready(self, generation: Generation) -> None:
        self.is_up = True
        if generation.cold:
            generation.learning.forget()  # with it the boot failed, without it went well
        self.boot = generation.boot
        assert self.boot is not None
        self.ready_after_s = time.monotonic() - generation.began
        for refusal in [*self._own_refusals, *(self.boot.refusals if self.mold_report is None else ())]:
            self.log.warning("not used: %s", refusal)
        for url in self.urls():
            self.log.info("Listening at: %s (%d)", url, os.getpid())
        self.log.info("ready in %.2f s · %d × %s, %s · %s", self.ready_after_s, *self._headline(generation))
        self._on_ready()

    def _headline(self, generation: Generation) -> tuple[int, str, str, str]:
        assert generation.boot is not None
        method = "forked" if generation.start_method == "fork" else "spawned"
        return self._size, generation.boot.interface.upper(), method, generation.boot.summary()

    def _listen(self) -> bool:
        """Open the port, once, when the first worker is ready."""
        assert self._sockets is not None, "nothing was started without them"
        try:
            self._sockets.listen(self.settings.tenant.backlog)
        except JumpstartError as error:
            self._give_up(exit_code(error), str(error))
            return False
        return True

    def _shutdown_failed(self, member: Member, message: ShutdownFailed) -> None:
        """The app's own shut-down failed: said once in full, and in the exit code when the server stops."""
        known = self.shutdown_failed
        self.log.error("%s: %s", member.name, message.text.partition("\n")[0] if known else message.text)
        self.shutdown_failed = known or self.stopping

    def _save_soon(self, learning: Learning) -> None:
        """Write the warm-start cache a moment from now, once for all that arrives until then."""
        if not self._save_planned and not self.stopping:
            self._save_planned = True
            self._launcher.spawn_task(self._save_later(learning))

    async def _save_later(self, learning: Learning) -> None:
        await asyncio.sleep(SAVE_DELAY)
        self._save_planned = False
        await learning.save()

    # ------------------------------------------------------------------ the end of a worker

    def worker_gone(self, generation: Generation, member: Member, before: Worker, status: str) -> None:
        """As of `Owner`."""
        self._keep_books(generation, member, before)
        self._launcher.gone.set()
        if self.stopping or generation.is_discarded:
            return
        name = f"worker={before.slot} gen={before.generation} pid={before.pid}"
        if before.state is State.DRAINING:
            if member.is_killed:
                self.log.info("%s is gone (%s)", name, status)
            elif member.has_served:
                self.log.info("%s has drained (%s)", name, status)
            else:
                self.log.info("%s has ended before it served (%s)", name, status)
            self._reconcile()
        elif generation is self.rolling:
            if not member.complaint:
                text = f"worker {before.slot} of {generation.label} ended ({status}) before all were ready"
                self.boot_failed(generation, died(text), member)
        elif not self.is_up:
            if not member.complaint:
                self.boot_failed(generation, died(f"worker {before.slot} ended ({status}) before it was ready"), member)
        elif member.replaces is not None and member.replaces.is_accepting:
            self.log.error(
                "%s, which was to replace pid=%s, is gone (%s); that one serves on, another starts in %.1f s",
                *(name, member.replaces.worker.pid, member.complaint.partition("\n")[0] or status),
                self._renewals.failed(),
            )
        else:
            self._leave_profile(generation)
            self._replace(member, before, name, status)

    def _keep_books(self, generation: Generation, member: Member, before: Worker) -> None:
        self._questions.gone(member)
        self.shadowing.gone(member)
        generation.learning.gone((before.generation, before.slot, before.pid or 0))
        self._renewals.gone(member)
        if generation.is_over and not generation.members and generation is not self.current:
            self._generations.remove(generation)

    def _replace(self, member: Member, before: Worker, name: str, status: str) -> None:
        """A worker has died by itself: another takes its place, in time."""
        now = time.monotonic()
        served = now - before.since if before.state is State.SERVING else None
        restarts, delay = self._restarts_of(before.slot).after_exit(served)
        self._slot_restarts[before.slot] = restarts
        if not member.complaint:
            self._last_complaint = f"the last one ended with {status}"
        if self._is_hopeless(restarts):
            self.log.warning("%s is gone (%s)%s", name, status, self._last_seen(member))
            self._end_attempts(restarts)
            return
        if before.slot < self._size:
            self.restarts += 1
            then = f"; another starts in {delay:.1f} s" if delay else "; another starts"
        else:
            then = ""
        self.log.warning("%s is gone (%s)%s%s", name, status, then, self._last_seen(member))
        if delay:
            self._start_later(before.slot, delay)
        else:
            self._reconcile()

    def _last_seen(self, member: Member) -> str:
        kills = oom_kills()
        since = kills - self._oom_kills if kills is not None and self._oom_kills is not None else 0
        self._oom_kills = kills
        return last_seen(member.pulse.last, member.pulse.silent_s(time.monotonic()), since)

    async def watch(self) -> None:
        """Look for workers that hang, until cancelled."""
        await Watchman(lambda: self.accepting, hung=self._hung, log=self.log).watch()

    def _hung(self, worker: Watched, reason: str) -> None:
        assert isinstance(worker, Member)
        worker.is_hung = True
        self.renew(worker, reason)

    def _is_hopeless(self, restarts: Restarts) -> bool:
        now = time.monotonic()
        served = [now - member.worker.since for member in self.accepting]
        return is_hopeless(restarts, self.settings.tenant.crash_limit, served)

    def _end_attempts(self, restarts: Restarts) -> None:
        text = (
            f"given up after {restarts.failures} failures in a row (--crash-limit); SIGHUP tries again\n"
            f"{self._last_complaint}"
        )
        self._give_up(ExitCode.APP, text.rstrip())

    # ------------------------------------------------------------------ what the admin pages ask

    @property
    def sockets(self) -> list[socket.socket]:
        return self._sockets.all if self._sockets is not None else []

    @property
    def members(self) -> list[Member]:
        return [member for generation in self._generations for member in generation.members]

    @property
    def accepting(self) -> list[Member]:
        return [member for member in self.members if member.is_accepting]

    @property
    def recent(self) -> list[WarmRequest]:
        """As of `Owner`."""
        return self.shadowing.recent(time.monotonic())

    def _wakeful(self) -> list[Member]:
        """The workers that serve or are about to."""
        return [member for member in self.members if member.worker.state not in (State.DRAINING, State.GONE)]

    def _generation_of(self, member: Member) -> Generation | None:
        return next((each for each in self._generations if member in each.members), None)

    @property
    def generation(self) -> int:
        """Number of the current one."""
        return self.current.number if self.current is not None else 0

    @property
    def mold(self) -> Mold | None:
        return self.current.mold if self.current is not None else None

    @property
    def start_method(self) -> str:
        """``fork`` or ``spawn``; empty until that is known."""
        methods = [each.start_method for each in self._generations if each is not self.rolling and each.start_method]
        return methods[-1] if methods else ""

    def urls(self) -> list[str]:
        """The addresses, with real ports."""
        return self._sockets.urls() if self._sockets is not None else []

    def waiting_for(self) -> str:
        """Why nothing is accepted yet, in words."""
        if self.given_up:
            return f"given up: {self.given_up}"
        workers = sorted((member.worker for member in self.members), key=lambda worker: worker.slot)
        states = ", ".join(f"worker {worker.slot} is {worker.state}" for worker in workers)
        return states or "the app is being imported"

    async def observed(self) -> ObserverSnapshot:
        """Request statistics of all workers, of those that are gone too."""
        return await self._questions.observed(self.accepting, self.members)

    async def capture(self) -> Capture:
        """What the workers and the warm-start cache know now, for a profile that is shipped."""
        report = self.mold_report or self.boot
        lineage = report.lineage if report is not None else None
        return await self._questions.capture(self.learning, lineage, self.accepting, self.members)

    def spans(self) -> list[Span]:
        """All spans of the boot, the mold's and the first worker's."""
        seen: dict[tuple[str, str, float], Span] = {}
        for report in self._reports():
            for span in report.spans:
                seen.setdefault((span.name, span.process, span.start_s), span)
        return sorted(seen.values(), key=lambda span: span.start_s)

    def refusals(self) -> list[Refusal]:
        return list(
            dict.fromkeys([*self._own_refusals, *(each for report in self._reports() for each in report.refusals)])
        )

    def _reports(self) -> list[BootReport]:
        return [report for report in (self.mold_report, self.boot) if report is not None]


def _warmup_of(settings: Settings) -> tuple[str, float]:
    return settings.tenant.warmup, settings.tenant.warmup_budget


def last_seen(beat: Beat | None, ago_s: float, oom_kills: int) -> str:
    """
    What is known of a worker that died, and may say why; for the end of a log line. Pure.

    Args:
        beat: its last sign of life.
        ago_s: how long before, in seconds; what it says of requests is as old.
        oom_kills: how many processes of our control group the kernel has killed since we last looked.
    """
    seen = ""
    if beat is not None:
        resident = f"{show_size(beat.rss)} resident, " if beat.rss else ""
        seen = f" · seen last {ago_s:.1f} s before with {resident}{count(beat.in_flight, 'request')} in flight"
    if oom_kills > 0:
        seen += f" · the kernel has killed {count(oom_kills, 'process', 'es')} of this control group for want of memory"
    return seen


def count(number: int, what: str, plural: str = "s") -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{plural}"
