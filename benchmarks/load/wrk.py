"""wrk, where it is installed: its command, and what it prints."""

from __future__ import annotations

import re
import shutil
from typing import Any

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def path() -> str | None:
    return shutil.which("wrk")


def command(program: str, port: int, path: str, connections: int, seconds: float) -> list[str]:
    """It takes whole seconds only. One thread, as it has to leave the cores to the server."""
    whole = max(1, round(seconds))
    options = ["-t1", f"-c{connections}", f"-d{whole}s", "--latency", "--timeout=10s"]
    return [program, *options, f"http://127.0.0.1:{port}{path}"]


def read(text: str) -> dict[str, Any]:
    """
    The figures out of what it printed, named as those of `closed_loop`.

    Raises:
        ValueError: there are none.
    """
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    requests = re.search(r"(\d+) requests in ", text)
    if rate is None or requests is None:
        raise ValueError(f"wrk printed {text[-300:]!r}")
    latencies = {
        share: float(value) * SECONDS[unit]
        for share, value, unit in re.findall(r"^\s+(50|99)(?:\.0+)?%\s+([\d.]+)(us|ms|s|m)\b", text, re.MULTILINE)
    }
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    return {
        "rate": float(rate[1]),
        "requests": int(requests[1]),
        "p50_s": latencies.get("50"),
        "p99_s": latencies.get("99"),
        "failures": (sum(map(int, errors.groups())) if errors else 0) + (int(bad[1]) if bad else 0),
    }
