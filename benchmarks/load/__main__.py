"""
``python -m benchmarks.load NAME OPTIONS LIMIT``: one load generator, or the upstream.

OPTIONS is a JSON object: the arguments of that module's `run`. What it returns is printed as JSON, with the CPU time
that it took. It ends after LIMIT seconds, whatever happens.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time

NAMES = ("burst", "closed_loop", "crowd", "mix", "upstream")


def main() -> None:
    name, options, limit_s = sys.argv[1:]
    if name not in NAMES:
        raise SystemExit(f"no load generator {name!r}: {', '.join(NAMES)}")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(limit_s))
    # A server with a thousand runnable threads would else starve its own meter.
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    except PermissionError:
        pass
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    result = importlib.import_module(f"benchmarks.load.{name}").run(**json.loads(options))
    print(json.dumps({**result, "cpu_s": time.process_time()}), flush=True)


main()
