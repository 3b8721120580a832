"""
What an export needs of the settings: routes, addresses, and figures with the keys that they come from. Pure.

A route is a prefix of whole path segments, as in Kubernetes: ``/chat`` and ``/chat/`` both mean ``/chat`` and whatever
lies under it, and not ``/chatter``. ``/`` is the rest.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import Address, addresses_of, parse_address
from jumpstart_server.envelope.sizing import SPARE_PROCESSES, SPARE_THREADS, show_size
from jumpstart_server.forwarded import TrustedProxies
from jumpstart_server.settings import Settings, TenantSettings
from jumpstart_warmup.corpus import MARKER_HEADER

MARGIN = 5  # seconds by which a proxy is more patient than we are, so that the 504 is ours and not the proxy's
STOP_MARGIN = 10  # seconds that a process manager waits longer than we drain, before it kills
KEEP_ALIVE_SHARE = 0.8  # a proxy drops an idle connection before we do; else it may send into one that we just closed
LONG_REQUEST = 60  # seconds; a tenant whose requests may take longer is taken for one that streams
BASE_MEMORY = 256 << 20  # bytes: the supervisor, and a mold that has imported the app
MANY_FILES = 65_536  # descriptors of a process; what servers are mostly given
FILES_PER_THREAD = 3  # a handler's client, what it waits for, and a file
SPARE_FILES = 1024  # what the app opens by itself

OUR_HEADERS = ("X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "X-Real-IP")
"""What a proxy writes anew about the client, whatever the client itself has sent."""
FORGED_HEADERS = ("Forwarded", "X-Forwarded-Ssl", "X-Forwarded-Protocol", "Proxy", MARKER_HEADER)
"""
What clients must not get past a proxy: other spellings of the same claims, which apps may read; ``Proxy``, which CGI's
names make HTTP_PROXY; and the mark of our own warm-up requests.
"""

_ROUTE = re.compile(r"/|(?:/[A-Za-z0-9._~@:+-]+)+/?")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,48}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from; *value* None is no limit."""

    value: int | None
    text: str


