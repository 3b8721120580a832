"""
The proof of a profile: before it is shipped, a fresh consumer shows that it does what it is for.

    consume   a process boots the app, from the profile alone or from nothing, and is asked the golden requests
    judge     what these consumers did, against the gates: pure
    prove     some of both, by turns, since a machine that is busy just now would favour whoever comes later

Consumers have no warm-start cache, no ledger and no store; of the host they see the keys. Golden requests are GET and
HEAD requests that real traffic made (`jumpstart_warmup/golden.py`), sent as warm-up requests are, with the same marks.
What each should be answered with is what the seeder wrote down; where it wrote nothing, what cold boots agree on.

What a profile must show:

- ``drained``: its seeder has seen enough requests and routes;
- ``boot-failed``: the app boots with it;
- ``few-used``: enough of its records are used;
- ``answers-differ``: every golden request is answered with that status and shape. One that a cold boot answers
  otherwise, too, and like the consumer, tells of the app and not of the profile: it is set aside. So is one whose shape
  cold boots do not agree on themselves (a list of things that are drawn at random, say), as long as its status is one
  that they answer with. While that may be so and has not shown, cold boots are asked more often;
- ``no-golden``: at least half of them could be compared, and there is one;
- ``low-coverage``: enough of them, by their traffic, ran without a cold event;
- ``no-gain``: fewer cold events than in a cold boot, and a first request that takes no longer, within a tolerance that
  a busy machine needs; or the same number of them, and a first request that is clearly faster.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jumpstart import files
from jumpstart.errors import AppLoadError, JumpstartError, ProfileRefusedError
from jumpstart.profile import Golden, Profile, Seeding, Validation
from jumpstart.report import BootReport
from jumpstart_server.messages import BlockingChannel, BootFailed, Proved, Start, encode
from jumpstart_server.profiles import ERROR_OF_CODE, read_as_boot
from jumpstart_server.settings import ProfileSettings, Settings
from jumpstart_server.spawn import lone_interpreter
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.golden import golden_requests
from jumpstart_warmup.shapes import Answer

logger = logging.getLogger(__name__)

ROUNDS = 2  # cold and warm boots, at least
MOST_ROUNDS = 4  # while the figures are too near to tell a gain, or answers may only be unsteady
ASKED = 2  # times in each consumer; the first one is timed
ASKED_IN_DOUBT = 6  # times in a cold one, while answers may be unsteady
TOLERANCE = 1.25  # times the cold boot's latency that is no worse, on a machine that does other things too …
TOLERANCE_S = 0.002  # … and as many seconds more
CLEAR_GAIN = 0.9  # times the cold boot's latency that is faster beyond doubt
GOLDEN_LEFT = 0.5  # share of the golden requests that must be left to compare
ANSWER_LIMIT = 30.0  # seconds for the golden requests of one consumer, which ends them by itself before that
BOOT_LIMIT = 120.0  # seconds for a consumer, where ``--startup-timeout`` sets none
SHUTDOWN_LIMIT = 10.0  # seconds for the app's own shut-down, when the golden requests are answered


class Fault(enum.StrEnum):
    """Why a profile is not proven. The values are an API: logs, metrics and `status` show them."""

    REFUSED = "refused"  # the file itself may not be used; the detail has the reason code
    DRAINED = "drained"
    BOOT_FAILED = "boot-failed"
    FEW_USED = "few-used"
    NO_GOLDEN = "no-golden"
    ANSWERS_DIFFER = "answers-differ"
    LOW_COVERAGE = "low-coverage"
    NO_GAIN = "no-gain"


REMEDIES = {
    Fault.REFUSED: "docs/reasons.md has a remedy for each code",
    Fault.DRAINED: "seed where there is traffic, or for longer",
    Fault.BOOT_FAILED: "look into the profile (jumpstart profile show -v); do not use it",
    Fault.FEW_USED: "make it from the sources that are served; `jumpstart status --boot` of a server that boots from "
    "it has the reason for each record",
    Fault.NO_GOLDEN: "prove it where the app can answer: with its database, and the requests of real traffic",
    Fault.ANSWERS_DIFFER: "look at these requests; a value that the profile ships may be wrong",
    Fault.LOW_COVERAGE: "`jumpstart status` of a server that boots from it names what was cold",
    Fault.NO_GAIN: "where the machine was busy, try again; else the app may have nothing to warm",
}


class Found(msgspec.Struct, frozen=True):
    """A fault and its words."""

    fault: Fault
    detail: str

    def __str__(self) -> str:
        return f"{self.fault} ({self.detail}): {REMEDIES[self.fault]}"


@dataclass(frozen=True, kw_only=True)
class Gates:
    """
    What a profile must reach.

    Attributes:
        coverage: share of the golden requests, by their traffic, without a cold event.
        used: share of the records that are used.
        requests, routes: that the seeder has seen; of an off-line build, whose requests were chosen, one will do.
    """

    coverage: float = 0.8
    used: float = 0.5
    requests: int = 100
    routes: int = 1

    @classmethod
    def of(cls, settings: ProfileSettings) -> Gates:
        return cls(
            coverage=settings.prove_coverage,
            used=settings.prove_used,
            requests=settings.prove_requests,
            routes=settings.prove_routes,
        )


class Consumed(msgspec.Struct, frozen=True, kw_only=True):
    """What one consumer did."""

    report: BootReport
    answers: list[Answer]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """
    The verdict.

    Attributes:
        validation: the figures; None where no consumer was asked.
        faults: why it is not proven; empty when it is.
        notes: what a person may want to know beside.
    """

    validation: Validation | None = None
    faults: list[Found] = []
    notes: list[str] = []

    @property
    def is_proven(self) -> bool:
        return not self.faults

    def describe(self) -> list[str]:
        """As lines for a person."""
        lines = [f"not proven: {found}" for found in self.faults]
        if self.validation is not None:
            lines.append(describe_validation(self.validation))
        return [*lines, *self.notes]


def describe_validation(figures: Validation) -> str:
    """The figures in one line."""
    used = "" if figures.used is None else f", {figures.used:.0%} of the records used"
    return (
        f"{figures.matched} of {figures.golden} golden requests answered alike, warm coverage "
        f"{figures.warm_coverage:.0%}{used}; first request {figures.first_request_s * 1000:.1f} ms with "
        f"{figures.cold_events} cold events, cold boot {figures.cold_first_request_s * 1000:.1f} ms with "
        f"{figures.cold_boot_events}"
    )


# -- decisions --


def judge_yield(seeding: Seeding, gates: Gates) -> list[Found]:
    """Whether the seeder has seen enough. Pure."""
    # Without real requests there is no coverage: it was built off line.
    requests = min(1, gates.requests) if seeding.warm_coverage is None else gates.requests
    if seeding.requests >= requests and seeding.routes >= gates.routes:
        return []
    detail = (
        f"its seeder saw {seeding.requests} requests of {seeding.routes} routes; {requests} of {gates.routes} asked"
    )
    return [Found(Fault.DRAINED, detail)]


def judge(golden: Sequence[Golden], cold: Sequence[Consumed], warm: Sequence[Consumed], gates: Gates) -> Proof:
    """
    Judge by what *cold* and *warm* consumers did, at least one of each. Pure.

    Each request's latency is the best of its first times in each of them; cold events count where they were fewest.

    Args:
        golden: what the seeder wrote down.
    """
    expected = expectations(golden, cold)
    compared = compare(expected, cold, warm)
    matched, differing = compared.matched, compared.differing
    faults: list[Found] = []
    used = _used(warm)
    if used < gates.used:
        faults.append(Found(Fault.FEW_USED, f"{used:.0%} of its records are used, {gates.used:.0%} are asked"))
    if differing:
        shown = "; ".join(differing[:3]) + (" …" if len(differing) > 3 else "")
        faults.append(Found(Fault.ANSWERS_DIFFER, f"{len(differing)} of {len(expected)} golden requests: {shown}"))
    elif len(matched) < max(1, len(expected) * GOLDEN_LEFT):
        detail = f"{len(matched)} of {len(expected)} golden requests can be compared"
        faults.append(Found(Fault.NO_GOLDEN, detail if expected else "there is no safe request to compare answers by"))
    names = matched or list(expected)
    coverage = _coverage(names, warm)
    if names and coverage < gates.coverage:
        detail = f"{coverage:.0%} of the golden requests ran without cold work, {gates.coverage:.0%} are asked"
        faults.append(Found(Fault.LOW_COVERAGE, detail))
    validation = Validation(
        golden=len(expected),
        matched=len(matched),
        warm_coverage=coverage,
        used=used,
        first_request_s=_latency(names, warm),
        cold_first_request_s=_latency(names, cold),
        cold_events=_cold_events(names, warm),
        cold_boot_events=_cold_events(names, cold),
    )
    if names and (found := judge_gain(validation)) is not None:
        faults.append(found)
    notes = [f"set aside, {why}: {name}" for name, why in compared.aside.items()]
    return Proof(validation=validation, faults=faults, notes=notes)


def judge_gain(figures: Validation) -> Found | None:
    """Whether the first requests are better off with the profile. Pure."""
    warm, cold = figures.first_request_s, figures.cold_first_request_s
    words = f"first request {warm * 1000:.1f} ms, of a cold boot {cold * 1000:.1f} ms"
    if figures.cold_events > figures.cold_boot_events:
        return Found(Fault.NO_GAIN, f"{figures.cold_events} cold events, a cold boot has {figures.cold_boot_events}")
    if figures.cold_events < figures.cold_boot_events:
        return None if warm <= cold * TOLERANCE + TOLERANCE_S else Found(Fault.NO_GAIN, words)
    if warm < cold * CLEAR_GAIN:
        return None
    return Found(Fault.NO_GAIN, f"{words}, each with {figures.cold_events} cold events")


_Given = tuple[int, str]
"""Status and shape."""
NOT_WHOLE: _Given = (0, "")


def expectations(golden: Sequence[Golden], cold: Sequence[Consumed]) -> dict[str, _Given]:
    """
    Request → what it should be answered with: as the seeder wrote down, else as *cold* consumers agree. Pure.

    What these do not agree on, and what they answer with 4xx, is not golden, as in a seeder. What fails in them, and no
    seeder has spoken of, is: with `NOT_WHOLE`, so that it counts among what cannot be compared.
    """
    expected = {each.request: (each.status, each.shape) for each in golden}
    for name in dict.fromkeys(each.name for consumer in cold for each in consumer.answers):
        found = _answers(name, cold)
        if name in expected or (len(found) > 1 and not any(map(_is_failure, found))):
            continue
        if any(map(_is_failure, found)):
            expected[name] = NOT_WHOLE
        elif all(status < 400 for status, _ in found):
            (expected[name],) = found
    return expected


@dataclass(frozen=True)
class Compared:
    """
    What became of the golden requests.

    Attributes:
        matched: names of those that are answered as they should be.
        aside: name → why it tells nothing about the profile.
        differing: in words.
        may_be_unsteady: of those that differ, all may do so by chance: more answers of cold boots will tell.
    """

    matched: list[str]
    aside: dict[str, str]
    differing: list[str]
    may_be_unsteady: bool


def compare(expected: Mapping[str, _Given], cold: Sequence[Consumed], warm: Sequence[Consumed]) -> Compared:
    """Compare the answers of *warm* consumers with what is *expected*, and with those of *cold* ones. Pure."""
    matched: list[str] = []
    aside: dict[str, str] = {}
    differing: list[str] = []
    doubtful = 0
    asked = dict.fromkeys(each.name for consumer in warm for each in consumer.answers)
    for name in {**dict.fromkeys(expected), **asked}:
        with_it, without = _answers(name, warm), _answers(name, cold)
        if name not in expected:
            failures = {each for each in with_it if _is_failure(each)}
            if failures - without:
                differing.append(f"{name} is {_status(failures)}, and not in a cold boot")
            continue
        golden = expected[name]
        if golden == NOT_WHOLE:
            aside[name] = "fails in a cold boot"
            continue
        may_be_chance = _statuses(with_it) <= _statuses(without | {golden}) and not any(map(_is_failure, with_it))
        if not with_it:
            aside[name] = "there was no time for it"
        elif with_it == {golden}:
            # The seeder may have been wrong for long: what it holds of a value, say, and ships.
            if len(without) == 1 and golden not in without and NOT_WHOLE not in without:
                differing.append(f"{name} is answered otherwise by a cold boot ({_status(without)})")
            else:
                matched.append(name)
        elif with_it <= without:
            aside[name] = "answered otherwise now, with and without the profile"
        elif may_be_chance and len(without - {NOT_WHOLE}) > 1:
            aside[name] = "answered in several ways, with and without the profile"
        else:
            shape = " of another shape" if _statuses(with_it) == {golden[0]} else ""
            differing.append(f"{name} was {golden[0]}, is {_status(with_it)}{shape}")
            doubtful += may_be_chance and golden in with_it
    return Compared(matched, aside, differing, bool(differing) and doubtful == len(differing))


def _answers(name: str, consumers: Sequence[Consumed]) -> set[_Given]:
    found = {(each.status, each.shape) for consumer in consumers for each in consumer.answers if each.name == name}
    return {(status, shape) if shape else NOT_WHOLE for status, shape in found}


def _is_failure(answer: _Given) -> bool:
    return answer == NOT_WHOLE or answer[0] >= 500


def _statuses(answers: Iterable[_Given]) -> set[int]:
    return {status for status, _ in answers}


def _status(answers: set[_Given]) -> str:
    return " or ".join(dict.fromkeys(str(status) if shape else "no whole answer" for status, shape in sorted(answers)))


def _used(warm: Sequence[Consumed]) -> float:
    """Of the consumer that did worst."""
    return min(each.report.share or 0.0 for each in warm)


def _first(name: str, consumer: Consumed) -> Answer | None:
    return next((each for each in consumer.answers if each.name == name), None)


def _coverage(names: Sequence[str], warm: Sequence[Consumed]) -> float:
    total = covered = 0
    for name in names:
        found = [answer for each in warm if (answer := _first(name, each)) is not None]
        weight = max(1, *(answer.weight for answer in found)) if found else 1
        total += weight
        covered += weight if found and min(answer.cold_events for answer in found) == 0 else 0
    return covered / total if total else 0.0


def _latency(names: Sequence[str], consumers: Sequence[Consumed]) -> float:
    best = [min((a.elapsed_s for each in consumers if (a := _first(name, each))), default=math.nan) for name in names]
    known = [each for each in best if not math.isnan(each)]
    return round(sum(known) / len(known), 6) if known else 0.0


def _cold_events(names: Sequence[str], consumers: Sequence[Consumed]) -> int:
    return sum(min((a.cold_events for each in consumers if (a := _first(name, each))), default=0) for name in names)


# -- what happens --


def prove(settings: Settings, data: bytes, *, consume: Callable[..., Consumed] | None = None) -> Proof:
    """
    Prove the profile of bytes *data* with the app of *settings*, by the gates that these name.

    Args:
        consume: how a consumer is run, for tests.

    Raises:
        ConfigError, AppLoadError, JumpstartError: the app cannot be booted, with or without the profile.
    """
    consume = consume or run_consumer
    gates = Gates.of(settings.profile)
    try:
        profile = read_as_boot(settings, data)
    except ProfileRefusedError as error:
        return Proof(faults=[Found(Fault.REFUSED, str(error))])
    if faults := judge_yield(profile.manifest.seeding, gates):
        return Proof(faults=faults)
    requests = _requests_of(profile) if settings.tenant.replay else []
    if not requests:
        why = "there is no safe request to compare answers by" if settings.tenant.replay else "--no-replay sends none"
        return Proof(faults=[Found(Fault.NO_GOLDEN, why)])
    names = {request.name for request in requests}
    golden = [each for each in profile.manifest.golden if each.request in names]
    with files.temporary_folder() as folder:
        path = folder / "proof.jumpstart"
        path.write_bytes(data)
        cold: list[Consumed] = []
        warm: list[Consumed] = []
        proof, times = Proof(), ASKED
        while len(warm) < MOST_ROUNDS:
            cold.append(consume(alone(settings, folder), _asked(requests, times)))
            try:
                warm.append(consume(alone(settings, folder, path), _asked(requests, ASKED)))
            except JumpstartError as error:
                text = str(error).strip().splitlines()
                return Proof(faults=[Found(Fault.BOOT_FAILED, text[-1] if text else "it died")])
            proof = judge(golden, cold, warm, gates)
            compared = compare(expectations(golden, cold), cold, warm)
            if len(warm) >= ROUNDS and not _is_undecided(proof, compared):
                break
            times = ASKED_IN_DOUBT if compared.may_be_unsteady else ASKED
        return proof


def _requests_of(profile: Profile) -> list[WarmRequest]:
    """Its requests that may be golden, whether the seeder wrote their answers down or not."""
    try:
        corpus = profile.records("corpus")[0] if "corpus" in profile.sections else []
    except ProfileRefusedError:
        corpus = []
    return golden_requests(corpus)


def _is_undecided(proof: Proof, compared: Compared) -> bool:
    """Whether more boots may change the verdict."""
    open_to_doubt = {Fault.NO_GAIN, Fault.ANSWERS_DIFFER} if compared.may_be_unsteady else {Fault.NO_GAIN}
    faults = {found.fault for found in proof.faults}
    return bool(faults) and faults <= open_to_doubt


def _asked(requests: Sequence[WarmRequest], times: int) -> list[WarmRequest]:
    return [msgspec.structs.replace(request, repeat=times) for request in requests]


def alone(settings: Settings, folder: Path, profile: Path | None = None) -> Settings:
    """*settings* for a consumer that boots from *profile*, or from nothing, and knows nothing else of this host."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        tenant=replace(settings.tenant, profile=str(profile or ""), warmup="", access_logfile=""),
        profile=replace(settings.profile, warm_start=False, require_warm=False),
        home_cache=str(folder),
        home_state=str(folder),
    )


