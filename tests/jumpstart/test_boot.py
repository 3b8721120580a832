"""A boot takes what applies of a profile and of the host's cache, says why of the rest, and is stopped by neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import pytest

from jumpstart.boot import BootSettings, find_state
from jumpstart.profile import AppInfo, encode_section, new_manifest, write_profile
from jumpstart.recorder import Recorder, WarmSettings
from jumpstart.recorders import RecorderSet
from jumpstart.records import Reason, Record, Tally
from jumpstart.report import BootReport
from jumpstart.runtime import RuntimeKey, module_dependency, runtime_key
from jumpstart.trust import KeyRing
from jumpstart.warmstart import StoredSection, StoredState, WarmStartCache

ROOT = Path(__file__).parents[2]


class Names(Recorder):
    """Data only: any host, any signature."""

    name: ClassVar[str] = "names"

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        for record in records:
            tally.used(record)


class Code(Names):
    """Needs trust and the very same runtime."""

    name: ClassVar[str] = "code"
    encoding: ClassVar[Literal["json", "msgpack"]] = "msgpack"
    needs_trust: ClassVar[bool] = True
    runtime_bound: ClassVar[bool] = True
    version: ClassVar[int] = 2


class Host:
    """A host's folders, an app, and what earlier servers left behind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.app = root / "app"
        self.app.mkdir()
        (self.app / "js_site.py").write_text("import js_part\n\ndef app(environ, start_response): ...\n")
        (self.app / "js_part.py").write_text("VALUE = 1\n")
        self.keys = KeyRing(root / "keys")
        self.recorders = RecorderSet([Names(WarmSettings()), Code(WarmSettings())])

    def settings(self, **words: Any) -> BootSettings:
        plain = {"target": "js_site:app", "app_dir": str(self.app), "keys": str(self.root / "keys"), "name": "site"}
        return BootSettings(**{**plain, **words})

    def profile(
        self,
        sections: dict[str, list[Record]],
        *,
        target: str = "js_site:app",
        runtime: RuntimeKey | None = None,
        versions: dict[str, int] | None = None,
        age: timedelta = timedelta(),
        keys: KeyRing | None = None,
        name: str = "site.jumpstart",
    ) -> str:
        kinds: dict[str, Recorder] = {each.name: each for each in self.recorders.recorders}
        encoded = [
            encode_section(
                section,
                (versions or {}).get(section, kinds[section].version if section in kinds else 1),
                kinds[section].encoding if section in kinds else "json",
                records,
            )
            for section, records in sections.items()
        ]
        manifest = new_manifest(app=AppInfo(target=target), tenant="web", sections=encoded, now=datetime.now(UTC) - age)
        if runtime is not None:
            manifest = msgspec.structs.replace(manifest, runtime=runtime)
        path = self.root / name
        write_profile(path, manifest, {each.info.recorder: each.data for each in encoded}, (keys or self.keys).sign)
        return str(path)

    def cache(self, settings: BootSettings, sections: dict[str, list[Record]], version: int | None = None) -> None:
        stored = {}
        for name, records in sections.items():
            kind = self.recorders.get(name)
            assert kind is not None
            number = version or kind.version
            stored[name] = StoredSection(
                number, kind.encoding, encode_section(name, number, kind.encoding, records).data
            )
        state = StoredState(
            runtime=runtime_key(), app=AppInfo(target=settings.target), saved=datetime.now(UTC), sections=stored
        )
        assert WarmStartCache(Path(settings.warm_start)).save(settings.state_key, state) == []


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def found(host: Host, settings: BootSettings) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    state = find_state(settings, host.recorders)
    keys = {name: [record.key for record in records] for name, records in state.sections.items()}
    return keys, [(refusal.where, str(refusal.reason)) for refusal in state.refusals]


A, B, C = (Record(key=key) for key in "abc")

# -- what is found --


def test_nothing_asked_for_is_nothing_found_and_nothing_wrong(host: Host) -> None:
    assert found(host, host.settings()) == ({}, [])


def test_an_empty_cache_is_nothing_wrong(host: Host) -> None:
    state = find_state(host.settings(warm_start=str(host.root / "warm")), host.recorders)
    assert (state.sections, state.refusals, state.sources) == ({}, [], [])