@dataclass(frozen=True)
class Tenant:
    """
    One tenant, as an engine sees it.

    Attributes:
        is_named: the file has a table of this name; else it is the only tenant, and nobody named it.
        routes: normalized: ``/``, or without a slash at the end; the longest first.
        binds: where it serves.
        settings: its table of the file.
        admin: ``[server] admin``.
        user: ``[server] user``.
    """

    name: str
    is_named: bool
    routes: tuple[str, ...]
    binds: tuple[Address, ...]
    settings: TenantSettings
    admin: str
    user: str

    @property
    def place(self) -> str:
        return f"[tenants.{self.name}]"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where somebody on the same host reaches it."""
        return tuple(_from_here(address) for address in self.binds)

    @property
    def admin_address(self) -> Address | None:
        """Where somebody on the same host finds the admin pages; None where that is not fixed."""
        if self.admin in ("auto", "off"):
            return None
        address = _from_here(parse_address(self.admin, option="[server] admin"))
        return None if address.fd >= 0 or (address.host and not address.port) else address

    @property
    def streams(self) -> bool:
        """Whether its envelope says that responses come bit by bit: it has an `idle_timeout`, or requests are long."""
        each = self.settings
        return bool(each.idle_timeout) or not each.timeout or each.timeout > LONG_REQUEST

    @property
    def strips(self) -> str:
        """The prefix that a proxy takes off the path, so that the app sees it as SCRIPT_NAME; empty for none."""
        return self.settings.root_path

    def request_time(self) -> Figure:
        """How long a client may wait for the end of a response, in seconds, from the end of its request."""
        return _sum(self, [("queue_timeout", True), ("timeout", True), ("timeout_extension", False)])

    def silence(self) -> Figure:
        """How long we may say nothing to a proxy, in seconds: until the first byte, or between two chunks."""
        each = self.settings
        first: list[tuple[str, bool]] = [("timeout", True), ("timeout_extension", False)]
        if each.first_byte_timeout:
            first = [("first_byte_timeout", True)]
        until_first = _sum(self, [("queue_timeout", True), *first])
        between = _sum(self, [("idle_timeout", True)]) if each.idle_timeout else _sum(self, [*_TOTAL])
        if until_first.value is None or between.value is None:
            return until_first if until_first.value is None else between
        return max(until_first, between, key=lambda figure: figure.value or 0)

    def idle_connection(self) -> Figure:
        """How long a proxy keeps an idle connection to us, in seconds; 0 where it must keep none."""
        keep_alive = self.settings.keep_alive
        seconds = int(keep_alive * KEEP_ALIVE_SHARE)
        return Figure(seconds, f"{self.place} keep_alive {keep_alive:g}: shorter, so that we never close first")

    def idle_connections(self) -> Figure:
        """How many idle connections are worth keeping: as many as there are threads, up to a few hundred."""
        count = self.settings.workers * self.threads
        kept = max(1, min(count, 256))
        return Figure(kept, f"{self.place} workers {self.settings.workers} × threads {self.threads}, at most 256")

    def startup_time(self) -> Figure:
        """How long a boot may take, in seconds: that of the mold, and of a worker after it."""
        limit = self.settings.startup_timeout
        if not limit:
            return Figure(None, f"{self.place} startup_timeout 0: for ever")
        return Figure(
            math.ceil(2 * limit) + STOP_MARGIN, f"{self.place} 2 processes × startup_timeout {limit:g} + {STOP_MARGIN}"
        )

    def stop_time(self) -> Figure:
        """How long a stop may take, in seconds."""
        delay, limit = self.settings.drain_delay, self.settings.graceful_timeout
        return Figure(
            math.ceil(delay + limit) + STOP_MARGIN,
            f"{self.place} drain_delay {delay:g} + graceful_timeout {limit:g} + {STOP_MARGIN}",
        )

    @property
    def threads(self) -> int:
        """Most threads of a worker."""
        return self.settings.max_threads if self.settings.threads == "auto" else self.settings.threads

    def tasks(self) -> Figure:
        """How many threads and processes it may have, while one generation of workers replaces another."""
        each = self.settings
        return Figure(
            2 * each.workers * (self.threads + SPARE_THREADS) + SPARE_PROCESSES,
            f"{self.place} 2 generations × workers {each.workers} × (threads {self.threads} + {SPARE_THREADS})"
            f" + {SPARE_PROCESSES}",
        )

    def files(self) -> Figure:
        """How many descriptors a process needs."""
        each = self.settings
        need = FILES_PER_THREAD * self.threads + each.queue + SPARE_FILES
        return Figure(
            max(MANY_FILES, need),
            f"at least {MANY_FILES}, and {FILES_PER_THREAD} × {self.place} threads {self.threads}"
            f" + queue {each.queue} + {SPARE_FILES}",
        )

    def memory(self, *, spare: int = 0, generations: int = 1) -> Figure:
        """Bytes of all its workers and *spare* more, or of so many *generations*; None without a `memory_limit`."""
        each = self.settings
        if not each.memory_limit:
            return Figure(None, f"{self.place} has no memory_limit")
        workers = f"(workers {each.workers} + {spare})" if spare else f"workers {each.workers}"
        workers = f"{generations} generations × {workers}" if generations > 1 else workers
        return Figure(
            generations * (each.workers + spare) * each.memory_limit,
            f"{self.place} {workers} × memory_limit {show_size(each.memory_limit)}",
        )

    def distrust(self) -> str:
        """Why a proxy on the same host is not believed about its clients; empty where it is."""
        each = self.settings
        if not each.proxy_headers:
            return f"{self.place} proxy_headers is off: the app sees the proxy's address instead of the client's"
        trusted = TrustedProxies(each.forwarded_allow_ips)
        strangers = [str(address) for address in self.addresses if not trusted.trusts(_peer(address))]
        if not strangers:
            return ""
        return (
            f"{self.place} forwarded_allow_ips = {each.forwarded_allow_ips!r} does not name the proxy of "
            f"{', '.join(strangers)}: the app sees the proxy's address instead of the client's"
        )


_TOTAL = (("timeout", True), ("timeout_extension", False))


def _sum(tenant: Tenant, keys: Iterable[tuple[str, bool]]) -> Figure:
    """The keys' values and `MARGIN`; a key with True is endless at 0."""
    total = 0.0
    words = []
    for key, endless in keys:
        value: float = getattr(tenant.settings, key)
        if endless and not value:
            return Figure(None, f"{tenant.place} {key} 0: for ever")
        if value:
            total += value
            words.append(f"{key} {value:g}")
    return Figure(math.ceil(total) + MARGIN, f"{tenant.place} {' + '.join(words)} + {MARGIN}")


def _peer(address: Address) -> str | None:
    """As whom a proxy on this host connects to *address*."""
    if address.path:
        return None
    return {"localhost": "127.0.0.1"}.get(address.host, address.host)


def tenants_of(all_settings: Sequence[Settings], *, are_named: bool = True) -> list[Tenant]:
    """
    The tenants in the order of the file.

    Args:
        are_named: the file has tables of their names.

    Raises:
        ConfigError: a route, name or address is wrong, or two tenants claim the same.
    """
    given = {each.tenant_name: routes_of(each) for each in all_settings}
    _refuse_double(
        [(route, name) for name, routes in given.items() for route in routes],
        "routes",
        "leave the path to one of them",
    )
    return [_tenant(each, given[each.tenant_name], are_named) for each in all_settings]


