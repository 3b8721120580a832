"""The profile file: whole, signed, fresh, or refused with a reason; hostile bytes never do anything else."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jumpstart import profile as profile_module
from jumpstart.archive import COMMENT_BYTES, DEFAULT, Caps
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.profile import (
    AppInfo,
    EncodedSection,
    Manifest,
    Profile,
    Seeding,
    Trust,
    Validation,
    decode_section,
    encode_section,
    new_manifest,
    pack_profile,
    parse_profile,
    read_profile,
    write_profile,
)
from jumpstart.profile_view import describe, describe_diff, diff_profiles
from jumpstart.records import Reason, Record
from jumpstart.report import Refusal
from jumpstart.trust import KeyRing, Signature

NOW = datetime(2025, 6, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
PATIENT = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def fake_sign(message: bytes) -> Signature:
    return Signature("fake", "seeder", hashlib.sha256(message).hexdigest())


def fake_verify(message: bytes, signature: Signature) -> None:
    """As `KeyRing.verify`, at the price of a hash."""
    if signature.key != "seeder":
        raise ProfileRefusedError(Reason.UNKNOWN_KEY, signature.key)
    if signature != fake_sign(message):
        raise ProfileRefusedError(Reason.BAD_SIGNATURE, "no")


MODULES = [Record(key=f"module{number}", depends={"module:os": "python-3"}, weight=number) for number in range(20)]
VALUES = [Record(key="value", data={"payload": b"\x80\x04\x95" * 10})]
SECTIONS = [encode_section("modules", 1, "json", MODULES), encode_section("values", 2, "msgpack", VALUES)]


def manifest_of(sections: list[EncodedSection], created: datetime = NOW) -> Manifest:
    return new_manifest(
        app=AppInfo(target="shop.web:app", build="b1"),
        tenant="web",
        sections=sections,
        now=created,
        seeding=Seeding(requests=10, routes=2, duration_s=1.5, warm_coverage=0.9),
    )


def packed(sections: list[EncodedSection] = SECTIONS, created: datetime = NOW) -> bytes:
    return pack_profile(manifest_of(sections, created), {each.info.recorder: each.data for each in sections}, fake_sign)


PACKED = packed()


def parsed(data: bytes, trust: Trust = "signed", caps: Caps = DEFAULT, now: datetime = NOW) -> Profile:
    return parse_profile(data, trust=trust, verify=fake_verify, now=now, max_age=DAY, caps=caps)


def refused(data: bytes, trust: Trust = "signed", caps: Caps = DEFAULT, now: datetime = NOW) -> Reason:
    with pytest.raises(ProfileRefusedError) as caught:
        parsed(data, trust, caps, now)
    assert caught.value.detail
    return caught.value.reason


def outcome(data: bytes, trust: Trust) -> Profile | None:
    """Parse hostile bytes: a profile whose every section decodes or is refused, or None. Anything else is raised."""
    try:
        profile = parsed(data, trust)
        for name in profile.sections:
            try:
                profile.records(name)
            except ProfileRefusedError:
                pass
        describe(profile, verbose=True)
    except ProfileRefusedError:
        return None
    return profile


def archive(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A ZIP of any members, with the right container digest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in members:
            file.writestr(zipfile.ZipInfo(name), data, compress_type=method)
        file.comment = b"sha256:" + b"0" * 64
    return resealed(buffer.getvalue())


def resealed(data: bytes) -> bytes:
    body = data[:-COMMENT_BYTES]
    return body + b"sha256:" + hashlib.sha256(body).hexdigest().encode()


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def signed(manifest: object) -> list[tuple[str, bytes]]:
    encoded = msgspec.json.encode(manifest)
    return [("manifest.json", encoded), ("manifest.sig", msgspec.json.encode(fake_sign(encoded)))]


# -- the good case --


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    path = tmp_path / "shop.jumpstart"
    manifest = manifest_of(SECTIONS)
    write_profile(path, manifest, {each.info.recorder: each.data for each in SECTIONS}, ring.sign)
    profile = read_profile(path, trust="signed", verify=ring.verify, now=NOW, max_age=DAY)
    assert profile.manifest == manifest
    assert profile.trusted and profile.signed_by == next(iter(ring.trusted()))
    assert profile.refusals == []
    assert profile.records("modules") == (MODULES, [])
    assert profile.records("values") == (VALUES, [])
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["shop.jumpstart"]


def test_any_tool_opens_it_and_the_same_content_gives_the_same_bytes() -> None:
    assert list(members_of(PACKED)) == [
        "manifest.json",
        "manifest.sig",
        "sections/modules.json",
        "sections/values.msgpack",
    ]
    manifest = manifest_of(SECTIONS)
    data = {each.info.recorder: each.data for each in SECTIONS}
    assert pack_profile(manifest, data, fake_sign) == pack_profile(manifest, dict(reversed(data.items())), fake_sign)


def test_sections_that_the_manifest_does_not_describe_are_never_written() -> None:
    manifest = manifest_of(SECTIONS)
    data = {each.info.recorder: each.data for each in SECTIONS}
    for wrong in ({}, data | {"modules": b"[]"}, data | {"more": b"[]"}):
        with pytest.raises(ValueError):
            pack_profile(manifest, wrong, fake_sign)
    with pytest.raises(ValueError):
        pack_profile(msgspec.structs.replace(manifest, tenant="x" * 2000), data, fake_sign)


# -- damage --


def test_every_single_flipped_byte_is_noticed_and_does_no_other_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions, not a sample; anything unpickled or unmarshalled would fail the test."""
    tripwire(monkeypatch)
    for position in range(len(PACKED)):
        data = bytearray(PACKED)
        data[position] ^= 0xFF
        for trust in ("signed", "data-only"):
            profile = outcome(bytes(data), "signed" if trust == "signed" else "data-only")
            assert profile is None or profile.refusals, position


