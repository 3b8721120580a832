"""What the flag brings: imported when a request first needs it."""

from __future__ import annotations

import email.mime.multipart
import pydoc
import sqlite3
import unittest.mock
import xmlrpc.client

USED = (email.mime.multipart, pydoc, sqlite3, unittest.mock, xmlrpc.client)


def render(prices: dict[str, int]) -> str:
    return ", ".join(f"{name}: {price}" for name, price in prices.items())
