"""
The format of profile files does not change under those who have some.

`tests/golden` holds files of format 1. They were made once, by `make` at the end of this file, and are never made
again: a change that needs other files is another format, with files of its own beside these.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jumpstart import profile as profile_module
from jumpstart.archive import DEFAULT
from jumpstart.errors import ProfileRefusedError
from jumpstart.lineage import MAX_ANCESTORS, MAX_CARRIED, Lineage
from jumpstart.profile import (
    MAX_GOLDEN,
    AppInfo,
    Golden,
    Manifest,
    SectionInfo,
    Seeding,
    Trust,
    Validation,
    read_profile,
)
from jumpstart.recorder import Recorder, WarmSettings
from jumpstart.recorders import load_recorders
from jumpstart.recorders.bytecode import BytecodeData
from jumpstart.recorders.cached import CachedData
from jumpstart.recorders.lru import LruData
from jumpstart.recorders.regex import RegexData
from jumpstart.records import Reason, Record
from jumpstart.runtime import RuntimeKey
from jumpstart.trust import KeyRing, Signature
from jumpstart_warmup.corpus import CorpusRecorder

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
PAGE = (ROOT / "docs" / "profile-format.md").read_text("utf-8")
MADE = datetime(2025, 6, 1, 12, tzinfo=UTC)

SIGNED = GOLDEN / "format-1.jumpstart"
UNSIGNED = GOLDEN / "format-1-unsigned.jumpstart"  # stored, and with fields that a later version has added
FUTURE = GOLDEN / "format-2.jumpstart"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "format-1.json").read_text("utf-8"))
KEY = GOLDEN / "seeder.pub"

DIGESTS = {
    "format-1.jumpstart": "48bda377b519d4a1be574e3b8448d9ebf828f685c30ed9f0188c13aa7f01249b",
    "format-1-unsigned.jumpstart": "9abf03edfc52f2b9b7fe2cd75301be60963e23a81e0979d7dc7be0ae8c0d5b68",
    "format-2.jumpstart": "3b742d82e5317d533cdb84ee070aca1832a5db359a3ed499b95b617e720e07c0",
    "format-1.json": "afa4b83c4473c382496d1cfd2c76a8f7f880f6bcbf93167b8a3953d3d62e5c2b",
    "seeder.pub": "f0ff50dacf109dea7f716d7c03eb7a821aa3a283fd3fa02f4c14dbba7d3c3322",
}


def test_the_golden_files_are_those_that_were_made_once() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in GOLDEN.iterdir()}
    assert found == DIGESTS


# -- Jumpstart's reader --


def plain(value: Any) -> Any:
    """*value* as JSON has it: bytes as an object with their base64."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def read(path: Path, keys: Path, trust: Trust = "signed") -> dict[str, Any]:
    ring = KeyRing(keys)
    found = read_profile(
        path, trust=trust, verify=ring.verify, now=MADE + timedelta(hours=1), max_age=timedelta(days=1)
    )
    sections = {}
    for name in found.sections:
        records, dropped = found.records(name)
        assert not dropped
        sections[name] = [
            {"key": each.key, "data": plain(each.data), "depends": each.depends, "weight": each.weight}
            for each in records
        ]
    return {
        "manifest": json.loads(msgspec.json.encode(found.manifest)),
        "signed_by": found.signed_by,
        "refusals": [f"{refusal.where}: {refusal.reason}" for refusal in found.refusals],
        "sections": sections,
    }


