"""
`Service`: where another service is, found anew in the background; requests take the addresses that are known.

An answer without addresses counts as a failure: the last ones stay in use, since a registry that has lost its memory is
more likely than a service without an instance, and a connection that is refused tells the same.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeAlias

from jumpstart import live
from jumpstart.upkeep import Rules


class Address(NamedTuple):
    """Host and port; as text ``host:port``, with brackets around an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Place: TypeAlias = Address | str
"""An address as the function gave it: a pair of host and port, or a text such as a URL."""


class Service(live.Live[tuple[Place, ...]]):
    """
    The addresses of a service: ``inference.pick()``, ``inference.addresses()``.

    Args:
        name: in profiles, logs and ``jumpstart status``; handed to *resolve* if that has a parameter without a default.
        resolve: returns addresses, each a ``(host, port)`` or a text; a function or a coroutine function. Called in a
            background thread. See `jumpstart.sources.dns`.
        ttl: seconds for which addresses are fresh. Older ones are used while new ones are looked for.
        stale_ttl: seconds beyond *ttl* for which they are used at most; None: until there are others.
        negative_ttl: seconds before it is asked again after it has failed, or found none; more and more from then on.
            Meanwhile nobody asks, and those who find no address are told so at once.
        timeout: seconds that one look-up may take.
        default: addresses to use until there was an answer.
        on_down, boot_timeout, snapshot: as for `Config`.

    Raises:
        ValueError, TypeError: an option is out of range.
    """

    kind: ClassVar[str] = "service"
    noun: ClassVar[str] = "service"

    def __init__(
        self,
        name: str,
        resolve: Callable[..., Any],
        *,
        ttl: float = 30.0,
        stale_ttl: float | None = None,
        negative_ttl: float = 1.0,
        timeout: float = 5.0,
        default: Iterable[Any] | None = None,
        on_down: live.OnDown = "profile",
        boot_timeout: float = 5.0,
        snapshot: live.Snapshot | None = None,
    ) -> None:
        if not negative_ttl > 0:
            raise ValueError(f"negative_ttl is {negative_ttl!r}; it must be a number of seconds above 0")
        if stale_ttl is not None and stale_ttl < 0:
            raise ValueError(f"stale_ttl is {stale_ttl!r}; it must be a number of seconds, or None")
        self._stale_ttl = stale_ttl
        self._shunned: dict[Place, float] = {}  # address → until when, monotonic
        super().__init__(
            name,
            (lambda: resolve(name)) if callable(resolve) and _takes_name(resolve) else resolve,
            Rules(ttl, timeout, negative_ttl),
            boot_timeout=boot_timeout,
            on_down=on_down,
            default=live._NOTHING if default is None else self._check(default),
            snapshot=snapshot,
        )

    def addresses(self) -> tuple[Place, ...]:
        """
        All of them, in the order in which they were given; never empty.

        Raises:
            SourceUnavailable: there are none, or they are older than *ttl* and *stale_ttl* together.
        """
        found = self._current()
        if not found:
            raise self._unavailable()
        if self._stale_ttl is not None:
            with self._lock:
                kept, age = self._upkeep, self._upkeep.age(time.monotonic())
                # Those of a profile or a default are there for the very time without an answer.
                is_over = kept.origin == "source" and age > kept.rules.ttl + self._stale_ttl
            if is_over:
                raise self._unavailable(f"its addresses are {age:.0f} s old")
        return found

    def pick(self) -> Place:
        """
        One of them by chance; one that was reported as failing only where all were.

        Raises:
            SourceUnavailable: as `addresses`.
        """
        found = self.addresses()
        if self._shunned:
            now = time.monotonic()
            found = tuple(place for place in found if self._shunned.get(place, 0.0) <= now) or found
        return random.choice(found)

    def report_failure(self, address: Place | tuple[str, int], seconds: float = 10.0) -> None:
        """Have `pick` leave *address* out for *seconds*, in this process, and look for others at once."""
        now = time.monotonic()
        place = _place(address)
        self._shunned = {each: until for each, until in list(self._shunned.items()) if until > now}
        is_news = place not in self._shunned
        self._shunned[place] = now + seconds
        if is_news and not self.info().failures:
            self.refresh()

    def __repr__(self) -> str:
        info = self.info()
        return f"<Service {self.name!r} version {info.version} from {info.origin}>"

    # ------------------------------------------------------------------ for `Live`

    def _check(self, answer: Any) -> tuple[Place, ...]:
        if isinstance(answer, str | bytes) or not isinstance(answer, Iterable):
            raise TypeError(f"resolved to {type(answer).__name__}, which is no list of addresses")
        places = tuple(dict.fromkeys(map(_place, answer)))
        if not places:
            raise LookupError("resolved to no address")
        return places

    def _merge(
        self, old: tuple[Place, ...] | None, new: tuple[Place, ...], version: int
    ) -> tuple[tuple[Place, ...], frozenset[str]]:
        if old is not None and set(old) == set(new):  # name servers turn them round
            return old, frozenset()
        return new, frozenset(map(str, set(new).symmetric_difference(old or ())))

    def _as_data(self, value: tuple[Place, ...]) -> Any:
        return [list(place) if isinstance(place, Address) else place for place in value]


def _place(given: Any) -> Place:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, tuple | list) and len(given) == 2:
        host, port = given
        if isinstance(host, str) and host and type(port) is int and 0 < port < 65536:
            return Address(host, port)
    raise ValueError(f"{given!r} is no address: a pair of host and port, or a text")


def _takes_name(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)
