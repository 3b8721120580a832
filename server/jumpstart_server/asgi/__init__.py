"""
ASGI over HTTP/1.1, as an asyncio protocol that plugs into uvicorn's server.

Reading order: `protocol` (a connection: bytes, timers, who is next), `exchange` (a request and its response: the app's
`receive` and `send`), `service` (what all connections of a server share); `proxied` (a PROXY header before it all).
"""

from jumpstart_server.asgi.exchange import ASGIMisuseError, ClientGoneError
from jumpstart_server.asgi.protocol import JumpstartProtocol
from jumpstart_server.asgi.proxied import ProxiedProtocol

__all__ = ["ASGIMisuseError", "ClientGoneError", "JumpstartProtocol", "ProxiedProtocol"]
