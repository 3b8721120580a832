"""
Warm another host up over HTTP, until it is warm or the budget ends: what ``jumpstart warm`` does before a rollout.

Every request has a connection of its own. Kept-alive ones would be faster, but each stays with the worker that accepted
it, and the other workers of the host would stay cold.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from jumpstart.errors import ConfigError
from jumpstart_warmup.corpus import MARKER_HEADER, WarmRequest, encodable
from jumpstart_warmup.settle import Round, Verdict, judge, percentile

if TYPE_CHECKING:
    import httpx

Clock = Callable[[], float]

BODY_LIMIT_BYTES = 1024 * 1024  # of a response; after that it is closed and counts
BODY_LIMIT_S = 5.0  # seconds for a response's body; after that it is closed and counts
FIRST_PAUSE_S = 0.1  # seconds until a host that refused, or failed, is tried again; doubles
LONGEST_PAUSE_S = 1.0


class Progress(msgspec.Struct, frozen=True):
    """
    How far a warm-up is; told after every round and every time that the host could not be reached.

    Attributes:
        rounds: completed so far.
        requests: sent in the last round.
        errors: of these.
        p50_ms: median of the last round in milliseconds, None when nothing was answered.
        p95_ms: its 95th percentile.
        reason: why the host does not count as warm yet, or that it does.
    """

    rounds: int
    requests: int
    errors: int
    p50_ms: float | None
    p95_ms: float | None
    elapsed_s: float
    reason: str


class RequestWarmth(msgspec.Struct, frozen=True):
    """
    One request of the list: its latency in milliseconds at first and at last.

    Attributes:
        status: the last one; None when there never was an answer.
        error: what was wrong with the last answer, None when nothing was.
    """

    method: str
    path: str
    first_ms: float | None
    last_ms: float | None
    status: int | None
    error: str | None


class HostWarmth(msgspec.Struct, frozen=True):
    """
    What a warm-up of a host came to.

    Attributes:
        warm: whether it may take traffic.
        reason: for people, why (not).
        first_ms: median latency of the first round.
        settled_ms: median latency of the last round.
    """

    url: str
    warm: bool
    reason: str
    rounds: int
    requests: tuple[RequestWarmth, ...]
    elapsed_s: float
    first_ms: float | None
    settled_ms: float | None


class _Answer(msgspec.Struct):
    index: int
    latency_s: float | None
    status: int | None
    error: str | None
    unreachable: bool = False
    hopeless: bool = False  # waiting will not mend it
    cut: bool = False  # by the end of the budget, which says nothing about the host


def warm_host(
    url: str,
    requests: Sequence[WarmRequest],
    *,
    budget_s: float,
    concurrency: int = 4,
    timeout_s: float = 30.0,
    verify: bool | Path = True,
    clock: Clock = time.monotonic,
    progress: Callable[[Progress], None] | None = None,
) -> HostWarmth:
    """
    Send all *requests*, each `repeat` times, in rounds until `jumpstart_warmup.settle` calls the host warm.

    A host that cannot be reached yet is waited for, and failed rounds are repeated, within the budget. When it ends,
    requests that still run are given up: the call takes *budget_s* seconds at most.
    Call it where no event loop runs. Proxy settings of the environment are not used: the host itself is meant.

    Args:
        url: ``http://host:port``, with a path prefix if need be, or ``unix:/path/of/socket``.
        timeout_s: for one request; a body that is longer than 1 MiB or 5 s is left and counts.
        verify: whether to check certificates, or a file of certificates to trust.
        progress: called in this thread; what it raises ends the warm-up.

    Raises:
        ConfigError: the URL is none, there are no requests, or the certificates cannot be read.
    """
    if not requests:
        raise ConfigError("there are no requests to warm the host up with")
    base, socket_path = parse_url(url)
    context = ssl_context(verify) if base.startswith("https:") else False
    work = _Warming(url, base, socket_path, requests, budget_s, concurrency, timeout_s, context, clock, progress)
    return asyncio.run(work.run())


def parse_url(url: str) -> tuple[str, str | None]:
    """
    Return the base URL without a trailing slash, and the socket's path.

    Raises:
        ConfigError: *url* is none.
    """
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        path = "/" + path.lstrip("/") if path.startswith("/") else path
        if not path:
            raise ConfigError(f"{url!r} names no socket; write unix:/path/of/socket")
        return "http://localhost", path
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no address; write http://host:port, https://host:port or unix:/path/of/socket")
    return url.rstrip("/"), None


def ssl_context(verify: bool | Path) -> ssl.SSLContext:
    """For *verify* as in `warm_host`. Raises `ConfigError` when the certificates cannot be read."""
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, Path) else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{verify}: cannot be read as certificates: {error}") from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Warming:
    """One call of `warm_host`."""

    def __init__(
        self,
        url: str,
        base: str,
        socket_path: str | None,
        requests: Sequence[WarmRequest],
        budget_s: float,
        concurrency: int,
        timeout_s: float,
        verify: ssl.SSLContext | bool,
        clock: Clock,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._url = url
        self._base = base
        self._socket_path = socket_path
        self._requests = requests
        self._sends = [index for index, request in enumerate(requests) for _ in range(request.repeat)]
        self._budget_s = budget_s
        self._concurrency = max(concurrency, 1)
        self._timeout_s = timeout_s
        self._verify = verify
        self._clock = clock
        self._progress = progress
        self._started = clock()
        self._rounds: list[Round] = []
        self._first: dict[int, float] = {}
        self._last: dict[int, _Answer] = {}
        self._last_ms: dict[int, float] = {}
        self._trouble: str | None = None  # of the last round

    async def run(self) -> HostWarmth:
        import httpx  # 60 ms that only this function's callers should pay

        cookies = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))  # each request stands for another client
        transport = httpx.AsyncHTTPTransport(
            verify=self._verify,
            uds=self._socket_path,
            limits=httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=0),
        )
        async with httpx.AsyncClient(
            transport=transport,
            timeout=self._timeout_s,
            trust_env=False,
            cookies=cookies,
            headers={"user-agent": "jumpstart-warm"},
            event_hooks={"response": [_forget_location]},
        ) as client:
            return await self._warm(client)

    async def _warm(self, client: httpx.AsyncClient) -> HostWarmth:
        verdict = judge(self._rounds)
        pause_s = FIRST_PAUSE_S
        while self._left_s() > 0:
            answers = await self._round(client)
            hopeless = next((answer for answer in answers if answer.hopeless), None)
            if hopeless is not None:
                return self._result(Verdict(False, hopeless.error or "", verdict.first_ms, verdict.settled_ms))
            self._trouble = self._describe_trouble(answers)
            complete = len(answers) == len(self._sends)
            if complete and not all(answer.unreachable for answer in answers):
                latencies = tuple(answer.latency_s for answer in answers if answer.latency_s is not None)
                errors = sum(answer.error is not None for answer in answers)
                self._rounds.append(Round(latencies, errors))
                verdict = judge(self._rounds)
            self._tell(answers, verdict)
            if complete and verdict.settled and self._trouble is None:
                return self._result(verdict)
            if self._trouble is None:
                pause_s = FIRST_PAUSE_S
                continue
            await asyncio.sleep(max(min(pause_s, self._left_s()), 0))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        reason = f"the budget of {self._budget_s:g} s ended before the host was warm: {self._trouble or verdict.reason}"
        return self._result(Verdict(False, reason, verdict.first_ms, verdict.settled_ms))

    async def _round(self, client: httpx.AsyncClient) -> list[_Answer]:
        """Send everything once; fewer answers than sends mean that the budget or an unreachable host ended it."""
        queue = iter(self._sends)
        answers: list[_Answer] = []
        stop = False

        async def sender() -> None:
            nonlocal stop
            for index in queue:
                if stop or self._left_s() <= 0:
                    return
                answer = await self._send(client, index)
                self._note(answer)
                answers.append(answer)
                stop = stop or answer.unreachable

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(self._sends))):
                group.create_task(sender())
        return answers

    async def _send(self, client: httpx.AsyncClient, index: int) -> _Answer:
        import httpx

        request = self._requests[index]
        prefix = httpx.URL(self._base)
        path = prefix.raw_path.decode("ascii").rstrip("/") + request.path
        headers = [*request.headers, (MARKER_HEADER, "1"), ("connection", "close")]
        begun = self._clock()
        left_s = max(self._left_s(), 0)
        try:
            async with asyncio.timeout(min(self._timeout_s, left_s)):
                built = client.build_request(
                    request.method,
                    prefix.copy_with(raw_path=path.encode("ascii")),
                    headers=headers,
                    content=request.body or None,
                )
                response = await client.send(built, stream=True)
                try:
                    answered = self._clock()
                    whole = await _read_some(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            if left_s < self._timeout_s:
                # Cut by the budget's end: how long it would have taken nobody knows, and other answers say more.
                return _Answer(index, None, None, f"took longer than the budget's last {left_s:.3g} s", cut=True)
            return _Answer(index, None, None, f"took longer than {self._timeout_s:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            certificate = _cause(error, ssl.SSLError)
            if certificate is not None:
                text = encodable(f"cannot speak TLS with {self._url}: {certificate}")
                return _Answer(index, None, None, text, hopeless=True)
            return _Answer(index, None, None, encodable(_describe_connect(error, self._url)), unreachable=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _Answer(index, None, None, encodable(f"{type(error).__name__}: {error}"))
        # A stream that was left says nothing by its length; its first byte does.
        latency_s = (self._clock() if whole else answered) - begun
        status = response.status_code
        error_text = None if request.is_success(status) else request.complaint(status)
        return _Answer(index, latency_s, status, error_text)

    def _note(self, answer: _Answer) -> None:
        if not answer.cut or answer.index not in self._last:
            self._last[answer.index] = answer
        if answer.latency_s is not None:
            self._first.setdefault(answer.index, answer.latency_s * 1000)
            self._last_ms[answer.index] = answer.latency_s * 1000

    def _describe_trouble(self, answers: list[_Answer]) -> str | None:
        for answer in sorted(answers, key=lambda answer: answer.cut):
            if answer.unreachable:
                return answer.error
            if answer.cut and self._trouble is not None:
                return self._trouble  # of the round before; it says more
            if answer.error is not None:
                request = self._requests[answer.index]
                return f"{request.method} {request.path} {answer.error}"
        return None

    def _left_s(self) -> float:
        return self._budget_s - (self._clock() - self._started)

    def _tell(self, answers: list[_Answer], verdict: Verdict) -> None:
        if self._progress is None:
            return
        latencies = [answer.latency_s for answer in answers if answer.latency_s is not None]
        self._progress(
            Progress(
                rounds=len(self._rounds),
                requests=len(answers),
                errors=sum(answer.error is not None for answer in answers),
                p50_ms=percentile(latencies, 0.5) * 1000 if latencies else None,
                p95_ms=percentile(latencies, 0.95) * 1000 if latencies else None,
                elapsed_s=self._clock() - self._started,
                reason=self._trouble or verdict.reason,
            )
        )

    def _result(self, verdict: Verdict) -> HostWarmth:
        rows = []
        for index, request in enumerate(self._requests):
            last = self._last.get(index)
            rows.append(
                RequestWarmth(
                    request.method,
                    request.path,
                    self._first.get(index),
                    self._last_ms.get(index),
                    last.status if last else None,
                    last.error if last else None,
                )
            )
        return HostWarmth(
            url=encodable(self._url),
            warm=verdict.settled,
            reason=verdict.reason,
            rounds=len(self._rounds),
            requests=tuple(rows),
            elapsed_s=self._clock() - self._started,
            first_ms=verdict.first_ms,
            settled_ms=verdict.settled_ms,
        )


async def _forget_location(response: httpx.Response) -> None:
    """Redirects are answers here, not followed; httpx would call one to a broken address an error all the same."""
    response.headers.pop("location", None)


async def _read_some(response: httpx.Response) -> bool:
    """Read the body up to the limits; return whether that was all of it."""
    size = 0
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for chunk in response.aiter_raw():
                size += len(chunk)
                if size >= BODY_LIMIT_BYTES:
                    return False
    except TimeoutError:
        return False
    return True


def _cause(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, kind):
        seen = seen.__cause__ or seen.__context__
    return seen


def _describe_connect(error: Exception, url: str) -> str:
    if _cause(error, ConnectionRefusedError) is not None or "refused" in str(error):
        return f"connection refused by {url}"
    if _cause(error, FileNotFoundError) is not None:
        return f"connection refused by {url}: there is no such socket"
    return f"cannot connect to {url}: {error or type(error).__name__}"
