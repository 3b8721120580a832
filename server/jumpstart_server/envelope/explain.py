"""
What a configuration comes to: each limit with its source, what the limits mean together, and what in them is nonsense.

Every option has been looked at by itself when it was read (`config.py`). Here they are looked at together, with all the
tenants that share the machine. Decides and describes; does nothing. A finding is an *error* where the configuration
cannot do what it says, and a *warning* where it can, and most probably is not what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from jumpstart_server.envelope.sizing import (
    MIB,
    REQUEST_MEMORY,
    Allowance,
    Machine,
    Sizing,
    allowance,
    reserve_of,
    show_size,
    size_threads,
    tasks_of_worker,
)
from jumpstart_server.settings import BYTES, Option, Settings, TenantSettings, declared_options

BASE = 64 * MIB  # bytes that a warm worker is taken to need: small Flask and FastAPI apps take 45 to 80
LEAST_BASE = 24 * MIB  # bytes that a worker takes with no app at all; measured with Python 3.11 to 3.13
LONG = 120.0  # seconds; a timeout that is longer is for streams and jobs, and not for pages
FEW_THREADS = 100  # of all workers of a tenant, for requests that take that long
IDLE_OF_BALANCERS = (
    60.0  # seconds that AWS's and Azure's load balancers keep an idle connection; nginx and Envoy as long
)
HASTY = 5.0  # seconds; processes pause as long for reasons that pass by themselves

ENVELOPE = (
    *("workers", "threads", "max_threads", "memory_limit", "memory_soft", "request_memory"),
    *("timeout", "timeout_extension", "first_byte_timeout", "idle_timeout", "on_deadline", "max_overruns"),
    *("limit_concurrency", "queue", "queue_timeout", "backlog"),
    *("keep_alive", "header_timeout", "body_timeout", "write_timeout", "limit_request_body"),
    *("startup_timeout", "drain_delay", "graceful_timeout", "worker_healthcheck_timeout"),
    *("max_requests", "max_requests_jitter", "crash_limit"),
)
"""The options that are limits, in the order in which they are shown."""
_ZERO = {
    "timeout": "0: for ever",
    "first_byte_timeout": "0: as long as timeout",
    "idle_timeout": "0: as long as timeout",
    "queue_timeout": "0: for ever",
    "header_timeout": "0: for ever",
    "body_timeout": "0: for ever",
    "write_timeout": "0: for ever",
    "startup_timeout": "0: for ever",
    "worker_healthcheck_timeout": "0: never looked for",
    "keep_alive": "0: no connection is kept",
    "limit_request_body": "0: no limit",
    "limit_concurrency": "0: as many as come",
    "max_requests": "0: never replaced for that",
    "crash_limit": "0: never given up",
}


class Tenant(msgspec.Struct, frozen=True):
    """
    One tenant's settings.

    Attributes:
        sources: option (``tenant.workers``) → where its value stands; what is not in it is the default.
        addresses: where it listens.
    """

    settings: Settings
    sources: Mapping[str, str]
    addresses: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.settings.tenant_name

    @property
    def limits(self) -> TenantSettings:
        return self.settings.tenant

    def is_given(self, key: str) -> bool:
        return f"tenant.{key}" in self.sources

    def place(self, key: str) -> str:
        """Where an option stands, for a message."""
        return self.sources.get(f"tenant.{key}", f"[tenants.{self.name}] {key} (default)")


class Finding(msgspec.Struct, frozen=True):
    """
    Something that is wrong.

    Attributes:
        is_error: it cannot work; else it is a warning.
        place: file and key, flag or variable.
        text: what is wrong with it, and the remedy.
    """

    is_error: bool
    place: str
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.place}: {self.text}"


class Fit(msgspec.Struct, frozen=True):
    """
    A tenant on this machine.

    Attributes:
        allowed: the memory of a worker.
        sizing: the threads of a worker, with *BASE* for what it takes by itself.
    """

    allowed: Allowance
    sizing: Sizing


def fit(tenant: Tenant, machine: Machine, workers: int) -> Fit:
    """How many threads a worker has; *workers* are those of all tenants."""
    limits = tenant.limits
    allowed = allowance(limits.memory_limit, machine, workers)
    if limits.threads != "auto":
        return Fit(allowed, Sizing(limits.threads, f"{limits.threads}, as set"))
    sizing = size_threads(
        allowed,
        machine,
        base=BASE,
        request_memory=limits.request_memory,
        max_threads=limits.max_threads,
        workers=workers,
    )
    return Fit(allowed, sizing)


# ---------------------------------------------------------------------- findings


def findings(tenants: Sequence[Tenant], machine: Machine) -> list[Finding]:
    """Everything that is wrong, errors first."""
    workers = sum(tenant.limits.workers for tenant in tenants)
    found = [*_total(tenants, machine)]
    for tenant in tenants:
        found += _times(tenant)
        found += _stops(tenant)
        found += _memory(tenant, fit(tenant, machine, workers))
        found += _threads(tenant, fit(tenant, machine, workers).sizing, machine, workers)
    return sorted(found, key=lambda finding: not finding.is_error)


def _error(tenant: Tenant, key: str, text: str) -> Finding:
    return Finding(True, tenant.place(key), text)


def _warning(tenant: Tenant, key: str, text: str) -> Finding:
    return Finding(False, tenant.place(key), text)


def _total(tenants: Sequence[Tenant], machine: Machine) -> Iterator[Finding]:
    """All workers together must fit into the machine."""
    limited = [tenant for tenant in tenants if tenant.limits.memory_limit]
    total = sum(tenant.limits.workers * tenant.limits.memory_limit for tenant in limited)
    if machine.memory is None or not limited:
        return
    room = machine.memory - reserve_of(machine.memory)
    if total <= room:
        return
    sums = " + ".join(f"{t.limits.workers} × {show_size(t.limits.memory_limit)}" for t in limited)
    if len(limited) > 1 or limited[0].limits.workers > 1:
        sums += f" = {show_size(total)}"
    whole = f"{machine.memory_source} of {show_size(machine.memory)}"
    text = f"{sums} for the workers is more than the {show_size(room)} that {whole} leaves them"
    if machine.is_limited:
        remedy = "the kernel kills a process before a worker reaches its limit; lower memory_limit or workers"
    else:
        remedy = "when all of them grow, the host swaps or kills; lower memory_limit or workers"
    yield Finding(machine.is_limited, limited[0].place("memory_limit"), f"{text}: {remedy}")


def _times(tenant: Tenant) -> Iterator[Finding]:
    limits = tenant.limits
    timeout = limits.timeout
    for key in ("first_byte_timeout", "idle_timeout"):
        value = getattr(limits, key)
        if 0 < timeout < value:
            yield _error(
                tenant,
                key,
                f"{value:g} s is never reached: the whole request has {timeout:g} s ({tenant.place('timeout')}); make "
                f"it less than that, or timeout more than {value:g}",
            )
    if limits.timeout_extension and not timeout:
        yield _warning(tenant, "timeout_extension", "has no effect: timeout is 0, which is for ever; leave it out")
    if not timeout:
        yield _warning(
            tenant,
            "timeout",
            "0 is for ever: a handler that hangs keeps its thread until the server stops; set a limit",
        )
    if 0 < timeout < limits.write_timeout and tenant.is_given("write_timeout"):
        yield _warning(
            tenant,
            "write_timeout",
            f"{limits.write_timeout:g} s is never reached: the whole request has {timeout:g} s; make it less than that",
        )
    if not limits.write_timeout:
        yield _warning(
            tenant, "write_timeout", "0 is for ever: a client that reads nothing keeps a thread; 30 is the default"
        )
    if not limits.header_timeout:
        yield _warning(
            tenant, "header_timeout", "0 is for ever: a client that sends nothing keeps a connection; 10 is the default"
        )
    if not limits.queue_timeout and limits.queue:
        yield _warning(
            tenant,
            "queue_timeout",
            "0 is for ever: a request may wait for a thread until its client has long given up; 10 is the default",
        )
    if 0 < limits.keep_alive <= IDLE_OF_BALANCERS:
        yield _warning(
            tenant,
            "keep_alive",
            f"{limits.keep_alive:g} s is not longer than load balancers keep idle connections "
            f"({IDLE_OF_BALANCERS:g} s as a rule): one may send a request as it is closed, and its client sees a 502; "
            f"more than {IDLE_OF_BALANCERS:g} is safe, and where no balancer stands in front it does not matter",
        )


def _stops(tenant: Tenant) -> Iterator[Finding]:
    limits = tenant.limits
    graceful, timeout = limits.graceful_timeout, limits.timeout
    if graceful < timeout or (not timeout and not graceful):
        yield _warning(
            tenant,
            "graceful_timeout",
            f"requests may take {f'{timeout:g} s' if timeout else 'for ever'}, and a stop or a replacement cuts them "
            f"after {graceful:g} s; make it {timeout or 30:g} where they are worth waiting for",
        )
    if 0 < limits.worker_healthcheck_timeout < HASTY:
        yield _warning(
            tenant,
            "worker_healthcheck_timeout",
            f"{limits.worker_healthcheck_timeout:g} s is short: a machine that swaps pauses as long; 30 is the default",
        )


def _memory(tenant: Tenant, fitted: Fit) -> Iterator[Finding]:
    limits = tenant.limits
    limit, request = limits.memory_limit, limits.request_memory
    if 0 < limit < LEAST_BASE:
        hint = f"; did you mean {limit}MiB?" if limit < 100_000 else ""
        yield _error(
            tenant,
            "memory_limit",
            f"{show_size(limit)} is less than the {show_size(LEAST_BASE)} that a worker takes without any app{hint}",
        )
        return
    if limits.threads == "auto":
        if not fitted.sizing.fits:
            key = "memory_limit" if limit else "workers"
            yield _error(
                tenant,
                key,
                f"there is no memory for a request: threads = {fitted.sizing.arithmetic}; "
                f"{'raise it' if limit else 'have fewer of them'}",
            )
        return
    if request and fitted.allowed.size is not None and limits.threads * request + BASE > fitted.allowed.size:
        product = f"{limits.threads} × {show_size(request)} = {show_size(limits.threads * request)}"
        text = (
            f"threads × request_memory = {product}, with about {show_size(BASE)} for the worker itself, is more than "
            f'its {show_size(fitted.allowed.size)} ({fitted.allowed.text}); write threads = "auto", or change one'
        )
        yield Finding(fitted.allowed.is_own, tenant.place("threads"), text)
    if request and not limit and fitted.allowed.size is None:
        yield _warning(tenant, "request_memory", 'has no effect without threads = "auto" or a memory limit')
    if tenant.is_given("max_threads"):
        yield _warning(tenant, "max_threads", f'has no effect: threads is {limits.threads}, and not "auto"')


def _threads(tenant: Tenant, sizing: Sizing, machine: Machine, workers: int) -> Iterator[Finding]:
    limits = tenant.limits
    room = tasks_of_worker(machine, workers)
    if limits.threads != "auto" and room is not None and limits.threads > room:
        yield _warning(
            tenant,
            "threads",
            f"{limits.threads} are more than {machine.tasks_source} {machine.tasks} leaves a worker, which is {room}; "
            "raise that limit, or have fewer threads or workers",
        )
    at_once = limits.workers * sizing.threads
    if (limits.timeout >= LONG or not limits.timeout) and at_once < FEW_THREADS:
        time = limits.timeout or LONG
        rate = _rate(at_once / time)
        yield _warning(
            tenant,
            "threads",
            f"{limits.workers} × {sizing.threads} threads, each taken for up to {time:g} s, serve as little as {rate} "
            "(at once = rate × time); where such long requests are the rule, threads that wait cost little: write "
            'threads = "auto"',
        )


def _rate(per_second: float) -> str:
    if per_second >= 10:
        return f"{per_second:.0f} requests a second"
    if per_second >= 1:
        return f"{per_second:.1f} requests a second"
    return f"{per_second * 60:.0f} requests a minute" if per_second * 60 >= 1 else "less than a request a minute"


# ---------------------------------------------------------------------- explanations


def explain(tenant: Tenant, machine: Machine, workers: int) -> list[str]:
    """
    A tenant in lines for a terminal.

    Args:
        workers: of all tenants that are served together.
    """
    limits = tenant.limits
    fitted = fit(tenant, machine, workers)
    options = {option.key: option for option in declared_options() if option.section == "tenant"}
    rows = [
        (
            key,
            _value(options[key], getattr(limits, key), fitted.allowed, machine),
            tenant.sources.get(f"tenant.{key}", "default"),
        )
        for key in ENVELOPE
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    target = tenant.settings.target or "(no app named)"
    lines = [f"tenant {tenant.name}: {target} on {', '.join(tenant.addresses)}", ""]
    lines += [f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {source}" for key, value, source in rows]
    lines += ["", *(f"  {line}" for line in _meaning(tenant, fitted, machine, workers))]
    return lines


def _share(allowed: Allowance, machine: Machine) -> str:
    """What a worker without a limit of its own may take."""
    if allowed.size is None:
        return "no limit"
    share = f"its share of {machine.memory_source}, {show_size(allowed.size)}"
    return share if machine.is_limited else f'no limit; threads "auto" reckons with {share}'


def _value(option: Option, value: object, allowed: Allowance, machine: Machine) -> str:
    if option.key == "memory_limit" and not value:
        return f"0: {_share(allowed, machine)}"
    if not value and option.key in _ZERO:
        return _ZERO[option.key]
    if option.key == "request_memory":
        return show_size(int(str(value))) if value else f"0: {show_size(REQUEST_MEMORY)}"
    if option.unit == BYTES:
        return show_size(int(str(value)))
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{shown} {option.unit}".rstrip()


def _meaning(tenant: Tenant, fitted: Fit, machine: Machine, workers: int) -> Iterator[str]:
    limits = tenant.limits
    threads = fitted.sizing.threads
    yield f"threads = {fitted.sizing.arithmetic}"
    if limits.threads == "auto":
        twice = "" if fitted.allowed.is_own else "; twice, since in a roll the next one boots beside it"
        yield f"  ({show_size(BASE)} are assumed for a warm worker; each one measures its own when it boots{twice})"
    at_once = limits.workers * threads
    means = f"{limits.workers} × {threads} = {at_once} requests run at once"
    if limits.timeout:
        means += f": {_rate(at_once / limits.timeout)} if each takes all of its {limits.timeout:g} s"
    yield f"{means}, {_rate(at_once / 0.1)} at 100 ms each."
    wait = f"for up to {limits.queue_timeout:g} s" if limits.queue_timeout else "without a limit"
    yield (
        f"Requests that find no thread (WSGI), or more than limit_concurrency (ASGI), wait {wait}, {limits.queue} of "
        "them per worker; the others are answered with 503."
        if limits.queue
        else "A request that finds no thread (WSGI), or more than limit_concurrency (ASGI), is answered with 503."
    )
    if limits.timeout and limits.queue_timeout:
        longest = limits.queue_timeout + limits.timeout + limits.timeout_extension
        yield (
            f"From the last byte of a request to the last of its response at most {longest:g} s pass; a proxy in front "
            "should wait for longer than that."
        )
    if fitted.allowed.is_own:
        soft = fitted.allowed.size or 0
        yield (
            f"A worker above {show_size(int(soft * limits.memory_soft))} takes no more requests at once, and is "
            f"replaced when that lasts; above {show_size(soft)} at once."
        )
        total = limits.workers * (fitted.allowed.size or 0)
        if machine.memory is not None:
            yield f"Its workers take up to {show_size(total)}; {machine.memory_source} is {show_size(machine.memory)}."
    elif machine.is_limited and fitted.allowed.size is not None:
        yield (
            f"A worker's share of the memory is {fitted.allowed.text}; when the cgroup is short of memory, workers "
            "above their share are replaced."
        )
    elif fitted.allowed.size is not None:
        yield (
            "A worker is not replaced for its memory, whatever it takes: memory_limit is 0, and no cgroup sets a limit."
            f' Only threads = "auto" reckons with its share of the RAM, {fitted.allowed.text}.'
        )
    else:
        yield "A worker is not replaced for its memory, whatever it takes: memory_limit is 0, and no other is known."
    delay = f"After SIGTERM it serves on for {limits.drain_delay:g} s. " if limits.drain_delay else ""
    yield (
        f"{delay}At a stop or a roll, requests have {limits.graceful_timeout:g} s to end; whoever stops the server "
        f"should wait for {limits.drain_delay + limits.graceful_timeout + 5:g} s before it kills."
    )
