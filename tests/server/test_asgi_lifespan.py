"""What becomes of a lifespan: done, unsupported, failed at its start, in its middle or at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import pytest

from jumpstart.errors import AppLoadError
from jumpstart_server.asgi import lifespan as module
from jumpstart_server.asgi.exchange import ASGIMisuseError
from jumpstart_server.asgi.lifespan import Lifespan

Mode = Literal["auto", "on", "off"]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Any

STARTED = {"type": "lifespan.startup.complete"}
ENDED = {"type": "lifespan.shutdown.complete"}


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(module.logger, "propagate", True)
    caplog.set_level("INFO", module.logger.name)
    return caplog


def live(app: App, mode: Mode = "auto") -> Lifespan:
    """Start up, twice as the server does, and shut down."""

    async def main() -> Lifespan:
        lifespan = Lifespan(app, mode)
        async with asyncio.timeout(5):
            await lifespan.startup()
            await lifespan.startup()
            assert lifespan.is_started
            await asyncio.sleep(0)
            await lifespan.shutdown()
            await lifespan.shutdown()
        return lifespan

    return asyncio.run(main())


def test_a_life() -> None:
    story: list[Any] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        scope["state"]["db"] = "open"
        story.append((scope["type"], scope["asgi"], await receive()))
        await send(STARTED)
        story.append(await receive())
        await send(ENDED)

    lifespan = live(app, "on")
    assert (lifespan.state, lifespan.failure, lifespan.should_exit) == ({"db": "open"}, "", False)
    asgi = {"version": "3.0", "spec_version": "2.0"}
    assert story == [("lifespan", asgi, {"type": "lifespan.startup"}), {"type": "lifespan.shutdown"}]


async def knows_none(scope: Any, receive: Receive, send: Send) -> None:
    raise NotImplementedError(scope["type"])


async def returns(scope: Any, receive: Receive, send: Send) -> None:
    pass


def test_off_asks_nothing() -> None:
    assert live(knows_none, "off").failure == ""


def test_161_one_that_knows_no_lifespan_goes_on_without(log: pytest.LogCaptureFixture) -> None:
    assert live(knows_none).failure == ""
    assert "going on without it: NotImplementedError: lifespan" in log.text
    assert not [record for record in log.records if record.levelname != "INFO"]
    assert live(returns).failure == ""


def test_161_on_ends_the_boot_of_one_that_knows_none() -> None:
    with pytest.raises(AppLoadError, match=r"lifespan start-up failed\nTraceback(?s:.*)NotImplementedError: lifespan"):
        live(knows_none, "on")
    with pytest.raises(AppLoadError, match=r"returned without an answer to lifespan\.startup"):
        live(returns, "on")


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("raises", [True, False])
def test_161_a_start_up_that_says_it_failed_ends_the_boot(
    mode: Mode, raises: bool, log: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})
        if raises:
            raise LookupError("as Starlette does")

    with pytest.raises(AppLoadError, match=r"^the app's lifespan start-up failed\nno database$"):
        live(app, mode)
    assert not log.records  # it is said once, by the supervisor


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_161_a_shut_down_that_raises(mode: Mode, log: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)
        await receive()
        raise LookupError("in the shut-down")

    failure = live(app, mode).failure
    assert failure.startswith("Traceback") and failure.endswith("LookupError: in the shut-down")
    assert not log.records


@pytest.mark.parametrize("message", ["not flushed", ""])
def test_161_a_shut_down_that_says_it_failed(message: str, log: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)
        await receive()
        await send({"type": "lifespan.shutdown.failed", "message": message})
        raise LookupError("as Starlette does")

    assert live(app).failure == (message or "it gave no reason")
    assert not log.records


def test_61_a_shut_down_that_hangs_has_its_time_and_is_named() -> None:
    async def flush() -> None:
        await asyncio.Event().wait()

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)
        await receive()
        await flush()

    async def main() -> str:
        lifespan = Lifespan(app, "auto")
        await lifespan.startup()
        lifespan.end_by = asyncio.get_running_loop().time() + 0.05
        async with asyncio.timeout(5):
            await lifespan.shutdown()
        return lifespan.failure

    failure = asyncio.run(main())
    assert (
        failure.startswith("it had not ended when the time of --graceful-timeout was over\n") and "in flush" in failure
    )


def test_one_that_ends_while_it_serves_is_told_at_once_and_at_the_end(log: pytest.LogCaptureFixture) -> None:
    async def raises(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)
        raise LookupError("in the middle")

    async def says(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)
        await send({"type": "lifespan.shutdown.failed", "message": "lost the database"})

    assert live(raises).failure == "it had ended before, while the app served"
    assert "LookupError: in the middle" in log.text
    assert live(says).failure == "lost the database"
    assert "while it served\nlost the database" in log.text


def test_one_that_returns_while_it_serves_is_done(log: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)

    assert live(app, "on").failure == ""
    assert not log.records


def test_what_it_does_after_its_last_word_is_logged(log: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)
        await receive()
        await send(ENDED)
        raise LookupError("too late")

    assert live(app).failure == ""
    assert "exception at the end of the app's lifespan" in log.text


@pytest.mark.parametrize(
    "messages",
    [
        [ENDED],
        [STARTED, STARTED],
        [{"type": "http.response.start"}],
        [STARTED, {"type": "lifespan.startup.failed"}],
    ],
)
def test_a_message_out_of_place_is_the_apps_mistake(messages: list[dict[str, Any]]) -> None:
    caught: list[Exception] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        try:
            for message in messages:
                await send(message)
        except Exception as error:
            caught.append(error)
            raise

    with contextlib.suppress(AppLoadError):
        live(app, "on")
    assert isinstance(caught[0], ASGIMisuseError)
    assert "while the app's lifespan is" in str(caught[0])


def test_a_task_that_is_cancelled_is_no_failure_of_the_app() -> None:
    """The worker cancels what is left when it ends."""

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(STARTED)
        await receive()

    async def main() -> Lifespan:
        lifespan = Lifespan(app, "auto")
        await lifespan.startup()
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return lifespan

    assert asyncio.run(main()).failure == ""


def test_161_starlettes_own(log: pytest.LogCaptureFixture) -> None:
    from starlette.applications import Starlette

    def app(where: str) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[dict[str, str]]:
            if where == "start":
                raise LookupError("at the start")
            yield {"name": "value"}
            if where == "end":
                raise LookupError("at the end")

        return Starlette(lifespan=lifespan)

    assert live(app("")).state == {"name": "value"}
    with pytest.raises(AppLoadError, match="LookupError: at the start"):
        live(app("start"))
    failure = live(app("end")).failure
    assert failure.count("LookupError: at the end") == 1 and "Traceback" in failure
    assert not log.records
