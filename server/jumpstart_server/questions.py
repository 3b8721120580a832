"""What is asked of workers, and the answers put together: statistics, and all that a profile is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from jumpstart.lineage import Lineage
from jumpstart.profile import Golden
from jumpstart_server.learning import Learning
from jumpstart_server.messages import Ask, Captured, Section, Stats
from jumpstart_server.processes import Member
from jumpstart_warmup.corpus import CorpusRecorder, WarmRequest
from jumpstart_warmup.golden import golden_requests
from jumpstart_warmup.observe import ObserverSnapshot, merge_snapshots

ANSWER_TIMEOUT = 2.0  # seconds that a worker may take to answer for statistics
CAPTURE_TIMEOUT = 30.0  # seconds that a worker may take to capture a profile
GOLDEN_TIMEOUT = 20.0  # seconds that a worker may take to answer golden requests


@dataclass(frozen=True, kw_only=True)
class Capture:
    """
    What a profile is made of.

    Attributes:
        golden: safe requests, and how a worker answers them.
        lineage: None where the process booted from no profile.
    """

    sections: dict[str, Section]
    golden: list[Golden]
    lineage: Lineage | None
    observed: ObserverSnapshot


class Questions:
    """The questions that one tenant asks its workers. For the event loop's thread only."""

    def __init__(self) -> None:
        self._last = 0  # number of a question
        self._past: list[ObserverSnapshot] = []  # statistics of workers that are gone

    def gone(self, member: Member) -> None:
        """A worker has ended; what it had counted stays counted."""
        if member.stats is not None:
            self._past = [merge_snapshots(*self._past, member.stats.observed)]

    async def observed(self, accepting: Sequence[Member], members: Sequence[Member]) -> ObserverSnapshot:
        """
        Request statistics of all workers, of those that are gone too.

        Args:
            accepting: who is asked.
            members: whose latest report counts.
        """
        await self._ask(accepting, capture=False, timeout_s=ANSWER_TIMEOUT)
        living = [member.stats.observed for member in members if member.stats is not None]
        return merge_snapshots(*self._past, *living)

    async def capture(
        self, learning: Learning, lineage: Lineage | None, accepting: Sequence[Member], members: Sequence[Member]
    ) -> Capture:
        """What the workers and the warm-start cache know now, for a profile that is shipped."""
        answers = await self._ask(accepting, capture=True, timeout_s=CAPTURE_TIMEOUT)
        sections = learning.handed_down([answer.sections for answer in answers if isinstance(answer, Captured)])
        corpus = sections.get(CorpusRecorder.name)
        requests = golden_requests(corpus.records) if corpus is not None else []
        return Capture(
            sections=sections,
            golden=await self._golden(accepting, requests),
            lineage=lineage,
            observed=await self.observed(accepting, members),
        )

    async def _golden(self, accepting: Sequence[Member], requests: list[WarmRequest]) -> list[Golden]:
        """How one of the workers answers *requests* at its leisure; those that it answers alike each time."""
        if not requests:
            return []
        answers = await self._ask(accepting[:1], golden=requests, timeout_s=GOLDEN_TIMEOUT)
        return [golden for answer in answers if isinstance(answer, Captured) for golden in answer.golden]

    async def _ask(
        self,
        members: Sequence[Member],
        *,
        capture: bool = False,
        golden: list[WarmRequest] | None = None,
        timeout_s: float,
    ) -> list[Stats | Captured]:
        futures = []
        for member in members:
            self._last += 1
            future: asyncio.Future[Stats | Captured] = asyncio.get_running_loop().create_future()
            member.answers[self._last] = future
            member.send(Ask(self._last, capture, golden or []))
            futures.append(future)
        if not futures:
            return []
        done, late = await asyncio.wait(futures, timeout=timeout_s)
        for future in late:
            future.cancel()
        return [future.result() for future in done if not future.cancelled()]
