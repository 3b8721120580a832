"""The recorders `config` and `service`: names always, values with their age where asked for, and only what JSON has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import jumpstart
from jumpstart import live
from jumpstart.recorder import WarmSettings
from jumpstart.recorders.live import ConfigRecorder, ServiceRecorder
from jumpstart.records import Reason, Record, Tally
from tests.jumpstart.live_lab import Scripted, no_threads_left

DOWN = OSError("down")


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    with no_threads_left():
        yield


def over_json(records: list[Record]) -> list[Record]:
    return [Record(key=record.key, data=json.loads(json.dumps(record.data))) for record in records]


def boot(recorder: ConfigRecorder | ServiceRecorder, records: list[Record]) -> Tally:
    """As `jumpstart.boot` does."""
    tally = Tally()
    recorder.restore_early(records, tally)
    asyncio.run(live.settle_all())
    dropped = {drop.key for drop in tally.dropped}
    asyncio.run(recorder.restore_late(None, [record for record in records if record.key not in dropped], tally))
    return tally


def test_values_come_back_with_their_age_and_names_without_values() -> None:
    flags = jumpstart.Config("flags", Scripted({"a": [1, None, "x", 1.5]}), snapshot="value")
    secret = jumpstart.Config("secret", Scripted({"token": "s3cret"}))
    where = jumpstart.Service("where", Scripted([("h", 1), "http://c/"]), snapshot="value")
    assert flags["a"] and secret["token"] and where.addresses()
    configs = over_json(ConfigRecorder(WarmSettings()).capture("ship"))
    services = over_json(ServiceRecorder(WarmSettings()).capture("ship"))
    assert {record.key: "value" in record.data for record in configs} == {"flags": True, "secret": False}
    assert "s3cret" not in str(configs)
    for each in (flags, secret, where):
        each.close()

    def later() -> datetime:
        return datetime.now(UTC) + timedelta(hours=1)

    flags = jumpstart.Config("flags", Scripted(DOWN), snapshot="value", boot_timeout=0.1)
    secret = jumpstart.Config("secret", Scripted({"token": "new"}))
    where = jumpstart.Service("where", Scripted(DOWN), snapshot="value", boot_timeout=0.1)
    services_recorder, services_tally = ServiceRecorder(WarmSettings(), later), Tally()
    services_recorder.restore_early(services, services_tally)
    tally = boot(ConfigRecorder(WarmSettings(), later), configs)
    assert (tally.used_keys, tally.dropped) == ({"flags", "secret"}, [])
    assert flags["a"] == [1, None, "x", 1.5]
    assert flags.age is not None and flags.age >= 3600
    assert secret["token"] == "new"
    asyncio.run(services_recorder.restore_late(None, services, services_tally))
    assert services_tally.used_keys == {"where"}
    assert where.addresses() == (("h", 1), "http://c/")
    # What came from a profile is recorded again, no younger than it is.
    again = ConfigRecorder(WarmSettings(), later).capture("host")[0].data["created"]
    assert datetime.fromisoformat(again) <= later() - timedelta(hours=1)
    secret.close()


def test_records_that_are_of_no_use_say_why() -> None:
    flags = jumpstart.Config("flags", Scripted(DOWN), boot_timeout=0.1)
    records = [
        Record(key="flags", data={"name": "flags", "value": {"a": 1}, "created": "2026-01-01T00:00:00Z"}),
        Record(key="gone", data={"name": "gone"}),
        Record(key="bad", data={"name": 5}),
    ]
    tally = boot(ConfigRecorder(WarmSettings()), records)
    reasons = {drop.key: drop.reason for drop in tally.dropped}
    assert reasons == {"flags": Reason.FAILED, "gone": Reason.GONE, "bad": Reason.MALFORMED}
    with pytest.raises(jumpstart.SourceUnavailable):  # it has snapshot=None now: the value is not used
        flags["a"]


@pytest.mark.parametrize("value", [(1, 2), {1, 2}, float("nan"), datetime(2026, 1, 1), "x" * 2_000_000, object()])
def test_what_json_cannot_give_back_is_not_recorded_and_said_once(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    flags = jumpstart.Config("flags", Scripted({"a": value}), snapshot="value")
    assert "a" in flags
    recorder = ConfigRecorder(WarmSettings())
    for _ in range(3):
        assert [record.data for record in recorder.capture("host")] == [{"name": "flags"}]
    assert caplog.text.count("its value is not recorded") == 1


def test_a_default_is_no_knowledge() -> None:
    flags = jumpstart.Config("flags", Scripted(DOWN), default={"a": 1}, snapshot="value", boot_timeout=0.1)
    assert flags["a"] == 1
    assert ConfigRecorder(WarmSettings()).capture("host")[0].data == {"name": "flags"}


def test_they_are_taken_from_signed_profiles_only() -> None:
    assert ConfigRecorder.needs_trust and ServiceRecorder.needs_trust
