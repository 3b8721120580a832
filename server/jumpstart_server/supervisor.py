"""
The supervisor: the process that binds, has its tenants served, and never imports an app.

Here are signals, the collection of children, what runs beside, and the exit code; each tenant is a `Tier`. Handlers of
signals run in the event loop, as everything here does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jumpstart._version import __version__
from jumpstart.errors import JumpstartError
from jumpstart_server import early_signals, reload, system
from jumpstart_server.children import Children
from jumpstart_server.config import keep_fixed
from jumpstart_server.exits import ExitCode
from jumpstart_server.generation import KILL_GRACE
from jumpstart_server.host import Host
from jumpstart_server.logs import reopen_logs
from jumpstart_server.processes import Launcher
from jumpstart_server.settings import Settings
from jumpstart_server.spawn import Interpreter
from jumpstart_server.tier import Tier, count

logger = logging.getLogger(__name__)

THREADS = 4  # for files: the warm-start cache, profiles


def _unless_a_child_is_gone(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A channel that breaks as its reader is cancelled tells nobody anything new: its process has ended."""
    is_waiter = "future" in context and not isinstance(context["future"], asyncio.Task)
    if not (is_waiter and isinstance(context.get("exception"), ConnectionError)):
        loop.default_exception_handler(context)


class Supervisor:
    """
    The server's process. `run` serves until a signal and returns the exit code.

    Attributes:
        settings: of the first tenant; what belongs to the process and not to a tenant is the same in all.
        tiers: the tenants by name.
        stopping: it drains, or has ended.
    """

    def __init__(
        self,
        tenants: Sequence[Settings],
        started: float,
        waiting: Interpreter | None = None,
        *,
        serve_beside: Callable[[Supervisor], Coroutine[Any, Any, None]] | None = None,
        reread: Callable[[], Sequence[Settings]] | None = None,
        host: Host | None = None,
    ) -> None:
        """
        Args:
            tenants: the settings of each; at least one.
            started: when the command began, on the monotonic clock.
            waiting: an interpreter that was started ahead and becomes the first process.
            serve_beside: what else runs in this event loop until the end: the admin pages. Begun when the mold was told
                what to do, so that it may import at leisure; a `JumpstartError` of its costs a line, not the server.
            reread: reads the configuration anew, for SIGHUP; raises what reading it raises.
            host: what is to hear how we are; by default nobody.
        """
        self.settings = tenants[0]
        self.started = started
        self.stopping = False
        self._serve_beside = serve_beside
        self._reread = reread
        self._host = host or Host(tenants, {}, os.getpid())
        self._exit_code = ExitCode.CLEAN
        self._give_up_waiting_at = 0.0
        self._ended = asyncio.Event()
        self._children = Children(self._child_ended)
        self._launcher = Launcher(self._children, self._spawn_task, started, waiting)
        self._interrupts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._said_nothing: set[int] = set()  # signals of which was said that they do nothing
        self.tiers: dict[str, Tier] = {}
        for settings in tenants:
            self.tiers[settings.tenant_name] = Tier(
                settings,
                self._launcher,
                is_alone=len(tenants) == 1,
                on_given_up=self._given_up,
                on_ready=self._tell_ready,
            )

    # ------------------------------------------------------------------ from start to end

    async def run(self) -> ExitCode:
        """
        Serve until SIGTERM or SIGINT.

        Raises:
            AddressInUseError, ConfigError: an address cannot be bound, or the pid file not written.
        """
        # Of our threads only this one takes signals, so that it can hold them back at the end.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, initializer=early_signals.hold))
        asyncio.get_running_loop().set_exception_handler(_unless_a_child_is_gone)
        waiting = self._launcher.waiting
        self._children.leave_alone(waiting.pid if waiting is not None else None)
        handlers = self._handle_signals()
        system.adopt_orphans()
        try:
            for tier in self.tiers.values():
                tier.open()
            self._host.bound()
            logger.info("jumpstart %s pid %d boots %s", __version__, os.getpid(), self._targets())
            for tier in self.tiers.values():
                tier.start()
            notifying = self._host.notifier.run()
            watching = [work for tier in self.tiers.values() for work in (tier.watch(), tier.seeding.watch())]
            for work in (self._run_beside(), self._watch_files(), notifying, *watching):
                self._spawn_task(work)
            await self._ended.wait()
            await self._wait_for_processes()
            for tier in self.tiers.values():
                await tier.learning.save()
            await self._children.end_orphans()
            logger.info("stopped")
        finally:
            for task in list(self._tasks):
                task.cancel()
            self._children.kill_all()
            for tier in self.tiers.values():
                tier.close()
            self._host.ended()
            early_signals.hold()  # or one in the last moment would make another end of it
            for number in handlers:
                asyncio.get_running_loop().remove_signal_handler(number)
        if self._exit_code is ExitCode.CLEAN and any(tier.shutdown_failed for tier in self.tiers.values()):
            return ExitCode.APP
        return self._exit_code

    def _targets(self) -> str:
        if len(self.tiers) == 1:
            return self.settings.target
        return ", ".join(f"{tier.settings.target} (tenant {name})" for name, tier in self.tiers.items())

    def _handle_signals(self) -> list[signal.Signals]:
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: lambda: self._stop_asked(signal.SIGTERM),
            signal.SIGINT: lambda: self._stop_asked(signal.SIGINT),
            signal.SIGQUIT: self._quit,
            signal.SIGHUP: self._roll_asked,
            signal.SIGUSR1: self._reopen_logs,
            signal.SIGTTIN: lambda: self._resize(+1),
            signal.SIGTTOU: lambda: self._resize(-1),
            signal.SIGUSR2: lambda: self._do_nothing(signal.SIGUSR2),
            signal.SIGWINCH: lambda: self._do_nothing(signal.SIGWINCH),
            signal.SIGCHLD: self._children.reap,
        }
        for number, handler in handlers.items():
            asyncio.get_running_loop().add_signal_handler(number, handler)
        early_signals.let_in()
        return list(handlers)

    async def _run_beside(self) -> None:
        try:
            if self._serve_beside is not None:
                await self._serve_beside(self)
        except JumpstartError as error:
            logger.warning("no admin pages: %s", error)

    async def _watch_files(self) -> None:
        server = self.settings.server
        if not server.reload:
            return
        folders = server.reload_dir or tuple(sorted({tier.settings.app.app_dir for tier in self.tiers.values()}))
        patterns = reload.Patterns.of(server.reload_include, server.reload_exclude)
        logger.info("watching %s for changes", ", ".join(folders))
        async for changed in reload.watch(folders, patterns, server.reload_delay):
            logger.info("changed: %s; reloading", reload.describe(changed, folders))
            self._host.notifier.reloading()
            self._roll([tier.settings for tier in self.tiers.values()])

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("internal error in the supervisor", exc_info=error)
            self._stop(ExitCode.INTERNAL)

    def _child_ended(self, pid: int) -> None:
        self._launcher.gone.set()
        asyncio.get_running_loop().call_later(KILL_GRACE, self._hang_up, pid)

    def _hang_up(self, pid: int) -> None:
        for tier in self.tiers.values():
            tier.hang_up(pid)

    # ------------------------------------------------------------------ signals

    def _stop_asked(self, number: signal.Signals) -> None:
        self._interrupts += number is signal.SIGINT
        if self.stopping and (number is signal.SIGTERM or self._interrupts < 2):
            return  # timeout(1) sends TERM twice, to the process and to its group; others turn Ctrl-C into TERM too
        if self.stopping:
            logger.warning("second %s: stopping at once", number.name)
            self._exit_code = ExitCode.INTERRUPTED
            self._children.kill_all()
            return
        if not self._was_ready():
            # TERM has what it asked for; Ctrl-C ends the command before it did what it is for.
            logger.info("%s: stopped before it was ready", number.name)
            self._stop(ExitCode.INTERRUPTED if number is signal.SIGINT else ExitCode.CLEAN)
            return
        logger.info("%s: draining %s", number.name, self._workers())
        if given_up := [name for name, tier in self.tiers.items() if tier.given_up]:
            logger.info("%s was given up before; the exit code is that of a stop all the same", ", ".join(given_up))
        self._stop(ExitCode.CLEAN)

    def _quit(self) -> None:
        if self._was_ready() or self.stopping:
            logger.info("SIGQUIT: stopping %s, requests in flight are not waited for", self._workers())
        else:
            logger.info("SIGQUIT: stopped before it was ready")
        self._stop(ExitCode.CLEAN, at_once=True)

    def _was_ready(self) -> bool:
        return any(tier.ready_after_s is not None for tier in self.tiers.values())

    def _workers(self) -> str:
        return count(sum(len(tier.members) for tier in self.tiers.values()), "worker")

    def _roll_asked(self) -> None:
        if self.stopping:
            return
        logger.info("SIGHUP: the configuration is read anew, new workers take the place of the old ones")
        self._host.notifier.reloading()  # systemd's notify-reload waits for it, and then for ready, also where it fails
        try:
            tenants = self._reread() if self._reread is not None else [tier.settings for tier in self.tiers.values()]
        except JumpstartError as error:
            logger.error("nothing is changed: %s", error)
            self._tell_ready()
            return
        self._roll(tenants)

    def _roll(self, tenants: Sequence[Settings]) -> None:
        found = {settings.tenant_name: settings for settings in tenants}
        for name in found.keys() - self.tiers.keys():
            logger.warning("[tenants.%s] is new; it is served from the next start on", name)
        for name, tier in self.tiers.items():
            settings = found.get(name)
            if settings is None:
                logger.warning("[tenants.%s] is not in the configuration any more; it is served until the end", name)
                continue
            settings, kept = keep_fixed(tier.settings, settings)
            for line in kept:
                logger.warning("%s", line)
            tier.roll(settings)
        self._tell_ready()

    def _reopen_logs(self) -> None:
        """Here, in the molds and in all workers; one that boots does so when it is up."""
        reopen_logs()
        if problem := self._host.reopened():
            logger.error("%s", problem)
        logger.info("SIGUSR1: log files are opened anew")
        for tier in self.tiers.values():
            tier.reopen_logs()

    def _resize(self, change: int) -> None:
        for tier in self.tiers.values():
            tier.resize(change)

    def _do_nothing(self, number: signal.Signals) -> None:
        if number not in self._said_nothing:  # a terminal sends SIGWINCH again and again
            self._said_nothing.add(number)
            logger.info("%s does nothing here", number.name)

    # ------------------------------------------------------------------ the end

    def _stop(self, code: ExitCode, *, at_once: bool = False) -> None:
        """Drain everything; `run` returns *code* when it is done."""
        if self.stopping and not at_once:
            return
        if not self.stopping:
            self._exit_code = code
        self.stopping = True
        # Each worker has a time limit of its own; this one is for what those do not end.
        seconds = max(tier.stop(at_once=at_once) for tier in self.tiers.values()) + KILL_GRACE
        self._give_up_waiting_at = time.monotonic() + seconds
        self._host.notifier.stopping(within_s=seconds)
        self._launcher.gone.set()  # the wait may be shorter now
        self._ended.set()

    def _given_up(self, tier: Tier, code: ExitCode) -> None:
        waits_for_changes = self.settings.server.reload and code is ExitCode.APP
        if waits_for_changes:
            logger.info("waiting for changes")
        elif all(each.given_up for each in self.tiers.values()):
            self._stop(code)
            return
        else:
            tier.log.error("given up; the other tenants serve on. Mend it, and send SIGHUP")
        self._tell_ready()

    def _tell_ready(self) -> None:
        """To the service manager: every tenant is ready or given up, and no roll is under way."""
        tiers = self.tiers.values()
        if (
            not self.stopping
            and any(not tier.given_up for tier in tiers)
            and all(tier.given_up or (tier.accepting and tier.rolling is None) for tier in tiers)
        ):
            urls = [url for tier in tiers for url in tier.urls()]
            self._host.notifier.ready(f"ready at {', '.join(urls)}")

    async def _wait_for_processes(self) -> None:
        """Wait for the workers within their time; kill those that take longer."""
        killed = False
        gone = self._launcher.gone
        while True:
            gone.clear()
            self._children.reap()
            if not self._children.ours and not any(tier.members for tier in self.tiers.values()):
                break
            left = self._give_up_waiting_at - time.monotonic()
            if left <= 0 and killed:
                logger.error("giving up on %s", sorted(self._children.ours) or "channels that nobody closes")
                break
            if left <= 0:
                killed = True
                logger.error("not gone in time, killed: %s", sorted(self._children.ours))
                self._children.kill_all()
                self._give_up_waiting_at = time.monotonic() + KILL_GRACE
            try:
                await asyncio.wait_for(gone.wait(), max(left, 0.05))
            except TimeoutError:
                pass

    # ------------------------------------------------------------------ what the admin pages ask

    def uptime_s(self) -> float:
        return time.monotonic() - self.started
