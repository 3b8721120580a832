"""
Profiles that were made to do harm: each is refused with a reason, before anything of a section is decoded.

The fuzzer runs in a process of its own, with a limit on its memory and a wire across everything that unpickles,
unmarshals or runs code. ``FUZZ_PROFILES=50`` in the environment makes it try fifty times as much.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jumpstart.archive import COMMENT_BYTES, MIB
from jumpstart.errors import ProfileRefusedError
from jumpstart.profile import (
    MAX_VALUES,
    AppInfo,
    EncodedSection,
    Profile,
    Trust,
    count_msgpack_values,
    encode_section,
    new_manifest,
    pack_profile,
    parse_profile,
)
from jumpstart.profile_view import describe
from jumpstart.records import Reason, Record
from jumpstart.trust import KeyRing

ROOT = Path(__file__).parents[2]
NOW = datetime(2025, 6, 1, 12, tzinfo=UTC)
MEMORY = 320 * MIB  # more than a process that has not read anything may take
SECONDS = 1.0  # of processor time for one file

TRUSTS: tuple[Trust, ...] = ("signed", "data-only", "any")


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os._exit, (77,))


RECORDS = [Record(key=f"module{number}", depends={"module:os": "python-3"}, weight=number) for number in range(20)]
BOMBS = [Record(key="bomb", data={"code": pickle.dumps(Bomb()), "opt": 0, "src": "0" * 64})]
MODULES = encode_section("modules", 1, "json", RECORDS)
BYTECODE = encode_section("bytecode", 1, "msgpack", BOMBS)


class Lab:
    """A host with its keys, and what it has made."""

    def __init__(self, folder: Path) -> None:
        self.ring = KeyRing(folder)
        self.ring.own_key()
        self.original = self.packed(MODULES, BYTECODE)
        self.other = self.packed(encode_section("modules", 1, "json", RECORDS[5:]), tenant="genai")
        self.sections = {
            section.data for data in (self.original, self.other) for section in self.parse(data).sections.values()
        }

    def packed(self, *sections: EncodedSection, tenant: str = "web") -> bytes:
        manifest = new_manifest(app=AppInfo(target="shop.web:app"), tenant=tenant, sections=sections, now=NOW)
        return pack_profile(manifest, {each.info.recorder: each.data for each in sections}, self.ring.sign)

    def parse(self, data: bytes, trust: Trust = "signed") -> Profile:
        return parse_profile(data, trust=trust, verify=self.ring.verify, now=NOW, max_age=timedelta(days=1))

    def refused(self, data: bytes, trust: Trust = "signed") -> Reason:
        """The reason code for which *data* is refused as a whole."""
        with pytest.raises(ProfileRefusedError) as caught:
            self.parse(data, trust)
        assert caught.value.detail
        return caught.value.reason

    def manifest(self, **changes: Any) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(members_of(self.original)["manifest.json"])
        return manifest | changes

    def signed(self, manifest: bytes, **members: bytes) -> bytes:
        """A file with any text for its manifest, signed by the trusted key, and the sections of the original."""
        signature = msgspec.json.encode(self.ring.sign(manifest))
        found = members_of(self.original) | {"manifest.json": manifest, "manifest.sig": signature} | members
        return archive([(name, data) for name, data in found.items()])

    def lying(self, **changes: Any) -> bytes:
        """A file whose manifest says something else about the section of modules than is true, signed."""
        manifest = self.manifest()
        next(each for each in manifest["sections"] if each["recorder"] == "modules").update(changes)
        return self.signed(json.dumps(manifest).encode())

    def outcome(self, data: bytes) -> list[Profile]:
        """What becomes of *data* with each kind of trust; anything but profiles and refusals is raised."""
        profiles = []
        for trust in TRUSTS:
            began = time.process_time()
            try:
                with watched():
                    profile = self.parse(data, trust)
                    describe(profile, verbose=True)
                profiles.append(profile)
            except ProfileRefusedError as error:
                if not isinstance(error.reason, Reason) or not error.detail:
                    raise AssertionError("a refusal without a reason") from error
            assert time.process_time() - began < SECONDS
        return profiles

    def whole_or_refused(self, data: bytes) -> None:
        for profile in self.outcome(data):
            assert {section.data for section in profile.sections.values()} <= self.sections
            assert len(profile.sections) == len(profile.manifest.sections) or profile.refusals
            for name in profile.sections:
                try:
                    records, dropped = profile.records(name)
                    assert records and not dropped
                except ProfileRefusedError:
                    assert profile.signed_by is None  # else nobody can have changed the number of records


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("keys"))


# -- archives --


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def deflated(data: bytes) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


def member(
    name: bytes | str,
    data: bytes,
    *,
    packed: bytes | None = None,
    method: int = 8,
    flags: int = 0,
    size: int | None = None,
    mode: int = 0o100644,
    extra: bytes = b"",
    comment: bytes = b"",
    offset: int | None = None,
    local_name: bytes | None = None,
) -> Callable[[int], tuple[bytes, bytes]]:
    """What returns, for an offset, a member with its header and its entry of the directory, as odd as is asked for."""
    name = name.encode() if isinstance(name, str) else name
    packed = (deflated(data) if method == 8 else data) if packed is None else packed
    common = struct.pack(
        "<5H3L", 20, flags, method, 0, 33, zlib.crc32(data), len(packed), len(data) if size is None else size
    )

    def build(position: int) -> tuple[bytes, bytes]:
        own = local_name if local_name is not None else name
        local = b"PK\x03\x04" + common + struct.pack("<2H", len(own), len(extra)) + own + extra + packed
        where = position if offset is None else offset
        entry = b"PK\x01\x02" + struct.pack("<H", 0x314) + common
        entry += struct.pack("<5H2L", len(name), len(extra), len(comment), 0, 0, mode << 16, where)
        return local, entry + name + extra + comment

    return build


def archive(
    members: Sequence[tuple[str, bytes] | Callable[[int], tuple[bytes, bytes]]],
    *,
    before: bytes = b"",
    between: bytes = b"",
    after: bytes = b"",
    count: int | None = None,
    disk: int = 0,
    digest: bool = True,
) -> bytes:
    """A ZIP archive with the right container digest, whatever else is wrong with it."""
    body, directory = before, b""
    for each in members:
        build = each if callable(each) else member(*each)
        local, entry = build(len(body))
        body += local
        directory += entry
    body += between
    number = len(members) if count is None else count
    end = struct.pack("<4H2LH", disk, disk, number, number, len(directory), len(body), COMMENT_BYTES)
    body += directory + b"PK\x05\x06" + end
    return body + b"sha256:" + (hashlib.sha256(body).hexdigest().encode() if digest else b"0" * 64) + after


def test_the_archives_of_these_tests_are_like_ours(lab: Lab) -> None:
    """Else all of them would be refused for a slip in the test."""
    made = archive(list(members_of(lab.original).items()))
    profile = lab.parse(made)
    assert profile.trusted and not profile.refusals
    assert {section.data for section in profile.sections.values()} == {MODULES.data, BYTECODE.data}


@pytest.mark.parametrize(
    "name",
    [
        "../manifest.json",
        "sections/../../x.json",
        "/sections/modules.json",
        "//sections/modules.json",
        "C:sections/modules.json",
        "C:\\sections\\modules.json",
        "sections\\modules.json",
        "sections/modules.json\0.txt",
        "\0sections/modules.json",
        "sections/./modules.json",
        "sections//modules.json",
        "sections/modules.json/",
        "sections/modulés.json",
        "sections/" + "m" * 65 + ".json",
        "sections/modules.json\n",
        "./manifest.json",
        "",
    ],
)
def test_names_that_lead_elsewhere(lab: Lab, name: str) -> None:
    members = [*members_of(lab.original).items(), (name, b"[]")]
    for trust in TRUSTS:
        assert lab.refused(archive(members), trust) is Reason.DAMAGED


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param({"mode": 0o120777}, id="a symbolic link"),
        pytest.param({"mode": 0o040755}, id="a folder"),
        pytest.param({"mode": 0o010644}, id="a FIFO"),
        pytest.param({"flags": 0x1}, id="encrypted"),
        pytest.param({"flags": 0x8}, id="sizes after the data"),
        pytest.param({"flags": 0x40}, id="strongly encrypted"),
        pytest.param({"flags": 0x800}, id="a name in UTF-8"),
        pytest.param({"method": 12}, id="bzip2"),
        pytest.param({"method": 14}, id="LZMA"),
        pytest.param({"method": 93}, id="Zstandard"),
        pytest.param({"method": 99}, id="AES"),
        pytest.param({"extra": struct.pack("<2H2Q", 1, 16, 1, 1)}, id="ZIP64"),
        pytest.param({"extra": b"up\x05\x00\x01abcd"}, id="another name in an extra field"),
        pytest.param({"comment": b"hello"}, id="a comment"),
        pytest.param({"local_name": b"sections/cached.json."}, id="another name in its own header"),
        pytest.param({"offset": 0}, id="the bytes of the first member"),
        pytest.param({"offset": 40}, id="overlapping the first member"),
        pytest.param({"offset": 2**32 - 1}, id="outside the file"),
    ],
)
def test_members_of_a_kind_that_profiles_do_not_have(lab: Lab, odd: dict[str, Any]) -> None:
    members = members_of(lab.original)
    last = members.pop("sections/modules.json")
    for trust in TRUSTS:
        assert lab.refused(archive([*members.items(), member("sections/modules.json", last, **odd)]), trust) is (
            Reason.DAMAGED
        )


def test_bytes_before_between_and_after_the_members(lab: Lab) -> None:
    members = list(members_of(lab.original).items())
    assert lab.refused(archive(members, before=b"#!/bin/sh\n")) is Reason.DAMAGED
    assert lab.refused(archive(members, between=b"PK\x03\x04 hidden")) is Reason.DAMAGED
    assert lab.refused(archive(members, after=b"\n")) is Reason.DAMAGED
    assert lab.refused(archive(members, after=b"x" * 100_000)) is Reason.DAMAGED
    assert lab.refused(b"MZ" + lab.original) is Reason.DAMAGED
    assert lab.refused(lab.original + lab.original) is Reason.DAMAGED  # the second one's offsets lie


def test_counts_of_members_that_lie(lab: Lab) -> None:
    members = list(members_of(lab.original).items())
    for count in (0, 1, 3, 5, 60):
        assert lab.refused(archive(members, count=count)) is Reason.DAMAGED
    assert lab.refused(archive(members, count=65_535)) is Reason.TOO_LARGE
    assert lab.refused(archive(members, disk=1)) is Reason.DAMAGED
    twice = archive([*members, members[2]])
    assert lab.refused(twice) is Reason.DAMAGED
    many = archive([(f"sections/r{number}.json", b"[]") for number in range(100)])
    assert lab.refused(many) is Reason.TOO_LARGE


# -- bombs --


def test_sizes_that_lie_alike_in_both_headers(lab: Lab) -> None:
    """Nothing is inflated past the size that a member says it has."""
    members = members_of(lab.original)
    section = members.pop("sections/modules.json")
    for size in (0, len(section) - 1, len(section) + 1, MIB + 1, 2**31):
        data = archive([*members.items(), member("sections/modules.json", section, size=size)])
        if size == 2**31:
            assert lab.refused(data) is Reason.TOO_LARGE
        else:
            refusals = [(refusal.where, refusal.reason) for refusal in lab.parse(data).refusals]
            assert refusals == [("section modules", Reason.DAMAGED)]
    manifest = archive([member("manifest.json", members["manifest.json"], size=5), *list(members.items())[1:]])
    assert lab.refused(manifest) is Reason.DAMAGED


def test_bombs_of_zeros_and_archives_in_archives(lab: Lab) -> None:
    members = members_of(lab.original)
    zeros = deflated(b"0" * 50 * MIB)
    for name in ("manifest.json", "manifest.sig"):
        rest = [item for item in members.items() if item[0] != name]
        bomb = member(name, b"", packed=zeros, size=50 * MIB)
        assert lab.refused(archive([bomb, *rest])) is Reason.TOO_LARGE
    members.pop("sections/modules.json")
    bomb = member("sections/modules.json", b"", packed=zeros, size=50 * MIB)
    refusals = lab.parse(archive([*members.items(), bomb])).refusals
    assert [(refusal.where, refusal.reason) for refusal in refusals] == [("section modules", Reason.DAMAGED)]
    size = {"size": 50 * MIB, "sha256": hashlib.sha256(b"0" * 50 * MIB).hexdigest()}
    manifest = lab.manifest()
    next(each for each in manifest["sections"] if each["recorder"] == "modules").update(size)
    encoded = json.dumps(manifest).encode()
    members |= {"manifest.json": encoded, "manifest.sig": msgspec.json.encode(lab.ring.sign(encoded))}
    refusals = lab.parse(archive([*members.items(), bomb])).refusals
    assert [(refusal.where, refusal.reason) for refusal in refusals] == [("section modules", Reason.TOO_LARGE)]
    # An archive in the place of a section is bytes that are no records, and nobody looks into it.
    inner = archive([("manifest.json", b"0" * MIB)])
    nested = EncodedSection(
        msgspec.structs.replace(MODULES.info, size=len(inner), sha256=hashlib.sha256(inner).hexdigest()), inner
    )
    with pytest.raises(ProfileRefusedError) as caught:
        lab.parse(lab.packed(nested)).records("modules")
    assert caught.value.reason is Reason.MALFORMED


def hostile_section(data: bytes, encoding: str = "json", records: int = 1) -> EncodedSection:
    recorder = "modules" if encoding == "json" else "bytecode"
    info = msgspec.structs.replace(
        (MODULES if encoding == "json" else BYTECODE).info,
        recorder=recorder,
        records=records,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    return EncodedSection(info, data)


def test_counts_of_records_and_values_that_would_fill_the_memory(lab: Lab) -> None:
    """Signed by a trusted key, small as bytes, huge as objects."""
    open_lists = b'[{"key":"k","data":{"x":[' + b"[]," * (MAX_VALUES // 2) + b"0]}}]"
    packed_lists = b"\xdd\0\0\0\1\x82\xa3key\xa1k\xa4data\x81\xa1x\xdd" + (2 * MAX_VALUES).to_bytes(4, "big")
    packed_lists += b"\x90" * (2 * MAX_VALUES)
    for section, reason in (
        (hostile_section(b"[" + b"1,\n" * 200_000 + b"1]", records=1), Reason.TOO_LARGE),
        (hostile_section(open_lists), Reason.TOO_LARGE),
        (hostile_section(packed_lists, "msgpack"), Reason.TOO_LARGE),
        (hostile_section(b"\xdd\xff\xff\xff\xff", "msgpack"), Reason.TOO_LARGE),
        (hostile_section(b"\xdd\0\0\0\2\xc0", "msgpack"), Reason.MALFORMED),
        (hostile_section(b"\x9f" * 1000, "msgpack"), Reason.MALFORMED),
        (hostile_section(b'{"key":"k"}'), Reason.MALFORMED),
        (hostile_section(b"[]" * 5, records=4), Reason.MALFORMED),
    ):
        with pytest.raises(ProfileRefusedError) as caught:
            # Stored, since the ratio would give some of them away.
            lab.parse(stored(lab.packed(section))).records(section.info.recorder)
        assert caught.value.reason is reason


def stored(data: bytes) -> bytes:
    return archive([member(name, content, method=0) for name, content in members_of(data).items()])


@given(
    st.recursive(
        st.none() | st.binary(max_size=300) | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    )
)
def test_values_of_msgpack_are_counted_without_making_any(value: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(count(key) + count(inner) for key, inner in value.items())
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    encoded = msgspec.msgpack.encode(value)
    assert count_msgpack_values(encoded, 10_000) == count(value)
    assert count_msgpack_values(encoded, 3) <= max(4, count(value))


# -- manifests that lie --


def test_a_manifest_that_lies_about_a_section(lab: Lab) -> None:
    for changes in ({"size": 5}, {"size": 2**53}, {"sha256": "0" * 64}, {"records": 2**53}):
        refusals = lab.parse(lab.lying(**changes)).refusals
        assert [refusal.where for refusal in refusals] == ["section modules"], changes
        assert refusals[0].reason in (Reason.DAMAGED, Reason.TOO_LARGE)
    for changes in ({"records": 3}, {"records": 0}):
        with pytest.raises(ProfileRefusedError) as caught:
            lab.parse(lab.lying(**changes)).records("modules")
        assert caught.value.reason is Reason.MALFORMED
    for changes in ({"recorder": "other"}, {"encoding": "msgpack"}):
        assert lab.refused(lab.lying(**changes)) is Reason.DAMAGED  # a member that the manifest does not name
    impossible: list[tuple[str, Any]] = [("size", -1), ("size", 2**70), ("size", 1e300), ("sha256", "g" * 64)]
    for field, value in (*impossible, ("recorder", "../x"), ("version", 2**70), ("encoding", "pickle")):
        assert lab.refused(lab.lying(**{field: value})) is Reason.DAMAGED


def test_a_list_of_sections_that_is_not_the_one_of_the_members(lab: Lab) -> None:
    manifest = lab.manifest()
    fewer = lab.signed(json.dumps(manifest | {"sections": manifest["sections"][:1]}).encode())
    assert lab.refused(fewer) is Reason.DAMAGED
    members = members_of(lab.original)
    del members["sections/modules.json"]
    refusals = lab.parse(archive(list(members.items()))).refusals
    assert [(refusal.where, refusal.reason) for refusal in refusals] == [("section modules", Reason.DAMAGED)]


def test_a_field_that_comes_twice(lab: Lab) -> None:
    encoded = members_of(lab.original)["manifest.json"]
    for twice in (
        encoded.replace(b'"tenant"', b'"tenant": "genai", "tenant"'),
        encoded.replace(b'"recorder"', b'"recorder": "modules", "recorder"', 1),
        encoded.replace(b'"format"', b'"format": 2, "f\\u006frmat"'),
        encoded.replace(b'"tenant"', b'"later": {"a": [{"b": 1, "b": 2}]}, "tenant"'),
    ):
        assert twice != encoded
        assert lab.refused(lab.signed(twice)) is Reason.DAMAGED
    signature = members_of(lab.original)["manifest.sig"].replace(b'{"key', b'{"key":"x","key', 1)
    signature = signature.replace(b'{"algorithm"', b'{"algorithm":"none","algorithm"', 1)
    twice = archive(list((members_of(lab.original) | {"manifest.sig": signature}).items()))
    assert lab.refused(twice) is Reason.BAD_SIGNATURE


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
def test_nesting_and_numbers_without_end(lab: Lab, depth: int) -> None:
    encoded = members_of(lab.original)["manifest.json"]
    nested = encoded.replace(b'"tenant"', b'"later": ' + b"[" * depth + b"]" * depth + b', "tenant"')
    number = encoded.replace(b'"format": 1', b'"format": 1' + b"0" * depth)
    fraction = encoded.replace(b'"duration_s": 0.0', b'"duration_s": 1e' + b"9" * depth)
    assert number != encoded and fraction != encoded
    assert lab.refused(lab.signed(number)) in (Reason.FORMAT, Reason.DAMAGED)
    assert lab.refused(lab.signed(fraction)) is Reason.DAMAGED
    if depth > 100:
        assert lab.refused(lab.signed(nested)) is Reason.DAMAGED
    else:
        assert lab.parse(lab.signed(nested)).refusals == []


def test_a_format_from_the_future_is_named_whatever_else_it_holds(lab: Lab) -> None:
    for version in (0, 2, 999):
        assert lab.refused(lab.signed(b'{"format": %d, "everything": "else"}' % version)) is Reason.FORMAT


# -- signatures --


def test_a_signature_of_something_else(lab: Lab, tmp_path: Path) -> None:
    ours, other = members_of(lab.original), members_of(lab.other)
    exchanged = archive(list((ours | {"manifest.sig": other["manifest.sig"]}).items()))
    assert lab.refused(exchanged) is Reason.BAD_SIGNATURE
    sections = archive(list((ours | {"sections/modules.json": other["sections/modules.json"]}).items()))
    refusals = lab.parse(sections).refusals
    assert [(refusal.where, refusal.reason) for refusal in refusals] == [("section modules", Reason.DAMAGED)]
    stranger = Lab(tmp_path)
    assert lab.refused(stranger.original) is Reason.UNKNOWN_KEY
    claimed = json.loads(members_of(stranger.original)["manifest.sig"]) | {
        "key": json.loads(ours["manifest.sig"])["key"]
    }
    forged = members_of(stranger.original) | {"manifest.sig": json.dumps(claimed).encode()}
    assert lab.refused(archive(list(forged.items()))) is Reason.BAD_SIGNATURE


def test_a_key_that_was_revoked_is_refused_from_the_next_look_on(tmp_path: Path) -> None:
    seeder, consumer = Lab(tmp_path / "seeder"), Lab(tmp_path / "consumer")
    key = consumer.ring.trust(seeder.ring.public_pem(), "seeder")
    again = Lab(tmp_path / "again")
    consumer.ring.trust(again.ring.public_pem(), "again")  # several are trusted at a time
    assert consumer.parse(seeder.original).signed_by == key.id
    assert consumer.parse(again.original).trusted
    consumer.ring.revoke(key.id)
    assert consumer.refused(seeder.original) is Reason.REVOKED_KEY
    assert consumer.parse(again.original).trusted
    assert not consumer.parse(seeder.original, "data-only").trusted


def test_whom_each_kind_of_trust_believes(lab: Lab, tmp_path: Path) -> None:
    unsigned = archive([item for item in members_of(lab.original).items() if item[0] != "manifest.sig"])
    stranger = Lab(tmp_path).original
    for data, reason in ((unsigned, Reason.UNSIGNED), (stranger, Reason.UNKNOWN_KEY)):
        assert lab.refused(data, "signed") is reason
        data_only, anybody = lab.parse(data, "data-only"), lab.parse(data, "any")
        assert not data_only.trusted and [refusal.reason for refusal in data_only.refusals] == [reason]
        assert anybody.trusted and anybody.signed_by is None
        assert [refusal.reason for refusal in anybody.refusals] == [Reason.UNCHECKED]
        assert str(reason) in anybody.refusals[0].detail
    # Whoever made it: what its own hashes do not fit is refused all the same.
    damaged = members_of(stranger) | {"sections/modules.json": b"[]"}
    assert "modules" not in lab.parse(archive(list(damaged.items())), "any").sections


# -- the fuzzer --

NASTY: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 1e308, -1e308, "", "\0", "x" * 2000, "\ud800"),
    *([], {}, [[[[]]]], {"": {"": {}}}, ["a"] * 300, "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00"),
    *("2025-06-01T12:00:00Z", "2025-06-01T12:00:00", "json", "msgpack", "../x", "modules", "0" * 32, "0" * 64),
]


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ():
        yield from places(document[key], (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = document.copy()
    if len(path) == 1 and value is places:  # take it out
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


def fuzz(lab: Lab, times: int) -> dict[str, int]:
    """Mutate; return how many mutants of each kind there were, and how many were profiles and not refused."""
    options = settings(
        max_examples=100 * times,
        deadline=None,
        database=None,
        derandomize=times == 1,
        suppress_health_check=list(HealthCheck),
    )
    tried: dict[str, int] = {}
    original = lab.original

    def note(kind: str) -> None:
        tried[kind] = tried.get(kind, 0) + 1

    @options
    @given(st.lists(st.tuples(st.integers(0, len(original) - 1), st.integers(1, 255)), min_size=1, max_size=8))
    def flips(changes: list[tuple[int, int]]) -> None:
        data = bytearray(original)
        for position, mask in changes:
            data[position] ^= mask
        lab.whole_or_refused(resealed(bytes(data)))
        note("flips")

    @options
    @given(st.integers(0, len(original)), st.integers(0, len(lab.other)), st.booleans())
    def splices(cut: int, resume: int, reseal: bool) -> None:
        for data in (original[:cut] + lab.other[resume:], lab.other[:resume] + original[cut:], original[:cut]):
            lab.whole_or_refused(resealed(data) if reseal else data)
        note("splices")

    @options
    @given(
        st.sampled_from([original, lab.other]),
        st.integers(0, len(original)),
        st.binary(max_size=64),
        st.integers(0, 64),
    )
    def insertions(source: bytes, cut: int, inserted: bytes, removed: int) -> None:
        lab.whole_or_refused(resealed(source[:cut] + inserted + source[cut + removed :]))
        note("insertions")

    manifest = lab.manifest()

    @options
    @given(
        st.lists(
            st.tuples(st.sampled_from(list(places(manifest))), st.sampled_from([places, *NASTY])),
            min_size=1,
            max_size=3,
        )
    )
    def manifests(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
        document: Any = manifest
        for path, value in changes:
            with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):  # changed away before
                document = changed(document, path, value)
        encoded = json.dumps(document if document is not places else None).encode()
        for profile in lab.outcome(lab.signed(encoded)):
            assert {section.data for section in profile.sections.values()} <= lab.sections
        note("manifests")

    @options
    @given(
        st.lists(
            st.tuples(st.integers(0, len(json.dumps(manifest))), st.binary(max_size=12), st.integers(0, 12)),
            min_size=1,
            max_size=4,
        )
    )
    def manifest_texts(changes: list[tuple[int, bytes, int]]) -> None:
        encoded = json.dumps(manifest).encode()
        for cut, inserted, removed in changes:
            encoded = encoded[:cut] + inserted + encoded[cut + removed :]
        for profile in lab.outcome(lab.signed(encoded)):
            assert {section.data for section in profile.sections.values()} <= lab.sections
        note("manifest texts")

    @options
    @given(st.sampled_from([MODULES, BYTECODE]), st.integers(0, 500), st.binary(max_size=200), st.integers(0, 300))
    def sections(section: EncodedSection, cut: int, inserted: bytes, removed: int) -> None:
        data = section.data[:cut] + inserted + section.data[cut + removed :]
        kind = "json" if section is MODULES else "msgpack"
        for profile in lab.outcome(lab.packed(hostile_section(data, kind, section.info.records))):
            for name in profile.sections:
                with contextlib.suppress(ProfileRefusedError):
                    profile.records(name)
        note("sections")

    signature = json.loads(members_of(original)["manifest.sig"])

    @options
    @given(st.sampled_from([*signature, "later"]), st.sampled_from([places, *NASTY]), st.booleans())
    def signatures(field: str, value: Any, of_another: bool) -> None:
        document = json.loads(members_of(lab.other)["manifest.sig"]) if of_another else signature
        if value is not places:
            document = document | {field: value}
        else:
            document = {name: each for name, each in document.items() if name != field}
        members = members_of(original) | {"manifest.sig": json.dumps(document).encode()}
        lab.whole_or_refused(archive(list(members.items())))
        note("signatures")

    for each in (flips, splices, insertions, manifests, manifest_texts, signatures, sections):
        each()
    return tried


def resealed(data: bytes) -> bytes:
    """*data* with the right digest in the place of its comment."""
    body = data[:-COMMENT_BYTES]
    return body + b"sha256:" + hashlib.sha256(body).hexdigest().encode()


FORBIDDEN = ("pickle.", "marshal.", "exec", "import", "os.", "subprocess.", "socket.", "ctypes.", "compile")
is_watched = False


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """In the fuzzer's process, end it when the block unpickles, unmarshals, imports or runs anything."""
    global is_watched
    is_watched = True
    try:
        yield
    finally:
        is_watched = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if is_watched and event.startswith(FORBIDDEN) and event not in ("os.listdir", "os.scandir"):  # the trusted keys
        os.write(2, f"a profile has caused {event} {arguments!r:.200}\n".encode())
        os._exit(78)


