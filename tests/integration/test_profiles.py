"""Profiles, end to end: built or captured, shipped to another host, trusted or refused with a reason."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jumpstart.boot import BootSettings, WarmState, find_state
from jumpstart.profile import Manifest, Profile, encode_section, pack_profile, read_profile
from jumpstart.recorder import WarmSettings
from jumpstart.recorders import RecorderSet
from jumpstart.recorders.cached import version_digest
from jumpstart.records import Record
from jumpstart.trust import KeyRing
from jumpstart_warmup.corpus import CorpusRecorder
from tests.integration.server import TRACEBACK, Serve, Server, run_command
from tests.integration.shop import (
    LRU,
    PAGES,
    SHOP,
    TWINS,
    WARM_TOML,
    boot_report,
    cold_events,
    copy_of_shop,
    reasons,
    running_backend,
    sections,
    visit,
)

pytestmark = pytest.mark.slow

NEED_TRUST = {"bytecode", "regex", "cached", "lru-cache", "jinja-bytecode"}
DATA_ONLY = {"modules", "jinja", "corpus"}
RECORDERS = RecorderSet([*RecorderSet.load(WarmSettings()).recorders, CorpusRecorder(WarmSettings())])


@pytest.fixture(scope="module")
def backend() -> Iterator[dict[str, str]]:
    """The shop's back end, as environment variables for a server."""
    with running_backend() as address:
        yield {"SHOP_BACKEND": address}


class Seeder:
    """The host that makes profiles: its state folder, its public key, and a profile of each twin."""

    def __init__(self, folder: Path, backend: dict[str, str]) -> None:
        self.home = folder / "seeder"
        self.home.mkdir()
        self.public = folder / "seeder.pub"
        self.public.write_text(self.run("keys", "show").stdout)
        self.files = {target: folder / f"{target.partition(':')[0]}.jumpstart" for target in TWINS}
        for target, file in self.files.items():
            built = self.run(
                *("build", target, "--app-dir", str(SHOP), "--requests", str(WARM_TOML), "-o", str(file), *LRU),
                env=backend,
            )
            assert "request failed" not in built.stderr
            assert re.search(r"15 requests; records: .*\bcorpus\b", built.stdout), built.stdout
        self.file = self.files[TWINS[0]]

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        done = run_command(*arguments, home=self.home, env=env)
        assert done.returncode == 0, done.stderr
        return done

    @property
    def keys(self) -> KeyRing:
        return KeyRing(self.home / "config" / "keys")

    def read(self) -> Profile:
        return read_profile(
            self.file, trust="signed", verify=self.keys.verify, now=datetime.now(UTC), max_age=timedelta(days=1)
        )

    def signed(self, **changes: Any) -> bytes:
        """The profile with another manifest, signed all the same."""
        profile = self.read()
        manifest: Manifest = msgspec.structs.replace(profile.manifest, **changes)
        return pack_profile(
            manifest, {name: section.data for name, section in profile.sections.items()}, self.keys.sign
        )


@pytest.fixture(scope="module")
def seeder(tmp_path_factory: pytest.TempPathFactory, backend: dict[str, str]) -> Seeder:
    return Seeder(tmp_path_factory.mktemp("seeder"), backend)


@pytest.fixture
def trusting(home: Path, seeder: Seeder) -> Path:
    """The state folder of a host that trusts the seeder."""
    home.mkdir()
    done = run_command("keys", "trust", str(seeder.public), "--name", "fleet", home=home)
    assert done.returncode == 0, done.stderr
    return home


def consumer(serve: Serve, file: Path, *options: str, backend: dict[str, str], **more: Any) -> Server:
    """A server that boots from *file* and from nothing else."""
    more.setdefault("app_dir", SHOP)
    target = more.pop("target", TWINS[0])
    return serve(target, "--profile", str(file), "--no-warm-start", *LRU, *options, env=backend, **more)


# -- shipped --


