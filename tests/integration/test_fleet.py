"""Consumers boot at once from what three seeders published; `scripts/fleet` has thirty, with all the proofs, and S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from jumpstart.choice import TRIALS
from tests.integration.fleet import Fleet

pytestmark = pytest.mark.slow


def test_a_fleet_serves_whatever_one_seeder_publishes(tmp_path: Path) -> None:
    """Those that chose the bad profile at the same moment try it once, then nobody does; the drained one is absent."""
    store = tmp_path / "store"
    store.mkdir()
    fleet = Fleet(tmp_path, str(store))
    fleet.good = fleet.build("good", "/", "/about")
    fleet.bad = fleet.build("bad", "/", "/bad", SEEDING="1")
    assert fleet.seed("drained", "/", "/about", asks=False) == ""
    assert set(fleet.votes()) == {fleet.good, fleet.bad}
    first = fleet.consume(5)
    print(f"at once: {first}")
    assert first.served == 5 and first.sources == {fleet.good[:12]: 5}
    assert first.bad_boots == first.tried_bad <= TRIALS, "few try it, and nobody twice"
    assert fleet.votes() == {fleet.good: (5, 0), fleet.bad: (0, first.tried_bad)}
    votes = next(store.rglob(f"{fleet.bad}.jumpstart")).with_suffix(".votes")
    votes.mkdir(exist_ok=True)
    for number in range(2):  # two hosts that crashed are needed, and by chance hardly any of these five may have
        (votes / f"{number:016x}.crashed").touch()
    later = fleet.consume(2, votes=False)
    print(f"later: {later}")
    assert later.served == 2 and later.tried_bad == 0 and later.sources == {fleet.good[:12]: 2}