@pytest.mark.parametrize("below", ["warm-start", "jumpstart/warm-start"])
def test_a_cache_that_cannot_be_kept_is_said_at_once_and_made_by_nobody(host: Host, below: str) -> None:
    """As where ~/.cache is a file; nothing was lost for this boot."""
    (host.root / "cache").write_text("")
    state = find_state(host.settings(warm_start=str(host.root / "cache" / below)), host.recorders)
    assert state.refusals == state.passed
    assert [refusal.reason for refusal in state.passed] == [Reason.UNREADABLE]
    detail = state.passed[0].detail
    assert f"{host.root / 'cache'} is not a folder" in detail
    assert "JUMPSTART_HOME" in detail and "--no-warm-start" in detail


def test_a_read_only_home_is_said_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "supports_effective_ids", {os.access})
    assert found(host, host.settings(warm_start=str(host.root / "x"))) == ({}, [("warm-start cache", "unreadable")])
    assert found(host, host.settings()) == ({}, [])


def test_an_empty_database_is_a_new_one(host: Host) -> None:
    """SQLite makes the file before it writes a page; whoever was killed in between left nothing that could be lost."""
    settings = host.settings(warm_start=str(host.root / "warm"))
    host.cache(settings, {"names": [A]})
    (host.root / "warm" / "cache.db").write_bytes(b"")
    assert found(host, settings) == ({}, [])
    host.cache(settings, {"names": [A]})
    assert found(host, settings) == ({"names": ["a"]}, [])


def test_profile_and_cache_apply_together(host: Host) -> None:
    settings = host.settings(
        profile=host.profile({"names": [A, B], "code": [Record(key="x", data={"b": b"\0"})]}),
        warm_start=str(host.root / "warm"),
    )
    host.cache(settings, {"names": [Record(key="b", data={"from": "cache"}), C]})
    state = find_state(settings, host.recorders)
    assert state.sources == ["profile site.jumpstart", "warm-start cache"]
    assert [record.key for record in state.sections["names"]] == ["a", "b", "c"]
    assert state.sections["names"][1].data == {"from": "cache"}
    assert state.sections["code"][0].data == {"b": b"\0"}
    assert state.refusals == []


def test_another_tenants_or_apps_cache_is_not_ours(host: Host) -> None:
    settings = host.settings(warm_start=str(host.root / "warm"))
    host.cache(settings, {"names": [A]})
    assert found(host, settings)[0] == {"names": ["a"]}
    assert found(host, host.settings(warm_start=str(host.root / "warm"), tenant="genai")) == ({}, [])
    assert found(host, host.settings(warm_start=str(host.root / "warm"), name="other")) == ({}, [])


def test_an_app_without_a_name_goes_by_target_and_folder() -> None:
    def key(**words: Any) -> str:
        return BootSettings(**{"target": "a:b", "app_dir": "/x", **words}).state_key

    assert key() == key()
    assert len({key(), key(target="a:c"), key(app_dir="/y"), key(tenant="t"), key(name="n")}) == 5
    assert key(target="a") == key(target="a:") == key(target="a:app") != key(target="a:application")
    assert key(name="n", app_dir="/release-1") == key(name="n", app_dir="/release-2")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), Reason.ABSENT),
        (lambda path: path.write_bytes(b""), Reason.DAMAGED),
        (lambda path: path.write_bytes(path.read_bytes()[:-150]), Reason.DAMAGED),
        (lambda path: (path.unlink(), path.mkdir()), Reason.UNREADABLE),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused_with_its_reason(host: Host, spoil: Any, reason: Reason) -> None:
    path = host.profile({"names": [A]})
    spoil(Path(path))
    sections, refusals = found(host, host.settings(profile=path))
    assert sections == {}
    assert refusals == [("profile site.jumpstart", str(reason))]


def test_age_and_signature_decide_about_the_whole_file(host: Host, tmp_path: Path) -> None:
    old = host.profile({"names": [A]}, age=timedelta(days=2))
    assert found(host, host.settings(profile=old)) == ({}, [("profile site.jumpstart", "too-old")])
    assert found(host, host.settings(profile=old, max_age_s=86_400 * 3))[0] == {"names": ["a"]}
    future = host.profile({"names": [A]}, age=timedelta(days=-2))
    assert found(host, host.settings(profile=future)) == ({}, [("profile site.jumpstart", "from-the-future")])
    foreign = host.profile({"names": [A]}, keys=KeyRing(tmp_path / "other-keys"))
    assert found(host, host.settings(profile=foreign)) == ({}, [("profile site.jumpstart", "unknown-key")])


