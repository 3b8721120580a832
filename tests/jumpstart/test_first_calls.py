"""First executions of functions, put to the request that met them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

from jumpstart import first_calls
from jumpstart.context import RequestContext, request_context

needs_monitoring = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
monitoring: Any = getattr(sys, "monitoring", None)


@pytest.fixture
def watching() -> Iterator[None]:
    assert first_calls.start()
    yield
    first_calls.stop()


def names(request: RequestContext) -> list[str]:
    return [code.co_name for code in request.first_calls or () if code.co_filename == "app.py"]


def app(source: str) -> dict[str, Any]:
    """Code that nobody has run."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "app.py", "exec"), namespace)
    return namespace


@needs_monitoring
@pytest.mark.usefixtures("watching")
def test_each_function_is_put_to_the_first_request_that_ran_it() -> None:
    code = app("def one():\n    return two()\ndef two():\n    return [n for n in gen()]\ndef gen():\n    yield 1")
    first, second = RequestContext(), RequestContext()
    with request_context(first):
        code["one"]()
    with request_context(second):
        code["one"]()
    assert names(first) == ["one", "two", "gen"]
    assert second.first_calls is None


@needs_monitoring
@pytest.mark.usefixtures("watching")
def test_what_ran_before_is_not_new_and_our_own_code_is_not_the_apps() -> None:
    code = app("def early(): pass\ndef late(): pass")
    code["early"]()
    request = RequestContext()
    with request_context(request):
        code["early"]()
        code["late"]()
        first_calls.name_of(code["late"].__code__)
    assert names(request) == ["late"]
    assert "name_of" not in [each.co_name for each in request.first_calls or ()]


@needs_monitoring
@pytest.mark.usefixtures("watching")
def test_a_thread_of_the_request_counts_for_it() -> None:
    code, request = app("def job(): pass"), RequestContext()
    with request_context(request):
        thread = threading.Thread(target=copy_context().run, args=(code["job"],))
    thread.start()
    thread.join()
    assert names(request) == ["job"]


@needs_monitoring
@pytest.mark.usefixtures("watching")
def test_a_fork_knows_what_ran_before_it() -> None:
    code = app("def known(): pass\ndef new(): pass")
    code["known"]()
    pid = os.fork()
    if not pid:
        request = RequestContext()
        with request_context(request):
            code["known"]()
            code["new"]()
        os._exit(0 if names(request) == ["new"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@needs_monitoring
def test_who_holds_a_tool_id_keeps_it_and_ours_are_free_after() -> None:
    monitoring.use_tool_id(first_calls.TOOL_IDS[0], "a debugger")
    try:
        assert first_calls.start()
        assert monitoring.get_tool(first_calls.TOOL_IDS[0]) == "a debugger"
        code, request = app("def there(): pass"), RequestContext()
        with request_context(request):
            code["there"]()
        assert names(request) == ["there"]
        first_calls.stop()
        first_calls.stop()
        assert monitoring.get_tool(first_calls.TOOL_IDS[1]) is None
    finally:
        monitoring.free_tool_id(first_calls.TOOL_IDS[0])


@needs_monitoring
def test_without_a_free_tool_id_it_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    for tool in first_calls.TOOL_IDS:
        monitoring.use_tool_id(tool, f"tool {tool}")
    try:
        assert not first_calls.start()
        assert "tool 4, tool 3 hold the ids" in caplog.text
    finally:
        for tool in first_calls.TOOL_IDS:
            monitoring.free_tool_id(tool)


@needs_monitoring
def test_the_end_of_the_interpreter_is_as_quiet_as_ever() -> None:
    script = """
from jumpstart import first_calls
assert first_calls.start()
class Last:
    def __del__(self):
        print("gone")
first_calls.last = Last()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("gone\n", "")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring is there")
def test_an_older_python_says_what_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    assert not first_calls.start()
    assert "needs Python 3.12" in caplog.text
    first_calls.stop()


def test_a_function_is_named_as_people_look_for_it() -> None:
    line = app.__code__.co_firstlineno
    assert first_calls.name_of(app.__code__) == f"jumpstart/test_first_calls.py:{line} app"
