"""The benchmarks' own virtual environment: this project and the servers beside it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
FOLDER = HERE / ".venv"
PYTHON = FOLDER / "bin" / "python"
REQUIREMENTS = HERE / "requirements.txt"
STAMP = FOLDER / ".installed"
INSTALL_S = 1200.0


def inside() -> bool:
    return Path(sys.prefix).resolve() == FOLDER.resolve()


def programs() -> Path:
    """Where the running environment has its commands."""
    return Path(sysconfig.get_path("scripts"))


def prepare() -> None:
    """
    Make it, or bring it up to date. Does nothing when nothing changed since.

    The project is installed as a link to this folder: what is measured is what the folder holds.

    Raises:
        subprocess.SubprocessError: an install step failed; it has printed why.
    """
    wanted = _digest()
    if PYTHON.exists() and STAMP.is_file() and STAMP.read_text("utf-8").strip() == wanted:
        return
    print(f"benchmarks: installing the servers into {FOLDER.relative_to(ROOT)}", file=sys.stderr, flush=True)
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True, timeout=INSTALL_S)
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    what = ["--editable", str(ROOT), "--requirement", str(REQUIREMENTS)]
    subprocess.run([*install, *what], check=True, timeout=INSTALL_S)
    STAMP.write_text(wanted + "\n", "utf-8")


def enter(arguments: list[str]) -> None:
    """Go on as the environment's own interpreter. Does not return."""
    os.chdir(ROOT)
    os.execv(PYTHON, [str(PYTHON), "-m", "benchmarks", *arguments])


def _digest() -> str:
    parts = [REQUIREMENTS.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), str(ROOT.resolve()).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
