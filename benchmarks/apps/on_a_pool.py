"""The WSGI app that $BENCH_APP names, as an ASGI app on $BENCH_THREADS threads: for servers that only speak ASGI."""

from __future__ import annotations

import importlib
import os

module, _, name = os.environ["BENCH_APP"].partition(":")
# Imported by name: only the benchmarks' own environment has a2wsgi.
app = importlib.import_module("a2wsgi").WSGIMiddleware(
    getattr(importlib.import_module(module), name), workers=int(os.environ["BENCH_THREADS"])
)