def run_consumer(settings: Settings, requests: list[WarmRequest]) -> Consumed:
    """
    Boot a consumer in a process of its own and ask it the golden *requests*.

    Raises:
        ConfigError, AppLoadError: the app cannot be loaded or started.
        JumpstartError: the process died, or hung.
    """
    start = Start(
        role="prover",
        settings=settings,
        started=time.monotonic(),
        supervisor_pid=os.getpid(),
        golden=requests,
        cold=not settings.tenant.profile,
    )
    limit = (settings.tenant.startup_timeout or BOOT_LIMIT) + settings.tenant.warmup_budget + ANSWER_LIMIT
    with lone_interpreter(settings.target) as consumer:
        try:
            consumer.tell(encode(start), [])
            channel = BlockingChannel(consumer.control)
            answered = _wait_for_answers(channel, limit)
        except TimeoutError:
            text = f"a consumer hung: it had not booted and answered within {limit:.0f} s (--startup-timeout)"
            raise AppLoadError(text) from None
        except OSError as error:
            raise AppLoadError(f"a consumer died before it was told what to do ({error})") from None
        # The app may close what it has opened, and end what it has started. How that goes is no matter of a proof.
        with contextlib.suppress(TimeoutError):
            for _ in channel.said(SHUTDOWN_LIMIT):
                pass
    return Consumed(report=answered.report, answers=answered.answers)


def _wait_for_answers(channel: BlockingChannel, limit_s: float) -> Proved:
    for message in channel.said(limit_s):
        if isinstance(message, Proved):
            return message
        if isinstance(message, BootFailed):
            raise ERROR_OF_CODE.get(message.exit_code, JumpstartError)(message.text)
    raise AppLoadError("a consumer died before it had answered")
