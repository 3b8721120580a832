"""
Where a profile comes from, and how long a record lives that nobody sees being used.

A process that booted from a profile has in place what that brought, so that it cannot see real traffic need it. What it
captures holds those records all the same, and they would live for ever. So each counts how many profiles in a row have
carried it along without new evidence, and is left out after `MAX_CARRIED`: then some consumer meets it cold, which is
evidence, and the count begins anew. A profile names its ancestors. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated

import msgspec

from jumpstart.records import Record

MAX_CARRIED = 10  # profiles in a row; with one for each release, ten releases
MAX_ANCESTORS = 16  # that a profile names; it counts them all

_Id = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the process had booted from that a profile was captured in.

    Attributes:
        generation: how many profiles came before this one, each made by a process that had booted from the one before;
            0 for one that was learnt from nothing.
        ancestors: their ids, the nearest first; the last `MAX_ANCESTORS`.
    """

    generation: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    ancestors: Annotated[list[_Id], msgspec.Meta(max_length=MAX_ANCESTORS)] = []

    def descend(self, profile: str) -> Lineage:
        """The lineage of what is captured in a process that booted from *profile*, whose own lineage this is."""
        return Lineage(generation=min(self.generation + 1, 2**53), ancestors=[profile, *self.ancestors][:MAX_ANCESTORS])


def hand_down(records: Iterable[Record], seen: Collection[str]) -> list[Record]:
    """
    Return the *records* that a new profile holds, in their order.

    Args:
        seen: the keys of those that real traffic has shown to be hot since this process began.
    """
    handed = []
    for record in records:
        carried = 0 if record.key in seen else max(record.carried, 0) + 1
        if carried <= MAX_CARRIED:
            handed.append(record if carried == record.carried else msgspec.structs.replace(record, carried=carried))
    return handed
