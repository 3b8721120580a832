"""What a connection may cost and how long it may take; both engines are given one of these."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jumpstart_server.forwarded import TrustedProxies
from jumpstart_server.http1 import HeaderMap, Limits, ProxyProtocol

if TYPE_CHECKING:
    from jumpstart_server.settings import TenantSettings

ACCEPTS = 16  # connections at one event; the others stay for other workers
ACCEPT_PAUSE = 0.1  # seconds without accepting after the descriptors ran out
COMPLAINT_PAUSE = 60.0  # seconds between lines about that
NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

LINGER_TIME = (
    2.0  # seconds that an answer has to arrive while the client still sends; nginx gives 5 per read, 30 in all
)
LINGER_BYTES = 256 * 1024  # read and dropped meanwhile
DISCARD_BYTES = (
    256 * 1024
)  # of a body that the app did not read, to keep the connection; more costs more than a new one


@dataclass(frozen=True)
class ConnectionSettings:
    """
    Limits and times of a connection. Times are in seconds; 0 is no limit, but of *keep_alive* it is no keep-alive.

    Attributes:
        header_timeout: to the end of a request's head, from the connection's begin or the request's first byte.
            Absolute, so that a byte now and then does not prolong it.
        body_timeout: between two pieces of a request's body, while we wait for one.
        write_timeout: until a client takes any byte of those that wait for it.
        keep_alive: of a connection between two requests.
        proxies: whose headers say who the client is; None: nobody's.
        proxy_protocol: which PROXY header every connection begins with.
        proxy_senders: who may connect then; None: nobody.
    """

    limits: Limits = field(default_factory=Limits)
    header_map: HeaderMap = "drop"
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    keep_alive: float = 75.0
    proxies: TrustedProxies | None = None
    proxy_protocol: ProxyProtocol = "off"
    proxy_senders: TrustedProxies | None = None

    @classmethod
    def of(cls, tenant: TenantSettings) -> ConnectionSettings:
        """What the operator has set."""
        return cls(
            limits=Limits(
                limit_request_line=tenant.limit_request_line,
                limit_request_fields=tenant.limit_request_fields,
                limit_request_field_size=tenant.limit_request_field_size,
                limit_request_body=tenant.limit_request_body,
            ),
            header_map=tenant.header_map,
            header_timeout=tenant.header_timeout,
            body_timeout=tenant.body_timeout,
            write_timeout=tenant.write_timeout,
            keep_alive=tenant.keep_alive,
            proxies=TrustedProxies(tenant.forwarded_allow_ips) if tenant.proxy_headers else None,
            proxy_protocol=tenant.proxy_protocol,
            proxy_senders=TrustedProxies(tenant.proxy_allow_from, option="--proxy-allow-from"),
        )
