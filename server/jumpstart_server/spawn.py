"""Starting the processes that hold the app: always a fresh interpreter, which then reads what it is to be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def start_interpreter(control: socket.socket, label: str) -> int:
    """
    Start ``python -m jumpstart_server.mold`` with *control* as its channel, and give *control* away. Return the pid.

    Inherited are the environment, the flags of this interpreter, and descriptors that are marked inheritable.

    Args:
        label: shown by ps; nothing else.
    """
    control.set_inheritable(True)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    # -P: a folder of the user's with a file called logging.py must not come first on sys.path.
    safe_path = [] if "-P" in flags else ["-P"]
    words = [sys.executable, *flags, *safe_path, "-m", "jumpstart_server.mold", str(control.fileno()), label]
    try:
        return os.posix_spawn(sys.executable, words, os.environ)
    finally:
        control.close()
