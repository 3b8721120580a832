"""What a profile must show, by made-up consumers; `tests/integration/test_proof.py` has real ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from jumpstart.errors import AppLoadError
from jumpstart.profile import Golden, Seeding, Validation
from jumpstart.records import Dropped, Reason, Record
from jumpstart.report import BootReport, SectionReport
from jumpstart.trust import KeyRing
from jumpstart_server.cli.proof import stamped
from jumpstart_server.messages import Section
from jumpstart_server.profiles import pack, read_as_boot, stamp
from jumpstart_server.proving import (
    ASKED,
    ASKED_IN_DOUBT,
    MOST_ROUNDS,
    ROUNDS,
    Consumed,
    Fault,
    Gates,
    Proof,
    alone,
    expectations,
    judge,
    judge_gain,
    judge_yield,
    prove,
)
from jumpstart_server.settings import (
    AppSettings,
    HostSettings,
    ProfileSettings,
    Settings,
    TenantSettings,
    boot_settings,
)
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.observe import ObserverSnapshot, RouteStats
from jumpstart_warmup.shapes import Answer

SHAPE, OTHER = "a" * 32, "b" * 32
GOLDEN = [Golden(request=f"GET /{name}", status=200, shape=SHAPE) for name in "abcd"]
GATES = Gates()
NOW = datetime.now(UTC)


def consumed(
    *,
    elapsed_s: float = 0.001,
    cold: int = 0,
    shapes: dict[str, tuple[int, str]] | None = None,
    used: int = 9,
    dropped: list[Dropped] | None = None,
    weights: dict[str, int] | None = None,
    cold_only: str = "",
) -> Consumed:
    section = SectionReport(recorder="modules", offered=used + len(dropped or []), used=used, dropped=dropped or [])
    answers = []
    for golden in GOLDEN:
        status, shape = (shapes or {}).get(golden.request, (200, SHAPE))
        events = cold if not cold_only or golden.request == cold_only else 0
        weight = (weights or {}).get(golden.request, 1)
        answers.append(
            Answer(
                name=golden.request, weight=weight, status=status, shape=shape, elapsed_s=elapsed_s, cold_events=events
            )
        )
    return Consumed(report=BootReport(target="a:b", sections=[section]), answers=answers)


COLD = [consumed(elapsed_s=0.1, cold=5), consumed(elapsed_s=0.08, cold=5)]
WARM = [consumed(), consumed(elapsed_s=0.002)]


def faults(proof: Proof) -> list[Fault]:
    return [found.fault for found in proof.faults]


def test_a_good_profile_is_proven_with_its_figures() -> None:
    proof = judge(GOLDEN, COLD, WARM, GATES)
    assert proof.is_proven
    assert proof.validation == Validation(
        golden=4,
        matched=4,
        warm_coverage=1.0,
        used=1.0,
        first_request_s=0.001,  # the best of each
        cold_first_request_s=0.08,
        cold_events=0,
        cold_boot_events=20,
    )
    assert proof.describe() == [
        "4 of 4 golden requests answered alike, warm coverage 100%, 100% of the records used; first request 1.0 ms "
        "with 0 cold events, cold boot 80.0 ms with 20"
    ]


def test_another_answer_than_the_seeders_is_a_fault_of_the_profile() -> None:
    for answer in ((500, OTHER), (200, OTHER), (0, "")):
        worse = [consumed(shapes={"GET /b": answer}), consumed()]
        proof = judge(GOLDEN, COLD, worse, GATES)
        assert faults(proof) == [Fault.ANSWERS_DIFFER]
        assert "GET /b was 200" in str(proof.faults[0])


def test_what_a_cold_boot_answers_otherwise_too_is_set_aside_unless_it_is_most() -> None:
    shapes = {"GET /a": (200, OTHER), "GET /b": (404, OTHER)}
    warm, cold = [consumed(shapes=shapes)], [consumed(shapes=shapes, cold=5, elapsed_s=0.1)]
    proof = judge(GOLDEN, cold, warm, GATES)
    assert proof.is_proven and proof.validation is not None and proof.validation.matched == 2
    assert len([note for note in proof.notes if "set aside" in note]) == 2
    shapes["GET /c"] = (200, OTHER)
    warm, cold = [consumed(shapes=shapes)], [consumed(shapes=shapes, cold=5, elapsed_s=0.1)]
    assert faults(judge(GOLDEN, cold, warm, GATES)) == [Fault.NO_GOLDEN]


def test_what_only_the_profile_makes_the_app_answer_is_a_fault_even_if_the_seeder_did_so_too() -> None:
    cold = [consumed(shapes={"GET /b": (200, OTHER)}, cold=5, elapsed_s=0.1)] * 2
    proof = judge(GOLDEN, cold, WARM, GATES)
    assert faults(proof) == [Fault.ANSWERS_DIFFER] and "cold boot" in str(proof.faults[0])
    flapping = [cold[0], COLD[1]]
    assert judge(GOLDEN, flapping, WARM, GATES).is_proven


def all_answered(answer: tuple[int, str]) -> dict[str, tuple[int, str]]:
    return {each.request: answer for each in GOLDEN}


def test_where_the_seeder_wrote_nothing_down_cold_boots_say_what_is_right() -> None:
    proof = judge(GOLDEN[:1], COLD, WARM, GATES)
    assert proof.is_proven and proof.validation is not None and proof.validation.matched == len(GOLDEN)
    worse = [consumed(shapes={"GET /d": (200, OTHER)}), consumed()]
    assert faults(judge(GOLDEN[:1], COLD, worse, GATES)) == [Fault.ANSWERS_DIFFER]
    refused = [consumed(shapes={"GET /c": (401, OTHER), "GET /d": (404, OTHER)}, cold=5, elapsed_s=0.1)]
    assert expectations(GOLDEN[:1], refused) == {"GET /a": (200, SHAPE), "GET /b": (200, SHAPE)}
    proof = judge(GOLDEN[:1], refused, [consumed(shapes={"GET /d": (500, OTHER)})], GATES)
    assert faults(proof) == [Fault.ANSWERS_DIFFER] and "GET /d is 500" in str(proof.faults[0])


def test_without_anything_to_compare_nothing_is_proven() -> None:
    for failure in ((500, OTHER), (0, "")):  # no database where the proof runs, say
        failing = [consumed(shapes=all_answered(failure) | {"GET /a": (200, SHAPE)}, cold=5, elapsed_s=0.1)]
        assert faults(judge(GOLDEN[:1], failing, failing, Gates(coverage=0))) == [Fault.NO_GOLDEN, Fault.NO_GAIN]
        assert Fault.NO_GOLDEN in faults(judge(GOLDEN, failing, failing, GATES))
    unheard = [msgspec.structs.replace(consumed(), answers=consumed().answers[:1])]
    proof = judge(GOLDEN, COLD, unheard, GATES)
    assert faults(proof) == [Fault.NO_GOLDEN] and "set aside, there was no time for it: GET /d" in proof.notes


def test_what_cold_boots_do_not_agree_on_themselves_is_no_fault_of_the_profile_unless_it_fails() -> None:
    drawn = [consumed(shapes={"GET /a": (200, shape * 32)}, cold=5, elapsed_s=0.1) for shape in "cd"]
    assert judge(GOLDEN, drawn, [consumed(shapes={"GET /a": (200, OTHER)}), WARM[0]], GATES).is_proven
    for failure in ((500, OTHER), (302, OTHER), (0, "")):
        failing = [consumed(shapes={"GET /a": failure}), WARM[0]]
        assert faults(judge(GOLDEN, drawn, failing, GATES)) == [Fault.ANSWERS_DIFFER]
    most = [consumed(shapes=all_answered((200, shape * 32)), cold=5, elapsed_s=0.1) for shape in "cd"]
    assert faults(judge(GOLDEN, most, [consumed(shapes=all_answered((200, OTHER)))], GATES)) == [Fault.NO_GOLDEN]


def test_enough_records_must_be_used_and_those_without_a_use_here_do_not_count() -> None:
    stale = [Dropped(f"s{n}", Reason.STALE) for n in range(10)]
    unneeded = [Dropped(f"n{n}", Reason.NOT_APPLICABLE) for n in range(90)]
    assert judge(GOLDEN, COLD, [consumed(dropped=unneeded)], GATES).is_proven
    assert faults(judge(GOLDEN, COLD, [consumed(dropped=[*stale, *unneeded])], GATES)) == [Fault.FEW_USED]
    assert judge(GOLDEN, COLD, [consumed(dropped=stale)], Gates(used=0.4)).is_proven
    assert faults(judge(GOLDEN, COLD, [consumed(used=0, dropped=unneeded)], GATES)) == [Fault.FEW_USED]


def test_coverage_is_weighed_by_traffic() -> None:
    rare = [consumed(cold=1, cold_only="GET /a", weights={"GET /b": 97})]
    hot = [consumed(cold=1, cold_only="GET /b", weights={"GET /b": 97})]
    assert judge(GOLDEN, COLD, rare, GATES).is_proven
    assert faults(judge(GOLDEN, COLD, hot, GATES)) == [Fault.LOW_COVERAGE]


def figures(warm_s: float, cold_s: float, warm: int = 0, cold: int = 0) -> Validation:
    return Validation(
        golden=1,
        matched=1,
        warm_coverage=1,
        first_request_s=warm_s,
        cold_first_request_s=cold_s,
        cold_events=warm,
        cold_boot_events=cold,
    )


@pytest.mark.parametrize(
    ("validation", "gains"),
    [
        (figures(0.010, 0.100, 0, 5), True),
        (figures(0.101, 0.100, 0, 5), True),  # a tie within noise, and less cold work
        (figures(0.0015, 0.0005, 0, 5), True),  # of what takes no time at all, noise is most
        (figures(0.200, 0.100, 0, 5), False),  # less cold work, and slower beyond noise
        (figures(0.100, 0.100), False),  # nothing is better
        (figures(0.050, 0.100), True),  # faster, by work that nobody counts
        (figures(0.010, 0.100, 6, 5), False),  # more cold work
        (figures(0.0, 0.0), False),
    ],
)
def test_the_gain_is_less_cold_work_and_no_slower_or_clearly_faster(validation: Validation, gains: bool) -> None:
    assert (judge_gain(validation) is None) is gains


@pytest.mark.parametrize(
    ("seeding", "is_enough"),
    [
        (Seeding(requests=99, routes=5, warm_coverage=0.9), False),
        (Seeding(requests=100, routes=1, warm_coverage=0.9), True),
        (Seeding(requests=3, routes=3), True),  # off line
        (Seeding(), False),
        (Seeding(requests=500, routes=0, warm_coverage=0.9), False),
    ],
)
def test_a_drained_seeder_is_told(seeding: Seeding, is_enough: bool) -> None:
    found = judge_yield(seeding, GATES)
    assert [each.fault for each in found] == ([] if is_enough else [Fault.DRAINED])


# -- the order of events --


def settings_for(root: Path, prove_requests: int = 100) -> Settings:
    return Settings(
        app=AppSettings(target="js_app:app", app_dir=str(root)),
        tenant=TenantSettings(warmup="w.toml", profile="s3://x"),
        profile=ProfileSettings(prove_requests=prove_requests),
        server=HostSettings(),
        home_cache=str(root / "cache"),
        home_state=str(root / "state"),
        home_config=str(root / "config"),
    )


def packed(settings: Settings, golden: list[Golden] = GOLDEN) -> bytes:
    corpus = [
        Record(key=each.request, data={"route": "/", "method": "GET", "target": each.request[4:], "headers": []})
        for each in GOLDEN
    ]
    sections = {"corpus": Section(1, "json", corpus)}
    observed = ObserverSnapshot(routes={"GET /": RouteStats(requests=500)})
    return pack(settings, sections, observed, 1.0, NOW, golden=golden)


class Host:
    """Runs made-up consumers, and remembers their settings."""

    def __init__(self, warm: Callable[[], Consumed], cold: Callable[[], Consumed] = lambda: COLD[0]) -> None:
        self.booted: list[Settings] = []
        self.asked: list[int] = []
        self._warm, self._cold = warm, cold

    def consume(self, settings: Settings, requests: list[WarmRequest]) -> Consumed:
        assert [request.name for request in requests] == [each.request for each in GOLDEN]
        self.booted.append(settings)
        self.asked.append({request.repeat for request in requests}.pop())
        return (self._warm if settings.tenant.profile else self._cold)()


def test_cold_and_warm_boots_take_turns_and_know_nothing_of_the_host(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    host = Host(lambda: WARM[0])
    assert prove(settings, packed(settings), consume=host.consume).is_proven
    assert [bool(each.tenant.profile) for each in host.booted] == [False, True] * ROUNDS
    for each in host.booted:
        assert not each.profile.warm_start and not each.tenant.warmup
        assert str(tmp_path) not in each.home_cache + each.home_state + each.tenant.profile
        assert boot_settings(each).keys == boot_settings(settings).keys
    assert not Path(host.booted[1].tenant.profile).exists(), "nothing is left behind"


def test_figures_that_are_too_near_are_taken_again_and_other_faults_are_not(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    slow = Host(lambda: COLD[0])
    assert faults(prove(settings, packed(settings), consume=slow.consume)) == [Fault.LOW_COVERAGE, Fault.NO_GAIN]
    assert len(slow.booted) == 2 * ROUNDS
    tie = Host(lambda: WARM[0], lambda: WARM[0])
    assert faults(prove(settings, packed(settings), consume=tie.consume)) == [Fault.NO_GAIN]
    assert len(tie.booted) == 2 * MOST_ROUNDS


def test_answers_that_may_be_drawn_at_random_are_asked_for_more_often_where_cold(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    drawn = consumed(shapes={"GET /a": (200, OTHER)}).answers[0]
    now_and_then = msgspec.structs.replace(WARM[0], answers=[*WARM[0].answers, drawn])
    host = Host(lambda: now_and_then)
    assert faults(prove(settings, packed(settings), consume=host.consume)) == [Fault.ANSWERS_DIFFER]
    assert host.asked == [ASKED, ASKED, *[ASKED_IN_DOUBT, ASKED] * (MOST_ROUNDS - 1)]

    def cold() -> Consumed:
        seldom = [drawn] if host.asked[-1] == ASKED_IN_DOUBT else []
        return msgspec.structs.replace(COLD[0], answers=[*COLD[0].answers, *seldom])

    host = Host(lambda: now_and_then, cold)
    assert prove(settings, packed(settings), consume=host.consume).is_proven
    always = Host(lambda: consumed(shapes={"GET /a": (200, OTHER)}))
    assert faults(prove(settings, packed(settings), consume=always.consume)) == [Fault.ANSWERS_DIFFER]
    assert len(always.booted) == 2 * ROUNDS, "nothing speaks for chance"


def test_a_consumer_that_dies_is_the_profiles_fault_and_an_app_that_never_boots_is_not(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)

    def die() -> Consumed:
        raise AppLoadError("Traceback\nValueError: boom")

    proof = prove(settings, packed(settings), consume=Host(die).consume)
    assert faults(proof) == [Fault.BOOT_FAILED] and "boom" in str(proof.faults[0])
    with pytest.raises(AppLoadError):
        prove(settings, packed(settings), consume=Host(lambda: WARM[0], die).consume)


def test_what_shows_before_is_not_booted_for(tmp_path: Path) -> None:
    def never(settings: Settings, requests: list[WarmRequest]) -> Consumed:
        raise AssertionError("booted")

    settings = settings_for(tmp_path)
    asking = settings_for(tmp_path, prove_requests=501)
    assert faults(prove(asking, packed(settings), consume=never)) == [Fault.DRAINED]
    assert faults(prove(settings, packed(settings)[:-200], consume=never)) == [Fault.REFUSED]
    stranger = msgspec.structs.replace(settings, home_config=str(tmp_path / "stranger"))
    assert faults(prove(settings, packed(stranger), consume=never)) == [Fault.REFUSED]
    empty = pack(settings, {}, ObserverSnapshot(routes={"GET /": RouteStats(requests=500)}), 1.0, NOW)
    assert faults(prove(settings, empty, consume=never)) == [Fault.NO_GOLDEN]
    silent = msgspec.structs.replace(settings, tenant=msgspec.structs.replace(settings.tenant, replay=False))
    proof = prove(silent, packed(settings), consume=never)
    assert faults(proof) == [Fault.NO_GOLDEN] and "--no-replay" in str(proof.faults[0])


def test_a_profile_that_names_no_golden_requests_is_compared_with_a_cold_boot(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    assert prove(settings, packed(settings, []), consume=Host(lambda: WARM[0]).consume).is_proven
    worse = Host(lambda: consumed(shapes={"GET /a": (200, OTHER)}))
    assert faults(prove(settings, packed(settings, []), consume=worse.consume)) == [Fault.ANSWERS_DIFFER]


def test_the_figures_go_into_the_file_which_stays_the_same_otherwise(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    data, validation = packed(settings), figures(0.01, 0.1, 0, 5)
    before = read_as_boot(settings, data)
    after = read_as_boot(settings, stamp(settings, data, validation))
    assert after.manifest == msgspec.structs.replace(before.manifest, validation=validation)
    assert after.sections == before.sections and after.signed_by == before.signed_by


def test_only_the_host_that_signed_a_profile_marks_it_as_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, proof = settings_for(tmp_path), Proof(validation=figures(0.01, 0.1, 0, 5))
    data = packed(settings)
    assert read_as_boot(settings, stamped(settings, data, proof, "x")).manifest.validation == proof.validation
    maker = msgspec.structs.replace(settings, home_config=str(tmp_path / "maker"))
    foreign = packed(maker)
    KeyRing(Path(boot_settings(settings).keys)).trust(KeyRing(Path(boot_settings(maker).keys)).public_pem(), "maker")
    assert stamped(settings, foreign, proof, "x") == foreign
    assert "is not this host's own" in capsys.readouterr().err


def test_a_consumer_boots_cold_when_no_profile_is_given(tmp_path: Path) -> None:
    settings = alone(settings_for(tmp_path), tmp_path / "x")
    assert boot_settings(settings).profile == "" and boot_settings(settings).warm_start == ""