@PATIENT
@given(position=st.integers(0, len(PACKED) - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(position: int, bit: int) -> None:
    data = bytearray(PACKED)
    data[position] ^= 1 << bit
    profile = outcome(bytes(data), "signed")
    assert profile is None or profile.refusals


def test_every_truncation_costs_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    tripwire(monkeypatch)
    for length in range(len(PACKED)):
        profile = outcome(PACKED[:length], "data-only")
        # Without the comment all the rest is whole; else the directory at the end is lost.
        assert profile is None or (profile.refusals and length >= len(PACKED) - COMMENT_BYTES)


@PATIENT
@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert outcome(data, "data-only") is None
    assert outcome(resealed(data + b"x" * COMMENT_BYTES), "signed") is None


@PATIENT
@given(
    cut=st.integers(0, len(PACKED)), inserted=st.binary(max_size=40), removed=st.integers(0, 40), reseal=st.booleans()
)
def test_spliced_bytes_never_do_more_than_be_refused(cut: int, inserted: bytes, removed: int, reseal: bool) -> None:
    data = PACKED[:cut] + inserted + PACKED[cut + removed :]
    profile = outcome(resealed(data) if reseal else data, "data-only")
    if profile is not None and data != PACKED and not reseal:
        assert profile.refusals


def test_a_flipped_byte_inside_a_section_costs_that_section_only() -> None:
    stored = archive(list(members_of(PACKED).items()), zipfile.ZIP_STORED)
    assert parsed(stored).refusals == []
    for data in (PACKED, stored):
        start = data.index(b"sections/modules.json") + len("sections/modules.json")
        hit = bytearray(data)
        hit[start + 30] ^= 1
        profile = parsed(bytes(hit))
        assert [(refusal.where, refusal.reason) for refusal in profile.refusals] == [
            ("container", Reason.DAMAGED),
            ("section modules", Reason.DAMAGED),
        ]
        assert profile.trusted
        assert profile.records("values") == (VALUES, [])
        with pytest.raises(KeyError):
            profile.records("modules")


def test_a_flip_in_the_bookkeeping_costs_a_note() -> None:
    hit = bytearray(PACKED)
    hit[-1] ^= 1
    assert parsed(bytes(hit)).refusals == [
        Refusal("container", Reason.DAMAGED, "the file is not the one that was written")
    ]
    assert len(parsed(bytes(hit)).sections) == 2


def test_a_half_written_file_of_zeros_or_nothing_is_refused() -> None:
    half = len(PACKED) // 2
    for data in (b"", b"\0" * len(PACKED), PACKED[:half] + b"\0" * half, b"PK\x05\x06", PACKED[-COMMENT_BYTES:]):
        assert refused(data) is Reason.DAMAGED


# -- trust --


def test_a_file_without_a_trusted_signature_is_refused_or_taken_as_data_only() -> None:
    members = members_of(PACKED)
    unsigned = archive([(name, data) for name, data in members.items() if name != "manifest.sig"])
    stranger = members | {"manifest.sig": b'{"algorithm":"fake","key":"stranger","signature":""}'}
    forged = members | {"manifest.sig": b'{"algorithm":"fake","key":"seeder","signature":""}'}
    garbage = members | {"manifest.sig": b"[" * 4000}
    for data, reason in (
        (unsigned, Reason.UNSIGNED),
        (archive(list(stranger.items())), Reason.UNKNOWN_KEY),
        (archive(list(forged.items())), Reason.BAD_SIGNATURE),
        (archive(list(garbage.items())), Reason.BAD_SIGNATURE),
    ):
        assert refused(data) is reason
        profile = parsed(data, "data-only")
        assert not profile.trusted and profile.signed_by is None
        assert [(refusal.where, refusal.reason) for refusal in profile.refusals] == [("signature", reason)]
        assert len(profile.sections) == 2


def test_the_signature_is_checked_before_the_manifest_is_parsed() -> None:
    assert refused(archive([("manifest.json", b"{"), ("manifest.sig", b"{}")])) is Reason.BAD_SIGNATURE
    assert refused(archive(signed({"format": 1}))) is Reason.DAMAGED


def test_a_valid_signature_over_other_sections_does_not_cover_these() -> None:
    other = packed([encode_section("modules", 1, "json", MODULES[:-1]), SECTIONS[1]])
    mixed = members_of(PACKED) | {"sections/modules.json": members_of(other)["sections/modules.json"]}
    for trust in ("signed", "data-only"):
        profile = parsed(archive(list(mixed.items())), "signed" if trust == "signed" else "data-only")
        assert [(refusal.where, refusal.reason) for refusal in profile.refusals] == [
            ("section modules", Reason.DAMAGED)
        ]


def test_unreadable_keys_are_a_refusal() -> None:
    def unreadable(message: bytes, signature: Signature) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(ProfileRefusedError) as caught:
        parse_profile(PACKED, trust="signed", verify=unreadable, now=NOW, max_age=DAY)
    assert caught.value.reason is Reason.UNREADABLE


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that would create a file when loaded goes through every function here and stays bytes."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    sections = [
        encode_section("values", 1, "msgpack", [Record(key="v", data={"pickle": bomb})]),
        EncodedSection(
            msgspec.structs.replace(
                SECTIONS[0].info, recorder="raw", size=len(bomb), sha256=hashlib.sha256(bomb).hexdigest()
            ),
            bomb,
        ),
    ]
    tripwire(monkeypatch)
    profile = parsed(packed(sections))
    assert profile.records("values")[0][0].data["pickle"] == bomb
    with pytest.raises(ProfileRefusedError):
        profile.records("raw")
    describe(profile, verbose=True)
    diff_profiles(profile, parsed(PACKED))
    assert not (tmp_path / "exploded").exists()


# -- format and age --


def test_too_old_from_the_future_and_just_right() -> None:
    assert refused(packed(created=NOW - DAY - timedelta(seconds=1))) is Reason.TOO_OLD
    assert refused(packed(created=NOW + timedelta(minutes=5, seconds=1))) is Reason.FROM_THE_FUTURE
    parsed(packed(created=NOW - DAY))
    parsed(packed(created=NOW + timedelta(minutes=5)))
    ancient = packed(created=NOW - 1000 * DAY)
    parse_profile(ancient, trust="signed", verify=fake_verify, now=NOW, max_age=None)


def test_another_format_is_refused_by_its_number_whatever_its_shape() -> None:
    assert refused(archive(signed({"format": 2, "all": "else"}))) is Reason.FORMAT


def test_a_field_that_a_later_version_adds_is_ignored() -> None:
    later = msgspec.json.decode(members_of(PACKED)["manifest.json"]) | {"later": 1}
    members = members_of(PACKED) | dict(signed(later))
    assert parsed(archive(list(members.items()))).refusals == []


@pytest.mark.parametrize(
    "change",
    [
        {"created": "yesterday"},
        {"created": "2025-06-01T12:00:00"},
        {"id": "x"},
        {"sections": {}},
        {
            "sections": [
                {"recorder": "../../etc", "version": 1, "encoding": "json", "records": 0, "size": 0, "sha256": ""}
            ]
        },
        {"seeding": {"warm_coverage": 7}},
        {"runtime": None},
        {"format": "1"},
    ],
)
def test_a_manifest_that_is_not_one_is_refused_though_it_is_signed(change: dict[str, object]) -> None:
    odd = msgspec.json.decode(members_of(PACKED)["manifest.json"]) | change
    members = members_of(PACKED) | dict(signed(odd))
    assert refused(archive(list(members.items()))) is Reason.DAMAGED


def test_a_section_named_twice_or_too_many_sections() -> None:
    manifest = manifest_of(SECTIONS)
    twice = msgspec.structs.replace(manifest, sections=[*manifest.sections, manifest.sections[0]])
    members = list((members_of(PACKED) | dict(signed(twice))).items())
    assert refused(archive(members)) is Reason.DAMAGED
    many = [msgspec.structs.replace(SECTIONS[0].info, recorder=f"r{number}") for number in range(70)]
    crowded = signed(msgspec.structs.replace(manifest, sections=many))
    assert refused(archive(crowded)) is Reason.TOO_LARGE


# -- hostile archives --


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/etc/passwd",
        "sections/../manifest.json",
        "sections/a/b.json",
        "sections/A.json",
        "C:\\x",
        "extra.txt",
        "sections/modules.json/",
        "sections/.json",
        "manifest.json\0",
        "MANIFEST.JSON",
        "sections/more.json",
    ],
)
def test_names_that_are_not_ours_cost_the_file(name: str) -> None:
    # zipfile mends some names when writing, so they are put in afterwards.
    data = archive([*members_of(PACKED).items(), (placeholder(name), b"x")])
    data = data.replace(placeholder(name).encode(), name.encode())
    assert refused(resealed(data)) is Reason.DAMAGED


