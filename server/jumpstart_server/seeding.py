"""
A running server as a seeder: it captures what real traffic has taught it, has that proven, and publishes it.

    is_due    when: pure
    Seeding   of a tenant, in the supervisor: waits, captures, hands the file to a process of its own, notes what came
    work      that process, at low priority: proves, and publishes or says why not

One profile for each build, and another when it is half as old as consumers would still take. Whatever goes wrong here
costs a line in the log and an entry in `status`; requests do not notice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jumpstart import files
from jumpstart.boot import full_target
from jumpstart.errors import JumpstartError, ProfileRefusedError
from jumpstart.paths import private_folder
from jumpstart.profile import write_file
from jumpstart.runtime import sources_digest
from jumpstart.stores import SUFFIX, Place, build_of, is_store, open_store
from jumpstart_server.messages import BlockingChannel, Channel, ChannelClosedError, Seeded, Start
from jumpstart_server.processes import Launcher
from jumpstart_server.profiles import evidence, pack, read_as_boot, stamp
from jumpstart_server.questions import Capture
from jumpstart_server.settings import ProfileSettings, Settings

if TYPE_CHECKING:
    from jumpstart_server.tier import Tier

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 5.0  # seconds between looks at the number of requests
PROOF_LIMIT = 900.0  # seconds for proof and publication together
FIRST_PAUSE = 60.0  # seconds at least after one that was not published; twice as long each time …
LONGEST_PAUSE = 3600.0  # … up to this
KEPT_REJECTED = 5  # profiles that are kept for inspection
REASON = ".txt"  # beside such a profile
NICENESS = 10  # of 19: what serves goes first


def pack_capture(settings: Settings, captured: Capture, seconds: float) -> bytes:
    """
    Return the signed profile of what a server knows that has run for so many *seconds*.

    Raises:
        ConfigError: the key cannot be made or read.
    """
    return pack(
        settings,
        captured.sections,
        captured.observed,
        seconds,
        datetime.now(UTC),
        golden=captured.golden,
        lineage=captured.lineage,
    )


def publish_url(settings: Settings) -> str:
    """The store that this tenant's profiles are published in; empty when none is named."""
    profile = settings.tenant.profile
    return settings.profile.publish or (profile if profile and is_store(profile) else "")


# -- decisions --


@dataclass(frozen=True, kw_only=True)
class Progress:
    """
    How far a seeder has come with a build.

    Attributes:
        since: when it began to serve it, or published last; seconds on the monotonic clock.
        requests: real ones that it had seen then, of all builds.
        has_published: this build.
        failures: attempts in a row that published nothing.
        tried: when the last of them was.
    """

    since: float
    requests: int
    has_published: bool = False
    failures: int = 0
    tried: float = 0.0


def is_due(progress: Progress, settings: ProfileSettings, requests: int, now: float) -> bool:
    """Whether to make a profile *now*, with so many real *requests* seen. Pure."""
    wait = settings.max_age / 2 if progress.has_published else 0.0
    if now - progress.since < max(settings.seed_after, wait):
        return False
    if requests - progress.requests < max(settings.seed_requests, settings.prove_requests):
        return False
    return not progress.failures or now - progress.tried >= pause_after(progress.failures, settings.seed_after)


def pause_after(failures: int, seed_after: float) -> float:
    """Seconds from one attempt to the next, after so many failures in a row. Pure."""
    return float(min(max(FIRST_PAUSE, seed_after) * 2 ** min(failures - 1, 20), LONGEST_PAUSE))


# -- in the supervisor --


