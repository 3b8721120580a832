"""
The supervisor's side of the boot ledger: which generation died of its profile, which is well, and the votes on it.

The mold writes down what it loads (`jumpstart/provision.py`); here is what became of it. Nothing here may stop a boot
or a worker: a ledger that cannot be written, or a store that takes no votes, costs one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jumpstart.boot import BootSettings
from jumpstart.errors import ProfileRefusedError
from jumpstart.ledger import Attempt, Ledger
from jumpstart.stores import Verdict
from jumpstart_server.lifecycle import HEALTHY_AFTER

logger = logging.getLogger(__name__)

T = TypeVar("T")

VOTE_TIMEOUT = 60.0  # seconds that a store may take for a vote; nobody waits for it
VOTE_PAUSES = (0.0, 5.0, 30.0)  # seconds before each attempt: hosts that boot at once keep a store, or a host, busy


class Failure(NamedTuple):
    """
    What a death means for profiles.

    Attributes:
        had_profile: the generation had loaded one, which is blamed now.
        may_take_another: and the next boot may load another one from the store.
    """

    had_profile: bool = False
    may_take_another: bool = False


class ProfileWatch:
    """
    Of one tenant. For the event loop's thread only.

    Attributes:
        server: the name of this server in the ledger; empty where none is kept.
    """

    def __init__(self, spawn_task: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.server = ""
        self._key = ""
        self._spawn_task = spawn_task
        self._ledger: Ledger | None = None
        self._decided: set[int] = set()  # generations that died or are well
        self._timed: set[int] = set()

    def begin(self, settings: BootSettings) -> None:
        """
        Before each boot: show that this server lives, if it may load a profile.

        What dead servers of this home were loading is blamed.
        """
        if not settings.profile or not settings.ledger:
            return
        if self._ledger is not None and self._key == settings.state_key:
            return
        self.leave()
        self._key = settings.state_key
        ledger = Ledger(Path(settings.ledger), self._key)
        try:
            self.server, dead = ledger.come_alive()
        except ProfileRefusedError as error:
            logger.warning("no boot ledger is kept: %s", error)
            return
        self._ledger = ledger
        for attempt in dead:
            logger.warning("the last boot with profile %s died before it was healthy", attempt.profile[:12])
            self._vote(attempt, "crashed")

    def failed(self, generation: int, *, cold: bool) -> Failure:
        """
        A process of that generation died by itself; nothing comes of it where the generation was healthy for a while.

        Args:
            cold: it was told to boot without warm state.
        """
        if generation in self._decided or self._ledger is None:
            return Failure()
        self._decided.add(generation)
        try:
            if cold:
                self._ledger.exonerate()
                return Failure()
            attempt = self._ledger.died(self.server, generation)
            account = self._ledger.read()
            if attempt is None:
                if not account.may_load:
                    self._ledger.exonerate()  # without a profile it dies as well
                return Failure()
        except ProfileRefusedError as error:
            logger.warning("not noted: %s", error)
            return Failure()
        self._vote(attempt, "crashed")
        return Failure(had_profile=True, may_take_another=account.may_load and bool(attempt.path))

    def accepts(self, generation: int) -> None:
        """A worker of that generation serves; when that lasts, the generation is well."""
        if self._ledger is not None and generation not in self._timed:
            self._timed.add(generation)
            asyncio.get_running_loop().call_later(HEALTHY_AFTER, self._is_well, generation)
            try:
                attempt = self._ledger.find(self.server, generation)
            except ProfileRefusedError:
                return  # `_is_well` says so
            if attempt is not None:
                # At once, since other hosts wait for it; if it dies after all, that vote of this host takes precedence.
                self._vote(attempt, "healthy")

    def _is_well(self, generation: int) -> None:
        if generation in self._decided or self._ledger is None:
            return
        self._decided.add(generation)
        try:
            self._ledger.healthy(self.server, generation)
        except ProfileRefusedError as error:
            logger.warning("not noted: %s", error)

    def end(self, generation: int | None = None) -> None:
        """That generation, or by default the tenant, is stopped in order before anybody can tell."""
        self._decided.update(self._timed if generation is None else {generation})
        if self._ledger is not None:
            try:
                self._ledger.end(self.server, generation)
            except ProfileRefusedError as error:
                logger.warning("not noted: %s", error)

    def leave(self) -> None:
        """The server ends."""
        if self._ledger is not None:
            self._ledger.leave(self.server)
            self._ledger = None
            self.server = ""

    def describe(self) -> dict[str, Any] | None:
        """What the ledger holds, as JSON types; None where none is kept."""
        if self._ledger is None:
            return None
        try:
            account = self._ledger.read()
        except ProfileRefusedError as error:
            return {"problem": str(error), "failures": 0, "loading": [], "not_loaded": []}
        return {
            "problem": "",
            "failures": account.failures,
            "loading": [
                {"profile": each.profile, "generation": each.generation, "ours": each.server == self.server}
                for each in account.attempts
            ],
            "not_loaded": sorted(account.avoid),
        }

    def _vote(self, attempt: Attempt, verdict: Verdict) -> None:
        is_read_only = attempt.url.startswith(("http://", "https://"))
        if attempt.path and not is_read_only and self._ledger is not None:
            self._spawn_task(self._cast(attempt, verdict))

    async def _cast(self, attempt: Attempt, verdict: Verdict) -> None:
        from jumpstart.fetching import VoteOrder, cast_vote  # only where there is a store

        assert self._ledger is not None
        try:
            voter = self._ledger.read().voter
        except ProfileRefusedError:
            return
        order = VoteOrder(url=attempt.url, path=attempt.path, voter=voter, verdict=verdict)
        for pause in VOTE_PAUSES:
            await asyncio.sleep(pause)
            outcome = await _in_daemon_thread(lambda: cast_vote(order, VOTE_TIMEOUT))
            for refusal in outcome.refusals:
                logger.debug("no vote: %s", refusal)
            if outcome.is_reached:
                return


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Await *work*, which never raises. The end of the process does not wait for it, as it would for `to_thread`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, name="vote", daemon=True).start()
    return await done
