"""
Signs of life: a worker's event loop beats once a second, and the supervisor notices when it stops.

A worker that does not beat is *hung* only if it does not compute either. One that holds the GIL for long, in a regular
expression or in C code, is busy: it comes back, and nobody's request is better served by killing it. What tells the two
apart is the processor time that the kernel counts. So a busy worker costs a line with its stacks, and is replaced only
after many times the limit; a hung one is replaced at the limit, the new one ready first.

`Pulse` decides, from beats and the kernel's counts. `Watchman` looks once a second, in the supervisor. The stacks are
written by the worker itself, in a signal handler that needs neither event loop nor GIL (faulthandler), into a memory
file that the supervisor reads.
"""

from __future__ import annotations

import asyncio
import enum
import faulthandler
import fcntl
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jumpstart_server.messages import Beat

BEAT_INTERVAL = 1.0  # seconds between two beats, and between two looks
BUSY_SHARE = 0.05  # of one processor: less in the whole time limit is no computing; a crowded machine gives as little
BUSY_LIMITS = 10  # times the limit after which a busy worker is replaced too
LATE_LOOK = 3.0  # seconds after which a look is late: then we were asleep ourselves, and not they
STACKS_PATIENCE = 0.5  # seconds that a process may take to write its stacks
STACKS_FILE = "jumpstart-stacks"
MOST_STACKS = 64 * 1024  # bytes of them in the log

# No library or profiler uses it, and the C library keeps only the first real-time signals for itself. SIGUSR1 and
# SIGUSR2 are apps' and ours, SIGALRM, SIGVTALRM and SIGPROF profilers'.
STACK_SIGNAL = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2


class Verdict(enum.StrEnum):
    BUSY = "busy"  # it computes, and does not beat: said once, and nothing else
    HUNG = "hung"
    STUCK = "stuck"  # it has computed for far too long
    STOPPED = "stopped"  # somebody looks at it with a debugger, or has sent SIGSTOP: said once, and nothing else


@dataclass(frozen=True)
class Vitals:
    """
    What the kernel knows about a process.

    Attributes:
        busy_s: seconds of processor time that it has used, or waited for, since its start.
        is_stopped: by SIGSTOP or a debugger.
    """

    busy_s: float
    is_stopped: bool = False


