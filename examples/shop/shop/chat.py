"""Only the chat, for a tenant of its own: ``jumpstart serve shop.chat:app --app-dir examples/shop``."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from . import web

app = Starlette(routes=[Route("/chat", web.chat), Route("/healthz", web.healthz)])
