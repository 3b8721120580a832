"""``jumpstart warm``: warm a host over HTTP before a rollout."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from jumpstart.errors import ConfigError
from jumpstart.profile import read_profile
from jumpstart.recorder import WarmSettings
from jumpstart.records import Tally
from jumpstart.trust import KeyRing
from jumpstart_server.config import environment, paths_of_host
from jumpstart_warmup.corpus import CorpusRecorder, WarmRequest, read_requests
from jumpstart_warmup.http import Progress, warm_host

CORPUS_LIMIT = 200  # requests of a profile in one round
REPEAT_AFTER_S = 5.0  # seconds until a line that has not changed is printed again


@click.command()
@click.argument("url")
@click.option("--requests", metavar="FILE", help="TOML file of requests.")
@click.option("--profile", metavar="FILE", help="Profile whose recorded requests are sent.")
@click.option("--budget", default=60.0, show_default=True, help="Seconds to become warm in.")
@click.option("--concurrency", default=4, show_default=True, help="Requests at once.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds for one request.")
@click.option("--ca-file", metavar="FILE", help="Certificates to trust.")
@click.option("--insecure", is_flag=True, help="Do not check the certificate.")
def warm(
    url: str,
    requests: str | None,
    profile: str | None,
    budget: float,
    concurrency: int,
    timeout: float,
    ca_file: str | None,
    insecure: bool,
) -> int:
    """Send requests to URL until its latency has settled; exit 0 only when it is warm."""
    if requests is None and profile is None:
        raise ConfigError("which requests? Name them with --requests FILE (TOML) or with --profile FILE")
    if requests is not None and profile is not None:
        raise ConfigError("--requests and --profile both name requests; give one, not both")
    if budget <= 0 or timeout <= 0 or concurrency < 1:
        raise ConfigError("--budget and --timeout must be over 0, --concurrency at least 1")
    wanted = read_requests(Path(requests)) if requests is not None else _requests_of_profile(Path(profile or ""))
    with _view(budget) as view:
        result = warm_host(
            url,
            wanted,
            budget_s=budget,
            concurrency=concurrency,
            timeout_s=timeout,
            verify=False if insecure else (Path(ca_file) if ca_file else True),
            progress=view,
        )
    for request in result.requests:
        first = "-" if request.first_ms is None else f"{request.first_ms:.1f} ms"
        last = "-" if request.last_ms is None else f"{request.last_ms:.1f} ms"
        error = f"  {request.error}" if request.error else ""
        click.echo(f"{first:>12} → {last:>10}  {request.method} {request.path}{error}")
    click.echo(f"{'warm' if result.warm else 'NOT WARM'}: {result.reason}")
    return 0 if result.warm else 1


def _requests_of_profile(path: Path) -> list[WarmRequest]:
    """The recorded requests of a profile. They are data, scrubbed again when read, so any signer will do."""
    ring = KeyRing(paths_of_host(environment()).keys)
    found = read_profile(path, trust="data-only", verify=ring.verify, now=datetime.now(UTC), max_age=None)
    if "corpus" not in found.sections:
        raise ConfigError(f"--profile {path}: has no recorded requests; use --requests FILE")
    corpus = CorpusRecorder(WarmSettings())
    corpus.restore(None, found.records("corpus")[0], Tally())
    requests = corpus.requests_for_warmup(CORPUS_LIMIT)
    if not requests:
        raise ConfigError(f"--profile {path}: has no recorded requests; use --requests FILE")
    return requests


def _words(progress: Progress) -> str:
    latency = "" if progress.p50_ms is None else f"p50 {progress.p50_ms:.1f} ms, p95 {progress.p95_ms:.1f} ms, "
    return f"round {progress.rounds}: {latency}{progress.errors} errors; {progress.reason}"


def _view(budget: float) -> _Bar | _Lines:
    if sys.stderr.isatty():
        return _Bar(budget)
    return _Lines()


class _Lines:
    """One line per round, for logs; one that says the same again only now and then."""

    def __init__(self) -> None:
        self._latest = ""
        self._said_s = 0.0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, progress: Progress) -> None:
        words = _words(progress)
        if words != self._latest or progress.elapsed_s - self._said_s >= REPEAT_AFTER_S:
            click.echo(words, err=True)
            self._latest, self._said_s = words, progress.elapsed_s


class _Bar:
    """A progress bar over the budget, for people."""

    def __init__(self, budget: float) -> None:
        self._latest = ""
        self._bar = click.progressbar(
            range(round(budget * 10)),
            label="warming",
            item_show_func=lambda _: self._latest,
            file=sys.stderr,  # its results go to standard output, which may be a file
        )
        self._shown = 0

    def __enter__(self) -> _Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(None, None, None)

    def __call__(self, progress: Progress) -> None:
        self._latest = _words(progress)
        now = round(progress.elapsed_s * 10)
        self._bar.update(max(0, now - self._shown))
        self._shown = now