def test_without_trust_only_data_is_taken(host: Host, tmp_path: Path) -> None:
    foreign = host.profile({"names": [A], "code": [B]}, keys=KeyRing(tmp_path / "other-keys"))
    sections, refusals = found(host, host.settings(profile=foreign, trust="data-only"))
    assert sections == {"names": ["a"]}
    assert refusals == [
        ("profile site.jumpstart signature", "unknown-key"),
        ("profile site.jumpstart section code", "needs-trust"),
    ]
    own = host.profile({"names": [A], "code": [B]})
    assert found(host, host.settings(profile=own, trust="data-only")) == ({"names": ["a"], "code": ["b"]}, [])


def test_another_apps_profile_gives_whatever_applies_and_says_so(host: Host) -> None:
    path = host.profile({"names": [A]}, target="shop.web:app")
    state = find_state(host.settings(profile=path), host.recorders)
    assert [record.key for record in state.sections["names"]] == ["a"]
    (refusal,) = state.refusals
    assert refusal.reason is Reason.OTHER_APP
    assert "shop.web:app" in refusal.detail and "js_site:app" in refusal.detail


@pytest.mark.parametrize("field", ["version", "platform", "implementation", "cache_tag", "magic"])
def test_another_runtimes_profile_keeps_what_is_not_bound_to_it(host: Host, field: str) -> None:
    other = msgspec.structs.replace(runtime_key(), **{field: "other"})
    path = host.profile({"names": [A], "code": [B]}, runtime=other)
    sections, refusals = found(host, host.settings(profile=path))
    assert sections == {"names": ["a"]}
    assert refusals == [
        ("profile site.jumpstart", "other-runtime"),
        ("profile site.jumpstart section code", "other-runtime"),
    ]


def test_sections_of_another_version_or_of_nobody_are_not_offered(host: Host) -> None:
    path = host.profile({"names": [A], "code": [B], "strange": [C]}, versions={"code": 3})
    sections, refusals = found(host, host.settings(profile=path))
    assert sections == {"names": ["a"]}
    assert sorted(refusals) == [
        ("profile site.jumpstart section code", "no-recorder"),
        ("profile site.jumpstart section strange", "no-recorder"),
    ]
    settings = host.settings(warm_start=str(host.root / "warm"))
    host.cache(settings, {"names": [A]}, version=7)
    assert found(host, settings) == ({}, [("warm-start cache section names", "no-recorder")])


def test_a_recorder_that_is_switched_off_is_not_offered_its_section(host: Host) -> None:
    path = host.profile({"names": [A], "code": [B]})
    host.recorders = RecorderSet([Names(WarmSettings())])
    sections, refusals = found(host, host.settings(profile=path))
    assert sections == {"names": ["a"]}
    assert [(where, reason in ("no-recorder", "disabled")) for where, reason in refusals] == [
        ("profile site.jumpstart section code", True)
    ]


def test_malformed_records_cost_themselves(host: Host) -> None:
    path = host.profile({"names": [A, Record(key="bad", data={}), B]})
    encoded = encode_section("names", 1, "json", [A, B])
    spoilt = encoded.data.replace(b'{"key":"b"}', b'{"key":7}')
    manifest = new_manifest(
        app=AppInfo(target="js_site:app"),
        tenant="web",
        sections=[msgspec_replace(encoded, spoilt)],
        now=datetime.now(UTC),
    )
    write_profile(Path(path), manifest, {"names": spoilt}, host.keys.sign)
    state = find_state(host.settings(profile=path), host.recorders)
    assert [record.key for record in state.sections["names"]] == ["a"]
    assert [dropped.reason for dropped in state.malformed["names"]] == [Reason.MALFORMED]


