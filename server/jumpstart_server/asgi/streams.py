"""
Sync generators as bodies of responses, without a hand-over to a thread and back for each chunk.

Starlette runs ``next()`` of a sync iterator in a thread, chunk by chunk, and forgets the generator when the client
leaves: it is closed whenever the collector finds it, in the event loop. `iterate` takes the place of Starlette's
``iterate_in_threadpool``, which FastAPI uses too:

* A thread runs the iterator ahead of the client, by `CHUNKS` chunks and `BYTES` at most, and wakes the event loop only
  when that waits for it. Chunks that could change later (a memoryview of a buffer, an object) are not run ahead of.
* The thread counts as one of the tenant's (`threads.py`). It goes back when the client is too slow (`PATIENCE`), and
  while others wait for a thread, after `SLICE`; so a stream waits for its client without a thread, and no number of
  streams starves an endpoint.
* All steps run in one copy of the request's context, so that what the generator sets there is there in its next step.
* When nobody reads any more, because the client left, an unfinished generator is closed: once, in a thread, as soon as
  it has come to its next ``yield``. Nothing can interrupt a step.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from types import ModuleType
from typing import Any

from jumpstart.deadlines import RequestTimeout
from jumpstart.imports import namespace_of, when_imported

logger = logging.getLogger(__name__)

NAME = "iterate_in_threadpool"
USES = {"iter", "anyio", "to_thread", "run_sync", "_next", "_StopIteration"}  # all that Starlette's names in its code

CHUNKS = 64  # between the thread and the event loop
BYTES = 64 * 1024  # the same; one chunk more may be longer
PATIENCE = 0.05  # seconds that a thread waits for a slow client before it goes back to the pool
SLICE = 0.02  # seconds that a stream keeps its thread while others wait for one
READER_GRACE = 0.25  # seconds from the end of the task that reads to the generator's close; another may read on


def replace_in_starlette() -> None:
    """Put `iterate` in place of Starlette's, now or when it is imported; a Starlette that looks different is left."""
    when_imported("starlette.concurrency", _replace)


def _replace(module: ModuleType) -> None:
    original = getattr(module, NAME, None)
    if original is iterate:
        return
    why = _unlike(original)
    if why:
        logger.warning("sync generators are streamed by Starlette itself, chunk by chunk in threads: %s", why)
        return
    # Those that have imported the name before have it from there; the module comes last.
    for each in list(sys.modules.values()):
        namespace = namespace_of(each)
        if namespace.get(NAME) is original:
            namespace[NAME] = iterate


def _unlike(original: Any) -> str:
    """How Starlette's function differs from the one that we know; "" when it does not."""
    if not inspect.isasyncgenfunction(original):
        return f"its {NAME} is no async generator function"
    if list(inspect.signature(original).parameters) != ["iterator"]:
        return f"its {NAME} takes other arguments"
    unknown = set(original.__code__.co_names) - USES
    return f"its {NAME} uses {', '.join(sorted(unknown))}" if unknown else ""


async def iterate(iterator: Iterable[Any]) -> AsyncIterator[Any]:
    """Iterate over a sync iterable whose steps may block. As of Starlette's ``iterate_in_threadpool``."""
    stream = _Stream(iter(iterator))
    del iterator  # its last reference is to be dropped in a thread
    chunks = stream.chunks
    in_a_row = 0
    try:
        while True:
            ended = stream.ended  # before the look at the chunks: the thread sets it after the last one
            if chunks:
                yield stream.take()
                in_a_row += 1
                if in_a_row >= CHUNKS:
                    in_a_row = 0
                    await asyncio.sleep(0)  # a quick pair of thread and client must not keep the loop for itself
            elif ended:
                break
            else:
                in_a_row = 0
                await stream.more()
        stream.raise_error()
    finally:
        stream.abandon()


