"""
The mold: imports the app, restores warm state, audits itself, freezes the collector and forks workers on demand.

``python -m jumpstart_server.mold FD`` starts every process that holds the app: a mold, a worker that may not be forked,
or the builder of a profile. The role comes with the first message on the control socket.

A worker is forked twice, so that the supervisor, which adopts orphans, becomes its parent: it outlives its mold, its
exit is the supervisor's to collect, and the kernel ends it with the supervisor.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from jumpstart import effects, first_calls, hooks
from jumpstart.boot import Booted, BootSettings, WarmState, boot, find_state
from jumpstart.errors import ConfigError, JumpstartError
from jumpstart.recorders import RecorderSet, load_recorders
from jumpstart.report import Stopwatch
from jumpstart_server import early_signals, system, worker
from jumpstart_server.addresses import parse_permissions
from jumpstart_server.envfile import add_to_environment
from jumpstart_server.exits import ExitCode, exit_code
from jumpstart_server.forksafety import reasons_not_to_fork
from jumpstart_server.logs import keep_enabled, reopen_logs, set_up_logging
from jumpstart_server.messages import BlockingChannel, BootFailed, ChannelClosedError, Fork, MoldReady, Reopen, Start
from jumpstart_server.privileges import Identity, drop, identity_of, unreachable
from jumpstart_server.settings import boot_settings
from jumpstart_warmup.corpus import CorpusRecorder

logger = logging.getLogger(__name__)


def main() -> None:
    """Take the control socket from the command line and become what the first message says."""
    control = socket.socket(fileno=int(sys.argv[1]))
    channel = BlockingChannel(control)
    try:
        start = channel.receive()
    except ChannelClosedError:
        os._exit(ExitCode.INTERNAL)
    assert isinstance(start, Start)
    system.die_with_parent(start.supervisor_pid)
    listeners = [socket.socket(fileno=channel.take_descriptor()) for _ in range(start.listeners)]
    control.set_inheritable(False)
    heirlooms = _Heirlooms([control, *listeners])
    os.register_at_fork(after_in_child=heirlooms.drop)
    os.chdir(start.settings.app.chdir or ".")
    if start.settings.tenant.umask:
        os.umask(parse_permissions(start.settings.tenant.umask))
    add_to_environment(start.settings.environment)
    sys.argv[:] = ["jumpstart", "serve", start.settings.target]
    # Ctrl-C reaches the whole process group, and so may other signals; the supervisor alone acts on them.
    for number in (signal.SIGINT, *early_signals.HELD_SIGNALS):
        signal.signal(number, early_signals.ignore)
    # As the supervisor, before the app has a say. What the app sets up for itself replaces it, and is its own affair.
    signal.signal(signal.SIGUSR1, lambda *_: reopen_logs())
    if start.role == "seeder":  # never has anything of the app in it, and keeps what it may
        from jumpstart_server import seeding

        set_up_logging(start.settings.server.log_level, file=start.settings.server.error_logfile, tenant=_label(start))
        seeding.work(channel, start)
        os._exit(ExitCode.CLEAN)
    found: _Found | None = None
    try:
        identity = identity_of(start.settings.server.user, start.settings.server.group)
        if identity is not None:
            found = _become(identity, start)
        _set_up_logging(start)
    except JumpstartError as error:
        _fail(channel, exit_code(error), str(error))
    early_signals.let_in(signal.SIGINT)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by whoever started us, children could not be waited for
    limit = start.settings.tenant.startup_timeout
    if limit:
        # Says where a stuck import stands, before the supervisor ends it, whose time runs already.
        elapsed = time.monotonic() - start.started if start.role == "mold" else 0.0
        system.dump_stacks_after(max(limit - 0.5 - elapsed, limit / 4))
    stopwatch = Stopwatch(f"{start.role} {start.generation}", start.started)
    stopwatch.add("start the interpreter", start.started, start.started + stopwatch.since_start())
    own_pid = os.getpid()
    try:
        booted, corpus = _boot(start, found, stopwatch)
    except JumpstartError as error:
        _fail(channel, exit_code(error), str(error))
    except BaseException:
        _fail(channel, ExitCode.INTERNAL, f"internal error while booting\n{traceback.format_exc()}")
    if os.getpid() != own_pid:
        os._exit(ExitCode.CLEAN)  # the app forked itself and came back: its parent is the mold, this copy is nobody
    system.cancel_dump()
    if start.role == "mold":
        _serve_forks(channel, start, booted, corpus, listeners, heirlooms)
    worker.run(control, start, booted, corpus, listeners, process=f"worker {start.slot}")


class _Heirlooms:
    """
    Sockets that are for our own forks only.

    A helper that the app forks (multiprocessing, say) would keep port and channels open when all of ours are gone.
    """

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        self.is_our_fork = False

    def drop(self) -> None:
        """Called in each new child."""
        if not self.is_our_fork:
            for sock in self.sockets:
                sock.close()


def _set_up_logging(start: Start) -> None:
    settings = start.settings
    server = settings.server
    if settings.logging is not None and settings.app.app_dir not in sys.path:
        sys.path.insert(0, settings.app.app_dir)  # it may name classes of the app
    set_up_logging(
        server.log_level,
        file=server.error_logfile,
        config=settings.logging,
        capture_output=server.capture_output,
        tenant=_label(start),
    )


def _label(start: Start) -> str:
    return "" if start.is_alone else start.settings.tenant_name


_Found = tuple[RecorderSet, CorpusRecorder, WarmState]


def _load_recorders(start: Start) -> tuple[RecorderSet, CorpusRecorder]:
    corpus = CorpusRecorder(start.settings.warm)
    return RecorderSet([*load_recorders(start.settings.warm), corpus]), corpus


def _boot_settings(start: Start) -> BootSettings:
    settings = boot_settings(start.settings, cold=start.cold)
    return msgspec.structs.replace(settings, server=start.server, generation=start.generation)


def _become(identity: Identity, start: Start) -> _Found:
    """Drop root's privileges, after reading what is root's: keys and warm-start cache. Nothing of these has run."""
    server = start.settings.server
    # Without --log-config, which may name code of the app.
    set_up_logging(server.log_level, file=server.error_logfile, tenant=_label(start))
    recorders, corpus = _load_recorders(start)
    state = find_state(_boot_settings(start), recorders)
    drop(identity)
    system.die_with_parent(start.supervisor_pid)
    add_to_environment(identity.variables)
    tenant = start.settings.tenant
    paths = {
        **{"Python's own": os.__file__, "the server's own": __file__, "--app-dir": start.settings.app.app_dir},
        **{"--ssl-certfile": tenant.ssl_certfile, "--ssl-keyfile": tenant.ssl_keyfile, "--warmup": tenant.warmup},
        "--requests": start.requests,
    }
    problem = unreachable(paths, identity)
    if problem is not None:
        raise ConfigError(problem)
    return recorders, corpus, state


def _boot(start: Start, found: _Found | None, stopwatch: Stopwatch) -> tuple[Booted, CorpusRecorder]:
    settings = _boot_settings(start)
    recorders, corpus, state = found or (*_load_recorders(start), None)
    if start.settings.tenant.guard != "off":
        effects.install()  # what the app opens before is not watched
    if start.settings.tenant.first_calls:
        first_calls.start()  # what ran before would be taken for new
    booted = boot(settings, recorders, stopwatch, state)
    with _app_last(settings.app_dir):
        worker.import_what_workers_need(booted.interface)
    # What the app may have changed for itself, and we rely on:
    keep_enabled()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: None)
    return booted, corpus


@contextlib.contextmanager
def _app_last(app_dir: str) -> Iterator[None]:
    """Import ours while the app's modules come last: one that is called ``queue`` is not the one that we mean."""
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if entry != app_dir] + [app_dir]
    try:
        yield
    finally:
        sys.path[:] = before


