"""
What the shop asks its back end: configuration, and at which address each service runs.

The answers are kept with `jumpstart.cached`. A process that boots from a profile has them before its first request;
without Jumpstart's server it is an ordinary cache with a time to live.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from jumpstart import cached

DEFAULT_BACKEND = "127.0.0.1:9100"
TIMEOUT = 5  # seconds; the back end answers within 0.02


class BackendError(Exception):
    """The back end cannot be reached, or answered something else than what was asked. For the operator."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The shop's configuration."""

    title: str
    announcement: str
    free_shipping_cents: int
    shipping_cents: int


@cached(ttl=300, snapshot="value")
def settings() -> Settings:
    """
    The configuration, at most five minutes old. Its value travels in profiles: it is small, and it is no secret.

    Raises:
        BackendError: the back end did not answer.
    """
    return Settings(**_get("/config"))


@cached(ttl=60, snapshot="key")
def address_of(service: str) -> str:
    """
    Where *service* runs. Only the name travels in profiles; the address is looked up again at boot.

    Raises:
        BackendError: the back end did not answer.
    """
    return str(_get(f"/discovery?name={quote(service)}")["address"])


@cached(ttl=60, snapshot="key")
async def find(service: str) -> str:
    """`address_of` for coroutines, with a cache of its own."""
    answer = await asyncio.to_thread(_get, f"/discovery?name={quote(service)}")
    return str(answer["address"])


def _get(path: str) -> dict[str, Any]:
    backend = os.environ.get("SHOP_BACKEND", DEFAULT_BACKEND)
    connection = http.client.HTTPConnection(backend, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise BackendError(
            f"the shop's back end at {backend} did not answer {path}: {error}. "
            "Start it with `python examples/shop/backend.py`, or set SHOP_BACKEND=HOST:PORT"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise BackendError(f"the shop's back end at {backend} answered {path} with {response.status}")
    answer: dict[str, Any] = json.loads(body)
    return answer