class Pulse:
    """
    One worker's signs of life, from its first request on. Every time is in seconds on the monotonic clock.

    Attributes:
        last: the latest beat; None before the first.
        limit_s: how long it may be silent; 0 for ever.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self.last: Beat | None = None
        self.limit_s = limit_s
        self._beaten_at = now
        self._looked_at = now
        self._vitals: deque[tuple[float, float]] = deque()
        self._said: Verdict | None = None

    def beat(self, now: float, beat: Beat) -> None:
        """It has beaten."""
        self.last = beat
        self._beaten_at = now
        self._vitals.clear()
        self._said = None

    def silent_s(self, now: float) -> float:
        """How long it has not beaten."""
        return now - self._beaten_at

    def needs_vitals(self, now: float) -> bool:
        """Whether `look` wants to know more than the beats; mostly it does not."""
        return bool(self.limit_s) and self.silent_s(now) > 2 * BEAT_INTERVAL

    def look(self, now: float, vitals: Vitals | None) -> Verdict | None:
        """
        Judge; once a second.

        Args:
            vitals: None where the system does not tell, or when `needs_vitals` said no.

        Returns: what is wrong, when that has changed; it is not said again.
        """
        late = now - self._looked_at
        self._looked_at = now
        if late > LATE_LOOK:  # beats may lie unread
            self._beaten_at += late
            self._vitals = deque((at + late, busy) for at, busy in self._vitals)
        if not self.limit_s or not self.needs_vitals(now):
            return None
        if vitals is not None and vitals.is_stopped:
            self._beaten_at = now
            if self._said is Verdict.STOPPED:
                return None
            self._said = Verdict.STOPPED
            return Verdict.STOPPED
        if vitals is not None:
            self._vitals.append((now, vitals.busy_s))
            while now - self._vitals[0][0] > max(self.limit_s, 3 * BEAT_INTERVAL):
                self._vitals.popleft()
        silent = self.silent_s(now)
        needed = max(self.limit_s - 3 * BEAT_INTERVAL, 1.9 * BEAT_INTERVAL)
        if silent <= self.limit_s or (self._vitals and now - self._vitals[0][0] < needed):
            return None
        verdict = Verdict.HUNG
        if self._is_busy(now):
            verdict = Verdict.STUCK if silent > self.limit_s * BUSY_LIMITS else Verdict.BUSY
        if verdict is self._said:
            return None
        self._said = verdict
        return verdict

    def _is_busy(self, now: float) -> bool:
        if not self._vitals:
            return True  # nobody can say
        (since, before), (_, after) = self._vitals[0], self._vitals[-1]
        return after - before > BUSY_SHARE * (now - since)


# ---------------------------------------------------------------------- what the kernel knows


def vitals_of(pid: int, proc: Path = Path("/proc")) -> Vitals | None:
    """Of a living process; None where the system does not tell."""
    try:
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        state, ticks = fields[0], int(fields[11]) + int(fields[12])
        waited_ns = int((proc / str(pid) / "schedstat").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return Vitals(ticks / os.sysconf("SC_CLK_TCK") + waited_ns / 1e9, state in (b"T", b"t"))


# ---------------------------------------------------------------------- stacks


def offer_stacks() -> int:
    """
    Have this process write the stacks of all its threads when it gets `STACK_SIGNAL`, whatever it does.

    Returns the descriptor of the memory file that they are written to; -1 where it is standard error, since the system
    has none.
    """
    try:
        descriptor = os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)  # the reader cuts it
    except (AttributeError, OSError):
        descriptor = -1
    faulthandler.register(STACK_SIGNAL, file=descriptor if descriptor >= 0 else 2, all_threads=True)
    return descriptor


async def stacks_of(pid: int, descriptor: int) -> str:
    """
    The stacks of a process that has called `offer_stacks`, which returned *descriptor*; "" where it does not write.

    The signal would end a process that does not offer them, so it is sent to none that does not hold such a file.
    """
    file = Path(f"/proc/{pid}/fd/{descriptor}")
    text, give_up = b"", time.monotonic() + STACKS_PATIENCE
    try:
        if STACKS_FILE not in str(file.readlink()):
            return ""
        os.kill(pid, STACK_SIGNAL)
        while time.monotonic() < give_up:
            await asyncio.sleep(STACKS_PATIENCE / 10)
            before, text = text, file.read_bytes()
            if text and text == before:
                break
        os.truncate(file, 0)
    except OSError:
        pass  # it has ended, or writes to standard error
    return text[:MOST_STACKS].decode("utf-8", "replace").rstrip()


# ---------------------------------------------------------------------- the supervisor's side


class Watched(Protocol):
    """A worker that serves, as the watchman sees it."""

    pulse: Pulse

    @property
    def pid(self) -> int: ...

    @property
    def name(self) -> str: ...


class Watchman:
    """Looks after the workers of one tenant. For the supervisor's event loop."""

    def __init__(
        self,
        workers: Callable[[], Iterable[Watched]],
        *,
        hung: Callable[[Watched, str], None],
        log: logging.Logger | logging.LoggerAdapter[logging.Logger],
    ) -> None:
        """
        Args:
            workers: those that serve now.
            hung: replace this worker, the new one ready first, for this reason; it does not answer, so ended it has to
                be by signals.
        """
        self._workers = workers
        self._hung = hung
        self._log = log

    async def watch(self) -> None:
        """Look once a second, for ever."""
        while True:
            await asyncio.sleep(BEAT_INTERVAL)
            for worker in list(self._workers()):
                now = time.monotonic()
                vitals = vitals_of(worker.pid) if worker.pulse.needs_vitals(now) else None
                verdict = worker.pulse.look(now, vitals)
                if verdict is not None:
                    await self._act(worker, verdict)

    async def _act(self, worker: Watched, verdict: Verdict) -> None:
        pulse = worker.pulse
        silent = pulse.silent_s(time.monotonic())
        last = pulse.last
        if verdict is Verdict.STOPPED:
            self._log.warning("%s is stopped by a signal: it is left alone until SIGCONT", worker.name)
            return
        running = f", with {last.in_flight} requests running at the last one" if last is not None else ""
        stacks = await stacks_of(worker.pid, last.stacks) if last is not None else ""
        if not any(each is worker for each in self._workers()):
            return  # it ended meanwhile, or was told to
        why = {
            Verdict.BUSY: "computes: something holds the GIL. It is busy, and is left alone",
            Verdict.HUNG: "does nothing: it hangs, and is replaced",
            Verdict.STUCK: "has computed without a pause all the time, and is replaced",
        }[verdict]
        self._log.warning(
            "%s gives no sign of life for %.0f s (--worker-healthcheck-timeout %g s)%s, and %s%s",
            *(worker.name, silent, pulse.limit_s, running, why, f"\n{stacks}" if stacks else ""),
        )
        if verdict is not Verdict.BUSY:
            self._hung(worker, f"{verdict}: no sign of life for {silent:.0f} s")
