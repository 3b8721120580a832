"""
The app's lifespan: its start-up, its shut-down, and in words what went wrong there.

uvicorn's own does not tell an app that fails in its shut-down from one that knows no lifespan, and logs in every worker
what the supervisor says once.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import traceback
from typing import Any, Literal

from jumpstart.errors import AppLoadError
from jumpstart_server.asgi.exchange import App, ASGIMisuseError, Message
from jumpstart_server.asgi.stacks import stack_of_task

logger = logging.getLogger(__name__)


class _Phase(enum.Enum):
    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    OVER = "over"  # it has said its last word, or never knew one


class Lifespan:
    """
    One app's lifespan in one worker.

    Attributes:
        state: what the app puts there is copied into the scope of each request.
        is_started: the app's start-up is done.
        failure: why its shut-down failed, for the log; "" when it did not.
        end_by: until when it may take, in the event loop's time.
        should_exit: uvicorn's server asks for it. A start-up that failed is an exception here.
    """

    should_exit = False

    def __init__(self, app: App, mode: Literal["auto", "on", "off"]) -> None:
        """Args: mode: as of ``--lifespan``."""
        self.state: dict[str, Any] = {}
        self.is_started = False
        self.failure = ""
        self.end_by = math.inf
        self._app = app
        self._mode = mode
        self._phase = _Phase.NEW
        self._refusal: str | None = None  # why the start-up failed
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._answered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def startup(self) -> None:
        """
        Wait for the app's start-up. The second call returns at once: uvicorn's server makes it.

        Raises:
            AppLoadError: the app says that it failed; or with ``--lifespan on`` raised, or gave no answer.
        """
        if self.is_started:
            return
        if self._mode != "off":
            self._phase = _Phase.STARTING
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._incoming.put_nowait({"type": "lifespan.startup"})
            await self._answered.wait()
            self._answered.clear()
            if self._refusal is not None:
                raise AppLoadError(f"the app's lifespan start-up failed\n{self._refusal}".rstrip())
        self.is_started = True

    async def shutdown(self) -> None:
        """
        Wait for the app's shut-down, if its start-up was done, but not beyond `end_by`.

        What goes wrong is in `failure`. Raises nothing.
        """
        if self._phase is not _Phase.SERVING:
            return
        self._phase = _Phase.STOPPING
        self._incoming.put_nowait({"type": "lifespan.shutdown"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if self.end_by == math.inf else self.end_by):
                await self._answered.wait()
                return
        stack = stack_of_task(self._task) if self._task is not None else ""
        self.failure = f"it had not ended when the time of --graceful-timeout was over\n{stack}".rstrip()
        self._phase = _Phase.OVER

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await self._app(scope, self._receive, self._send)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self._task is not None and self._task.cancelling():
                raise
            self._raised(error)
        else:
            if self._phase is _Phase.STARTING and self._mode == "on":
                self._refusal = "the app returned without an answer to lifespan.startup"
        finally:
            self._phase = _Phase.OVER
            self._answered.set()

    def _raised(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error)).rstrip()
        if self._phase is _Phase.STARTING:
            if self._mode == "on":
                self._refusal = text
            else:
                # Most likely it knows no lifespan; if it does, this line says what became of it.
                last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
                logger.info("the app appears not to support ASGI lifespan, going on without it: %s", last)
        elif self._phase is _Phase.STOPPING:
            self.failure = text
        elif self._phase is _Phase.SERVING:
            logger.error("the app's lifespan ended while it served", exc_info=error)
            self.failure = "it had ended before, while the app served"
        elif not self._refusal and not self.failure:  # those have said it themselves, and raise as well
            logger.error("exception at the end of the app's lifespan", exc_info=error)

    async def _receive(self) -> Message:
        return await self._incoming.get()

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        text = str(message.get("message", ""))
        if kind == "lifespan.startup.complete" and self._phase is _Phase.STARTING:
            self._phase = _Phase.SERVING
            self._answered.set()
        elif kind == "lifespan.startup.failed" and self._phase is _Phase.STARTING:
            self._phase = _Phase.OVER
            self._refusal = text
            self._answered.set()
        elif kind == "lifespan.shutdown.complete" and self._phase is _Phase.STOPPING:
            self._phase = _Phase.OVER
            self._answered.set()
        elif kind == "lifespan.shutdown.failed" and self._phase in (_Phase.STOPPING, _Phase.SERVING):
            if self._phase is _Phase.SERVING:
                logger.error("the app's lifespan ended while it served\n%s", text)
            self.failure = text or "it gave no reason"
            self._phase = _Phase.OVER
            self._answered.set()
        else:
            raise ASGIMisuseError(f"{kind!r} while the app's lifespan is {self._phase.value}")