def _fail(channel: BlockingChannel, code: ExitCode, text: str) -> NoReturn:
    may_be_state = code in (ExitCode.APP, ExitCode.INTERNAL)
    try:
        channel.send(BootFailed(exit_code=code, text=text, may_be_state=may_be_state))
    except ChannelClosedError:
        pass  # the supervisor is gone: nobody is left to tell
    os._exit(code)


def _serve_forks(
    channel: BlockingChannel,
    start: Start,
    booted: Booted,
    corpus: CorpusRecorder,
    listeners: list[socket.socket],
    heirlooms: _Heirlooms,
) -> NoReturn:
    with booted.stopwatch.span("on_capture hooks"):
        hooks.before_fork(start.settings.profile.restore_timeout)
    with booted.stopwatch.span("audit and freeze"):
        gc.collect()  # what the import left behind would otherwise be frozen with the rest
        own = {channel.sock.fileno(), *(listener.fileno() for listener in listeners)}
        reasons = reasons_not_to_fork(own)
        gc.freeze()
    report = booted.report("spawn" if reasons else "fork", reasons)
    try:
        channel.send(MoldReady(report=report))
        while not reasons:
            message = channel.receive()
            if isinstance(message, Fork):
                _fork(channel, message, start, booted, corpus, listeners, heirlooms)
            elif isinstance(message, Reopen):
                reopen_logs()
    except ChannelClosedError:
        pass  # the supervisor is gone
    # Not through sys.exit: the app's atexit hooks are for processes that served.
    os._exit(ExitCode.CLEAN)


def _fork(
    channel: BlockingChannel,
    order: Fork,
    start: Start,
    booted: Booted,
    corpus: CorpusRecorder,
    listeners: list[socket.socket],
    heirlooms: _Heirlooms,
) -> None:
    descriptor = channel.take_descriptor()
    heirlooms.is_our_fork = True
    between = os.fork()
    if between:
        heirlooms.is_our_fork = False
        os.close(descriptor)
        try:
            os.waitpid(between, 0)
        except ChildProcessError:
            pass  # the app collects all children; this one too
        return
    if os.fork():
        os._exit(0)  # orphans the worker into the supervisor's hands
    channel.sock.close()
    control = socket.socket(fileno=descriptor)
    heirlooms.is_our_fork = False
    heirlooms.sockets = [control, *listeners]
    system.die_with_parent(start.supervisor_pid)
    _disown_children()
    hooks.make_unique()
    start = msgspec.structs.replace(
        start, slot=order.slot, replay=order.replay, too_slow=order.too_slow, recent=order.recent
    )
    worker.run(control, start, booted, corpus, listeners, process=f"worker {order.slot}")


def _disown_children() -> None:
    """Processes that `multiprocessing` started in the mold are not this worker's to end or to join."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children.clear()


if __name__ == "__main__":
    main()