class Seeding:
    """Of one tenant. For the event loop's thread only."""

    def __init__(self, tier: Tier, launcher: Launcher) -> None:
        self._tier = tier
        self._launcher = launcher
        self._progress: Progress | None = None
        self._generation = 0
        self._build = ""
        self._state = "waiting"
        self._last: Seeded | None = None
        self._last_at = ""
        self._counts: dict[tuple[str, str], int] = {}
        self._prover: int | None = None

    async def watch(self) -> None:
        """Seed whenever it is due, until cancelled."""
        while True:
            settings = self._tier.settings.profile
            await asyncio.sleep(min(LOOK_INTERVAL, max(0.2, settings.seed_after / 4)))
            try:
                if settings.seed and self._tier.accepting and not self._tier.stopping:
                    await self._look()
            except Exception:
                self._state = "waiting"
                logger.exception("internal error in seeding; the server serves on")

    async def _look(self) -> None:
        tier, now = self._tier, time.monotonic()
        settings = tier.settings
        requests = sum(stats.requests for stats in evidence(await tier.observed()).values())
        if self._progress is None or self._generation != tier.generation:
            self._generation = tier.generation
            build = settings.app.build_id or await asyncio.to_thread(sources_digest, Path(settings.app.app_dir))
            if self._progress is None or build != self._build:  # a roll to the same build changes nothing
                self._build = build
                self._progress = Progress(since=now, requests=0 if self._progress is None else requests)
        if is_due(self._progress, settings.profile, requests, now):
            await self._seed(self._progress, settings, requests)

    async def _seed(self, progress: Progress, settings: Settings, requests: int) -> None:
        tier = self._tier
        self._state = "proving"
        tier.log.info("seeding: %d real requests seen; a profile is captured and proven", requests)
        path, kept = None, ""
        try:
            captured = await tier.capture()
            seconds = time.monotonic() - self._launcher.started
            data = await asyncio.to_thread(pack_capture, settings, captured, seconds)
            path = await asyncio.to_thread(_put_aside, settings, data)
            seeded = await self._prove(settings, path)
            if tier.stopping:
                return
            if seeded.outcome != "published":
                kept = f"; kept as {await asyncio.to_thread(_keep, path, seeded)}"
        except (JumpstartError, OSError) as error:
            seeded = Seeded(outcome="failed", lines=[str(error)])
        finally:
            self._state = "waiting"
            if path is not None:
                path.unlink(missing_ok=True)
        now = time.monotonic()
        self._last, self._last_at = seeded, datetime.now(UTC).isoformat(timespec="seconds")
        for reason in seeded.faults or [""]:
            key = seeded.outcome, reason
            self._counts[key] = self._counts.get(key, 0) + 1
        if seeded.outcome == "published":
            self._progress = Progress(since=now, requests=requests, has_published=True)
            tier.log.info("seeding: published %s · %s", seeded.place, " · ".join(seeded.lines))
        else:
            self._progress = replace(progress, failures=progress.failures + 1, tried=now)
            pause = pause_after(self._progress.failures, settings.profile.seed_after)
            tier.log.warning(
                "seeding: %s, not published: %s; tried again in %.0f s at the earliest%s",
                *(seeded.outcome, " · ".join(seeded.lines), pause, kept),
            )

    async def _prove(self, settings: Settings, path: Path) -> Seeded:
        if self._tier.stopping:
            return Seeded(outcome="failed", lines=["the server stops"])
        start = Start(
            role="seeder",
            settings=settings,
            started=time.monotonic(),
            supervisor_pid=os.getpid(),
            profile=str(path),
            is_alone=self._tier.is_alone,
        )
        process = self._launcher.launch(start, [])
        self._prover = process.pid
        channel = await Channel.open(process.control)
        try:
            async with asyncio.timeout(PROOF_LIMIT):
                message = await channel.receive()
        except ChannelClosedError:
            return Seeded(outcome="failed", lines=["the process that proves it died"])
        except TimeoutError:
            return Seeded(outcome="failed", lines=[f"the proof took over {PROOF_LIMIT:.0f} s"])
        finally:
            self.end()
            channel.close()
        assert isinstance(message, Seeded)
        return message

    def end(self) -> None:
        """End the process that proves, if there is one."""
        self._launcher.children.kill(self._prover)
        self._prover = None

    def describe(self) -> dict[str, Any] | None:
        """What happened, as JSON types; None where nothing is seeded."""
        settings = self._tier.settings
        if not settings.profile.seed:
            return None
        last = self._last
        return {
            "state": self._state,
            "store": publish_url(settings),
            "published": self._progress is not None and self._progress.has_published,
            "last": last.outcome if last is not None else "",
            "last_at": self._last_at,
            "place": last.place if last is not None else "",
            "faults": last.faults if last is not None else [],
            "lines": last.lines if last is not None else [],
        }

    def counts(self) -> dict[tuple[str, str], int]:
        """Outcome and fault code → how often, for the metrics."""
        return dict(self._counts)


def _rejected_folder(settings: Settings) -> Path:
    return private_folder(Path(settings.home_state) / "rejected")


def _put_aside(settings: Settings, data: bytes) -> Path:
    """Write the file under a name that says nothing of it yet, and that `files.sweep` knows; raises JumpstartError."""
    folder = _rejected_folder(settings)
    files.sweep(folder)
    path = folder / files.temporary_name()
    write_file(path, data)
    return path


def _keep(path: Path, seeded: Seeded) -> Path:
    """Keep for inspection what was put aside, never without its reasons; raises OSError."""
    kept = path.with_name(f"{time.time_ns():020}-{os.getpid()}{SUFFIX}")
    kept.with_name(kept.name + REASON).write_text("".join(f"{line}\n" for line in seeded.lines))
    path.rename(kept)
    known = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda each: each.name)
    for old in known[:-KEPT_REJECTED]:
        old.unlink(missing_ok=True)
        old.with_name(old.name + REASON).unlink(missing_ok=True)
    return kept


# -- in a process of its own --


def work(channel: BlockingChannel, start: Start) -> None:
    """Prove the profile of *start* and publish it; tell the supervisor what came of it."""
    os.nice(NICENESS)
    try:
        seeded = prove_and_publish(start.settings, Path(start.profile))
    except (JumpstartError, OSError) as error:
        seeded = Seeded(outcome="failed", lines=[str(error)])
    except Exception as error:
        logger.exception("internal error while a profile was proven")
        seeded = Seeded(outcome="failed", lines=[f"internal error: {type(error).__name__}: {error}"])
    try:
        channel.send(seeded)
    except ChannelClosedError:
        pass  # the server has stopped


def prove_and_publish(settings: Settings, path: Path) -> Seeded:
    """
    Raises:
        JumpstartError: the app does not boot without the profile either, or the store cannot be written.
        OSError: there is no process to be had.
    """
    from jumpstart_server.proving import prove

    data = path.read_bytes()
    proof = prove(settings, data)
    if not proof.is_proven:
        faults = [str(found.fault) for found in proof.faults]
        return Seeded(outcome="rejected", faults=faults, lines=proof.describe())
    try:
        manifest = read_as_boot(settings, data).manifest
        stamped = stamp(settings, data, proof.validation)
    except ProfileRefusedError as error:  # meanwhile
        return Seeded(outcome="rejected", faults=["refused"], lines=[str(error)])
    app = settings.app.name or full_target(settings.target)
    place = Place.of(app, manifest.tenant, build_of(manifest.app), manifest.id)
    open_store(publish_url(settings)).publish(place, stamped)
    return Seeded(outcome="published", place=place.path, lines=proof.describe())
