"""
nginx in front of the tenants: a file for its ``http`` context, such as `/etc/nginx/conf.d/jumpstart.conf`. Pure.

What it is careful about: the 504 at the end of a request's time is ours, with the stack in our log, and not nginx's; a
request that has been sent is not sent again, unless it may be; what clients write about themselves is thrown away; a
stream arrives as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jumpstart_server.addresses import Address
from jumpstart_server.export.model import (
    FORGED_HEADERS,
    Figure,
    Tenant,
    longest,
    reachable,
    with_all_routes,
)

ENDLESS = "7d"  # nginx has no word for no limit
ADMIN_TIMEOUT = 5  # seconds
HEADER_BUFFER = 8192  # bytes; nginx's default for a request line or field
UNLIMITED_HEAD = 1 << 20  # bytes: what 0 means for our limits of a head


@dataclass(frozen=True)
class NginxOptions:
    """
    Attributes:
        listen: as nginx's ``listen`` takes it: a port, HOST:PORT or unix:PATH.
        server_name: names, with spaces between them; ``_`` is any.
        health: path of the health page; empty for none.
    """

    listen: str = "80"
    server_name: str = "_"
    health: str = "/healthz"


def render(tenants: Sequence[Tenant], options: NginxOptions) -> str:
    """
    Raises:
        ConfigError: tenants have no routes, or no addresses that nginx can know.
    """
    tenants = with_all_routes(tenants)
    reachable(tenants, "nginx")
    return "\n".join([*_head(), *_upstreams(tenants), *_server(tenants, options), ""])


def _head() -> Iterator[str]:
    yield "# Made by `jumpstart export nginx`, for nginx's http context. Each figure names the keys that it comes from."
    yield ""
    yield "# WebSockets are the only upgrade that is passed on. Otherwise connections to the tenants are kept open."
    yield "map $http_upgrade $jumpstart_upgrade {"
    yield '    default "";'
    yield '    "~*^websocket$" websocket;'
    yield "}"
    yield "map $jumpstart_upgrade $jumpstart_connection {"
    yield "    default upgrade;"
    yield '    "" "";'
    yield "}"
    yield "# With its port, as the client sees it; HTTP/1.0 clients may send none."
    yield "map $http_host $jumpstart_host {"
    yield "    default $http_host;"
    yield '    "" $host;'
    yield "}"
    yield ""


def _upstreams(tenants: Sequence[Tenant]) -> Iterator[str]:
    for tenant in tenants:
        if reason := tenant.distrust():
            yield f"# BEWARE: {reason}."
        yield f"upstream {upstream_of(tenant)} {{"
        for address in tenant.addresses:
            yield f"    server {_quoted(str(address))} max_fails=0;"
        idle = tenant.idle_connection()
        if idle.value:
            connections = tenant.idle_connections()
            yield f"    keepalive {connections.value};  # {connections.text}"
            yield f"    keepalive_timeout {idle.value}s;  # {idle.text}"
        else:
            yield f"    # no idle connections are kept: {tenant.place} keep_alive {tenant.settings.keep_alive:g}"
        yield "}"
        yield ""
    if admin := _admin(tenants):
        yield f"upstream jumpstart_admin {{\n    server {_quoted(str(admin))} max_fails=0;  # [server] admin\n}}"
        yield ""


def _server(tenants: Sequence[Tenant], options: NginxOptions) -> Iterator[str]:
    yield "server {"
    yield f"    listen {options.listen};"
    yield f"    server_name {options.server_name};"
    yield ""
    yield from _limits_of_requests(tenants)
    yield ""
    yield "    proxy_http_version 1.1;"
    yield "    proxy_intercept_errors off;  # 503 with Retry-After, 504 and 413 are ours; they go through as they are"
    yield "    # A connection that just broke is replaced. A request that was sent is sent again only when it is"
    yield "    # idempotent, and never because it takes long."
    yield "    proxy_next_upstream error;"
    yield "    proxy_connect_timeout 5s;"
    yield "    proxy_buffer_size 16k;  # of a response's head; nginx's 4k are few for cookies"
    yield "    proxy_buffers 8 16k;"
    yield "    proxy_set_header Upgrade $jumpstart_upgrade;"
    yield "    proxy_set_header Connection $jumpstart_connection;"
    yield "    proxy_set_header Host $jumpstart_host;"
    yield "    # Written anew: what a client says about itself is not passed on. Behind one more proxy, let the realip"
    yield "    # module set $remote_addr, and put that proxy's scheme in place of $scheme."
    yield "    proxy_set_header X-Forwarded-For $remote_addr;"
    yield "    proxy_set_header X-Forwarded-Proto $scheme;"
    yield "    proxy_set_header X-Forwarded-Host $jumpstart_host;"
    yield "    proxy_set_header X-Real-IP $remote_addr;"
    for name in FORGED_HEADERS:
        yield f'    proxy_set_header {name} "";'
    yield ""
    yield from _health(tenants, options)
    routes = [(route, tenant) for tenant in tenants for route in tenant.routes]
    routes.sort(key=lambda item: (-len(item[0]), item[0]))  # nginx takes the first expression that matches
    for route, tenant in routes:
        yield from _location(route, tenant)
    if all(route != "/" for route, _ in routes):
        yield '    location / {\n        return 404;  # no tenant has the route "/"\n    }'
    yield "}"


def _limits_of_requests(tenants: Sequence[Tenant]) -> Iterator[str]:
    """Of what nginx reads before it knows the tenant."""
    settings = [(each.place, each.settings) for each in tenants]
    heads = longest(
        [
            Figure(round(each.header_timeout) or None, f"{place} header_timeout {each.header_timeout:g}")
            for place, each in settings
        ]
    )
    yield f"    client_header_timeout {_time(heads)};  # {heads.text}"
    lines = [
        Figure(size or UNLIMITED_HEAD, f"{place} {key} {size}")
        for place, each in settings
        for key, size in (
            ("limit_request_line", each.limit_request_line),
            ("limit_request_field_size", each.limit_request_field_size),
        )
    ]
    biggest = longest(lines)
    size = max(HEADER_BUFFER, -(-((biggest.value or 0) + 64) // 1024) * 1024)
    yield f"    large_client_header_buffers 4 {size // 1024}k;  # {biggest.text}, and its end"


def _health(tenants: Sequence[Tenant], options: NginxOptions) -> Iterator[str]:
    if not options.health:
        return
    if not _admin(tenants):
        yield f'    # No {options.health}: [server] admin = "{tenants[0].admin}" is no address that nginx can know.'
        yield '    # With one, such as admin = "127.0.0.1:9000", the health of the tenants is shown there.'
        yield ""
        return
    yield f"    location = {options.health} {{"
    yield "        proxy_pass http://jumpstart_admin/readyz;"
    yield f"        proxy_read_timeout {ADMIN_TIMEOUT}s;"
    yield "        access_log off;"
    yield "    }"
    yield ""


def _location(route: str, tenant: Tenant) -> Iterator[str]:
    each = tenant.settings
    silence = tenant.silence()
    expression = "/" if route == "/" else f'~ "^{re.escape(route)}(?:/|$)"'
    yield f"    location {expression} {{  # {tenant.place}"
    if tenant.strips:
        yield f'        rewrite "(?s)^{re.escape(tenant.strips)}/?(.*)$" /$1 break;  # {tenant.place} root_path'
    if each.ssl_certfile:
        yield "        proxy_ssl_server_name on;  # the certificate is not verified: proxy_ssl_verify is off by default"
        yield "        proxy_ssl_name $host;"
    yield f"        proxy_pass {'https' if each.ssl_certfile else 'http'}://{upstream_of(tenant)};"
    yield f"        # {silence.text}"
    yield f"        proxy_read_timeout {_time(silence)};"
    yield f"        proxy_send_timeout {_time(silence)};"
    body = Figure(round(each.body_timeout) or None, f"{tenant.place} body_timeout {each.body_timeout:g}")
    write = Figure(round(each.write_timeout) or None, f"{tenant.place} write_timeout {each.write_timeout:g}")
    yield f"        client_body_timeout {_time(body)};  # {body.text}"
    yield f"        send_timeout {_time(write)};  # {write.text}"
    yield (
        f"        client_max_body_size {each.limit_request_body};"
        f"  # {tenant.place} limit_request_body{'' if each.limit_request_body else ': no limit, in both'}"
    )
    if each.stream_bodies:
        yield f"        proxy_request_buffering off;  # {tenant.place} stream_bodies"
    if tenant.streams:
        yield f"        proxy_buffering off;  # it streams: {tenant.place} {streams_because(tenant)}"
    else:
        yield "        # Responses are buffered, so that slow clients hold no thread of ours. One that streams says so"
        yield "        # with the header X-Accel-Buffering: no, which nginx honours."
        yield "        proxy_buffering on;"
    yield "    }"


def streams_because(tenant: Tenant) -> str:
    """The key by which a tenant is taken for one that streams."""
    each = tenant.settings
    return f"idle_timeout {each.idle_timeout:g}" if each.idle_timeout else f"timeout {each.timeout:g}"


def upstream_of(tenant: Tenant) -> str:
    """The name of its upstream."""
    return f"jumpstart_{tenant.name}"


def _admin(tenants: Sequence[Tenant]) -> Address | None:
    return tenants[0].admin_address if tenants else None


def _time(figure: Figure) -> str:
    return ENDLESS if figure.value is None else f"{max(1, figure.value)}s"


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_.:/\[\]@+-]+", text) else '"' + re.sub(r'([\\"$])', r"\\\1", text) + '"'