def covers(found: Any, expected: Any) -> bool:
    """Whether *found* is *expected*, perhaps with fields beside it that did not exist when that was written."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            name in found and covers(found[name], value) for name, value in expected.items()
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(covers, found, expected))
    return bool(found == expected)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    KeyRing(tmp_path / "keys").trust(KEY, "seeder")
    return tmp_path / "keys"


def test_a_signed_file_is_read_as_it_always_was(keys: Path) -> None:
    found = read(SIGNED, keys)
    assert covers(found["manifest"], EXPECTED["manifest"])
    assert found["signed_by"] == EXPECTED["signed_by"]
    assert found["refusals"] == []
    assert found["sections"] == EXPECTED["sections"]


def test_an_unsigned_file_with_later_fields_is_read_as_it_always_was(keys: Path) -> None:
    with pytest.raises(ProfileRefusedError) as caught:
        read(UNSIGNED, keys)
    assert caught.value.reason is Reason.UNSIGNED
    found = read(UNSIGNED, keys, "data-only")
    assert found["refusals"] == ["signature: unsigned"]
    assert found["sections"] == {"modules": EXPECTED["sections"]["modules"]}


def test_a_file_of_the_next_format_is_refused_by_its_number(keys: Path) -> None:
    with pytest.raises(ProfileRefusedError) as caught:
        read(FUTURE, keys)
    assert caught.value.reason is Reason.FORMAT
    assert "format 2" in caught.value.detail


# -- another reader, written from docs/profile-format.md alone --


def read_by_the_page(path: Path, public: bytes) -> dict[str, Any]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = path.read_bytes()
    assert data[-71:] == b"sha256:" + hashlib.sha256(data[:-71]).hexdigest().encode()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        members = {name: archive.read(name) for name in archive.namelist()}
    encoded = members.pop("manifest.json")
    signature = json.loads(members.pop("manifest.sig"))
    assert signature["algorithm"] == "ed25519"
    assert signature["key"] == hashlib.sha256(public).hexdigest()[:16]
    message = b"jumpstart-profile-v1" + b"\0" + encoded
    Ed25519PublicKey.from_public_bytes(public).verify(base64.b64decode(signature["signature"]), message)
    manifest = json.loads(encoded)
    assert manifest["format"] == 1
    assert len(manifest["sections"]) == len(members)
    sections = {}
    for info in manifest["sections"]:
        section = members[f"sections/{info['recorder']}.{info['encoding']}"]
        assert len(section) == info["size"] and hashlib.sha256(section).hexdigest() == info["sha256"]
        if info["encoding"] == "json":
            assert section[:1] + section[-1:] == b"[]"
            records = [json.loads(line) for line in section[1:-1].split(b",\n")]
            assert records == json.loads(section)
        else:
            assert section[:1] == b"\xdd"
            records = msgspec.msgpack.decode(section)
        assert len(records) == info["records"]
        filled = [{"data": {}, "depends": {}, "weight": 1} | record for record in records]
        sections[info["recorder"]] = plain(filled)
    return {"manifest": manifest, "signed_by": signature["key"], "sections": sections}


def test_a_reader_that_was_written_from_the_page_reads_the_same(keys: Path) -> None:
    pem = KEY.read_text("utf-8")
    public = base64.b64decode("".join(line for line in pem.splitlines() if "-----" not in line))[-32:]
    found = read_by_the_page(SIGNED, public)
    ours = read(SIGNED, keys)
    assert found["signed_by"] == ours["signed_by"]
    assert found["sections"] == ours["sections"] == EXPECTED["sections"]
    assert found["manifest"] == EXPECTED["manifest"]
    assert covers(ours["manifest"], found["manifest"])


# -- the page --


def test_the_page_names_every_field() -> None:
    structs = (Manifest, AppInfo, SectionInfo, Seeding, Lineage, Golden, Validation, Signature, Record, RuntimeKey)
    datas = (BytecodeData, CachedData, LruData, RegexData)
    for struct in (*structs, *datas):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in PAGE, f"{struct.__name__}.{name}"


def test_the_page_has_the_limits_of_the_reader() -> None:
    caps = DEFAULT
    for text in (
        f"at most {MAX_GOLDEN}; see below",
        f"the nearest first, at most {MAX_ANCESTORS}",
        f"A writer leaves it out after {MAX_CARRIED}.",
        f"| the file | {caps.file_bytes >> 20} MiB |",
        f"| all members when inflated | {caps.total_bytes >> 20} MiB |",
        f"| {caps.manifest_bytes >> 20} MiB, {caps.signature_bytes} bytes, {caps.section_bytes >> 20} MiB |",
        f"| {caps.sections}; {caps.records:,} |",
        f"| {caps.ratio} times its compressed size |",
        f"| {profile_module.MAX_VALUES:,} (JSON",
        f"sections of over {profile_module.SMALL_MSGPACK >> 20} MiB)",
        f"At most {caps.sections + 2}: {caps.sections} sections",
        f"at most {profile_module.MAX_TEXT} characters",
        f"at most {profile_module.MAX_VERSIONS}, name",
        f"More than {profile_module.FUTURE_TOLERANCE.seconds // 60} minutes ahead",
    ):
        assert text in PAGE, text


def test_the_page_describes_every_recorder_that_has_records() -> None:
    rows = {
        match[1]: match.groups()[1:]
        for match in re.finditer(r"^\| `([a-z-]+)` \| (\d+) \| (\w+) \| (yes)? ?\| (yes)? ?\|", PAGE, re.MULTILINE)
    }
    settings = WarmSettings()
    recorders = [*load_recorders(settings), CorpusRecorder(settings)]
    recorded = {each.name: each for each in recorders if type(each).capture is not Recorder.capture}
    ours = {
        name: each for name, each in recorded.items() if type(each).__module__.startswith(("jumpstart.", "jumpstart_"))
    }
    assert set(rows) == set(ours)
    for name, recorder in ours.items():
        expected = (
            str(recorder.version),
            recorder.encoding,
            "yes" if recorder.needs_trust else None,
            "yes" if recorder.runtime_bound else None,
        )
        assert rows[name] == expected, name


def test_the_golden_file_has_a_section_of_each_recorder_of_its_time() -> None:
    times = {info["recorder"] for info in EXPECTED["manifest"]["sections"]}
    assert times == set(EXPECTED["sections"]) == set(SECTIONS)


# -- how they were made --

DIGEST = "sha256:" + "5" * 64
SECTIONS: dict[str, tuple[int, str, list[Record]]] = {
    "modules": (
        1,
        "json",
        [
            Record(key="decimal", depends={"module:decimal": "python-3.11.7"}),
            Record(key="shop.mail", depends={"module:shop.mail": DIGEST}, weight=3),
        ],
    ),
    "corpus": (
        1,
        "json",
        [
            Record(
                key="GET /products/7?page=2",
                data={
                    "route": "/products/{n}",
                    "method": "GET",
                    "target": "/products/7?page=2",
                    "headers": [["accept", "text/html"], ["accept-language", "de"]],
                },
                weight=1200,
            )
        ],
    ),
    "jinja": (1, "json", [Record(key="cart.html", data={"name": "cart.html", "source": DIGEST})]),
    "django": (
        1,
        "json",
        [
            Record(key="language:de", data={"kind": "language", "language": "de"}),
            Record(
                key="engine:django:base.html#1",
                data={"kind": "template", "name": "base.html", "engine": "engine:django", "source": DIGEST, "depth": 1},
            ),
        ],
    ),
    "starlette": (1, "json", [Record(key="openapi-built:0:Shop", data={"kind": "openapi-built", "app": "0:Shop"})]),
    "openapi": (
        1,
        "json",
        [
            Record(
                key="openapi:0:Shop",
                data={"app": "0:Shop", "document": {"openapi": "3.1.0", "info": {"title": "Süß"}}, "routes": DIGEST},
                depends={"module:shop.api": DIGEST},
            )
        ],
    ),
    "regex": (
        2,
        "json",
        [
            Record(
                key="'a(?P<n>b)?'#0123456789abcdef",
                data={
                    "type": "str",
                    "pattern": "a(?P<n>b)?",
                    "flags": 0,
                    "all_flags": 32,
                    "code": [14, 4, 0, 1, 4294967295, 1],
                    "groups": 1,
                    "group_index": {"n": 1},
                    "index_group": [None, "n"],
                    "magic": 20220615,
                    "lazy": True,
                },
            )
        ],
    ),
    "bytecode": (1, "msgpack", [Record(key="shop.mail", data={"code": b"\xe3\0\xff", "opt": 0, "src": "5" * 64})]),
    "lru-cache": (
        1,
        "msgpack",
        [Record(key="shop:tax(0011)", data={"fn": "shop:tax", "args": b"\x80\x05.", "value": b"\x80\x05K\x13."})],
    ),
    "cached": (
        1,
        "msgpack",
        [
            Record(
                key="shop:prices(0011)",
                data={
                    "fn": "shop:prices",
                    "args": b"\x80\x05.",
                    "version": "e3b0c44298fc1c14",
                    "value": b"\x80\x05}.",
                    "created": "2025-06-01T11:59:00Z",
                },
                depends={"module:shop": DIGEST, "dist:jinja2": "3.1.6"},
            ),
            Record(key="shop:rates(0022)", data={"fn": "shop:rates", "args": b".", "version": "", "failures": 1}),
        ],
    ),
    "jinja-bytecode": (1, "msgpack", [Record(key="cart.html#55", data={"fits": DIGEST, "code": b"\xe3" + bytes(9)})]),
}


def make() -> None:
    """Make the files, which was done once."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from jumpstart.profile import encode_section, pack_profile
    from jumpstart.trust import ALGORITHM, DOMAIN, key_id

    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = private.public_key().public_bytes_raw()

    def sign(message: bytes) -> Signature:
        return Signature(ALGORITHM, key_id(public), base64.b64encode(private.sign(DOMAIN + message)).decode())

    encoded = [
        encode_section(name, version, "json" if encoding == "json" else "msgpack", records)
        for name, (version, encoding, records) in SECTIONS.items()
    ]
    manifest = Manifest(
        format=1,
        id="0123456789abcdef0123456789abcdef",
        created=MADE,
        producer="jumpstart 0.1.0",
        host="seeder-1",
        runtime=RuntimeKey("cpython", "3.11.7", "cpython-311", "linux-x86_64", "a70d0d0a"),
        app=AppInfo(target="shop.web:app", build="b42", sources=DIGEST, distributions=DIGEST),
        tenant="web",
        sections=sorted((each.info for each in encoded), key=lambda info: info.recorder),
        seeding=Seeding(requests=1200, routes=9, duration_s=61.5, warm_coverage=0.98),
        validation=Validation(
            golden=20, matched=20, warm_coverage=1.0, first_request_s=0.004, cold_first_request_s=0.31
        ),
    )
    GOLDEN.mkdir(exist_ok=True)
    SIGNED.write_bytes(pack_profile(manifest, {each.info.recorder: each.data for each in encoded}, sign))
    KEY.write_bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )

    def archive(path: Path, members: dict[str, bytes]) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name, data in members.items():
                file.writestr(zipfile.ZipInfo(name), data)
            file.comment = b"sha256:" + b"0" * 64
        data = path.read_bytes()[:-71]
        path.write_bytes(data + b"sha256:" + hashlib.sha256(data).hexdigest().encode())

    document = json.loads(msgspec.json.encode(manifest))
    later = document | {
        "later": {"x": [1]},
        "sections": [each for each in document["sections"] if each["recorder"] == "modules"],
    }
    del later["seeding"], later["validation"], later["host"]
    modules = next(each.data for each in encoded if each.info.recorder == "modules")
    archive(UNSIGNED, {"manifest.json": json.dumps(later).encode(), "sections/modules.json": modules})
    future = b'{"format": 2, "everything": "else"}'
    archive(FUTURE, {"manifest.json": future, "manifest.sig": msgspec.json.encode(sign(future))})
    sections = {
        name: [
            plain({"key": each.key, "data": each.data, "depends": each.depends, "weight": each.weight})
            for each in records
        ]
        for name, (_, _, records) in SECTIONS.items()
    }
    expected = {"manifest": document, "signed_by": key_id(public), "sections": sections}
    (GOLDEN / "format-1.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n", "utf-8")