def placeholder(name: str) -> str:
    return "Q" * len(name.encode())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_comes_twice_costs_the_file() -> None:
    for name in ("manifest.json", "manifest.sig", "sections/modules.json"):
        assert refused(archive([*members_of(PACKED).items(), (name, b"[]")])) is Reason.DAMAGED


def directory_entry(data: bytes, name: bytes) -> int:
    end = data.rindex(b"PK\x05\x06")
    return data.index(name, struct.unpack_from("<L", data, end + 16)[0]) - 46


def patched(offset: int, value: bytes, name: bytes = b"sections/modules.json") -> bytes:
    """The profile with a field of one directory entry overwritten, and the right container digest."""
    data = bytearray(PACKED)
    start = directory_entry(PACKED, name) + offset
    data[start : start + len(value)] = value
    return resealed(bytes(data))


@pytest.mark.parametrize("size", [0, 1, 5, 2**20, 2**32 - 1])
def test_sizes_in_the_directory_that_lie_cost_the_file(size: int) -> None:
    for data in (patched(24, struct.pack("<L", size)), patched(20, struct.pack("<L", size))):
        assert refused(data) is Reason.DAMAGED


def test_an_offset_into_nowhere_or_into_another_member_costs_the_file() -> None:
    for offset in (0, 3, len(PACKED) - 10, 2**32 - 1):
        for name in (b"sections/modules.json", b"manifest.sig"):
            assert refused(patched(42, struct.pack("<L", offset), name)) is Reason.DAMAGED


