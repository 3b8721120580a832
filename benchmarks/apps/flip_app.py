"""A page whose new version is behind a flag: behind it a module, a template and a look-up that nothing has touched."""

from __future__ import annotations

import importlib
import os
import string
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jumpstart

FLAG = Path(os.environ["BENCH_FLAG"])
LOOK_UP_S = 0.15  # seconds that a database or another service takes for what is then cached


@jumpstart.cached(ttl=3600)
def prices() -> dict[str, int]:
    time.sleep(LOOK_UP_S)
    return {"lamp": 7}


def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/busy":
        time.sleep(0.05)
        text = "done"
    elif FLAG.exists():
        novelty = importlib.import_module("flip_novelty")
        text = novelty.render(prices())
    else:
        text = string.Template("lamp").substitute()
    start_response("200 OK", [("Content-Length", str(len(text)))])
    return [text.encode()]