class _Stream:
    """
    One iterator on its way through threads.

    No lock: each number has one side that writes it, and whoever goes to sleep first says so, then looks again.

    Attributes:
        chunks: that wait for the event loop; the thread appends, the loop takes.
        ended: there will be no more chunks than there are.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        import anyio.to_thread  # needed only where sync generators are

        from jumpstart_server.asgi.threads import turn

        self.chunks: deque[Any] = deque()
        self.ended = False
        self._iterator: Iterator[Any] | None = iterator
        self._loop = asyncio.get_running_loop()
        self._limiter: Any = anyio.to_thread.current_default_thread_limiter()
        self._turn = turn
        # Written by the thread
        self._error: BaseException | None = None
        self._context: contextvars.Context | None = None
        self._put = 0  # chunks
        self._put_bytes = 0
        self._is_fragile = False  # the last one is of a kind that may change
        self._wants_room = False
        # Written by the event loop
        self._taken = 0
        self._taken_bytes = 0
        self._used = 0  # of those taken, the reader is through with so many
        self._is_abandoned = False
        self._is_running = False  # in a thread, or about to
        self._pump: asyncio.Task[None] | None = None
        self._closer: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None
        # By both
        self._is_asleep = False  # the reader is; who wakes it takes this back
        self._room = threading.Event()
        self._wanted = asyncio.Event()

    # ------------------------------------------------------------------ the event loop's side

    def take(self) -> Any:
        """The next chunk, which is there."""
        chunk = self.chunks.popleft()
        self._used = self._taken
        self._taken += 1
        if type(chunk) is bytes or type(chunk) is str:
            self._taken_bytes += len(chunk)
        if len(self.chunks) <= CHUNKS // 2 and self._put_bytes - self._taken_bytes <= BYTES // 2:
            self._make_room()
        return chunk

    async def more(self) -> None:
        """Wait until there may be a chunk, or the end."""
        self._used = self._taken
        task = asyncio.current_task()
        if task is not self._reader:
            self._watch(task)
        if self._pump is None:
            self._pump = self._loop.create_task(self._keep_running())
        self._make_room()
        waiter = self._waiter = self._loop.create_future()
        self._is_asleep = True
        try:
            if not self.chunks and not self.ended:
                await waiter
        finally:
            self._is_asleep = False
            self._waiter = None

    def raise_error(self) -> None:
        """Raise what the iterator raised, if it did."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would be in a cycle with this frame

    def abandon(self) -> None:
        """Nobody reads any more: close the generator, if it is not at its end."""
        self._watch(None)
        if self._is_abandoned:
            return
        self._is_abandoned = True
        self._make_room()
        if not self._is_running and not self.ended and self._pump is not None:
            self._is_running = True
            self._closer = self._loop.create_task(self._run_in_thread())  # waits for no thread of the tenant's

    def _watch(self, task: asyncio.Task[Any] | None) -> None:
        """Notice the end of the task that reads: when it is cancelled between two chunks, nothing else tells us."""
        if self._reader is not None:
            self._reader.remove_done_callback(self._reader_ended)
        self._reader = task
        if task is not None:
            task.add_done_callback(self._reader_ended)

    def _reader_ended(self, task: asyncio.Task[Any]) -> None:
        self._loop.call_later(READER_GRACE, self._reader_is_gone, task)

    def _reader_is_gone(self, task: asyncio.Task[Any]) -> None:
        if self._reader is task:
            self.abandon()

    def _make_room(self) -> None:
        if self._wants_room:
            self._room.set()
        if not self._wanted.is_set():
            self._wanted.set()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _keep_running(self) -> None:
        """A task: give the iterator a thread whenever it can go on."""
        own_turn = self._turn.get()
        try:
            while not self.ended and not self._is_abandoned:
                self._wanted.clear()
                if self._is_full():
                    await self._wanted.wait()
                    continue
                self._turn.set(own_turn)  # a stream comes often, and is no closer to its end for that
                await self._limiter.acquire_on_behalf_of(self)
                try:
                    if not self._is_abandoned:
                        self._is_running = True
                        await self._run_in_thread()
                finally:
                    self._limiter.release_on_behalf_of(self)
        except asyncio.CancelledError:  # the worker ends
            self._is_abandoned = True
            self._room.set()
            raise
        except Exception as error:  # no thread to be had: the reader's to know
            self._end(error)

    async def _run_in_thread(self) -> None:
        import anyio

        try:
            await anyio.to_thread.run_sync(self._run, limiter=anyio.CapacityLimiter(1))
        except RequestTimeout as error:  # as the generator was left, and before that was noted
            self._end(error)
        self._is_running = False
        if self._is_abandoned and not self.ended:  # that came when the thread was on its way back
            await anyio.to_thread.run_sync(self._run, limiter=anyio.CapacityLimiter(1))

    # ------------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        if self._context is None:
            self._context = contextvars.copy_context()
        self._context.run(self._step_on)

    def _step_on(self) -> None:
        began = time.monotonic()
        iterator = self._iterator
        assert iterator is not None
        while True:
            if self._is_abandoned:
                self._close(iterator)
                return
            if self._is_full() and not self._wait_for_room():
                return
            try:
                chunk = next(iterator)
            except StopIteration:
                self._end(None)
                return
            except BaseException as error:
                self._end(error)
                return
            self._hand_over(chunk)
            del chunk
            if self._others_wait() and time.monotonic() - began >= SLICE:
                return

    def _hand_over(self, chunk: Any) -> None:
        self._is_fragile = type(chunk) is not bytes and type(chunk) is not str
        if not self._is_fragile:
            self._put_bytes += len(chunk)
        self._put += 1
        self.chunks.append(chunk)
        self._wake_reader()

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._iterator = None
        self.ended = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed: the worker has ended, and nobody reads
                self._is_abandoned = True

    def _is_full(self) -> bool:
        return (
            len(self.chunks) >= CHUNKS
            or self._put_bytes - self._taken_bytes >= BYTES
            or (self._is_fragile and self._used < self._put)
        )

    def _wait_for_room(self) -> bool:
        """Wait a moment for the reader; whether there is something to do now."""
        self._room.clear()
        self._wants_room = True
        try:
            if self._is_full() and not self._is_abandoned:
                self._room.wait(PATIENCE)
        finally:
            self._wants_room = False
        return self._is_abandoned or not self._is_full()

    def _others_wait(self) -> bool:
        return bool(getattr(self._limiter, "waiting", 1))

    def _close(self, iterator: Iterator[Any]) -> None:
        try:
            if isinstance(iterator, Generator):
                iterator.close()
        except BaseException:
            logger.exception("a generator raised when it was closed, since its client had left")
        self._end(RuntimeError("the task that read this stream has ended, and the generator was closed"))