def test_encrypted_streamed_and_oddly_compressed_members_cost_the_file() -> None:
    for data in (patched(8, b"\x01\x00"), patched(8, b"\x08\x00"), patched(10, b"\x0c\x00"), patched(0, b"XX")):
        assert refused(data) is Reason.DAMAGED


def test_directories_that_lie_about_themselves_cost_the_file() -> None:
    end = PACKED.rindex(b"PK\x05\x06")
    for offset, value in (
        (10, b"\x03\x00"),
        (10, b"\x05\x00"),
        (12, b"\0\0\0\0"),
        (12, b"\xff" * 4),
        (16, b"\xff" * 4),
    ):
        data = bytearray(PACKED)
        data[end + offset : end + offset + len(value)] = value
        assert refused(resealed(bytes(data))) is Reason.DAMAGED
    data = bytearray(PACKED)
    data[end + 10 : end + 12] = b"\xff\xff"
    assert refused(resealed(bytes(data))) is Reason.TOO_LARGE


def test_zip_bombs_are_refused_without_being_inflated() -> None:
    bomb = encode_section("modules", 1, "json", [Record(key="k", data={"zeros": "0" * 3_000_000})])
    profile = parsed(packed([bomb, SECTIONS[1]]))
    assert [(refusal.where, refusal.reason) for refusal in profile.refusals] == [("section modules", Reason.TOO_LARGE)]
    assert "bomb" in profile.refusals[0].detail
    assert parsed(packed([bomb]), caps=Caps(section_bytes=1000)).refusals[0].reason is Reason.TOO_LARGE
    assert refused(packed([bomb]), caps=Caps(total_bytes=1000)) is Reason.TOO_LARGE
    members = members_of(PACKED)
    assert refused(archive(list((members | {"manifest.json": b" " * 2_000_000}).items()))) is Reason.TOO_LARGE


