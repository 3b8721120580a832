"""
Requests that a worker asks of its own app, in its own process: warm-up, those of a build, golden ones.

They are answered to nobody. Shadow requests, which run beside real ones, are `shadow_runner.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from jumpstart.guard import EffectGuard
from jumpstart.profile import Golden
from jumpstart.target import Interface
from jumpstart_server.settings import TenantSettings
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.golden import Listener, settled
from jumpstart_warmup.inprocess import TIMEOUT_S, GuardOf, Outcome, WarmupResult, WSGIWarmup, guard_of, warm_asgi
from jumpstart_warmup.shapes import Answer

T = TypeVar("T")

GOLDEN_BUDGET = 10.0  # seconds for golden requests in one process
GOLDEN_SHARE = 0.5  # of the time that there is for one answer: what hangs does not leave the others without one
PATIENCE = 1.0  # seconds beyond the budget that a handler has which looks at its deadline


class AppDriver:
    """
    Drives one app.

    Attributes:
        state: of its lifespan, once that has begun.
    """

    def __init__(self, app: Any, interface: Interface, tenant: TenantSettings, guard: EffectGuard | None) -> None:
        """*app* is ASGI 3 unless *interface* is WSGI."""
        self.state: dict[str, Any] = {}
        self._app = app
        self._is_wsgi = interface == "wsgi"
        self._tenant = tenant
        self._guard = guard_of(guard) if guard is not None else None

    async def run(
        self,
        requests: Sequence[WarmRequest],
        budget_s: float,
        on_result: Callable[[Outcome], None],
        *,
        shadows: Sequence[WarmRequest] = (),
    ) -> WarmupResult:
        """
        Run *requests* one after the other; failures are counted, and what has no time is not run.

        *shadows*: those that are shadow requests, and guarded as such.
        """
        return await self._run(self._app, requests, budget_s, on_result, frozenset(shadows))

    async def answers(self, requests: Sequence[WarmRequest]) -> list[Answer]:
        """How the app answers golden *requests*, each asked as often as it says."""
        listener = Listener()
        until = time.monotonic() + GOLDEN_BUDGET
        for turn in range(max((request.repeat for request in requests), default=0)):
            await self._listen(listener, [each for each in requests if each.repeat > turn], until)
        return listener.answers()

    async def golden(self, requests: Sequence[WarmRequest], *, beside_others: bool) -> list[Golden]:
        """
        How the app answers *requests*: of those that it answers alike when asked twice. None with ``--no-replay``.

        *beside_others*: somebody waits for other requests of this process. Half of the time is theirs, and these are
        guarded as shadow requests are; there are none in a WSGI app that has one thread, since it may be made for one.
        """
        if not self._tenant.replay or (beside_others and self._is_wsgi and self._tenant.threads == 1):
            return []
        first, second = Listener(), Listener()
        began = time.monotonic()
        await self._listen(first, requests, began + GOLDEN_BUDGET / 2, beside_others=beside_others)
        again = [request for request in requests if request.name in first.answered]
        await self._listen(second, again, began + GOLDEN_BUDGET, beside_others=beside_others)
        return await on_own_thread("golden", lambda: settled(first.answers(), second.answers()))

    async def _listen(
        self, listener: Listener, requests: Sequence[WarmRequest], until: float, *, beside_others: bool = False
    ) -> None:
        """Ask each of *requests* once, until that moment. What there was no time for has no answer."""
        app = (listener.wsgi if self._is_wsgi else listener.asgi)(self._app)
        full = (until - time.monotonic()) * GOLDEN_SHARE
        for request in requests:
            once = msgspec.structs.replace(request, repeat=1)
            began = time.monotonic()
            if began >= until:
                break
            seconds = min(until - began, full)
            shadows = frozenset([once]) if beside_others else frozenset()

            def hear(outcome: Outcome, seconds: float = seconds) -> None:
                is_late = outcome.is_late or outcome.elapsed_s >= seconds
                if is_late and seconds < full:
                    listener.forget()
                else:
                    listener.heard(outcome, is_late=is_late)

            await self._run(app, [once], seconds, hear, shadows)
            now = time.monotonic()
            await asyncio.sleep(max(min(now - began, until - now), 0) if beside_others else 0)

    def _guard_among(self, shadows: frozenset[WarmRequest]) -> GuardOf | None:
        guard = self._guard
        if guard is None or self._tenant.guard == "all":
            return guard
        return lambda request: guard(request) if request in shadows else None

    async def _run(
        self,
        app: Any,
        requests: Sequence[WarmRequest],
        budget_s: float,
        on_result: Callable[[Outcome], None],
        shadows: frozenset[WarmRequest] = frozenset(),
    ) -> WarmupResult:
        if not requests:
            return WarmupResult()  # and no thread is started for nothing
        tenant = self._tenant
        how: dict[str, Any] = {
            "budget_s": budget_s,
            "timeout_s": min(TIMEOUT_S, tenant.timeout or TIMEOUT_S),
            "server": (tenant.warmup_host, 80),
            "root_path": tenant.root_path,
            "on_result": on_result,
            "guard": self._guard_among(shadows),
        }
        if not self._is_wsgi:
            return await warm_asgi(app, requests, state=self.state, **how)
        warmup = WSGIWarmup(app, requests, **how)
        # A thread of its own, not of the pool: a handler that blocks keeps it, and the boot goes on without it.
        with contextlib.suppress(TimeoutError, KeyboardInterrupt):  # the latter raised by the app; no Ctrl-C comes here
            async with asyncio.timeout(budget_s + PATIENCE if budget_s < math.inf else None):
                await on_own_thread("warmup", warmup.run)
        return warmup.leave()


async def on_own_thread(name: str, work: Callable[[], T]) -> T:
    """Do *work* on a thread that is made for it: the default executor is the app's, and may be full."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # long after: the loop has ended, and nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"jumpstart-{name}", daemon=True).start()
    return await done