@pytest.mark.parametrize(("target", "replay"), [(TWINS[0], "--replay"), (TWINS[1], "--no-replay")])
def test_a_built_profile_makes_another_host_warm(
    serve: Serve, backend: dict[str, str], seeder: Seeder, trusting: Path, tmp_path: Path, target: str, replay: str
) -> None:
    """In a new directory, under another user's home: 0 cold events for what it covers, and its requests warm too."""
    release = copy_of_shop(tmp_path / "srv" / "release-2")
    env = {**backend, "HOME": str(tmp_path)}
    with consumer(
        serve, seeder.files[target], replay, "--require-warm", backend=env, app_dir=release, target=target
    ) as server:
        visit(server)
        assert cold_events(server) == []
        assert server.status()["warm_coverage"] == 1.0
        assert reasons(server) == set()
        found = sections(server)
    assert set(found) >= NEED_TRUST | DATA_ONLY
    for name in DATA_ONLY | {"cached", "lru-cache"}:
        assert found[name]["used"] == found[name]["offered"] > 0, name


def test_a_captured_profile_makes_another_host_warm(
    serve: Serve, backend: dict[str, str], seeder: Seeder, trusting: Path, tmp_path: Path
) -> None:
    file = tmp_path / "captured.jumpstart"
    with serve(TWINS[0], *LRU, app_dir=SHOP, env=backend, home=seeder.home) as server:
        visit(server)
        done = run_command("profile", "capture", "-o", str(file), home=seeder.home)
        assert done.returncode == 0, done.stderr
        assert str(file) in done.stdout
    assert [path.name for path in tmp_path.glob("*captured*")] == ["captured.jumpstart"]
    release = copy_of_shop(tmp_path / "release")
    with consumer(serve, file, "--no-replay", backend=backend, app_dir=release) as server:
        visit(server)
        assert cold_events(server) == []


def test_a_profile_and_the_hosts_own_cache_add_up(
    serve: Serve, backend: dict[str, str], seeder: Seeder, trusting: Path
) -> None:
    with serve(TWINS[0], *LRU, "--profile", str(seeder.file), app_dir=SHOP, env=backend) as server:
        visit(server, ["/search?q=mug&region=jp"])
    with serve(TWINS[0], *LRU, "--profile", str(seeder.file), app_dir=SHOP, env=backend) as server:
        assert len(server.status()["sources"]) == 2
        visit(server, [*PAGES, "/search?q=mug&region=jp"])
        assert cold_events(server) == []


# -- trust --


def test_a_profile_by_an_unknown_key_is_not_used(serve: Serve, backend: dict[str, str], seeder: Seeder) -> None:
    with consumer(serve, seeder.file, backend=backend) as server:
        assert_refused(server, "unknown-key")
        visit(server, PAGES[:3])
        assert cold_events(server)
        assert server.status()["records_used"] == 0
        assert "jumpstart keys trust" in server.stderr
    assert_exits_4(consumer(serve, seeder.file, "--require-warm", backend=backend, wait=False), "unknown-key")


def test_data_only_uses_no_code_and_no_pickles(serve: Serve, backend: dict[str, str], seeder: Seeder) -> None:
    with consumer(serve, seeder.file, "--trust", "data-only", "--no-replay", backend=backend) as server:
        found = sections(server)
        assert set(found) >= DATA_ONLY
        assert not NEED_TRUST & set(found)
        refused = {refusal["where"].rpartition(" ")[2] for refusal in of_reason(server, "needs-trust")}
        assert refused == NEED_TRUST
        assert_refused(server, "needs-trust")
        visit(server)
        kinds = {name.split(": ")[1].split()[0] for name in cold_events(server)}
    assert "import" not in kinds
    assert "template" not in kinds
    assert_exits_4(
        consumer(serve, seeder.file, "--trust", "data-only", "--require-warm", backend=backend, wait=False),
        "needs-trust",
    )


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def with_bomb(seeder: Seeder, path: Path, keys: KeyRing) -> bytes:
    """The seeder's profile, its `cached` section replaced by one that holds pickle bombs, signed with *keys*."""
    profile = seeder.read()
    payload = pickle.dumps(Bomb(path))
    data = {"fn": "shop.remote:settings", "args": payload, "version": version_digest(""), "value": payload}
    record = Record(key="shop.remote:settings(bomb)", data={**data, "created": datetime.now(UTC).isoformat()})
    section = encode_section("cached", profile.sections["cached"].info.version, "msgpack", [record])
    infos = [section.info if info.recorder == "cached" else info for info in profile.manifest.sections]
    datas = {name: each.data for name, each in profile.sections.items()} | {"cached": section.data}
    return pack_profile(msgspec.structs.replace(profile.manifest, sections=infos), datas, keys.sign)


