"""What an app may import, and what that costs it."""

from __future__ import annotations

import subprocess
import sys

import jumpstart


def test_every_public_name_is_there_and_sorted() -> None:
    assert sorted(jumpstart.__all__) == jumpstart.__all__
    for name in jumpstart.__all__:
        assert getattr(jumpstart, name) is not None


def test_importing_jumpstart_stays_cheap() -> None:
    """An app imports it in scripts and tests too: no server, no event loop, nothing heavy."""
    code = "import sys, jumpstart; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {"cloudpickle", "cryptography", "diskcache", "asyncio", "uvicorn", "starlette", "httpx", "click", "ssl"}
    assert not loaded & heavy
    assert not {name for name in loaded if name.startswith(("jumpstart_server", "jumpstart_warmup"))}


def test_it_works_without_the_server() -> None:
    calls = []

    @jumpstart.cached(ttl=60)
    def price(region: str) -> int:
        calls.append(region)
        return len(region)

    assert price("eu") == price("eu") == 2
    assert calls == ["eu"]
    assert jumpstart.is_warmup() is False
    jumpstart.cold_event("template", "nobody counts it")
