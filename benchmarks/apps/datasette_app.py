"""Datasette, an app that others wrote, on the database that $BENCH_DB names."""

from __future__ import annotations

import os

from datasette.app import Datasette

app = Datasette([os.environ["BENCH_DB"]]).app()
