"""
Jumpstart: an application server for Python web apps that boots warm.

What an app may use is in `__all__`; everything else may change. All of it works without the server, in a script or a
test, and importing it stays cheap.
"""

from jumpstart._version import __version__
from jumpstart.caches import cached
from jumpstart.context import cold_event, is_warmup
from jumpstart.deadlines import RequestTimeout, cancelled, deadline, extend_deadline
from jumpstart.errors import JumpstartError
from jumpstart.hooks import on_capture, on_restore
from jumpstart.recorder import Recorder
from jumpstart.records import Reason, Record, Tally

__all__ = [
    "JumpstartError",
    "Reason",
    "Record",
    "Recorder",
    "RequestTimeout",
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
]
