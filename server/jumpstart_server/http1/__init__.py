"""
HTTP/1.1 without I/O: bytes in, events out (`request`); status, headers and body in, bytes out (`response`).

The shells (an epoll loop with threads for WSGI, an asyncio protocol for ASGI) own sockets, clocks and threads.
Reading order: `grammar`, `events`, `head`, `request`, `response`; and `proxy_protocol`, which may come before all.
"""

from jumpstart_server.http1.events import (
    BodyData,
    Event,
    HeaderMap,
    Limits,
    ParseError,
    RequestEnd,
    RequestHead,
)
from jumpstart_server.http1.proxy_protocol import ProxyHeader, ProxyHeaderError, ProxyProtocol, read_proxy_header
from jumpstart_server.http1.request import RequestParser, State
from jumpstart_server.http1.response import (
    DefaultFields,
    ResponseError,
    ResponseFramer,
    encode_fields,
    encode_status,
    error_response,
    http_date,
)

__all__ = [
    "BodyData",
    "DefaultFields",
    "Event",
    "HeaderMap",
    "Limits",
    "ParseError",
    "ProxyHeader",
    "ProxyHeaderError",
    "ProxyProtocol",
    "RequestEnd",
    "RequestHead",
    "RequestParser",
    "ResponseError",
    "ResponseFramer",
    "State",
    "encode_fields",
    "encode_status",
    "error_response",
    "http_date",
    "read_proxy_header",
]
