"""
The supervisor: binds, starts a mold and has it fork workers, replaces what dies, and never imports the app.

Signal handlers and readers of messages only note what happened; `Supervisor` acts on it in its event loop. What to do
when a worker dies is decided in `lifecycle.py`, what to keep of what workers learnt in `learning.py`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from jumpstart.errors import JumpstartError
from jumpstart.records import Reason
from jumpstart.report import BootReport, Refusal, Span
from jumpstart_server import lifecycle, system
from jumpstart_server.addresses import (
    FileIdentity,
    addresses_of,
    bind,
    describe,
    identify,
    remove_socket_file,
    socket_permissions,
)
from jumpstart_server.children import Children
from jumpstart_server.exits import ExitCode
from jumpstart_server.learning import Learning
from jumpstart_server.lifecycle import Event, LifecycleError, Restarts, State, Worker
from jumpstart_server.logs import reopen_logs
from jumpstart_server.messages import (
    Accept,
    Ask,
    BootFailed,
    Captured,
    Channel,
    ChannelClosedError,
    Drain,
    Hello,
    Learnt,
    MoldReady,
    Reopen,
    Section,
    ShutdownFailed,
    Start,
    Stats,
    StoppedAccepting,
    WorkerReady,
    encode,
)
from jumpstart_server.processes import Member, Mold
from jumpstart_server.settings import Settings, boot_settings
from jumpstart_server.spawn import Interpreter, start_interpreter
from jumpstart_warmup.observe import ObserverSnapshot, merge_snapshots

logger = logging.getLogger(__name__)

KILL_GRACE = 2.0  # seconds beyond graceful_timeout that a draining worker has before SIGKILL
ANSWER_TIMEOUT = 2.0  # seconds that a worker may take to answer for statistics
FORK_PATIENCE = 10.0  # seconds that a mold may take to fork and the worker to say hello
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGUSR2)  # that would end the process, and mean more elsewhere
SAVE_DELAY = 1.0  # seconds between a worker's report of something new and its writing to disk
CAPTURE_TIMEOUT = 30.0  # seconds that a worker may take to capture a profile


class Supervisor:
    """
    One tenant's server. `run` serves until a signal and returns the exit code.
    """

    def __init__(
        self,
        settings: Settings,
        started: float,
        waiting: Interpreter | None = None,
        serve_beside: Callable[[Supervisor], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """
        Args:
            started: when the command began, on the monotonic clock.
            waiting: an interpreter that was started ahead and becomes the first process.
            serve_beside: what else runs in this event loop until the end: the admin pages. Begun when the mold was told
                what to do, so that it may import at leisure; a `JumpstartError` of its costs a line, not the server.
        """
        self._serve_beside = serve_beside
        self._waiting = waiting
        self.settings = settings
        self.started = started
        self.sockets: list[socket.socket] = []
        self._files: list[FileIdentity | None] = []  # of the sockets, in their order
        self.mold: Mold | None = None
        self.members: dict[int, Member] = {}
        self.generation = 0
        self.boot: BootReport | None = None  # of the first worker of this generation that became ready
        self.mold_report: BootReport | None = None
        self.start_method = ""
        self.ready_after_s: float | None = None
        self.restarts = 0
        self.learning = Learning(boot_settings(settings))
        self.past: list[ObserverSnapshot] = []  # statistics of workers that are gone
        self._tenant = settings.tenant
        self._slots = range(settings.tenant.workers)
        self._worker_restarts: dict[int, Restarts] = {}
        self._mold_restarts = Restarts()
        self._mold_since = 0.0
        self._exit_code = ExitCode.CLEAN
        self._stopping = False
        self._ended = asyncio.Event()
        self._gone = asyncio.Event()  # set whenever a process is found gone
        self._children = Children(self._child_ended)
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._listening = False
        self._save_planned = False
        self._cold = False  # the boot with warm state failed; this one does without
        self._own_refusals: list[Refusal] = []

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> ExitCode:
        """
        Serve until SIGTERM or SIGINT.

        Raises:
            AddressInUseError, ConfigError: an address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_asked, number)
        for number in IGNORED_SIGNALS:
            loop.add_signal_handler(number, self._ignore, number)
        loop.add_signal_handler(signal.SIGUSR1, self._reopen_logs)
        loop.add_signal_handler(signal.SIGCHLD, self._children.reap)
        self._children.leave_alone(self._waiting.pid if self._waiting is not None else None)
        system.adopt_orphans()
        try:
            permissions = socket_permissions(self._tenant)
            for address in addresses_of(self._tenant):
                self.sockets.append(bind(address, permissions))
                self._files.append(identify(address))
            self._start_generation()
            self._spawn_task(self._run_beside())
            await self._ended.wait()
            await self._wait_for_processes()
            await self.learning.save()
            await self._children.end_orphans()
        finally:
            for task in list(self._tasks):
                task.cancel()
            self._children.kill_all()
            self._close_sockets()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, *IGNORED_SIGNALS):
                loop.remove_signal_handler(number)
        return self._exit_code

    async def _run_beside(self) -> None:
        try:
            if self._serve_beside is not None:
                await self._serve_beside(self)
        except JumpstartError as error:
            logger.warning("no admin pages: %s", error)

    def _ignore(self, number: int) -> None:
        logger.warning("%s does nothing in this version; it is ignored", signal.Signals(number).name)

    def _reopen_logs(self) -> None:
        """Here, in the mold and in all workers; one that boots does so when it is up."""
        reopen_logs()
        logger.info("SIGUSR1: log files are opened anew")
        if self.mold is not None:
            try:
                self.mold.reopen()
            except OSError as error:
                logger.warning("mold pid=%d does not open its log files anew: %s", self.mold.pid, error)
        for member in self.members.values():
            member.send(Reopen())

    def _stop_asked(self, number: int) -> None:
        if self._stopping and number == signal.SIGTERM:
            return  # timeout(1) sends it twice, to the process and to its group
        if self._stopping:
            logger.warning("second %s: stopping at once", signal.Signals(number).name)
            self._children.kill_all()
            return
        logger.info("%s: draining %d workers", signal.Signals(number).name, len(self.members))
        self._stop(ExitCode.CLEAN)

    def _stop(self, code: ExitCode) -> None:
        """Drain everything; `run` returns *code* when it is done."""
        if self._stopping:
            return
        self._stopping = True
        self._exit_code = code
        if not self.accepting:
            self._close_sockets()
        else:
            for sock, address in zip(self.sockets, addresses_of(self._tenant)):
                if address.fd < 0:  # one that we were given lives on, and resets nobody
                    system.take_no_more(sock)  # what connects after the last accept would be reset by the closing
            # Ours stay open while workers take the connections that wait, or the last one to close would reset them;
            # not longer, since what connects then would never be accepted.
            asyncio.get_running_loop().call_later(KILL_GRACE, self._close_sockets)
        for member in self.members.values():
            if member.worker.state is State.STARTING and member.worker.pid is not None:
                self._children.kill(member.worker.pid)  # spawned, and still at its import, as a mold may be
            elif not member.accepting:
                # It may end its lifespan in order, but has no client to wait for.
                asyncio.get_running_loop().call_later(KILL_GRACE, self._end, member)
            self._advance(member, Event.DRAIN_ASKED)
            member.send(Drain())
        if self.mold is not None:
            # It holds nothing that is worth a goodbye, and may be stuck in an import.
            self._children.kill(self.mold.pid)
        self._ended.set()

    def _end(self, member: Member) -> None:
        self._children.kill(member.worker.pid)

    async def _wait_for_processes(self) -> None:
        """Wait for the workers within their time; kill those that take longer."""
        deadline = time.monotonic() + self._tenant.graceful_timeout + KILL_GRACE
        killed = False
        while self._children.ours or self.members:
            self._gone.clear()
            self._children.reap()
            if not (self._children.ours or self.members):
                break
            left = deadline - time.monotonic()
            if left <= 0 and killed:
                logger.error("giving up on %s", sorted(self._children.ours) or "channels that nobody closes")
                break
            if left <= 0:
                killed = True
                slow = sorted(self._children.ours)
                logger.error("not gone after %.0f s, killed: %s", self._tenant.graceful_timeout + KILL_GRACE, slow)
                self._children.kill_all()
                deadline = time.monotonic() + KILL_GRACE
            try:
                await asyncio.wait_for(self._gone.wait(), max(left, 0.05))
            except TimeoutError:
                pass

    def _close_sockets(self) -> None:
        for sock, address, file in zip(self.sockets, addresses_of(self._tenant), self._files):
            if address.fd < 0 and self._listening:
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # in every copy, also one that a child of the app inherited
                except OSError:
                    pass  # macOS does not know this for listening sockets
            sock.close()
            try:
                remove_socket_file(address, file)
            except OSError:
                logger.warning("cannot remove %s", address.path)
        self.sockets.clear()
        self._files.clear()

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("internal error in the supervisor", exc_info=error)
            self._stop(ExitCode.INTERNAL)

    # ------------------------------------------------------------------ molds

    def _start_generation(self) -> None:
        self.generation += 1
        self._mold_since = time.monotonic()
        if self._tenant.fork == "never":
            self._spawn_workers()
            return
        interpreter = self._start_process("mold", 0)
        self._spawn_task(self._follow_mold(interpreter, self.generation))

    def _start_message(self, role: str, slot: int) -> Start:
        return Start(
            role=role,
            settings=self.settings,
            started=self.started,
            generation=self.generation,
            slot=slot,
            supervisor_pid=os.getpid(),
            listeners=len(self.sockets),
            cold=self._cold,
            replay=self._may_replay(slot),
        )

    def _start_process(self, role: str, slot: int) -> Interpreter:
        """Take the interpreter that waits already, or start one, and tell it its role."""
        interpreter, self._waiting = self._waiting or start_interpreter(self.settings.target), None
        interpreter.release()
        self._children.ours.add(interpreter.pid)
        try:
            interpreter.tell(encode(self._start_message(role, slot)), [sock.fileno() for sock in self.sockets])
        except OSError as error:
            logger.warning("process %d ended before it was told its role: %s", interpreter.pid, error)
        return interpreter

    async def _follow_mold(self, interpreter: Interpreter, generation: int) -> None:
        channel = await Channel.open(interpreter.control)
        mold = self.mold = Mold(interpreter.pid, generation, interpreter.control, channel)
        if self._stopping:
            self._children.kill(mold.pid)  # the stop came before there was a mold to end
        failed = False
        try:
            async with asyncio.timeout(self._tenant.startup_timeout or None):
                message = await channel.receive()
            if isinstance(message, BootFailed):
                failed = True
                self._boot_failed(message)
            elif isinstance(message, MoldReady):
                self._mold_ready(mold, message)
            while True:
                await channel.receive()  # a mold says no more; this ends when it does
        except TimeoutError:
            failed = True
            limit = self._tenant.startup_timeout
            self._children.kill(mold.pid)
            self._boot_died(f"the app was not imported within --startup-timeout {limit:g} s")
        except ChannelClosedError:
            pass
        except Exception:
            logger.exception("mold pid=%d is killed for what it said", mold.pid)
            self._children.kill(mold.pid)
        finally:
            channel.close()
        await self._mold_gone(mold, failed)

    def _mold_ready(self, mold: Mold, message: MoldReady) -> None:
        report = message.report
        self.mold_report = report
        self._mold_restarts = Restarts()
        for refusal in report.refusals:
            logger.warning("not used: %s", refusal)
        for name, why in report.recorders_off.items():
            logger.warning("recorder %s is switched off: %s", name, why)
        if report.start_method == "fork":
            mold.is_ready = True
            self.start_method = "fork"
            for slot in self._slots:
                if slot not in self.members:
                    self._start_worker(slot)
        else:
            logger.info("workers are spawned, not forked: %s", "; ".join(report.start_reasons))
            self._spawn_workers()

    def _spawn_workers(self) -> None:
        self.start_method = "spawn"
        for slot in self._slots:
            if slot not in self.members:
                self._start_worker(slot)

    async def _mold_gone(self, mold: Mold, failed: bool) -> None:
        status = await self._children.status_of(mold.pid)
        if self.mold is mold:
            self.mold = None
        if self._stopping or self.start_method == "spawn" or mold.generation != self.generation:
            return
        if not failed and not mold.is_ready and not self.members:
            self._boot_died(f"the mold ended ({status}) while it imported the app")
            return
        served = time.monotonic() - self._mold_since if mold.is_ready else None
        self._mold_restarts, delay = self._mold_restarts.after_exit(served)
        logger.warning(
            "mold pid=%d gen=%d is gone (%s); its workers serve on, another starts in %.1f s",
            *(mold.pid, mold.generation, status, delay),
        )
        await asyncio.sleep(delay)
        if not self._stopping and mold.generation == self.generation:
            self._start_generation()

    def _boot_failed(self, message: BootFailed) -> None:
        """An app that cannot boot ends the server, unless workers that serve are there to go on."""
        if self._stopping or (message.may_be_state and self._try_cold(message.text)):
            return
        logger.error("%s", message.text)
        if not any(member.accepting for member in self.members.values()):
            self._stop(ExitCode(message.exit_code))

    def _boot_died(self, text: str) -> None:
        """A process ended, or had to be ended, before it could say what was wrong."""
        self._boot_failed(BootFailed(exit_code=ExitCode.APP, text=text, may_be_state=True))

    def _try_cold(self, text: str) -> bool:
        """
        Boot once more, without warm state, when a first boot with it failed: nothing warm may keep an app from booting.

        Return whether that is done; under --require-warm it is not.
        """
        if self._cold or self.ready_after_s is not None or self.settings.profile.require_warm:
            return False
        if not self.learning.has_state():
            return False
        # The first line only: an app that fails cold as well says so with its traceback once, then.
        logger.warning("booting warm failed, trying once more cold: %s", text.partition("\n")[0])
        self._own_refusals.append(Refusal("warm state", Reason.FAILED, f"the boot with it failed: {text}"))
        self._cold = True
        if self.mold is not None:
            self._children.kill(self.mold.pid)
            self.mold = None  # or its workers, as they end, would be replaced by orders to it
        for member in self.members.values():
            if member.worker.pid is not None:
                self._children.kill(member.worker.pid)
            member.hang_up()
        self.start_method = ""
        self._start_generation()
        return True

    # ------------------------------------------------------------------ workers

    def _start_worker(self, slot: int) -> None:
        worker = Worker(slot, self.generation, since=time.monotonic())
        try:
            if self.start_method == "spawn":
                interpreter = self._start_process("worker", slot)
                worker, control = replace(worker, pid=interpreter.pid), interpreter.control
            elif self.mold is not None and self.mold.is_ready:
                control = self._fork_worker(self.mold, slot)
            else:
                return  # the next mold starts it
        except OSError as error:  # no descriptor or process to be had; those that serve go on
            self._worker_restarts[slot], delay = self._restarts_of(slot).after_exit(None)
            logger.error("cannot start worker=%d: %s; again in %.1f s", slot, error, delay)
            self._spawn_task(self._start_worker_later(slot, delay))
            return
        member = self.members[slot] = Member(worker)
        self._spawn_task(self._follow_worker(member, control))

    def _restarts_of(self, slot: int) -> Restarts:
        return self._worker_restarts.get(slot, Restarts())

    def _may_replay(self, slot: int) -> bool:
        """Warm-up requests that killed two workers in a row before they were ready are not tried a third time."""
        return self._restarts_of(slot).failures < 2

    async def _start_worker_later(self, slot: int, delay: float) -> None:
        await asyncio.sleep(delay)
        if not self._stopping and slot not in self.members:
            self._start_worker(slot)

    def _fork_worker(self, mold: Mold, slot: int) -> socket.socket:
        """Order a worker; a mold that is gone shows as a worker that is gone at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                mold.fork(slot, theirs, replay=self._may_replay(slot))
            except OSError as error:
                logger.warning("mold pid=%d does not take orders: %s", mold.pid, error)
        return ours

    async def _follow_worker(self, member: Member, sock: socket.socket) -> None:
        channel = await Channel.open(sock)
        member.connect(channel)
        limit = self._tenant.startup_timeout or None
        mold = self.mold if member.worker.pid is None else None
        try:
            async with asyncio.timeout(limit if mold is None else FORK_PATIENCE) as timeout:
                while True:
                    message = await channel.receive()
                    if isinstance(message, Hello) and mold is not None:
                        timeout.reschedule(asyncio.get_running_loop().time() + limit if limit else None)
                    elif isinstance(message, WorkerReady):
                        timeout.reschedule(None)
                    self._worker_said(member, message)
        except TimeoutError:
            if member.worker.pid is None and mold is not None:
                logger.error("mold pid=%d does not fork within %.0f s and is replaced", mold.pid, FORK_PATIENCE)
                member.complaint = "its mold does not answer"
                self._children.kill(mold.pid)
            elif member.worker.pid is not None:
                self._children.kill(member.worker.pid)
                member.complaint = (
                    f"worker {member.worker.slot} was not ready within --startup-timeout {limit or 0:g} s"
                )
                if member.worker.generation == self.generation:
                    self._boot_died(member.complaint)
        except ChannelClosedError:
            pass
        except Exception:
            logger.exception("worker=%d pid=%s is killed for what it said", member.worker.slot, member.worker.pid)
            self._children.kill(member.worker.pid)
        finally:
            channel.close()
        await self._worker_gone(member)

    def _worker_said(self, member: Member, message: object) -> None:
        worker = member.worker
        if isinstance(message, Hello):
            if worker.pid not in (None, message.pid):
                raise LifecycleError(f"worker {worker.slot} says it is pid {message.pid}, not {worker.pid}")
            self._advance(member, Event.HELLO)
            self._children.ours.add(message.pid)
            member.worker = replace(member.worker, pid=message.pid)
            if self._stopping:
                member.send(Drain())
        elif isinstance(message, WorkerReady):
            self._worker_ready(member, message)
        elif isinstance(message, StoppedAccepting):
            member.stopped_accepting = True
            if self._stopping and all(each.stopped_accepting for each in self.accepting):
                self._close_sockets()
        elif isinstance(message, Stats):
            member.stats = message
            member.answer(message.number, message)
        elif isinstance(message, Captured):
            member.answer(message.number, message)
        elif isinstance(message, Learnt):
            self.learning.learnt((worker.generation, worker.slot, worker.pid or 0), message.sections)
            self._save_soon()
        elif isinstance(message, ShutdownFailed):
            self._shutdown_failed(member, message)
        elif isinstance(message, BootFailed):
            member.complaint = message.text
            if worker.generation == self.generation:
                self._boot_failed(message)

    def _shutdown_failed(self, member: Member, message: ShutdownFailed) -> None:
        """The app's own shut-down failed: said once in full, and in the exit code when the server stops."""
        known = self._exit_code is ExitCode.APP
        text = message.text.partition("\n")[0] if known else message.text
        logger.error(
            "worker=%d gen=%d pid=%s: %s", member.worker.slot, member.worker.generation, member.worker.pid, text
        )
        if self._stopping and self._exit_code is ExitCode.CLEAN:
            self._exit_code = ExitCode.APP

    def _save_soon(self) -> None:
        """Write the warm-start cache a moment from now, once for all that arrives until then."""
        if not self._save_planned and not self._stopping:
            self._save_planned = True
            self._spawn_task(self._save_later())

    async def _save_later(self) -> None:
        await asyncio.sleep(SAVE_DELAY)
        self._save_planned = False
        await self.learning.save()

    def _worker_ready(self, member: Member, message: WorkerReady) -> None:
        self._advance(member, Event.READY)
        member.report = message.report
        self.learning.dropped(message.report)
        if member.worker.state is not State.SERVING:
            return
        if not self._listen():
            return
        member.send(Accept())
        member.accepting = True
        logger.info(
            "worker=%d gen=%d pid=%s ready",
            *(member.worker.slot, member.worker.generation, member.worker.pid),
        )
        if self.ready_after_s is None:
            if self._cold:
                self.learning.forget()  # with it the boot failed, without it went well
            self.boot = message.report
            self.ready_after_s = time.monotonic() - self.started
            for refusal in [*self._own_refusals, *(message.report.refusals if self.mold_report is None else ())]:
                logger.warning("not used: %s", refusal)
            for url in self.urls():
                logger.info("Listening at: %s (%d)", url, os.getpid())
            logger.info(
                "ready in %.2f s · %d × %s, %s · %s",
                self.ready_after_s,
                self._tenant.workers,
                message.report.interface.upper(),
                "forked" if self.start_method == "fork" else "spawned",
                message.report.summary(),
            )

    def _listen(self) -> bool:
        """Open the port, once, when the first worker is ready."""
        if self._listening:
            return True
        for sock in self.sockets:
            try:
                sock.listen(self._tenant.backlog)
            except OSError as error:
                code = ExitCode.ADDRESS_IN_USE if error.errno == errno.EADDRINUSE else ExitCode.USAGE
                logger.error("cannot listen on %s: %s", describe(sock), error.strerror)
                self._stop(code)
                return False
        self._listening = True
        return True

    def _advance(self, member: Member, event: Event) -> None:
        member.worker = lifecycle.advance(member.worker, event, time.monotonic())

    async def _worker_gone(self, member: Member) -> None:
        worker = member.worker
        status = await self._children.status_of(worker.pid) if worker.pid is not None else "never said hello"
        served = time.monotonic() - worker.since if worker.state is State.SERVING else None
        asked = worker.state is State.DRAINING
        self._advance(member, Event.EXITED)
        for future in member.answers.values():
            future.cancel()
        if member.stats is not None:
            self.past = [merge_snapshots(*self.past, member.stats.observed)]
        self.learning.gone((worker.generation, worker.slot, worker.pid or 0))
        if self.members.get(worker.slot) is member:
            del self.members[worker.slot]
        self._gone.set()
        if self._stopping:
            return
        if worker.generation != self.generation and worker.slot not in self.members:
            self._start_worker(worker.slot)
            return
        if served is None and not asked and self.ready_after_s is None:
            if not member.complaint:
                self._boot_died(f"worker {worker.slot} ended ({status}) before it was ready")
            return
        self._worker_restarts[worker.slot], delay = self._restarts_of(worker.slot).after_exit(served)
        self.restarts += 1
        logger.warning(
            "worker=%d gen=%d pid=%s is gone (%s); another starts%s",
            *(worker.slot, worker.generation, worker.pid, status, f" in {delay:.1f} s" if delay else ""),
        )
        if delay:
            await asyncio.sleep(delay)
        if not self._stopping and worker.slot not in self.members:
            self._start_worker(worker.slot)

    def _child_ended(self, pid: int) -> None:
        self._gone.set()
        asyncio.get_running_loop().call_later(KILL_GRACE, self._hang_up, pid)

    def _hang_up(self, pid: int) -> None:
        """
        Close the channel of a process that has ended.

        Its last messages were read meanwhile. A child of the app may have inherited its end and would keep it open for
        ever, and with a mold's end the orders in it, with the ends of workers that never came to be.
        """
        mold = self.mold
        if mold is not None and mold.pid == pid:
            mold.channel.close()
        for member in self.members.values():
            unborn = member.worker.pid is None and (mold is None or mold.pid == pid)
            if member.worker.pid == pid or unborn:
                member.hang_up()

    # ------------------------------------------------------------------ what the admin pages ask

    @property
    def accepting(self) -> list[Member]:
        return [member for member in self.members.values() if member.accepting]

    @property
    def stopping(self) -> bool:
        return self._stopping

    def uptime_s(self) -> float:
        return time.monotonic() - self.started

    def urls(self) -> list[str]:
        """The addresses, with real ports."""
        return [describe(sock, tls=bool(self._tenant.ssl_certfile)) for sock in self.sockets]

    def waiting_for(self) -> str:
        """Why nothing is accepted yet, in words."""
        states = ", ".join(f"worker {slot} is {member.worker.state}" for slot, member in sorted(self.members.items()))
        return states or "the app is being imported"

    async def observed(self) -> ObserverSnapshot:
        """Request statistics of all workers, of those that are gone too."""
        await self._ask_all(capture=False, timeout_s=ANSWER_TIMEOUT)
        living = [member.stats.observed for member in self.members.values() if member.stats is not None]
        return merge_snapshots(*self.past, *living)

    async def capture(self) -> dict[str, Section]:
        """What the workers and the warm-start cache know now, for a profile that is shipped."""
        answers = await self._ask_all(capture=True, timeout_s=CAPTURE_TIMEOUT)
        return self.learning.merged([answer.sections for answer in answers if isinstance(answer, Captured)])

    async def _ask_all(self, *, capture: bool, timeout_s: float) -> list[Stats | Captured]:
        futures = []
        for member in self.accepting:
            self._numbers += 1
            future: asyncio.Future[Stats | Captured] = asyncio.get_running_loop().create_future()
            member.answers[self._numbers] = future
            member.send(Ask(self._numbers, capture))
            futures.append(future)
        if not futures:
            return []
        done, late = await asyncio.wait(futures, timeout=timeout_s)
        for future in late:
            future.cancel()
        return [future.result() for future in done if not future.cancelled()]

    def spans(self) -> list[Span]:
        """All spans of the boot, the mold's and the first worker's."""
        reports = [report for report in (self.mold_report, self.boot) if report is not None]
        seen: dict[tuple[str, str, float], Span] = {}
        for report in reports:
            for span in report.spans:
                seen.setdefault((span.name, span.process, span.start_s), span)
        return sorted(seen.values(), key=lambda span: span.start_s)

    def refusals(self) -> list[Refusal]:
        reports = [report for report in (self.mold_report, self.boot) if report is not None]
        return list(dict.fromkeys([*self._own_refusals, *(each for report in reports for each in report.refusals)]))