def test_nothing_untrusted_is_unpickled(
    serve: Serve, backend: dict[str, str], seeder: Seeder, trusting: Path, tmp_path: Path
) -> None:
    bombed, file = tmp_path / "bombed", tmp_path / "bomb.jumpstart"
    file.write_bytes(with_bomb(seeder, bombed, KeyRing(tmp_path / "attacker")))
    for trust in ("signed", "data-only"):
        with consumer(serve, file, "--trust", trust, backend=backend) as server:
            visit(server, PAGES[:2])
            assert {"unknown-key"} <= reasons(server)
        assert not bombed.exists(), trust
    # The same section under a good signature whose bytes were exchanged afterwards is damaged, and not looked into.
    good = with_bomb(seeder, bombed, seeder.keys)
    file.write_bytes(exchanged(good, "manifest.json", read_member(seeder.file.read_bytes(), "manifest.json")))
    with consumer(serve, file, backend=backend) as server:
        visit(server, PAGES[:2])
        assert server.status()["refusals"]
    assert not bombed.exists()
    file.write_bytes(good)
    with consumer(serve, file, backend=backend) as server:
        visit(server, PAGES[:2])
    assert bombed.exists(), "the bomb of this test is a dud: it proves nothing"


# -- damage --


def flipped(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 0x10
    return bytes(changed)


def read_member(data: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(name)


def exchanged(data: bytes, name: str, content: bytes | None) -> bytes:
    """The archive with another content of one member, or without it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(buffer, "w") as copy:
        for member in archive.infolist():
            if member.filename != name:
                copy.writestr(member, archive.read(member))
            elif content is not None:
                copy.writestr(member, content)
    return buffer.getvalue()


def inside(seeder: Seeder, name: str) -> tuple[bytes, int]:
    """The profile's bytes, and the position of the middle of a member's data."""
    data = seeder.file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        member = archive.getinfo(name)
    return data, member.header_offset + 30 + len(name) + member.compress_size // 2


def flip_in(name: str) -> Callable[[Seeder], bytes]:
    return lambda seeder: flipped(*inside(seeder, name))


def flip_directory(seeder: Seeder) -> bytes:
    data = seeder.file.read_bytes()
    return flipped(data, data.rindex(b"PK\x01\x02") + 46)


def flip_comment(seeder: Seeder) -> bytes:
    data = seeder.file.read_bytes()
    return flipped(data, len(data) - 1)


def truncated(seeder: Seeder) -> bytes:
    data = seeder.file.read_bytes()
    return data[: len(data) // 2]


def unsigned(seeder: Seeder) -> bytes:
    return exchanged(seeder.file.read_bytes(), "manifest.sig", None)


def other_python(seeder: Seeder) -> bytes:
    runtime = msgspec.structs.replace(seeder.read().manifest.runtime, version="3.9.1", cache_tag="cpython-39")
    return seeder.signed(runtime=runtime)


def other_app(seeder: Seeder) -> bytes:
    """Really of another app: the twin's, which shares modules and templates with the one that is served."""
    return seeder.files[TWINS[1]].read_bytes()


def too_old(seeder: Seeder) -> bytes:
    return seeder.signed(created=datetime.now(UTC) - timedelta(hours=25))


def from_the_future(seeder: Seeder) -> bytes:
    return seeder.signed(created=datetime.now(UTC) + timedelta(hours=1))


COLD, PARTLY, WARM = "cold", "partly warm", "warm"


DAMAGE: dict[str, tuple[Callable[[Seeder], bytes] | None, set[str], str]] = {
    # Where there are two codes, it depends on what the flipped bit means to the inflater.
    "flip-manifest": (flip_in("manifest.json"), {"bad-signature", "damaged"}, COLD),
    "flip-signature": (flip_in("manifest.sig"), {"bad-signature", "damaged"}, COLD),
    "flip-section": (flip_in("sections/cached.msgpack"), {"damaged"}, PARTLY),
    "flip-directory": (flip_directory, {"damaged"}, COLD),
    "flip-comment": (flip_comment, {"damaged"}, WARM),
    "truncated": (truncated, {"damaged"}, COLD),
    "empty": (lambda seeder: b"", {"damaged"}, COLD),
    "unsigned": (unsigned, {"unsigned"}, COLD),
    "other-python": (other_python, {"other-runtime"}, PARTLY),
    "other-app": (other_app, {"other-app"}, PARTLY),
    "too-old": (too_old, {"too-old"}, COLD),
    "from-the-future": (from_the_future, {"from-the-future"}, COLD),
    "absent": (None, {"absent"}, COLD),
}


def damage(seeder: Seeder, name: str, file: Path) -> tuple[set[str], str]:
    """Write the damaged profile; the codes that it may be refused with, and how warm a boot is all the same."""
    make, codes, outcome = DAMAGE[name]
    if make is not None:
        file.write_bytes(make(seeder))
    return codes, outcome


def found_state(file: Path, trusting: Path) -> WarmState:
    """What a boot on this host would find."""
    return find_state(
        BootSettings(target=TWINS[0], app_dir=str(SHOP), profile=str(file), keys=str(trusting / "config" / "keys")),
        RECORDERS,
    )


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_used_is_refused_with_a_code(seeder: Seeder, trusting: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "shop.jumpstart"
    codes, outcome = damage(seeder, name, file)
    state = found_state(file, trusting)
    (code,) = {refusal.reason for refusal in state.refusals}
    assert code in codes
    assert bool(state.sections) == (outcome != COLD)
    if outcome == WARM:
        assert set(state.sections) == set(seeder.read().sections)
    if name == "flip-section":
        assert set(state.sections) == set(seeder.read().sections) - {"cached"}
    if name == "other-python":
        assert set(state.sections) >= DATA_ONLY
        assert not set(state.sections) & NEED_TRUST


@pytest.mark.parametrize("name", ["flip-comment", "flip-section", "other-app", "other-python", "too-old"])
def test_a_server_comes_up_as_warm_as_it_can_and_says_why_not_warmer(
    serve: Serve, backend: dict[str, str], seeder: Seeder, trusting: Path, tmp_path: Path, name: str
) -> None:
    """In log, status, boot report and metrics."""
    file = tmp_path / "shop.jumpstart"
    codes, outcome = damage(seeder, name, file)
    with consumer(serve, file, backend=backend) as server:
        (code,) = reasons(server)
        assert code in codes
        assert_refused(server, code)
        visit(server, PAGES[:3])
        status = server.status()
        if outcome == COLD:
            assert status["records_used"] == 0
            assert cold_events(server)
        else:
            assert status["records_used"] > 20
        if outcome == WARM:
            assert cold_events(server) == []


@pytest.mark.parametrize("name", ["flip-comment", "other-app", "absent"])
def test_none_of_it_will_do_where_warmth_is_required(
    serve: Serve, backend: dict[str, str], seeder: Seeder, trusting: Path, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "shop.jumpstart"
    (code,), _ = damage(seeder, name, file)
    assert_exits_4(consumer(serve, file, "--require-warm", backend=backend, wait=False), code)


def of_reason(server: Server, code: str) -> list[dict[str, str]]:
    return [refusal for refusal in server.status()["refusals"] if refusal["reason"] == code]


def assert_refused(server: Server, code: str) -> None:
    """The code stands wherever somebody may look for it."""
    assert of_reason(server, code)
    assert code in {refusal["reason"] for refusal in boot_report(server)["refusals"]}
    assert re.search(rf"\[WARNING\] not used: profile .*: {code}( \(|$)", server.stderr, re.MULTILINE)
    samples = {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(server.admin("/metrics").text)
        for sample in family.samples
        if sample.name == "jumpstart_boot_refusals"
    }
    assert samples[code] >= 1
    assert TRACEBACK not in server.stderr


def assert_exits_4(server: Server, code: str) -> None:
    with server:
        assert server.wait() == 4
        assert f": {code}" in server.stderr
        assert TRACEBACK not in server.stderr


@settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(where=st.integers(0, 10**9), bit=st.integers(0, 7), cut=st.booleans())
def test_any_flip_and_any_cut_of_a_real_profile_is_noticed(
    seeder: Seeder, trusting: Path, tmp_path: Path, where: int, bit: int, cut: bool
) -> None:
    """Through the boot's own reading: never an exception, always a refusal, and what is kept is what was signed."""
    data = seeder.file.read_bytes()
    changed = bytearray(data)
    if cut:
        del changed[where % len(data) :]
    else:
        changed[where % len(data)] ^= 1 << bit
    file = tmp_path / "changed.jumpstart"
    file.write_bytes(changed)
    state = found_state(file, trusting)
    assert state.refusals
    whole = seeder.read()
    for name, records in state.sections.items():
        assert records == whole.records(name)[0]


# -- writing --


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=0700", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_profile_is_written_whole_or_not_at_all(
    seeder: Seeder, backend: dict[str, str], serve: Serve, tiny_disk: Path
) -> None:
    old = tiny_disk / "shop.jumpstart"
    old.write_bytes(b"the old one")
    words = ("build", TWINS[0], "--app-dir", str(SHOP), "--requests", str(WARM_TOML), "-o", str(old))
    full = run_command(*words, home=seeder.home, env=backend)
    assert full.returncode == 2
    assert re.search(r"^error: cannot write the profile .*No space left", full.stderr, re.MULTILINE)
    assert TRACEBACK not in full.stderr
    assert [path.name for path in tiny_disk.iterdir()] == ["shop.jumpstart"]
    assert old.read_bytes() == b"the old one"
    with serve(TWINS[0], app_dir=SHOP, env=backend, home=seeder.home) as server:
        visit(server)
        full = run_command("profile", "capture", "-o", str(old), home=seeder.home)
        assert full.returncode == 2
        assert "No space left" in full.stderr
        assert old.read_bytes() == b"the old one"
        nowhere = run_command("profile", "capture", "-o", str(tiny_disk / "no" / "x"), home=seeder.home)
        assert nowhere.returncode == 2
        assert "No such file or directory" in nowhere.stderr
    missing = run_command(*words[:-1], str(tiny_disk / "no" / "such.jumpstart"), home=seeder.home)
    assert missing.returncode == 2
    assert "no such folder" in missing.stderr


def test_requests_that_fail_while_building_are_named(seeder: Seeder, backend: dict[str, str], tmp_path: Path) -> None:
    requests = tmp_path / "warm.toml"
    requests.write_text(
        '[[request]]\npath = "/about"\n[[request]]\npath = "/healthz"\nexpect_status = 418\n'
        '[[request]]\npath = "/products/9999"\nexpect_status = 404\n'
    )
    file = tmp_path / "shop.jumpstart"
    words = ("build", TWINS[0], "--app-dir", str(SHOP), "--requests", str(requests), "-o", str(file))
    done = seeder.run(*words, "--allow-failures", env=backend)
    assert "request failed: GET /healthz: answered 200, expected 418" in done.stderr
    assert done.stderr.count("request failed") == 1
    shown = seeder.run("profile", "show", str(file)).stdout
    assert "GET /about" in shown
    assert "9999" not in shown  # what was not found is not worth a replay


# -- looking inside --


def test_show_lists_every_record(seeder: Seeder) -> None:
    profile = seeder.read()
    lines = seeder.run("profile", "show", str(seeder.file)).stdout.splitlines()
    listed = [line[2:] for line in lines if line.startswith("  ")]
    for name in profile.sections:
        records, _ = profile.records(name)
        assert any(line.startswith(f"section {name}: ") and f" {len(records)} records" in line for line in lines)
        shown = {"".join(char if char.isprintable() else "" for char in record.key) for record in records}
        assert {key for key in shown if "\\" not in key} <= {line.replace("\\n", "") for line in listed}
    assert len(listed) == sum(section.info.records for section in profile.sections.values())
    assert any(profile.signed_by is not None and profile.signed_by in line for line in lines)
    verbose = seeder.run("profile", "show", "-v", str(seeder.file)).stdout
    assert "target = '/search?q=habour+lamp+under+45.00'" in verbose
    assert "needs module:shop.catalog = sha256:" in verbose


def test_verify_tells_whole_from_broken(seeder: Seeder, home: Path, tmp_path: Path) -> None:
    home.mkdir()
    done = seeder.run("profile", "verify", str(seeder.file))
    assert re.search(r": whole, \d+ records, signed by [0-9a-f]{16}$", done.stdout.strip())
    for name, make in (("flip", flip_in("sections/jinja.json")), ("cut", truncated), ("unsigned", unsigned)):
        file = tmp_path / f"{name}.jumpstart"
        file.write_bytes(make(seeder))
        broken = run_command("profile", "verify", str(file), home=seeder.home)
        assert broken.returncode == 1, name
        assert ("unsigned" if name == "unsigned" else "damaged") in broken.stdout
    stranger = run_command("profile", "verify", str(seeder.file), home=home)
    assert stranger.returncode == 1
    assert "unknown-key" in stranger.stdout
    absent = run_command("profile", "verify", str(tmp_path / "none"), home=home)
    assert absent.returncode == 1
    assert "absent" in absent.stdout


def test_diff_tells_what_a_new_build_changes(seeder: Seeder, backend: dict[str, str], tmp_path: Path) -> None:
    app = copy_of_shop(tmp_path / "app")
    catalog = app / "shop" / "catalog.py"
    catalog.write_text(catalog.read_text() + "\nCHANGED = True\n")
    requests = tmp_path / "warm.toml"
    requests.write_text(WARM_TOML.read_text().replace('path = "/about"', 'path = "/products?kind=mug"'))
    new = tmp_path / "new.jumpstart"
    words = ("build", TWINS[0], "--app-dir", str(app), "--requests", str(requests), "-o", str(new), *LRU)
    seeder.run(*words, env=backend)
    same = run_command("profile", "diff", str(new), str(new), home=seeder.home)
    assert (same.returncode, same.stdout) == (0, "")
    done = run_command("profile", "diff", str(seeder.file), str(new), home=seeder.home)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("app.sources: sha256:") for line in lines)
    assert "  - about.html" in lines
    assert "  - GET /about" in lines
    assert "  + GET /products?kind=mug" in lines
    assert any(re.match(r"  ~ shop\.catalog:prices\(", line) for line in lines)
    assert not any(line.startswith("section modules") for line in lines)


def test_nothing_personal_is_inside(
    serve: Serve, backend: dict[str, str], seeder: Seeder, home: Path, tmp_path: Path
) -> None:
    """Cookies, authorization, user agents, tokens in queries and bodies of what was sent are in no byte of it."""
    secrets = [f"secret{number}0f3e1d" for number in range(7)]
    headers = {
        "Cookie": f"cart=3x2; session={secrets[0]}",
        "Authorization": f"Bearer {secrets[1]}",
        "User-Agent": secrets[2],
        "X-Forwarded-For": "203.0.113.77",
        "Referer": f"https://example.org/{secrets[3]}",
    }
    file = tmp_path / "shop.jumpstart"
    with serve(TWINS[0], *LRU, app_dir=SHOP, env=backend) as server:
        for page in PAGES:
            assert server.get(page, headers=headers).status_code == 200
        server.get(f"/search?q=mug&token={secrets[4]}", headers=headers)
        server.get(f"/search?q={secrets[5]}@example.org", headers=headers)
        body = f"product=7&count=2&card={secrets[6]}"
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        assert server.request("POST", "/cart", content=body, headers={**headers, **form}).status_code == 303
        assert run_command("profile", "capture", "-o", str(file), home=home).returncode == 0
    with zipfile.ZipFile(file) as archive:
        inflated = b"\n".join(archive.read(member) for member in archive.infolist())
    stored = (home / "cache" / "warm-start" / "cache.db").read_bytes()
    for content in (file.read_bytes(), inflated, stored):
        for secret in (*secrets, "203.0.113.77", "cart=3x2"):
            assert secret.encode() not in content, secret
    assert b"GET /search?q=habour" in inflated
    assert b"POST" not in b"".join(line for line in inflated.splitlines() if b'"target"' in line)


# -- builds that meet failures, and the recipe of the README --

PLAIN = """
import os

STATUS = {"/ok": "200 OK", "/no": "404 Not Found", "/bad": "500 Internal Server Error"}

def app(environ, start_response):
    start_response(STATUS.get(environ["PATH_INFO"], "200 OK"), [])
    return [os.getcwd().encode()]
"""


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "js_plain.py").write_text(PLAIN)
    return folder


@pytest.mark.parametrize(
    ("paths", "options", "code"),
    [
        (["/ok"], [], 0),
        (["/ok", "/bad"], [], 1),
        (["/ok", "/bad"], ["--allow-failures"], 0),
        (["/bad"], [], 1),
        (["/ok", "/no"], [], 0),
        (["/no"], [], 1),
    ],
)
def test_a_build_whose_requests_fail_says_so_with_its_exit_code(
    plain: Path, tmp_path: Path, home: Path, paths: list[str], options: list[str], code: int
) -> None:
    home.mkdir()
    requests, file = tmp_path / "requests.toml", tmp_path / "x.jumpstart"
    requests.write_text("".join(f'[[request]]\npath = "{path}"\n' for path in paths))
    words = ("js_plain", "--app-dir", str(plain), "--requests", str(requests), "-o", str(file))
    done = run_command("build", *words, *options, home=home)
    assert done.returncode == code, done.stderr
    assert ("request failed: GET /bad: answered 500" in done.stderr) is ("/bad" in paths)
    assert ("GET /no: answered 404" in done.stderr) is ("/no" in paths)
    assert (f"not all requests succeeded; {file} is written all the same" in done.stderr) is ("/bad" in paths)
    assert ("no request succeeded" in done.stderr) is (paths == ["/no"])
    assert read_profile(
        file,
        trust="signed",
        verify=KeyRing(home / "config" / "keys").verify,
        now=datetime.now(UTC),
        max_age=timedelta(days=1),
    )


def test_the_recipe_of_the_readme(serve: Serve, plain: Path, tmp_path: Path, home: Path) -> None:
    """Keys shown where profiles are made, trusted where they are used; ``shop`` and ``shop:app`` are one app."""
    ci = tmp_path / "ci"
    ci.mkdir()
    home.mkdir()
    file, public = tmp_path / "x.jumpstart", tmp_path / "fleet.pub"
    public.write_text(run_command("keys", "show", home=ci).stdout)
    requests = tmp_path / "requests.toml"
    requests.write_text('[[request]]\npath = "/ok"\n')
    words = ("js_plain", "--chdir", str(plain), "--requests", str(requests), "-o", str(file))
    built = run_command("build", *words, home=ci)
    assert built.returncode == 0, built.stderr
    with serve("js_plain:app", "--profile", str(file), app_dir=plain) as server:
        server.wait_for_line(r"unknown-key .*jumpstart keys show > FILE.*jumpstart keys trust FILE")
    assert run_command("keys", "trust", str(public), home=home).returncode == 0
    with serve("js_plain:app", "--profile", str(file), "--require-warm", app_dir=plain) as server:
        assert reasons(server) == set()


@pytest.mark.parametrize("fork", ["auto", "never"])
def test_the_app_runs_in_the_folder_that_chdir_names(serve: Serve, plain: Path, fork: str) -> None:
    with serve("js_plain", "--chdir", str(plain), "--fork", fork, app_dir=None) as server:
        assert server.get("/").text == str(plain)


def test_a_cache_that_cannot_be_written_costs_one_line(serve: Serve, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    env = {"JUMPSTART_HOME": "", "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    home = tmp_path / "state" / "jumpstart"
    with serve("js_plain", app_dir=plain, env=env, home=home) as server:
        server.wait_for_line(r"not used: warm-start cache: unreadable \(nothing can be kept for the next start: ")
        assert server.get("/").status_code == 200
        assert "unreadable" in reasons(server)
    assert len(re.findall("WARNING", server.stderr)) == 1, server.stderr
