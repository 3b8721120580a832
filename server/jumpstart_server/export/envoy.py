"""
Envoy in front of the tenants: a static bootstrap file. Pure.

Deadlines are ours: a route's are longer than its tenant's, so that the 504 and its stack are ours too. Admission is
ours: Envoy's circuit breakers are wide open, for they would answer before our queue is full, without Retry-After.
Nothing is sent twice, and no host is ejected for its 5xx: a tenant is one address, and its 503 says that it works.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import Address
from jumpstart_server.export.model import FORGED_HEADERS, Figure, Tenant, longest, reachable, with_all_routes
from jumpstart_server.export.yaml import Noted, plain, to_yaml

HEAD = """Made by `jumpstart export envoy`: a bootstrap file. Each figure names the keys that it comes from.
Bodies go on as they come. Those without a length meet limit_request_body in the tenant."""
MANY = 100_000  # connections and requests of a cluster
CONNECT_TIMEOUT = "5s"
ADMIN = "jumpstart/admin"  # a cluster's name that no tenant can have
TYPES = "type.googleapis.com/envoy.extensions."


@dataclass(frozen=True)
class EnvoyOptions:
    """
    Attributes:
        listen: where Envoy serves.
        server_names: domains; ``*`` is any.
        health: path of the health page; empty for none.
    """

    listen: Address
    server_names: tuple[str, ...] = ("*",)
    health: str = "/healthz"


def render(tenants: Sequence[Tenant], options: EnvoyOptions, *, as_json: bool = False) -> str:
    """
    Args:
        as_json: without comments, for tools that read no YAML.

    Raises:
        ConfigError: tenants have no routes, or no addresses that Envoy can know.
    """
    tenants = with_all_routes(tenants)
    reachable(tenants, "envoy")
    admin = _admin(tenants) if options.health else None
    document = {
        "static_resources": {
            "listeners": [_listener(tenants, options)],
            "clusters": [*[_cluster(each) for each in tenants], *([_admin_cluster(admin)] if admin else [])],
        }
    }
    if as_json:
        return json.dumps(plain(document), indent=2) + "\n"
    notes = [f"BEWARE: {reason}." for each in tenants if (reason := each.distrust())]
    if options.health and not admin:
        notes.append(f'No {options.health}: [server] admin = "{tenants[0].admin}" is no address that Envoy can know.')
    if not all(_checked(each) for each in tenants):
        notes.append("No health checks: they need [server] admin at an IP address and a port, and no ssl_certfile.")
    return to_yaml(document, head="\n".join([HEAD, *notes]))


def _listener(tenants: Sequence[Tenant], options: EnvoyOptions) -> dict[str, Any]:
    headers = longest(
        [
            Figure(
                round(each.settings.header_timeout) or None,
                f"{each.place} header_timeout {each.settings.header_timeout:g}",
            )
            for each in tenants
        ]
    )
    manager = {
        "@type": TYPES + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "jumpstart",
        "use_remote_address": Noted(True, "the client is who connects, whatever its headers say"),
        "normalize_path": Noted(True, "so that /web/../chat is matched as what it is"),
        "request_headers_timeout": Noted(_seconds(headers), headers.text),
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "route_config": {
            "name": "jumpstart",
            "virtual_hosts": [
                {
                    "name": "jumpstart",
                    "domains": list(options.server_names),
                    "routes": [*_health(tenants, options), *_routes(tenants)],
                },
            ],
            "request_headers_to_remove": Noted(
                [name.lower() for name in FORGED_HEADERS], "claims about a client that it makes itself"
            ),
            "request_headers_to_add": Noted(
                [
                    _overwrite("X-Forwarded-For", "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%"),
                    _overwrite("X-Real-IP", "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%"),
                    _overwrite("X-Forwarded-Host", "%REQ(:authority)%"),
                ],
                "written anew; X-Forwarded-Proto is written by Envoy itself",
            ),
        },
        "http_filters": [_router()],
    }
    return {
        "name": "jumpstart",
        "address": _address(options.listen),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _routes(tenants: Sequence[Tenant]) -> list[dict[str, Any]]:
    """The longest first: Envoy takes the first that matches."""
    found = [(route, tenant) for tenant in tenants for route in tenant.routes]
    found.sort(key=lambda item: (-len(item[0]), item[0]))
    return [each for route, tenant in found for each in (*_too_large(route, tenant), _route(route, tenant))]


def _match(route: str) -> dict[str, Any]:
    return {"prefix": "/"} if route == "/" else {"path_separated_prefix": route}


def _too_large(route: str, tenant: Tenant) -> list[Any]:
    """
    Bodies that say how long they are, and are too long, are refused here.

    We refuse them too, at once, and close; but Envoy goes on writing, finds the connection broken, and may tell its
    client 503 in place of our 413.
    """
    limit = tenant.settings.limit_request_body
    if not limit:
        return []
    too_long = {"name": "content-length", "range_match": {"start": str(limit + 1), "end": str(2**63 - 1)}}
    found = {"match": {**_match(route), "headers": [too_long]}, "direct_response": {"status": 413}}
    return [Noted(found, f"{tenant.place} limit_request_body {limit}")]


def _route(route: str, tenant: Tenant) -> dict[str, Any]:
    time, silence = tenant.request_time(), tenant.silence()
    action: dict[str, Any] = {
        "cluster": tenant.name,
        "timeout": Noted(_seconds(time), time.text),
        "idle_timeout": Noted(_seconds(silence), f"between two bytes: {silence.text}"),
    }
    if tenant.strips:
        pattern = f"^{re.escape(tenant.strips)}/*"
        action["regex_rewrite"] = Noted(
            {"pattern": {"regex": pattern}, "substitution": "/"}, f"{tenant.place} root_path {tenant.strips}"
        )
    return {"match": _match(route), "route": action}


def _cluster(tenant: Tenant) -> dict[str, Any]:
    idle = tenant.idle_connection()
    options: dict[str, Any] = {
        "@type": TYPES + "upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http_protocol_options": {}},
    }
    if idle.value:
        options["common_http_protocol_options"] = {"idle_timeout": Noted(_seconds(idle), idle.text)}
    else:
        options["common_http_protocol_options"] = {
            "max_requests_per_connection": Noted(1, f"{tenant.place} keep_alive {tenant.settings.keep_alive:g}")
        }
    cluster: dict[str, Any] = {
        "name": tenant.name,
        "type": "STATIC" if all(_is_static(address) for address in tenant.addresses) else "STRICT_DNS",
        "connect_timeout": CONNECT_TIMEOUT,
        "circuit_breakers": Noted(
            {
                "thresholds": [
                    {"max_connections": MANY, "max_pending_requests": MANY, "max_requests": MANY},
                ]
            },
            f"wide open: {tenant.place} queue {tenant.settings.queue} is the limit, and its 503 has Retry-After",
        ),
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {
            "cluster_name": tenant.name,
            "endpoints": [{"lb_endpoints": [{"endpoint": _endpoint(each, tenant)} for each in tenant.addresses]}],
        },
    }
    if _checked(tenant):
        cluster["health_checks"] = Noted(
            [
                {
                    "timeout": "3s",
                    "interval": "5s",
                    "no_traffic_interval": "5s",
                    "unhealthy_threshold": 2,
                    "healthy_threshold": 1,
                    "http_health_check": {"path": f"/readyz/{tenant.name}", "host": "jumpstart"},
                }
            ],
            "of [server] admin: 200 while a worker is ready",
        )
    if tenant.settings.ssl_certfile:
        cluster["transport_socket"] = Noted(
            {
                "name": "envoy.transport_sockets.tls",
                "typed_config": {"@type": TYPES + "transport_sockets.tls.v3.UpstreamTlsContext"},
            },
            f"{tenant.place} ssl_certfile; it is not verified here",
        )
    return cluster


def _endpoint(address: Address, tenant: Tenant) -> dict[str, Any]:
    endpoint = {"address": _address(address)}
    if admin := _checked(tenant):
        endpoint["health_check_config"] = {"address": _address(admin)}
    return endpoint


def _checked(tenant: Tenant) -> Address | None:
    """Where Envoy can ask for its health: it takes IP addresses only, and asks with TLS where the tenant has that."""
    admin = tenant.admin_address
    usable = admin is not None and admin.host and _is_static(admin) and not tenant.settings.ssl_certfile
    return admin if usable else None


def _health(tenants: Sequence[Tenant], options: EnvoyOptions) -> list[Any]:
    """The route to the health page; none where nobody knows the admin pages."""
    if not options.health or not _admin(tenants):
        return []
    route = {"cluster": ADMIN, "prefix_rewrite": "/readyz", "timeout": "5s"}
    return [Noted({"match": {"path": options.health}, "route": route}, "200 while tenants are ready, else 503")]


def _admin(tenants: Sequence[Tenant]) -> Address | None:
    return tenants[0].admin_address if tenants else None


def _admin_cluster(address: Address) -> Any:
    endpoint = {"endpoint": {"address": _address(address)}}
    return Noted(
        {
            "name": ADMIN,
            "type": "STATIC" if _is_static(address) else "STRICT_DNS",
            "connect_timeout": CONNECT_TIMEOUT,
            "load_assignment": {"cluster_name": ADMIN, "endpoints": [{"lb_endpoints": [endpoint]}]},
        },
        "[server] admin",
    )


def _router() -> dict[str, Any]:
    return {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": TYPES + "filters.http.router.v3.Router"},
    }


def _overwrite(name: str, value: str) -> dict[str, Any]:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _address(address: Address) -> dict[str, Any]:
    if address.path:
        return {"pipe": {"path": address.path}}
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def _is_static(address: Address) -> bool:
    if address.path:
        return True
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return False
    return True


def check_listen(address: Address, text: str) -> Address:
    """
    Raises:
        ConfigError: Envoy cannot serve there.
    """
    if address.fd >= 0 or not _is_static(address):
        raise ConfigError(
            f"--listen {text}: envoy serves on IP addresses and Unix sockets: 0.0.0.0:8080, unix:/run/e.sock"
        )
    return address


def _seconds(figure: Figure) -> str:
    return "0s" if figure.value is None else f"{figure.value}s"
