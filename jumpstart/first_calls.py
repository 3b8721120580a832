"""
Which functions of the app run for the first time inside a request: cold work that no recorder knows.

Code that never ran has its caches empty: the interpreter's own, specialised instructions, and whatever it fills lazily.
`sys.monitoring` (Python 3.12) reports the start of each function; after its first report the function is left alone
(`DISABLE`), so a process in its steady state pays nothing. The price is paid once per function. That is why this is
off unless asked for: docs/coverage.md has the figures.

The state belongs to the process and goes along in a fork: what has run in the mold is not new in its workers. When a
tool such as a debugger calls `sys.monitoring.restart_events`, every function is reported once more.
"""

from __future__ import annotations

import atexit
import logging
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from jumpstart import context

logger = logging.getLogger(__name__)

MAX_FIRST_CALLS = 10_000  # noted per request; each is a reference
TOOL_IDS = (4, 3)  # 0, 1, 2 and 5 are reserved for debuggers, coverage, profilers and optimisers
_NAME = "jumpstart"
_PACKAGES = ("jumpstart", "jumpstart_warmup", "jumpstart_server", "warmup/jumpstart_warmup", "server/jumpstart_server")
_OWN = tuple(f"{Path(__file__).parents[1] / name}/" for name in _PACKAGES)  # installed, and in a checkout

_tool: int | None = None
_disable: Any = None


def start() -> bool:
    """
    Begin to watch; False, with a line in the log, where that cannot be: Python before 3.12, or no tool id is free.

    Functions that have run before are reported as new, once; so it is called before the app is imported.
    """
    global _tool, _disable
    if _tool is not None:
        return True
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        logger.warning("--first-calls needs Python 3.12 or later; first executions of functions are not counted")
        return False
    for tool in TOOL_IDS:
        try:
            monitoring.use_tool_id(tool, _NAME)
        except ValueError:  # somebody else holds it
            continue
        _tool, _disable = tool, monitoring.DISABLE
        monitoring.register_callback(tool, monitoring.events.PY_START, _started)
        monitoring.set_events(tool, monitoring.events.PY_START)
        atexit.register(stop)  # the interpreter clears our names before the last functions of others have run
        return True
    holders = ", ".join(str(monitoring.get_tool(tool)) for tool in TOOL_IDS)
    logger.warning("first executions of functions are not counted: %s hold the ids of sys.monitoring", holders)
    return False


def stop() -> None:
    """Watch no more, and leave the tool id to others; does nothing when nobody watches."""
    global _tool
    if _tool is None:
        return
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # there since 3.12
    monitoring.set_events(_tool, 0)
    monitoring.register_callback(_tool, monitoring.events.PY_START, None)
    monitoring.free_tool_id(_tool)
    atexit.unregister(stop)
    _tool = None


def name_of(code: CodeType) -> str:
    """``folder/file.py:12 Class.method``, as people look for it."""
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"


def _started(code: CodeType, _offset: int) -> Any:
    """Called by the interpreter, in whatever thread, at the first run of *code*. Must not raise into the app."""
    request = context.current()
    if request is not None and not code.co_filename.startswith(_OWN):
        if request.first_calls is None:
            request.first_calls = [code]
        elif len(request.first_calls) < MAX_FIRST_CALLS:
            request.first_calls.append(code)
    return _disable