def routes_of(settings: Settings) -> tuple[str, ...]:
    """
    A tenant's routes, normalized, the longest first.

    Raises:
        ConfigError: one is not a path.
    """
    found = set()
    for route in settings.tenant.routes:
        segments = route.split("/")
        if not _ROUTE.fullmatch(route) or "." in segments or ".." in segments:
            raise ConfigError(
                f"[tenants.{settings.tenant_name}] routes: {route!r} is not allowed; write the begin of a path, "
                'such as "/chat/", of letters, digits and . _ ~ @ : + - between slashes; "/" is the rest'
            )
        found.add(route.rstrip("/") or "/")
    return tuple(sorted(found, key=lambda route: (-len(route), route)))


def with_all_routes(tenants: Sequence[Tenant]) -> list[Tenant]:
    """
    The tenants, each with a route: one without gets ``/``, the rest.

    Raises:
        ConfigError: more than one has none, or the rest is another's.
    """
    without = [each for each in tenants if not each.routes]
    rest = next((each for each in tenants if "/" in each.routes), None)
    if len(without) > 1 or (without and rest):
        names = " and ".join(each.place for each in without)
        where = f'; "/", the rest, is that of {rest.place} already' if rest else ', and "/" for the rest in one of them'
        verb = "have" if len(without) > 1 else "has"
        raise ConfigError(f'{names} {verb} no routes; write which paths are theirs: routes = ["/chat/", "/v1/"]{where}')
    return [each if each.routes else replace(each, routes=("/",)) for each in tenants]


def reachable(tenants: Sequence[Tenant], proxy: str) -> None:
    """
    Refuse tenants that a proxy on the same host cannot find or speak to.

    Args:
        proxy: its name, for messages.

    Raises:
        ConfigError: an address is not known before the server runs, or is written in another protocol.
    """
    for tenant in tenants:
        for address in tenant.addresses:
            if address.fd >= 0:
                raise ConfigError(
                    f"{tenant.place} bind: {proxy} cannot tell what {address} is; write the socket's address"
                )
            if address.host and not address.port:
                raise ConfigError(
                    f"{tenant.place} port 0 is another one at each start, which {proxy} cannot know; choose one"
                )
            if address.path and not address.path.startswith("/"):
                raise ConfigError(f"{tenant.place} bind {address}: {proxy} needs the whole path; begin it with a slash")
        if tenant.settings.proxy_protocol != "off":
            raise ConfigError(
                f"{tenant.place} proxy_protocol = {tenant.settings.proxy_protocol!r}: what this writes for {proxy} "
                'speaks plain HTTP, with X-Forwarded-For; set proxy_protocol = "off"'
            )
        if tenant.strips and any(_under(route, tenant.strips) is None for route in tenant.routes):
            raise ConfigError(
                f"{tenant.place} root_path {tenant.strips} is what {proxy} strips, and routes "
                f"{', '.join(tenant.routes)} are not all under it; write routes = [{tenant.strips + '/'!r}]"
            )


def _under(route: str, prefix: str) -> str | None:
    return route[len(prefix) :] if route == prefix or route.startswith(prefix + "/") else None


def _tenant(settings: Settings, routes: tuple[str, ...], is_named: bool) -> Tenant:
    if not _NAME.fullmatch(settings.tenant_name):
        raise ConfigError(
            f"[tenants.{settings.tenant_name}]: the engines take no such name; "
            "use up to 50 letters, digits, - and _, a letter or digit at both ends"
        )
    return Tenant(
        name=settings.tenant_name,
        is_named=is_named,
        routes=routes,
        binds=tuple(addresses_of(settings.tenant)),
        settings=settings.tenant,
        admin=settings.server.admin,
        user=settings.server.user,
    )


def _from_here(address: Address) -> Address:
    """``0.0.0.0`` is where a server listens; nobody connects to it."""
    try:
        everywhere = bool(address.host) and ipaddress.ip_address(address.host).is_unspecified
    except ValueError:
        everywhere = False
    if not everywhere:
        return address
    return Address(host="::1" if ":" in address.host else "127.0.0.1", port=address.port)


def _refuse_double(claims: Iterable[tuple[str, str]], key: str, remedy: str) -> None:
    owner: dict[str, str] = {}
    for what, name in claims:
        first = owner.setdefault(what, name)
        if first != name:
            raise ConfigError(f"[tenants.{first}] and [tenants.{name}] {key}: both have {what}; {remedy}")


def longest(figures: Sequence[Figure]) -> Figure:
    """The largest of them; one without a limit beats all."""
    return next((each for each in figures if each.value is None), max(figures, key=lambda each: each.value or 0))


def total(figures: Sequence[Figure], *, more: int = 0, why: str = "") -> Figure:
    """Their sum and *more*; without a limit where one of them has none."""
    for each in figures:
        if each.value is None:
            return each
    words = " + ".join(each.text for each in figures)
    return Figure(sum(each.value or 0 for each in figures) + more, words + (f" + {why}" if more else ""))
