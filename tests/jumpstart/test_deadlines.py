"""What a handler is told of its time, with and without a server around it."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jumpstart
from jumpstart.context import RequestContext, request_context


def test_without_a_server_there_is_no_limit() -> None:
    assert jumpstart.deadline() is None
    assert jumpstart.extend_deadline(5) is None
    assert jumpstart.cancelled() is False


def test_a_request_without_a_limit_keeps_none() -> None:
    with request_context(RequestContext()) as context:
        assert jumpstart.deadline() is None
        assert jumpstart.extend_deadline(5) is None
        assert context.expires == math.inf
        assert not jumpstart.cancelled()


def test_the_time_left_shrinks_to_0_and_then_nobody_waits() -> None:
    with request_context(RequestContext(expires=time.monotonic() + 60)):
        left = jumpstart.deadline()
        assert left is not None and 50 < left <= 60
        assert not jumpstart.cancelled()
    with request_context(RequestContext(expires=time.monotonic() - 1)):
        assert jumpstart.deadline() == 0
        assert jumpstart.cancelled()


def test_a_client_that_left_is_a_reason_to_stop() -> None:
    with request_context(RequestContext()) as context:
        context.has_left = lambda: False
        assert not jumpstart.cancelled()
        context.has_left = lambda: True
        assert jumpstart.cancelled()


def test_a_stopped_request_is_over_whatever_its_clock_says() -> None:
    with request_context(RequestContext(expires=time.monotonic() + 60)) as context:
        context.is_stopped = True
        assert jumpstart.cancelled()


@given(left=st.floats(0, 1e4), room=st.floats(0, 1e4), asked=st.floats(0, 1e5))
def test_an_extension_never_shortens_and_never_passes_the_limit(left: float, room: float, asked: float) -> None:
    now = time.monotonic()
    context = RequestContext(expires=now + left, latest=now + left + room)
    before = context.expires
    with request_context(context):
        jumpstart.extend_deadline(asked)
    assert before <= context.expires <= max(before, context.latest)
    if asked <= left + room:
        assert context.expires >= min(now + asked, context.latest)


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan])
def test_what_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        jumpstart.extend_deadline(seconds)


def test_except_exception_does_not_swallow_a_timeout() -> None:
    assert not issubclass(jumpstart.RequestTimeout, Exception)
