"""
A generation: one mold with the workers that are forked from it; or, where they may not be forked, the spawned workers.

It starts its processes, reads what they say, keeps their deadlines and collects their ends. What follows from that is
decided by its owner, the tenant (`tier.py`). Once discarded or ended it reports nothing of its mold any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from dataclasses import replace
from typing import Protocol

from jumpstart.report import BootReport
from jumpstart_server import lifecycle
from jumpstart_server.exits import ExitCode
from jumpstart_server.learning import Learning
from jumpstart_server.lifecycle import Event, LifecycleError, State, Worker
from jumpstart_server.messages import (
    BootFailed,
    Channel,
    ChannelClosedError,
    Drain,
    Fork,
    Hello,
    Message,
    MoldReady,
    Reopen,
    Start,
    WorkerReady,
)
from jumpstart_server.processes import Launcher, Member, Mold
from jumpstart_server.profile_watch import ProfileWatch
from jumpstart_server.settings import Settings
from jumpstart_warmup.corpus import WarmRequest

FORK_PATIENCE = 10.0  # seconds that a mold may take to fork and the worker to say hello
KILL_GRACE = 2.0  # seconds beyond graceful_timeout that a draining worker has before SIGKILL
IMPORT_NOTICE = 5.0  # seconds after which the log says that the app is still being imported
GROUP_PATIENCE = 0.2  # seconds in which a signal that ended a process may be found to be ours as well
PATIENCE = 2.0  # seconds that an idle connection may wait for its last request when others serve on

FOR_THE_GROUP = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM")  # as `Children.status_of` says it
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Owner(Protocol):
    """The tenant, as its generations see it."""

    log: Log

    @property
    def sockets(self) -> list[socket.socket]: ...

    @property
    def profiles(self) -> ProfileWatch: ...

    @property
    def is_alone(self) -> bool:
        """Whether no other tenant runs."""

    @property
    def too_slow(self) -> list[str]:
        """Warm-up requests that earlier workers have waited for in vain."""

    @property
    def recent(self) -> list[WarmRequest]:
        """Requests that met cold work in other workers lately, for new ones."""

    def may_replay(self, slot: int) -> bool:
        """Whether the next worker of this slot runs warm-up requests."""

    def mold_ready(self, generation: Generation) -> None:
        """Workers can be started."""

    def mold_gone(self, generation: Generation, mold: Mold, status: str) -> None:
        """The mold has ended although it was ready; no more workers can be started from it."""

    def boot_failed(self, generation: Generation, failure: BootFailed, member: Member | None = None) -> None:
        """A worker, or the mold if it is none, will not come up; it ends, or has ended."""

    def worker_said(self, generation: Generation, member: Member, message: Message) -> None:
        """Anything but `Hello` and `BootFailed`."""

    def worker_gone(self, generation: Generation, member: Member, before: Worker, status: str) -> None:
        """A worker has ended; *before* is what it was until then, *status* its exit in words."""


class Generation:
    """
    One generation of a tenant. For the event loop's thread only.

    Attributes:
        cold: it boots without warm state, because the boot with it failed.
        members: its workers that have not been collected.
        mold: None before there is one and after it has ended.
        start_method: ``fork`` or ``spawn``; empty until that is known.
        mold_report: of its mold; None where workers are spawned without one.
        boot: of its first worker that became ready.
        is_over: nothing is started in it any more: it was discarded, or drains.
        is_discarded: it was killed; its ends mean nothing.
    """

    def __init__(
        self,
        number: int,
        settings: Settings,
        learning: Learning,
        launcher: Launcher,
        owner: Owner,
        *,
        began: float,
        cold: bool = False,
    ) -> None:
        """Args: began: when its boot did, on the monotonic clock: what the times in its reports count from."""
        self.number = number
        self.settings = settings
        self.learning = learning
        self.cold = cold
        self.members: list[Member] = []
        self.mold: Mold | None = None
        self.start_method = ""
        self.mold_report: BootReport | None = None
        self.boot: BootReport | None = None
        self.is_over = False
        self.is_discarded = False
        self.began = began
        self._launcher = launcher
        self._children = launcher.children
        self._owner = owner

    # ------------------------------------------------------------------ begin and end

    def start(self) -> None:
        """
        Start the mold; or none, where workers are never forked.

        Raises:
            OSError: there is no process or descriptor to be had.
        """
        if self.settings.tenant.fork == "never":
            self.start_method = "spawn"
            self._owner.mold_ready(self)
            return
        interpreter = self._launcher.launch(self._start_message("mold", 0), self._owner.sockets)
        self._launcher.spawn_task(self._follow_mold(interpreter.pid, interpreter.control))

    def discard(self) -> None:
        """Kill everything of it; it is of no use, and what comes of it now means nothing."""
        self.is_over = self.is_discarded = True
        self.end_mold()
        for member in self.members:
            self._children.kill(member.worker.pid)
            member.hang_up()

    def retire(self) -> None:
        """Let its workers finish their requests and end."""
        self.is_over = True
        self.end_mold()
        for member in list(self.members):
            self.drain(member, patience_s=PATIENCE)

    def end_mold(self) -> None:
        """It holds nothing that is worth a goodbye, and may be stuck in an import."""
        if self.mold is not None:
            self._children.kill(self.mold.pid)

    def drain(
        self, member: Member, limit_s: float | None = None, patience_s: float = 0.0, *, is_stop: bool = False
    ) -> None:
        """
        Ask a worker to finish its requests and to end, and kill it when it takes too long.

        Args:
            patience_s: as of `Drain`.
            limit_s: how long it may take; by default as ``--graceful-timeout`` says, and a moment more.
            is_stop: as of `Drain`; a worker that drains already hears of it.
        """
        loop = asyncio.get_running_loop()
        if member.worker.state is State.DRAINING:
            if is_stop:
                member.send(Drain(patience_s))
            if limit_s is not None:
                loop.call_later(limit_s, self._kill_late, member, limit_s)
            return
        if member.worker.state is State.STARTING and member.worker.pid is not None:
            member.is_killed = True
            self._children.kill(member.worker.pid)  # spawned, and still at its import, as a mold may be
        if limit_s is None:
            # One that does not serve may end its lifespan in order, but has no client to wait for.
            limit_s = KILL_GRACE + (self.settings.tenant.graceful_timeout if member.is_accepting else 0.0)
        member.has_served = member.worker.state is State.SERVING
        self.advance(member, Event.DRAIN_ASKED)
        member.send(Drain(patience_s, is_stop))
        loop.call_later(limit_s, self._kill_late, member, limit_s)

    def _kill_late(self, member: Member, limit_s: float) -> None:
        if member.worker.pid in self._children.ours and member in self.members:
            if member.has_served and not self.is_discarded:
                self._owner.log.error(
                    "%s is not gone %.0f s after it was told to drain, and is killed", member.name, limit_s
                )
            elif not self.is_discarded:
                self._owner.log.info("%s is not wanted any more; it had not served yet, and is killed", member.name)
            member.is_killed = True
            self._children.kill(member.worker.pid)

    def reopen_logs(self) -> None:
        """In all processes; one that boots does so when it is up."""
        if self.mold is not None:
            try:
                self.mold.reopen()
            except OSError as error:
                self._owner.log.warning("mold pid=%d does not open its log files anew: %s", self.mold.pid, error)
        for member in self.members:
            member.send(Reopen())

    def hang_up(self, pid: int) -> None:
        """
        Close the channel of a process that has ended.

        Its last messages were read meanwhile. A child of the app may have inherited its end and would keep it open for
        ever, and with a mold's end the orders in it, with the ends of workers that never came to be.
        """
        mold = self.mold
        if mold is not None and mold.pid == pid:
            mold.channel.close()
        for member in self.members:
            unborn = member.worker.pid is None and (mold is None or mold.pid == pid)
            if member.worker.pid == pid or unborn:
                member.hang_up()

    # ------------------------------------------------------------------ the mold

    @property
    def can_start(self) -> bool:
        """Whether workers can be started in it now."""
        if self.is_over:
            return False
        return self.start_method == "spawn" or (self.mold is not None and self.mold.is_ready)

    def _start_message(self, role: str, slot: int) -> Start:
        return Start(
            role=role,
            settings=self.settings,
            started=self.began,
            generation=self.number,
            slot=slot,
            supervisor_pid=os.getpid(),
            listeners=len(self._owner.sockets),
            cold=self.cold,
            replay=self._owner.may_replay(slot),
            too_slow=self._owner.too_slow,
            recent=self._owner.recent,
            server=self._owner.profiles.server,
            is_alone=self._owner.is_alone,
        )

    async def _follow_mold(self, pid: int, control: socket.socket) -> None:
        channel = await Channel.open(control)
        mold = self.mold = Mold(pid, self.number, control, channel)
        limit = self.settings.tenant.startup_timeout
        failed = False
        if self.is_over:
            self.end_mold()  # the end came before there was a mold
        notice = self._notice_import()
        try:
            async with asyncio.timeout(limit or None):
                message = await channel.receive()
            notice.cancel()
            if isinstance(message, BootFailed):
                failed = True
                self._report(message)
            elif isinstance(message, MoldReady):
                self._mold_ready(mold, message)
            while True:
                await channel.receive()  # a mold says no more; this ends when it does
        except TimeoutError:
            failed = True
            self._children.kill(pid)
            self._report(died(f"the app was not imported within --startup-timeout {limit:g} s"))
        except ChannelClosedError:
            pass
        except Exception:
            self._owner.log.exception("mold pid=%d is killed for what it said", pid)
            self._children.kill(pid)
        finally:
            notice.cancel()
            channel.close()
        status = await self._children.status_of(pid)
        self.mold = None
        await _wait_for_same_signal(status)
        if failed or self.is_over or self.start_method == "spawn":
            return
        if mold.is_ready:
            self._owner.mold_gone(self, mold, status)
        else:
            self._report(died(f"the mold ended ({status}) while it imported the app"))

    def _notice_import(self) -> asyncio.TimerHandle:
        """Have the log say that an import takes long, unless that is cancelled before; else it would seem to hang."""
        limit = self.settings.tenant.startup_timeout
        after = min(IMPORT_NOTICE, limit / 2) if limit else IMPORT_NOTICE

        def say() -> None:
            if not self.is_over:
                until = f"; --startup-timeout {limit:g} s ends it" if limit else ""
                self._owner.log.info("%s: the app is still being imported after %g s%s", self.label, after, until)

        return asyncio.get_running_loop().call_later(after, say)

    def _mold_ready(self, mold: Mold, message: MoldReady) -> None:
        report = self.mold_report = message.report
        if self.is_over:
            return
        log = self._owner.log
        for refusal in report.refusals:
            log.warning("not used: %s", refusal)
        for name, why in report.recorders_off.items():
            log.warning("recorder %s is switched off: %s", name, why)
        if report.start_method == "fork":
            mold.is_ready = True
            self.start_method = "fork"
        else:
            log.info("workers are spawned, not forked: %s", "; ".join(report.start_reasons))
            self.start_method = "spawn"
        self._owner.mold_ready(self)

    def _report(self, failure: BootFailed, member: Member | None = None) -> None:
        if not self.is_over:
            self._owner.boot_failed(self, failure, member)

    # ------------------------------------------------------------------ workers

    def start_worker(self, slot: int, replaces: Member | None = None) -> Member:
        """
        Start a worker; call this only while `can_start`.

        Raises:
            OSError: there is no descriptor or process to be had; those that serve go on.
        """
        worker = Worker(slot, self.number, since=time.monotonic())
        mold = self.mold if self.start_method == "fork" else None
        if mold is None:
            interpreter = self._launcher.launch(self._start_message("worker", slot), self._owner.sockets)
            worker, control = replace(worker, pid=interpreter.pid), interpreter.control
        else:
            control = self._fork(mold, slot)
        member = Member(worker)
        member.replaces = replaces
        self.members.append(member)
        self._launcher.spawn_task(self._follow_worker(member, control, mold))
        return member

    def _fork(self, mold: Mold, slot: int) -> socket.socket:
        """Order a worker; a mold that is gone shows as a worker that is gone at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                owner = self._owner
                mold.fork(Fork(slot, owner.may_replay(slot), owner.too_slow, owner.recent), theirs)
            except OSError as error:
                self._owner.log.warning("mold pid=%d does not take orders: %s", mold.pid, error)
        return ours

    async def _follow_worker(self, member: Member, control: socket.socket, mold: Mold | None) -> None:
        channel = await Channel.open(control)
        member.connect(channel)
        limit = self.settings.tenant.startup_timeout or None
        notice = self._notice_import() if mold is None else None
        try:
            async with asyncio.timeout(limit if mold is None else FORK_PATIENCE) as timeout:
                while True:
                    message = await channel.receive()
                    if notice is not None:
                        notice.cancel()
                    if isinstance(message, Hello) and mold is not None:
                        timeout.reschedule(asyncio.get_running_loop().time() + limit if limit else None)
                    elif isinstance(message, WorkerReady):
                        timeout.reschedule(None)
                    self._worker_said(member, message)
        except TimeoutError:
            self._worker_late(member, mold)
        except ChannelClosedError:
            pass
        except Exception:
            self._owner.log.exception("%s is killed for what it said", member.name)
            self._children.kill(member.worker.pid)
        finally:
            if notice is not None:
                notice.cancel()
            channel.close()
        pid = member.worker.pid
        status = await self._children.status_of(pid) if pid is not None else "never said hello"
        await _wait_for_same_signal(status)
        before = member.worker
        self.advance(member, Event.EXITED)
        self.members.remove(member)
        for future in member.answers.values():
            future.cancel()
        self._owner.worker_gone(self, member, before, status)

    def _worker_late(self, member: Member, mold: Mold | None) -> None:
        if member.worker.pid is None and mold is not None:
            self._owner.log.error("mold pid=%d does not fork within %.0f s and is replaced", mold.pid, FORK_PATIENCE)
            member.complaint = "its mold does not answer"
            self._children.kill(mold.pid)
        elif member.worker.pid is not None:
            self._children.kill(member.worker.pid)
            limit = self.settings.tenant.startup_timeout
            member.complaint = f"worker {member.worker.slot} was not ready within --startup-timeout {limit:g} s"
            self._report(died(member.complaint), member)

    def _worker_said(self, member: Member, message: Message) -> None:
        worker = member.worker
        if isinstance(message, Hello):
            if worker.pid not in (None, message.pid):
                raise LifecycleError(f"worker {worker.slot} says it is pid {message.pid}, not {worker.pid}")
            self.advance(member, Event.HELLO)
            self._children.ours.add(message.pid)
            member.worker = replace(member.worker, pid=message.pid)
            if self.is_discarded:
                self._children.kill(message.pid)
        elif isinstance(message, BootFailed):
            member.complaint = message.text
            self._report(message, member)
        else:
            self._owner.worker_said(self, member, message)

    def advance(self, member: Member, event: Event) -> None:
        member.worker = lifecycle.advance(member.worker, event, time.monotonic())

    # ------------------------------------------------------------------ what is told of it

    @property
    def label(self) -> str:
        return f"gen={self.number}"


async def _wait_for_same_signal(status: str) -> None:
    """Of what the whole process group gets, a child may end before we have heard; it is nothing to complain of then."""
    if status in FOR_THE_GROUP:
        await asyncio.sleep(GROUP_PATIENCE)


def died(text: str) -> BootFailed:
    """A process ended, or had to be ended, before it could say what was wrong."""
    return BootFailed(exit_code=ExitCode.APP, text=text, may_be_state=True)
