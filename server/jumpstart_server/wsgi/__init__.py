"""
The WSGI engine: sockets to handlers without an event loop of asyncio's in between.

Reading order: `connection` (who owns what, and when), `engine` (one thread that accepts, reads, parses and keeps time),
`gateway` (PEP 3333, in the handler's thread, which writes to the socket itself).
"""

from jumpstart_server.wsgi.engine import EngineSettings, WSGIEngine

__all__ = ["EngineSettings", "WSGIEngine"]
