"""
Who of a tenant's workers is to repeat which request of another one, and who listens to a sample of the traffic.

A request that met cold work goes to all other workers, once: `Relay` knows what it has passed on lately, since each of
them will meet the same. What they meet in it is never reported, so nothing goes round in circles; a shadow request that
was drawn at random is, since it may be the first to meet something. `Relay` decides and does nothing; `Shadowing` is
what a tenant has of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

from jumpstart_server.messages import MetCold, Sampled, SampleRate, Shadow
from jumpstart_server.processes import Member
from jumpstart_server.settings import TenantSettings
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.sampling import MAX_HELD, Cold, Memory, Sample
from jumpstart_warmup.shadow import MOST_RANDOM, ShadowCounts, add_counts

T = TypeVar("T")

MOST_RECENT = 100  # requests that new workers are given
RECENT_FOR = 3600.0  # seconds for which they are given to them
MOST_UNREAD = 10_000  # samples that one subscriber has not taken


class Relay(Generic[T]):
    """
    Decides who repeats what. Workers are whatever the caller calls them; it is given those that there are each time.

    Attributes:
        shared: requests with cold work that were passed on.
        sent: shadow requests, by lane.
        dropped: by reason: ``known``, it was passed on lately; ``alone``, there is nobody else.
    """

    def __init__(self) -> None:
        self.shared = 0
        self.sent = {"cold": 0, "random": 0}
        self.dropped: dict[str, int] = {}
        self._memory = Memory()
        self._recent: dict[tuple[str, bytes], tuple[float, WarmRequest]] = {}
        self._turn = 0

    def share(self, cold: Cold, others: Sequence[T], now: float) -> list[T]:
        """Whom to send a request that met cold work, of *others*: the workers but for the one that met it."""
        if not self._memory.is_news(cold.route, cold.events, now):
            self._drop("known")
            return []
        self._remember(cold.request, now)
        if not others:
            self._drop("alone")
            return []
        self.shared += 1
        self.sent["cold"] += len(others)
        return list(others)

    def pick(self, others: Sequence[T]) -> T | None:
        """Who repeats a request that was drawn at random: they take turns."""
        if not others:
            self._drop("alone")
            return None
        self._turn += 1
        self.sent["random"] += 1
        return others[self._turn % len(others)]

    def _remember(self, request: WarmRequest, now: float) -> None:
        key = (request.name, request.body)
        self._recent.pop(key, None)
        self._recent[key] = (now, request)
        while len(self._recent) > MOST_RECENT:
            del self._recent[next(iter(self._recent))]

    def recent(self, now: float) -> list[WarmRequest]:
        """What a new worker should run before it is ready, the latest last."""
        return [request for met, request in self._recent.values() if now - met < RECENT_FOR]

    def _drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


class Subscription:
    """
    Batches of sampled requests, as they come: a context manager, and an asynchronous iterator of lists.

    Attributes:
        fraction: of the real requests.
        dropped: how many its reader was too slow for, and how many workers lost.
    """

    def __init__(self, fraction: float, leave: Callable[[Subscription], None]) -> None:
        self.fraction = fraction
        self.dropped = 0
        self._leave = leave
        self._unread: deque[Sample] = deque()
        self._more = asyncio.Event()
        self._is_over = False

    def take(self, samples: Iterable[Sample], lost: int) -> None:
        """More has come."""
        self.dropped += lost
        for sample in samples:
            if sample.draw < self.fraction:
                if len(self._unread) >= MOST_UNREAD:
                    self._unread.popleft()
                    self.dropped += 1
                self._unread.append(sample)
        if self._unread:
            self._more.set()

    def end(self) -> None:
        """There will be no more: the iteration ends with what is there."""
        self._is_over = True
        self._more.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._leave(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Sample]:
        while not self._unread:
            if self._is_over:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        batch = list(self._unread)
        self._unread.clear()
        return batch


class Shadowing:
    """The shadow traffic of one tenant. For the event loop's thread only."""

    def __init__(self, workers: Callable[[], Sequence[Member]]) -> None:
        """*workers*: those that serve or are about to."""
        self._workers = workers
        self._relay: Relay[Member] = Relay()
        self._subscriptions: list[Subscription] = []
        self._random = 0.0
        self._told: float | None = None  # the fraction that somebody asked for since
        self._past = ShadowCounts()  # of workers that are gone

    # ------------------------------------------------------------------ workers

    def accepts(self, member: Member, settings: TenantSettings) -> None:
        """A worker serves: tell it how much to sample."""
        fraction = settings.shadow if self._told is None else self._told
        self._random = fraction if settings.replay else 0.0
        if self._rate():
            member.send(self._order())

    def gone(self, member: Member) -> None:
        """A worker has ended; what it had counted stays counted."""
        if member.stats is not None:
            self._past = add_counts(self._past, msgspec.structs.replace(member.stats.shadow, waiting=0))

    def met(self, member: Member, message: MetCold, now: float) -> None:
        """*member* has met cold work: have the others meet it in a shadow request."""
        for other in self._relay.share(message.cold, self._others(member), now):
            other.send(Shadow(message.cold.request, "cold"))

    def sampled(self, member: Member, message: Sampled) -> None:
        """A worker has sampled some of its requests."""
        for subscription in self._subscriptions:
            # What the user listed may hold a body, and stays on this host.
            safe = (sample for sample in message.samples if not sample.request.body and _is_safe(sample.request))
            subscription.take(safe, message.lost)
        for sample in message.samples:
            if sample.draw < self._random:
                other = self._relay.pick(self._others(member))
                if other is not None:
                    other.send(Shadow(sample.request, "random", sample.route))

    def recent(self, now: float) -> list[WarmRequest]:
        """As of `Relay`."""
        return self._relay.recent(now)

    def _others(self, member: Member) -> list[Member]:
        return [other for other in self._workers() if other is not member]

    # ------------------------------------------------------------------ those who listen

    def shadow(self, fraction: float, settings: TenantSettings) -> float:
        """
        Have this *fraction* of the requests shadowed from now on, until the server ends, whatever ``shadow`` says.

        Returns what it is now: nothing where ``replay`` is off.
        """
        before = self._order()
        self._told = fraction
        self._random = fraction if settings.replay else 0.0
        self._tell(before)
        return self._random

    def subscribe(self, fraction: float) -> Subscription:
        """
        Listen to a *fraction* of the real requests: safe, successful ones, scrubbed. Leave its ``with`` to end that.

        Workers sample only as long as somebody listens, or ``--shadow`` asks them to.
        """
        subscription = Subscription(fraction, self._unsubscribe)
        before = self._order()
        self._subscriptions.append(subscription)
        self._tell(before)
        return subscription

    def end(self) -> None:
        """The tenant stops."""
        for subscription in self._subscriptions:
            subscription.end()

    def _unsubscribe(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            before = self._order()
            self._subscriptions.remove(subscription)
            self._tell(before)

    def _rate(self) -> float:
        return max([self._random, *(each.fraction for each in self._subscriptions)])

    def _order(self) -> SampleRate:
        return SampleRate(self._rate(), MAX_HELD if self._subscriptions else MOST_RANDOM)

    def _tell(self, before: SampleRate) -> None:
        if self._order() != before:
            for member in self._workers():
                member.send(self._order())

    # ------------------------------------------------------------------ what the admin pages ask

    def counts(self) -> ShadowCounts:
        """What became of shadow requests in all workers, and of those that were sent to none."""
        counts = self._past
        for member in self._workers():
            if member.stats is not None:
                counts = add_counts(counts, member.stats.shadow)
        return add_counts(counts, ShadowCounts(dropped=dict(self._relay.dropped)))

    def sent(self) -> dict[str, int]:
        """Shadow requests that were sent to workers, by lane."""
        return dict(self._relay.sent)

    def describe(self) -> dict[str, Any]:
        """For the status, as JSON types."""
        return {
            "fraction": self._random,
            "shared": self._relay.shared,
            "sent": self.sent(),
            **msgspec.to_builtins(self.counts()),
            "subscribers": len(self._subscriptions),
        }


def _is_safe(request: WarmRequest) -> bool:
    return request.method in ("GET", "HEAD")
