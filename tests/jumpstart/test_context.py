"""Which request code runs for, in threads and tasks, and what it counts against it."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from jumpstart.context import MAX_EVENTS, RequestContext, cold_event, current, is_warmup, request_context


def test_outside_a_request_nothing_is_a_warmup_and_nothing_is_counted() -> None:
    assert current() is None
    assert is_warmup() is False
    cold_event("import", "decimal")


def test_inside_a_request_cold_work_is_counted_against_it() -> None:
    with request_context(RequestContext()) as context:
        assert current() is context
        cold_event("import", "decimal")
        cold_event("template", "cart.html")
        assert is_warmup() is False
    assert context.events == [("import", "decimal"), ("template", "cart.html")]
    assert current() is None


def test_a_warmup_knows_that_it_is_one() -> None:
    with request_context(RequestContext(warmup=True)):
        assert is_warmup() is True


def test_a_request_within_a_request_has_books_of_its_own() -> None:
    with request_context(RequestContext()) as outer:
        with request_context(RequestContext(warmup=True)) as inner:
            cold_event("import", "inner")
            assert is_warmup()
        assert not is_warmup()
        cold_event("import", "outer")
    assert (outer.events, inner.events) == ([("import", "outer")], [("import", "inner")])


def test_a_request_that_raises_is_left_too() -> None:
    with pytest.raises(ValueError):
        with request_context(RequestContext()):
            raise ValueError
    assert current() is None


def test_a_request_that_never_stops_costs_bounded_memory() -> None:
    with request_context(RequestContext()) as context:
        for number in range(MAX_EVENTS + 10):
            cold_event("import", str(number))
    assert len(context.events) == MAX_EVENTS


def test_tasks_and_threads_that_copy_the_context_belong_to_the_request() -> None:
    async def main() -> None:
        async def other() -> None:
            assert current() is None
            await asyncio.sleep(0)
            assert current() is None

        async def inner(name: str) -> None:
            await asyncio.sleep(0)
            cold_event("task", name)

        stranger = asyncio.create_task(other())
        with request_context(RequestContext()) as context:
            await asyncio.gather(inner("a"), inner("b"))
            await asyncio.to_thread(cold_event, "thread", "c")
        await stranger
        assert context.events == [("task", "a"), ("task", "b"), ("thread", "c")]

    asyncio.run(main())


def test_a_plain_thread_belongs_to_no_request() -> None:
    seen: list[RequestContext | None] = []
    with request_context(RequestContext()) as context:
        threads = [
            threading.Thread(target=lambda: seen.append(current())),
            threading.Thread(target=contextvars.copy_context().run, args=(lambda: seen.append(current()),)),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert seen == [None, context]
