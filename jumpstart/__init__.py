"""
Jumpstart: an application server for Python web apps that boots warm.

What an app may use is in `__all__`; everything else may change. All of it works without the server, in a script or a
test, and importing it stays cheap.
"""

from typing import TYPE_CHECKING, Any

from jumpstart._version import __version__
from jumpstart.caches import CacheInfo
from jumpstart.caching import cached
from jumpstart.context import cold_event, is_warmup, warmup_headers
from jumpstart.deadlines import RequestTimeout, cancelled, deadline, extend_deadline
from jumpstart.errors import EffectRefused, JumpstartError, SourceUnavailable
from jumpstart.hooks import on_capture, on_restore
from jumpstart.recorder import Recorder
from jumpstart.records import Reason, Record, Tally

if TYPE_CHECKING:
    from jumpstart import sources
    from jumpstart.config import Config
    from jumpstart.service import Service

__all__ = [
    "CacheInfo",
    "Config",
    "EffectRefused",
    "JumpstartError",
    "Reason",
    "Record",
    "Recorder",
    "RequestTimeout",
    "Service",
    "SourceUnavailable",
    "Tally",
    "__version__",
    "cached",
    "cancelled",
    "cold_event",
    "deadline",
    "extend_deadline",
    "is_warmup",
    "on_capture",
    "on_restore",
    "sources",
    "warmup_headers",
]

_LATER = {"Config": "jumpstart.config", "Service": "jumpstart.service", "sources": "jumpstart.sources"}


def __getattr__(name: str) -> Any:
    """Import what only some apps use when they do."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LATER[name])
    found = module if name == "sources" else getattr(module, name)
    globals()[name] = found
    return found