def test_huge_counts_are_refused() -> None:
    assert parsed(PACKED, caps=Caps(records=19)).refusals[0].reason is Reason.TOO_LARGE
    for data in (b"\x91" * 100_000, b"\xdd\x00\x00\x00\x05\x80", b"", b"\x80"):
        with pytest.raises(ProfileRefusedError) as caught:
            decode_section(data, "msgpack", 10)
        assert caught.value.reason is Reason.MALFORMED
    for data, encoding in ((b"[1,\n2,\n3]", "json"), (b"\xdd\xff\xff\xff\xff", "msgpack")):
        with pytest.raises(ProfileRefusedError) as caught:
            decode_section(data, "json" if encoding == "json" else "msgpack", 2)
        assert caught.value.reason is Reason.TOO_LARGE


# -- records --


def test_a_malformed_record_costs_only_itself() -> None:
    data = (
        b'[{"key":"a"},\n7,\n{"key":1},\n{"nokey":1},\n{"key":"a"},\n{"key":"b","weight":"x"},\n'
        b'{"key":"d",,},\n{"key":"e"},{"key":"f"},\n\n{"key":"c"}]'
    )
    records, dropped = decode_section(data, "json", 10)
    assert [record.key for record in records] == ["a", "c"]
    assert [(drop.key, drop.reason) for drop in dropped] == [(f"#{n}", Reason.MALFORMED) for n in (1, 2, 3, 4, 5, 6, 7)]
    nested = b'[{"key":"deep","data":{"x":' + b"[" * 500 + b"]" * 500 + b'}},\n{"key":"b"}]'
    assert decode_section(nested, "json", 10)[0][-1].key == "b"


def test_a_record_that_cannot_be_encoded_costs_only_itself() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    for encoding in ("json", "msgpack"):
        section = encode_section(
            "x",
            1,
            "json" if encoding == "json" else "msgpack",
            [
                Record(key="a"),
                Record(key="b", data={"x": cycle}),
                Record(key="c", data={"x": object()}),
                Record(key="d"),
            ],
        )
        records, dropped = decode_section(section.data, section.info.encoding, 10)
        assert [record.key for record in records] == ["a", "d"] and not dropped
        assert [drop.key for drop in section.dropped] == ["b", "c"] and section.info.records == 2


def test_a_section_with_another_number_of_records_than_it_says_is_refused() -> None:
    lying = EncodedSection(msgspec.structs.replace(SECTIONS[0].info, records=5), SECTIONS[0].data)
    with pytest.raises(ProfileRefusedError) as caught:
        parsed(packed([lying])).records("modules")
    assert caught.value.reason is Reason.MALFORMED


# -- files --


def read(path: Path, **caps: int) -> Profile:
    return read_profile(path, trust="signed", verify=fake_verify, now=NOW, max_age=DAY, caps=Caps(**caps))