def msgspec_replace(encoded: Any, data: bytes) -> Any:
    import dataclasses
    import hashlib

    info = msgspec.structs.replace(encoded.info, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return dataclasses.replace(encoded, info=info, data=data)


def test_a_cache_that_others_may_write_is_refused(host: Host) -> None:
    settings = host.settings(warm_start=str(host.root / "warm"))
    host.cache(settings, {"names": [A]})
    (host.root / "warm").chmod(0o777)
    assert found(host, settings) == ({}, [("warm-start cache", "unsafe-owner")])


# -- whole boots, each in a process of its own --

CHILD = """
import asyncio, gc, json, logging, sys, time
import msgspec
from jumpstart.boot import BootSettings, boot
from jumpstart.errors import JumpstartError
from jumpstart.recorder import Recorder, WarmSettings
from jumpstart.recorders import RecorderSet
from jumpstart.report import Stopwatch
from tests.jumpstart.test_boot import Code, Names

logging.basicConfig(stream=sys.stderr)

class Fails(Recorder):
    name = "fails"
    hook = ""
    def _do(self, hook):
        if hook == self.hook:
            raise {"SystemExit": SystemExit, "ValueError": ValueError}[sys.argv[3]]("boom in " + hook)
    def observe(self): self._do("observe")
    def restore_early(self, records, tally): self._do("restore_early")
    def restore(self, app, records, tally): self._do("restore")
    async def restore_late(self, app, records, tally): self._do("restore_late")
    def capture(self, purpose): self._do("capture"); return []

settings = msgspec.json.decode(sys.argv[1], type=BootSettings)
Fails.hook = sys.argv[2]
recorders = RecorderSet([Fails(settings.warm), Names(settings.warm), Code(settings.warm)])
try:
    booted = boot(settings, recorders, Stopwatch("test", time.monotonic()))
    asyncio.run(booted.restore_late())
    captured = sorted(recorders.capture("host"))
except JumpstartError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error), "imported": "js_site" in sys.modules}))
    sys.exit()
print(json.dumps({
    "report": msgspec.to_builtins(booted.report()),
    "interface": booted.interface,
    "app": booted.app.__name__,
    "gc": gc.isenabled(),
    "captured": captured,
    "path": sys.path[0],
}))
"""


class Outcome:
    def __init__(self, run: subprocess.CompletedProcess[str]) -> None:
        assert run.returncode == 0, run.stderr
        self.stderr = run.stderr
        self.document: dict[str, Any] = json.loads(run.stdout)
        self.report = (
            msgspec.convert(self.document["report"], BootReport) if "report" in self.document else BootReport(target="")
        )

    def section(self, name: str) -> tuple[int, dict[str, str]]:
        section = next(section for section in self.report.sections if section.recorder == name)
        return section.used, {dropped.key: str(dropped.reason) for dropped in section.dropped}


def boot_apart(settings: BootSettings, hook: str = "", error: str = "ValueError") -> Outcome:
    words = [sys.executable, "-c", CHILD, msgspec.json.encode(settings).decode(), hook, error]
    path = os.pathsep.join([str(ROOT), str(ROOT / "server"), str(ROOT / "warmup")])
    environ = {**os.environ, "PYTHONPATH": path}
    return Outcome(subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ, check=False))


