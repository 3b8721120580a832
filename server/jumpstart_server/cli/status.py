"""``jumpstart status``: what runs, how warm, why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import msgspec

from jumpstart_server.cli.client import AdminClient
from jumpstart_server.config import environment, paths_of_host

ROUTES_SHOWN = 20
COLD_ROUTES_SHOWN = 10
COLD_SHOWN_S = 600  # routes that were cold in a longer window only are history


@click.command()
@click.option("--admin", metavar="ADDRESS", help="Admin address; by default the one server of this user.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option("--boot", "boot", is_flag=True, help="The boot report with its spans instead.")
def status(admin: str | None, as_json: bool, boot: bool) -> int:
    """
    Tell what runs, how warm, and why not.

    Exit code 1 where a tenant was given up, or its last roll has failed.
    """
    client = AdminClient.find(admin, paths_of_host(environment()))
    document = client.get("/boot" if boot else "/status")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        for line in describe_boot(document) if boot else describe_status(document):
            click.echo(line)
    return 0 if boot else int(any(map(_is_in_trouble, document["tenants"])))


def _is_in_trouble(tenant: dict[str, Any]) -> bool:
    """It is not as it was asked to be: given up, or its last roll has failed."""
    return bool(tenant["given_up"]) or (tenant["last_roll"] or {}).get("outcome") == "failed"


def describe_status(document: dict[str, Any]) -> Iterator[str]:
    """The page as lines for a person."""
    yield f"pid {document['pid']}, up {document['uptime_s']:.0f} s{', stopping' if document['stopping'] else ''}"
    for tenant in document["tenants"]:
        yield from _describe_tenant(tenant)


def _describe_tenant(document: dict[str, Any]) -> Iterator[str]:
    yield f"{document['target']} (tenant {document['tenant']}) at {', '.join(document['addresses']) or 'no address'}"
    if document["ready"]:
        yield f"ready in {document['ready_after_s']:.2f} s"
        yield f"at boot: {document['boot']}"
    else:
        yield f"not ready: {document['waiting_for'] or 'stopping'}"
    roll = document["last_roll"]
    if roll is not None:
        why = f", {roll['why']}" if roll["why"] else ""
        yield f"last roll, to generation {roll['generation']}: {roll['outcome']}{why}"
    yield from _refusals(document)
    yield from _boot_ledger(document["boot_ledger"])
    yield from _seeding(document["seeding"])
    method = document["start_method"]
    reasons = f" because {'; '.join(document['start_reasons'])}" if document["start_reasons"] else ""
    yield f"workers by {method or '…'}{reasons}, generation {document['generation']}, replaced {document['restarts']}"
    for worker in document["workers"]:
        old = ", does not answer: its numbers are old" if worker["stale"] else ""
        threads = f"threads {worker['threads']}, busy {worker['busy']} of {worker['limit']}"
        waiting = f", waiting {worker['waiting']} up to {worker['oldest_wait_s']:.1f} s" if worker["waiting"] else ""
        refused = "".join(f", {count} refused ({reason})" for reason, count in sorted(worker["refused"].items()))
        load = f"{threads}{waiting}{', overloaded' if worker['overloaded'] else ''}{refused}"
        yield f"  worker {worker['slot']} pid {worker['pid']} {worker['state']}, {load}{old}"
        yield from _live(worker["live"])
    coverage = document["warm_coverage"]
    shown = "" if coverage is None else f", {coverage:.1%} of them warm"
    yield (
        f"real requests since: {document['requests']}, errors {document['errors']}, "
        f"cold events {document['cold_events']}{shown}"
    )
    yield from _coverage(document["coverage"])
    yield from _shadow(document["shadow"])
    routes = sorted(document["routes"].items(), key=lambda item: -item[1]["requests"])
    for route, stats in routes[:ROUTES_SHOWN]:
        mean_ms = 1000 * stats["latency_sum_s"] / max(1, stats["requests"])
        yield (
            f"  {stats['requests']:>8} × {route}, mean {mean_ms:.1f} ms, errors {stats['errors']}, "
            f"cold requests {stats['cold_requests']}"
        )
        for name in stats["cold_names"][:5]:
            yield f"{'':>12}cold: {name}"
        for name in stats["first_call_names"][-5:]:
            yield f"{'':>12}ran for the first time: {name}"
    if len(routes) > ROUTES_SHOWN:
        yield f"  … and {len(routes) - ROUTES_SHOWN} more routes (--json shows all)"


def describe_boot(document: dict[str, Any]) -> Iterator[str]:
    """The boot reports as lines for a person."""
    for tenant in document["tenants"]:
        yield from _describe_boot(tenant)


def _describe_boot(document: dict[str, Any]) -> Iterator[str]:
    ready = document["ready_after_s"]
    yield f"{document['target']}: " + (f"ready in {ready:.3f} s" if ready is not None else "not ready yet")
    for span in document["spans"]:
        detail = f" ({span['detail']})" if span["detail"] else ""
        yield f"  {span['start_s']:7.3f} s  +{span['duration_s']:7.3f} s  {span['process']}: {span['name']}{detail}"
    for section in document.get("sections", ()):
        reasons: dict[str, int] = {}
        for record in section["dropped"]:
            reasons[record["reason"]] = reasons.get(record["reason"], 0) + 1
        dropped = "".join(f", {count} {reason}" for reason, count in sorted(reasons.items()))
        yield f"  {section['recorder']}: {section['used']} of {section['offered']} records used{dropped}"
        for record in section["dropped"][:5]:
            yield f"      {record['key']}: {record['reason']} {record['detail']}".rstrip()
    yield from _refusals(document)


def _boot_ledger(document: dict[str, Any] | None) -> Iterator[str]:
    if document is None:
        return
    if document["problem"]:
        yield f"boot ledger: {document['problem']}"
    for each in document["loading"]:
        where = f"generation {each['generation']}" if each["ours"] else "another server"
        yield f"boot ledger: profile {each['profile'][:12]} is loaded by {where}, not healthy for long enough yet"
    if document["failures"]:
        yield f"boot ledger: {document['failures']} boots with a profile have died, one after the other"
    for profile in document["not_loaded"]:
        yield f"boot ledger: profile {profile[:12]} is not loaded here, a process that loaded it died"


def _seeding(document: dict[str, Any] | None) -> Iterator[str]:
    if document is None:
        return
    if document["state"] == "proving":
        yield f"seeding: a profile for {document['store']} is being proven"
    elif not document["last"]:
        yield f"seeding: waits for enough real requests and time, then publishes in {document['store']}"
    if document["last"]:
        what = f"{document['last']} {document['place']}".rstrip()
        yield f"seeding: {what} at {document['last_at']}: {' · '.join(document['lines'])}"


def _coverage(windows: list[dict[str, Any]]) -> Iterator[str]:
    """How warm it was lately, and of the last ten minutes what was not."""
    if not windows:
        return
    shares = (
        f"{window['warm_coverage']:.1%} of {window['requests']} in {_time(window['seconds'])}" for window in windows
    )
    yield f"warm requests lately: {', '.join(shares)}"
    recent = [window for window in windows if window["seconds"] <= COLD_SHOWN_S]
    routes = recent[-1]["routes"] if recent else {}
    cold = [(name, each) for name, each in routes.items() if each["cold_requests"] or each["first_call_requests"]]
    for name, each in cold[:COLD_ROUTES_SHOWN]:
        since = f", since {_time(each['cold_for_s'])} ago" if each["cold_for_s"] is not None else ""
        kinds = "".join(f", {kind} {count}" for kind, count in sorted(each["cold_events"].items()))
        calls = f", {each['first_calls']} functions ran for the first time" if each["first_calls"] else ""
        yield f"  {each['cold_requests']} of {each['requests']} × {name} cold{since}{kinds}{calls}"
    if len(cold) > COLD_ROUTES_SHOWN:
        yield f"  … and {len(cold) - COLD_ROUTES_SHOWN} more routes that were cold (--json shows all)"


def _time(seconds: float) -> str:
    """To the second, minute or hour."""
    if seconds <= 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def _shadow(document: dict[str, Any]) -> Iterator[str]:
    sent = sum(document["sent"].values())
    if not sent and not document["dropped"]:
        return
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in sorted(document["dropped"].items()))
    waiting = f", {document['waiting']} waiting" if document["waiting"] else ""
    yield (
        f"shadow requests: {sent} sent, {document['done']} done, {document['failed']} of them failed, "
        f"{document['cold_requests']} of them cold{waiting}{dropped}"
    )
    for each in document["effects"][:10]:
        yield f"  refused {each['count']} ×: {each['route']}: {each['effect']} {each['what']}"


def _live(infos: list[dict[str, Any]]) -> Iterator[str]:
    """Real-time values that are not as they should be; those that are need no line per worker."""
    for info in infos:
        if info["is_stale"]:
            age = "never fetched" if info["age_s"] is None else f"{info['age_s']:.0f} s old"
            error = f": {info['error']}" if info["error"] else ""
            yield f"    {info['kind']} {info['name']} is stale, {age}, from {info['origin']}{error}"


def _refusals(document: dict[str, Any]) -> Iterator[str]:
    for refusal in document["refusals"]:
        yield f"not used: {refusal['where']}: {refusal['reason']} ({refusal['detail']})"