def main() -> None:
    """The fuzzer's own process."""
    times = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        for data in (lab.original, lab.original[:-1] + b"!", lab.signed(b"{"), Lab(Path(folder) / "other").original):
            lab.outcome(data)  # what is imported late is there then: imports unmarshal
        "\0".encode("unicode_escape")
        size = int(re.findall(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        sys.addaudithook(watch)
        if times == 0:  # to see that the wire is there
            with watched():
                pickle.loads(BOMBS[0].data["code"])
        test_counts_of_records_and_values_that_would_fill_the_memory(lab)
        test_bombs_of_zeros_and_archives_in_archives(lab)
        print(json.dumps(fuzz(lab, times)))


def run_fuzzer(times: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.jumpstart.test_hostile_profiles", str(times)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120 * (1 + times),
    )


def test_the_wire_that_the_fuzzer_strings_is_there() -> None:
    done = run_fuzzer(0)
    assert done.returncode == 78, done.stderr
    assert "a profile has caused pickle.find_class" in done.stderr


def test_a_fuzzer_finds_no_file_that_does_anything_but_be_whole_or_refused() -> None:
    done = run_fuzzer(int(os.environ.get("FUZZ_PROFILES", "1")))
    assert done.returncode == 0, done.stderr[-5000:]
    tried = json.loads(done.stdout)
    assert set(tried) == {"flips", "splices", "insertions", "manifests", "manifest texts", "signatures", "sections"}
    assert min(tried.values()) >= 80, tried


if __name__ == "__main__":
    main()