def test_files_that_cannot_be_read_are_refused_with_a_reason(tmp_path: Path) -> None:
    def reason(path: Path, **caps: int) -> Reason:
        with pytest.raises(ProfileRefusedError) as caught:
            read(path, **caps)
        return caught.value.reason

    assert reason(tmp_path / "none") is Reason.ABSENT
    assert reason(tmp_path) is Reason.UNREADABLE
    os.mkfifo(tmp_path / "fifo")
    assert reason(tmp_path / "fifo") is Reason.UNREADABLE
    assert reason(Path("\0")) is Reason.UNREADABLE
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert reason(tmp_path / "loop") is Reason.UNREADABLE
    (tmp_path / "file").write_bytes(PACKED)
    assert reason(tmp_path / "file", file_bytes=100) is Reason.TOO_LARGE
    (tmp_path / "latest").symlink_to("file")
    assert read(tmp_path / "latest").trusted


@pytest.mark.parametrize("broken", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "shop.jumpstart"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, broken, full)
    with pytest.raises(ConfigError, match=r"cannot write the profile .*shop\.jumpstart: No space left"):
        write_profile(path, manifest_of([]), {}, fake_sign)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["shop.jumpstart"]


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_profile(tmp_path / "none" / "x.jumpstart", manifest_of([]), {}, fake_sign)


# -- showing --


def test_show_lists_everything_and_escapes_what_moves_a_terminal() -> None:
    odd = encode_section("odd", 1, "json", [Record(key="\x1b[2Jé", data={"a": 1}, depends={"module:m": "sha256:1"})])
    manifest = msgspec.structs.replace(
        manifest_of([odd]),
        validation=Validation(golden=5, matched=5, warm_coverage=1.0, first_request_s=0.01, cold_first_request_s=0.2),
    )
    profile = parsed(pack_profile(manifest, {"odd": odd.data}, fake_sign)[:-1] + b"!")
    text = "\n".join(describe(profile, verbose=True))
    assert "\x1b" not in text and "\\x1b[2Jé" in text
    for part in ("shop.web:app", "key seeder", "warm coverage 90.0%", "5 of 5 golden", "a = 1", "needs module:m"):
        assert part in text
    assert "refused: container: damaged" in text
    assert "a = 1" not in "\n".join(describe(profile))
    assert not any(line.startswith("validation") for line in describe(parsed(PACKED)))  # nothing to say


def test_diff_names_what_was_added_removed_and_changed() -> None:
    changed = msgspec.structs.replace(MODULES[1], data={"x": 1})
    heavier = msgspec.structs.replace(MODULES[2], weight=99)
    other = encode_section("modules", 1, "json", [changed, heavier, *MODULES[3:], Record(key="new")])
    diff = diff_profiles(parsed(PACKED), parsed(packed([other, SECTIONS[1]])))
    assert [(each.name, each.added, each.removed, each.changed) for each in diff.sections] == [
        ("modules", ("new",), ("module0",), ("module1",))
    ]
    assert diff.manifest == ()
    assert describe_diff(diff) == [
        "section modules: 1 added, 1 removed, 1 changed",
        "  + new",
        "  - module0",
        "  ~ module1",
    ]
    manifest = msgspec.structs.replace(manifest_of([]), tenant="genai", app=AppInfo(target="a:b", build="b1"))
    diff = diff_profiles(parsed(PACKED), parsed(pack_profile(manifest, {}, fake_sign)))
    assert [field for field, _, _ in diff.manifest] == ["tenant", "app.target"]
    assert [len(each.removed) for each in diff.sections] == [20, 1]
    assert describe_diff(diff_profiles(parsed(PACKED), parsed(PACKED))) == []


# -- helpers --


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os.mkdir, (str(self.path),))


def tripwire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every unpickling or unmarshalling fail the test."""

    import cloudpickle

    def tripped(*args: object, **kwargs: object) -> object:
        raise AssertionError("something was unpickled or unmarshalled")

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "loads", tripped)
        monkeypatch.setattr(module, "load", tripped)
    monkeypatch.setattr(pickle, "Unpickler", tripped)
    # marshal stays for imports, which read bytecode through it, but profile.py must not hold it.
    assert not hasattr(profile_module, "marshal") and not hasattr(profile_module, "pickle")