def dependent(host: Host, key: str, text: str) -> Record:
    """A record that depends on *js_part* being *text*."""
    import hashlib

    return Record(key=key, depends={"module:js_part": "sha256:" + hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.slow
def test_a_warm_boot_uses_what_is_valid_and_accounts_for_the_rest(host: Host) -> None:
    records = [
        A,
        dependent(host, "fresh", "VALUE = 1\n"),
        dependent(host, "stale", "VALUE = 0\n"),
        Record(key="gone", depends={"module:js_nowhere": "sha256:0"}),
    ]
    outcome = boot_apart(host.settings(profile=host.profile({"names": records})))
    assert outcome.section("names") == (2, {"stale": "stale", "gone": "gone"})
    document = outcome.document
    assert (document["interface"], document["app"], document["gc"]) == ("wsgi", "app", False)
    assert document["path"] == str(host.app)
    assert outcome.report.offered == 4
    spans = [span.name for span in outcome.report.spans]
    assert spans == [
        "find warm state",
        "check records",
        "early restores",
        "import the app",
        "restores",
        "late restores",
    ]


@pytest.mark.slow
def test_the_last_builds_cache_does_not_hide_this_builds_profile(host: Host) -> None:
    """A deploy to a host that has served: the cache knows the old sources, the profile the new ones."""
    settings = host.settings(warm_start=str(host.root / "warm"))
    host.cache(settings, {"names": [dependent(host, "k", "VALUE = 0\n"), dependent(host, "only", "VALUE = 0\n")]})
    profile = host.profile({"names": [dependent(host, "k", "VALUE = 1\n")]})
    outcome = boot_apart(msgspec.structs.replace(settings, profile=profile))
    assert outcome.section("names") == (1, {"only": "stale"})
    assert module_dependency("js_part") == {}, "this process has not seen it"


@pytest.mark.slow
def test_a_boot_with_nothing_to_go_by_is_cold_and_whole(host: Host) -> None:
    outcome = boot_apart(host.settings())
    assert (outcome.report.offered, outcome.report.used, outcome.report.sources) == (0, 0, [])
    assert "cold" in outcome.report.summary()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("observe", "ValueError"),
        ("restore_early", "SystemExit"),
        ("restore", "SystemExit"),
        ("restore_late", "ValueError"),
        ("capture", "SystemExit"),
    ],
)
def test_a_recorder_that_raises_in_any_hook_harms_nothing_else(host: Host, hook: str, error: str) -> None:
    settings = host.settings(warm_start=str(host.root / "warm"))
    profile = host.profile({"names": [A, B], "fails": [C]})
    outcome = boot_apart(msgspec.structs.replace(settings, profile=profile), hook, error)
    assert outcome.section("names") == (2, {})
    assert outcome.document["captured"] == ["code", "names"]
    assert f"boom in {hook}" in outcome.stderr
    if hook != "capture":  # the report was made after
        assert outcome.report.recorders_off == {"fails": f"{hook}: {error}: boom in {hook}"}
        assert outcome.section("fails") == (0, {"c": "recorder-error"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing given", "no profile was given and the warm-start cache has nothing for this app"),
        ("refused", "too-old"),
        ("all stale", "1 stale"),
    ],
)
def test_a_boot_that_must_be_warm_and_is_not_is_refused_with_the_reason(host: Host, case: str, words: str) -> None:
    settings = host.settings(require_warm=True)
    if case == "refused":
        settings = msgspec.structs.replace(settings, profile=host.profile({"names": [A]}, age=timedelta(days=2)))
    elif case == "all stale":
        profile = host.profile({"names": [dependent(host, "k", "VALUE = 0\n")]})
        settings = msgspec.structs.replace(settings, profile=profile)
    document = boot_apart(settings).document
    assert document["error"] == "ColdBootRefusedError"
    assert words in document["text"]


@pytest.mark.slow
def test_a_boot_that_must_be_warm_and_is_goes_on(host: Host) -> None:
    outcome = boot_apart(host.settings(require_warm=True, profile=host.profile({"names": [A]})))
    assert outcome.report.used == 1


@pytest.mark.slow
def test_no_place_for_the_next_start_is_no_reason_against_a_warm_one(host: Host) -> None:
    """A profile on a read-only host: warm, and a line about the cache."""
    (host.root / "file").write_text("")
    cache = str(host.root / "file" / "warm-start")
    settings = host.settings(require_warm=True, profile=host.profile({"names": [A]}), warm_start=cache)
    assert boot_apart(settings).report.used == 1
    document = boot_apart(msgspec.structs.replace(settings, profile="")).document
    assert document["error"] == "ColdBootRefusedError"
    assert "nothing can be kept for the next start" in document["text"]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "warned"), [("asgi", True), ("wsgi", False), (None, False)])
def test_an_interface_that_the_app_certainly_has_not_is_warned_of(
    host: Host, named: Literal["asgi", "wsgi"] | None, warned: bool
) -> None:
    outcome = boot_apart(host.settings(interface=named))
    assert ("looks like WSGI by its signature, and --interface says ASGI" in outcome.stderr) is warned


@pytest.mark.slow
def test_an_app_that_cannot_be_loaded_ends_the_boot_whatever_is_warm(host: Host) -> None:
    (host.app / "js_part.py").write_text("raise RuntimeError('no database')\n")
    document = boot_apart(host.settings(profile=host.profile({"names": [A]}))).document
    assert document["error"] == "AppLoadError"
    assert "no database" in document["text"]
