"""Profiles as the server makes them: captured from a running server, or built off line by a builder process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from jumpstart.errors import AppLoadError, ColdBootRefusedError, ConfigError, JumpstartError
from jumpstart.lineage import Lineage
from jumpstart.profile import (
    AppInfo,
    Golden,
    Profile,
    Seeding,
    Validation,
    encode_section,
    is_plain,
    new_manifest,
    pack_profile,
    parse_profile,
)
from jumpstart.runtime import distributions_digest, installed_distributions, sources_digest
from jumpstart.trust import KeyRing
from jumpstart_server.messages import (
    BlockingChannel,
    BootFailed,
    Captured,
    Section,
    ShutdownFailed,
    Start,
    encode,
)
from jumpstart_server.settings import Settings, boot_settings
from jumpstart_server.spawn import lone_interpreter
from jumpstart_warmup.observe import ObserverSnapshot, RouteStats, warm_coverage
from jumpstart_warmup.targets import is_health_check

logger = logging.getLogger(__name__)

BUILD_EXTRA = 60.0  # seconds of a build for golden requests and the end, beside twice --startup-timeout


def pack(
    settings: Settings,
    sections: Mapping[str, Section],
    observed: ObserverSnapshot,
    duration_s: float,
    now: datetime,
    *,
    golden: Sequence[Golden] = (),
    lineage: Lineage | None = None,
    is_offline: bool = False,
) -> bytes:
    """
    Return a signed profile file of *sections*, with this host's own key.

    Args:
        is_offline: it was built from requests that somebody chose. Else warm-up requests count for nothing, nor do
            those of health checks.

    Raises:
        ConfigError: the key cannot be made or read.
    """
    encoded = [
        encode_section(name, section.version, section.encoding, section.records) for name, section in sections.items()
    ]
    routes = observed.warmup if is_offline else evidence(observed)
    installed = installed_distributions()
    manifest = new_manifest(
        app=AppInfo(
            target=settings.target,
            build=settings.app.build_id,
            sources=sources_digest(Path(settings.app.app_dir)),
            distributions=distributions_digest(installed),
            versions={name: version for name, version in installed if is_plain(name) and is_plain(version)},
        ),
        tenant=settings.tenant_name,
        sections=encoded,
        now=now,
        seeding=Seeding(
            requests=sum(stats.requests for stats in routes.values()),
            routes=len(routes),
            duration_s=round(duration_s, 3),
            warm_coverage=warm_coverage(observed),
        ),
        lineage=lineage,
        golden=golden,
    )
    keys = KeyRing(Path(boot_settings(settings).keys))
    return pack_profile(manifest, {section.info.recorder: section.data for section in encoded}, keys.sign)


def read_as_boot(settings: Settings, data: bytes) -> Profile:
    """Read a profile as a boot with these *settings* would; raises ProfileRefusedError."""
    boot = boot_settings(settings)
    return parse_profile(
        data,
        trust=boot.trust,
        verify=KeyRing(Path(boot.keys)).verify,
        now=datetime.now(UTC),
        max_age=timedelta(seconds=boot.max_age_s),
    )


def stamp(settings: Settings, data: bytes, validation: Validation | None) -> bytes:
    """
    Return the profile *data* with the figures of its proof, signed anew with this host's own key.

    Raises:
        ProfileRefusedError, ConfigError: it, or the key, cannot be read.
    """
    profile = read_as_boot(settings, data)
    manifest = msgspec.structs.replace(profile.manifest, validation=validation)
    sections = {name: each.data for name, each in profile.sections.items()}
    return pack_profile(manifest, sections, KeyRing(Path(boot_settings(settings).keys)).sign)


def evidence(observed: ObserverSnapshot) -> dict[str, RouteStats]:
    """The routes that real traffic has asked for, without health checks and requests that are marked. Pure."""
    real = {}
    for key, stats in observed.routes.items():
        if stats.requests > stats.marked and not is_health_check(key.partition(" ")[2]):
            real[key] = msgspec.structs.replace(stats, requests=stats.requests - stats.marked)
    return real


@dataclass(frozen=True)
class Built:
    """
    A profile built off line.

    Attributes:
        data: the signed file.
        requests: sent, all of them.
        failures: requests that did not go as they should, in words; the first 20.
        rejected: requests that were answered with 4xx and did not say that this is as it should be, in words.
    """

    data: bytes
    sections: dict[str, Section]
    requests: int
    failures: list[str]
    rejected: list[str] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        """Whether no request failed and at least one taught something; also where none was asked for."""
        return not self.failures and (not self.requests or len(self.rejected) < self.requests)


def build(settings: Settings, requests: str) -> Built:
    """
    Boot the app cold in a process of its own, run the *requests* of a file once, and return what that taught it.

    The builder is the same kind of process as a worker, so that what a worker would import lazily is lazy in it too.

    Raises:
        ConfigError, AppLoadError: the app cannot be loaded or started.
        JumpstartError: the builder died.
    """
    started = time.monotonic()
    start = Start(
        role="builder", settings=settings, started=started, supervisor_pid=os.getpid(), requests=requests, cold=True
    )
    with lone_interpreter(settings.target) as builder:
        try:
            builder.tell(encode(start), [])
        except OSError as error:
            raise AppLoadError(f"the builder ended before it was told what to do: {error}") from None
        captured = _await_capture(BlockingChannel(builder.control), settings)
    seconds = time.monotonic() - started
    data = pack(
        settings,
        captured.sections,
        captured.observed,
        seconds,
        datetime.now(UTC),
        golden=captured.golden,
        is_offline=True,
    )
    count = sum(stats.requests for stats in captured.observed.warmup.values())
    rejected = list(captured.rejected)
    return Built(data, captured.sections, count, captured.failures, rejected)


def _await_capture(channel: BlockingChannel, settings: Settings) -> Captured:
    captured: Captured | None = None
    limit = 2 * settings.tenant.startup_timeout
    limit += BUILD_EXTRA if limit else 0.0  # 0 is none
    how = "ended before it had captured anything"
    try:
        for message in channel.said(limit):
            if isinstance(message, Captured):
                captured = message
            elif isinstance(message, BootFailed):
                raise ERROR_OF_CODE.get(message.exit_code, JumpstartError)(message.text)
            elif isinstance(message, ShutdownFailed):
                logger.error("%s", message.text)  # what it has learnt until then is none the worse
    except TimeoutError:
        how = f"hung: it had captured nothing within {limit:.0f} s (--startup-timeout)"
    if captured is None:
        raise AppLoadError(f"the builder {how}")
    return captured


ERROR_OF_CODE: dict[int, type[JumpstartError]] = {2: ConfigError, 3: AppLoadError, 4: ColdBootRefusedError}
