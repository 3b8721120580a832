"""
One request and its response: PEP 3333 to the letter, on the thread that runs the handler.

Bytes go to the socket from here, without a queue: a slow reader blocks this thread, and memory stays as it is.

When the time of a request is over, the keeper *seizes* its exchange (`Exchange.seize`): from then on the handler cannot
send, and it is the keeper who answers, while the handler still runs. Two threads then know one socket, and there is no
lock in the way of a send. Instead each says what it is about to do before it looks at what the other does: the handler
sets `in_send`, `in_receive` or `_over` and looks at `seized`; the keeper sets `seized` and looks at those three.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from jumpstart.context import RequestContext, enter
from jumpstart.deadlines import RequestTimeout
from jumpstart.errors import JumpstartError
from jumpstart_server import forks
from jumpstart_server.app_faults import warn_of_dropped
from jumpstart_server.envelope.interrupt import Interrupts
from jumpstart_server.http1 import (
    DefaultFields,
    ParseError,
    RequestHead,
    ResponseError,
    ResponseFramer,
    encode_fields,
    encode_status,
    error_response,
)
from jumpstart_server.refusals import body_size
from jumpstart_server.wsgi.body import RequestBodyError
from jumpstart_server.wsgi.connection import PROBE_TIME
from jumpstart_server.wsgi.environ import Environ
from jumpstart_server.wsgi.files import FileWrapper
from jumpstart_warmup.observe import CLIENT_CLOSED
from jumpstart_warmup.routes import werkzeug_rule

if TYPE_CHECKING:
    from jumpstart_server.wsgi.connection import Connection

logger = logging.getLogger(__name__)

WSGIApp = Callable[..., Iterable[bytes]]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Field = tuple[bytes, bytes]

JOIN_BYTES = 64 * 1024  # up to here head and body are joined for one write
KNOWN_STARTS = 512
KNOWN_START_BYTES = 512

KNOWN_HEADS = 64

TOO_LATE = "the request took too long"

SEIZING = threading.Lock()
"""Held while a seized exchange is answered; a handler that ends meanwhile waits before it gives up the socket."""


class Seizure(enum.Enum):
    """What an exchange was found in."""

    OVER = enum.auto()  # the handler has ended: nothing was seized
    WHOLE = enum.auto()  # its response has gone out, and only the end of the handler is missing
    ANSWERED = enum.auto()  # the client has got 504
    CUT = enum.auto()  # the response had begun, and was broken off


class Start:
    """
    What an app passed to start_response, checked and encoded. Handlers say the same again and again.

    Attributes:
        known: the heads that answers of 200 to an ordinary request had this second, by the length of their body, and
            the default fields that they have. Replaced as one, so that the two belong together for any thread.
    """

    __slots__ = ("fields", "known", "reason", "status")

    def __init__(self, status: int, reason: bytes, fields: tuple[Field, ...]) -> None:
        self.status = status
        self.reason = reason
        self.fields = fields
        self.known: tuple[DefaultFields | None, dict[int, bytes]] = (None, {})


_known_starts: dict[tuple[str, tuple[tuple[str, str], ...]], Start] = {}


class ClientGoneError(JumpstartError, ConnectionError):
    """Raised in a handler's thread where it produces output for a client that has left."""


class Exchange(msgspec.Struct, eq=False):  # for it is made and read sooner than any other object
    """
    One request and its response. All of it happens on one thread, but for `seize`, `answer_late` and `cut_off`.

    Attributes:
        status: of the response, as far as it is known; 499 when the client left before its end, 504 when its time was
            over.
        must_close: the connection must not be used for another request.
        broken: nothing more may be sent over it.
        is_accounted: the access log and the books have it already, though the handler still runs.
        is_left: the handler was told to stop since its client has left.
        context: of the request, as the handler sees it; its `expires` may have been moved.
        in_send: the handler's thread uses the socket to send.
        in_receive: the handler's thread waits for more of the body.
        seized: the time was over: the handler may not send.
        timed_out: and the client has got 504, or a broken stream.
        owes_answer: the handler's thread is to send the 504, since it was waiting for the body.
        probing: the keeper sends an interim response just now, as `has_left` does.
        probed_at: when it did, in seconds of the monotonic clock; 0.0 if it did not.
        sent_at: when the last send ended, in seconds of the monotonic clock; 0.0 before the first.
        began: seconds of the monotonic clock, when the handler was called.
        queued: seconds that the request waited for a thread.
        sending: seconds in calls that send, which may wait for the client and for the GIL.
        rule: the route that Werkzeug found, if it did.
        thread: the identity of the handler's thread.
    """

    connection: Connection
    head: RequestHead
    environ: Environ
    began: float
    context: RequestContext
    thread: int
    status: int = 0
    must_close: bool = False
    broken: bool = False
    is_accounted: bool = False
    is_left: bool = False
    in_send: bool = False
    in_receive: bool = False
    seized: bool = False
    timed_out: bool = False
    owes_answer: bool = False
    probing: bool = False
    probed_at: float = 0.0
    sent_at: float = 0.0
    queued: float = 0.0
    sending: float = 0.0
    rule: str | None = None
    answer: bytes = b""  # of our own, where the app gave none
    _start: Start | None = None
    _framer: ResponseFramer | None = None
    _sent: int = 0  # bytes of a body without a framer
    _iterable: Iterable[bytes] | None = None  # that is to be closed
    _complete: bool = False  # the response has gone out whole
    _over: bool = False

    def __str__(self) -> str:
        return f"{self.head.method} {self.head.path.decode('ascii', 'replace')}"

    @property
    def sent_bytes(self) -> int:
        """Of the body, given out so far."""
        return self._framer.sent_bytes if self._framer is not None else self._sent or body_size(self.answer)

    @property
    def response_fields(self) -> tuple[Field, ...]:
        """What the app gave to start_response."""
        return self._start.fields if self._start is not None else ()

    # ------------------------------------------------------------------ the server's side

    @property
    def is_over(self) -> bool:
        """The handler has ended."""
        return self._over

    def run(self, app: WSGIApp, interrupts: Interrupts) -> None:
        """
        Call *app* and send what it answers. Never raises; runs in a context of its own, which ends with it.

        *interrupts*: of the calling thread.
        """
        enter(self.context)
        reader = self.connection.reader
        if reader is not None:
            self.connection.exchange = self
            reader.begin()
        error: BaseException | None = None
        try:
            try:
                interrupts.job = self  # `arm`
                self._run(app)
            except BaseException as caught:
                error = caught
        except RequestTimeout as caught:  # it arrived a little late
            error = caught
        while True:
            try:
                interrupts.job = None  # `disarm`, where nobody has fired
                if interrupts.fired:
                    interrupts.disarm()
                break
            except RequestTimeout as caught:
                error = error or caught
        # From here on nothing can be raised from outside, so that what must be done once is done once.
        if self._iterable is not None:
            error = self._close_iterable(error)
        if error is not None:
            if forks.in_child:
                forks.end_child(error)
            self._end_badly(error)
            del error  # no cycle through the frame
        self._over = True
        if self.seized or self.probing:
            with SEIZING:
                if self.timed_out:
                    self.status = 504
                    self.must_close = True

    def _run(self, app: WSGIApp) -> None:
        # A call from C to C: when the app has returned, nothing can be raised until what it gave is at hand to be
        # closed.
        for iterable in map(app, (self.environ,), (self.start_response,)):
            kind = type(iterable)
            if kind is list or kind is tuple:
                if len(iterable) == 1:  # type: ignore[arg-type]
                    self._send_whole(iterable[0])  # type: ignore[index]
                else:
                    self._send_list(iterable)  # type: ignore[arg-type]
                return
            self._iterable = iterable
            if kind is FileWrapper and not self.connection.is_tls:
                self._send_file(iterable)  # type: ignore[arg-type]
            else:
                self._send_chunks(iterable)
            return
        raise RuntimeError("the app raised StopIteration")  # which `map` takes for its end

    def _send_list(self, parts: list[bytes] | tuple[bytes, ...]) -> None:
        size = 0
        for chunk in parts:
            if type(chunk) is not bytes:
                raise _not_bytes(chunk)
            size += len(chunk)
        if size <= JOIN_BYTES:
            self._send_whole(b"".join(parts))
        else:
            self._send_parts(parts, size)

    def _close_iterable(self, error: BaseException | None) -> BaseException | None:
        """Close what the app gave; the exception that counts then."""
        iterable, self._iterable = self._iterable, None
        close = getattr(iterable, "close", None)
        if close is None:
            return error
        try:
            close()
        except BaseException as caught:
            if not isinstance(caught, Exception) or not (self.broken or self.seized):
                if caught.__context__ is None:
                    caught.__context__ = error
                return caught
            logger.exception("exception in close(), after the client had left: %s", self)
        return error

    def _end_badly(self, error: BaseException) -> None:
        """The app has raised, or our own code did since there is nobody to send to."""
        if self.seized:
            logger.debug("the handler has ended after its time: %s: %r", self, error)
        elif isinstance(error, ClientGoneError) or self.broken or (self.is_left and isinstance(error, RequestTimeout)):
            self._client_gone(error)  # the app may have wrapped or replaced our ClientGoneError
        elif isinstance(error, RequestTimeout) and not self._complete:
            logger.error("timeout: %s has given up", self, exc_info=error)  # by itself, in good time
            self._give_up(504, TOO_LATE)
        else:
            self._failed(error)

    # ------------------------------------------------------------------ the keeper's side

    def seize(self) -> Seizure:
        """
        Take the socket from the handler, whose time is over. The caller holds `SEIZING`, and then does what this says.

        ANSWERED is for `answer_late` to be called, CUT for `cut_off`.
        """
        self.seized = True
        if self._over:
            return Seizure.OVER
        if self._complete:
            return Seizure.WHOLE
        self.context.is_stopped = True
        self.timed_out = True
        return Seizure.CUT if self.sent_at or self.in_send else Seizure.ANSWERED

    def has_left(self) -> bool:
        """
        Whether the client has gone, of whom an event said that it sends no more.

        Before the response has begun it is probed first, and this is False until it may have answered.
        """
        connection = self.connection
        if not connection.has_left():
            return False
        if self.sent_at or connection.reader is not None:
            return True
        if self.probed_at:
            if connection.is_reset():
                return True
            if monotonic() > self.probed_at + PROBE_TIME:
                connection.gone_at = 0.0  # it reads
            return False
        with SEIZING:
            self.probing = True  # and then look at what the handler does
            try:
                if self.in_send or self.sent_at or self._over:
                    return False
                self.probed_at = monotonic()
                return not connection.probe()
            finally:
                self.probing = False

    def answer_late(self, status: int = 504, reason: str = TOO_LATE) -> None:
        """Give the client an error page in the handler's place."""
        connection = self.connection
        defaults = connection.server.default_fields
        self.answer = error_response(status, reason, method=self.head.method, defaults=defaults)
        if self.in_receive:  # of TLS, two threads cannot use one connection: it wakes, and answers
            self.owes_answer = True
            connection.stop_receiving()
        else:
            connection.send_last(self.answer)

    def answer_owed(self) -> None:
        """The handler's thread has come back from waiting for the body, and finds that it was seized."""
        with SEIZING:
            if self.owes_answer:
                self.owes_answer = False
                self.connection.send_last(self.answer)

    def cut_off(self) -> None:
        """Break the response off so that the client can tell it from an end, and wake whoever waits for the client."""
        framer = self._framer
        if framer is not None and framer.ends_with_close:
            self.broken = True
            self.connection.abort()
        else:
            self.connection.stop_sending()

    def _send_whole(self, body: bytes) -> None:
        if type(body) is not bytes:
            raise _not_bytes(body)
        size = len(body)
        start = self._start
        framer = self._framer
        if framer is None:
            if start is not None:
                defaults, heads = start.known
                known = heads.get(size)
                if known is not None and defaults is self.connection.server.default_fields and self._is_ordinary():
                    self._send(known + body)
                    self._sent = size
                    self._complete = True
                    return
            head = self._head(len(body)) if self.head.method != "HEAD" else self._head_alone(len(body))
            framer = self._framer
            assert framer is not None
            if framer.takes_body:
                if len(body) <= JOIN_BYTES:
                    pieces = framer.body(body)
                    self._send(head + pieces[0] if len(pieces) == 1 else b"".join((head, *pieces)))
                else:
                    self._send(head)
                    for piece in framer.body(body):
                        self._send(piece)
            else:
                self._send(head)
            self._end()
            if start is not None and framer.takes_body and size <= JOIN_BYTES:
                self._remember(start, size, head)
            return
        if body:  # after write()
            self._chunk(body)
        self._end()

    def _is_ordinary(self) -> bool:
        """Whether nothing but the app's words decides what the head of the response is."""
        request = self.head
        connection = self.connection
        return (
            request.keep_alive
            and request.http_version == "1.1"
            and request.method != "HEAD"
            and connection.reader is None
            and connection.server.keeps_connections
        )

    def _remember(self, start: Start, size: int, head: bytes) -> None:
        framer = self._framer
        assert framer is not None
        if framer.must_close or framer.surplus_bytes or not self._is_ordinary():
            return
        defaults = self.connection.server.default_fields
        if start.known[0] is not defaults or len(start.known[1]) >= KNOWN_HEADS:
            start.known = (defaults, {})
        start.known[1][size] = head

    def _send_parts(self, parts: Iterable[bytes], size: int) -> None:
        """Large pieces that are all there already: as `_send_whole`, without a copy."""
        if self._framer is None:
            self._send(self._head(size) if self.head.method != "HEAD" else self._head_alone(size))
        for part in parts:
            self._chunk(part)
        self._end()

    def _send_chunks(self, iterable: Iterable[bytes]) -> None:
        connection = self.connection
        for chunk in iterable:
            if type(chunk) is not bytes:
                raise _not_bytes(chunk)
            if connection.gone_at and self.sent_at and connection.has_left():
                self.broken = True
                raise ClientGoneError("the client has left")
            if chunk:
                self._chunk(chunk)
                framer = self._framer
                if framer.surplus_bytes or not framer.takes_body:  # type: ignore[union-attr]  # _chunk has made it
                    if type(iterable) is FileWrapper:
                        framer.surplus_bytes = 0  # type: ignore[union-attr]  # a part of a file is no mistake
                    break  # nothing more will go out, and it may never end (PEP 3333, Content-Length)
        if self._framer is None:
            # Apps may answer HEAD without the body that GET has, and without its length.
            self._send(self._head(None if self.head.method == "HEAD" else 0))
        self._end()

    def _send_file(self, wrapper: FileWrapper) -> None:
        extent = wrapper.extent()
        if extent is None or self._framer is not None:
            self._send_chunks(wrapper)
            return
        fd, position, size = extent
        head = self._head(size) if self.head.method != "HEAD" else self._head_alone(size)
        framer = self._framer
        assert framer is not None
        self._send(head)
        if framer.takes_body:
            size = framer.plain(size)
            framer.surplus_bytes = 0  # a part of a file is no mistake
            if size:
                self._send_range(fd, position, size)
        self._end()

    def _send_range(self, fd: int, position: int, size: int) -> None:
        framer = self._framer
        assert framer is not None
        self._begin_send()
        try:
            sent = self.connection.send_file(fd, position, size)
        except OSError as error:
            self.broken = True
            raise ClientGoneError("the client has left") from error
        self.sent_at = monotonic()
        self.in_send = False
        if sent < size:
            framer.sent_bytes -= size - sent
            framer.abort()
            logger.error("a file became shorter while it was sent: %s", self)

    def _head(self, body_length: int | None) -> bytes:
        start = self._start
        if start is None:
            raise RuntimeError("the app produced a body before it called start_response")
        connection = self.connection
        request = self.head
        framer = ResponseFramer(request.method, request.http_version, request.keep_alive and connection.may_stay())
        head = framer.head(
            start.status,
            start.fields,
            reason=start.reason,
            body_length=body_length,
            defaults=connection.server.default_fields,
            keep_alive_timeout_s=connection.server.told_keep_alive_s,
        )
        self._framer = framer
        if framer.dropped_fields:
            warn_of_dropped(framer.dropped_fields)
        if connection.reader is not None:
            connection.reader.is_answered = True
        return head

    def _head_alone(self, body_length: int) -> bytes:
        """
        The answer to HEAD, with the length of the body that the app has made for nothing.

        Apps may also leave it out; an empty body says nothing about the one that GET has.
        """
        start = self._start
        has_length = start is None or any(name.lower() == b"content-length" for name, _ in start.fields)
        if body_length and start is not None and start.status not in (204, 304) and not has_length:
            length = (b"Content-Length", b"%d" % body_length)
            self._start = Start(start.status, start.reason, (*start.fields, length))
        return self._head(None)

    def _chunk(self, chunk: bytes) -> None:
        self.connection.server.steps += 1  # not exact, and need not be
        framer = self._framer
        if framer is None:
            head = self._head(None)
            framer = self._framer
            assert framer is not None
            pieces = framer.body(chunk)
            if len(chunk) <= JOIN_BYTES:
                self._send(b"".join((head, *pieces)))
                return
            self._send(head)
        else:
            pieces = framer.body(chunk)
        for piece in pieces:
            self._send(piece)

    def _send(self, data: bytes) -> None:
        if forks.in_child:
            forks.end_child()
        self.in_send = True  # and then look, as `_begin_send`
        if self.seized or self.probing:
            self._begin_send()
        began = monotonic()
        try:
            self.connection.send(data)
        except OSError as error:
            self.broken = True
            raise ClientGoneError("the client has left") from error
        self.sent_at = ended = monotonic()
        self.sending += ended - began
        self.in_send = False

    def send_interim(self, data: bytes) -> None:
        """
        Send an interim response.

        Raises:
            OSError: the client is gone, or the time of the request is over.
        """
        self._begin_send()
        self.connection.send(data)
        self.in_send = False

    def _begin_send(self) -> None:
        """To be called before the socket is used to send; `in_send` is to be reset afterwards."""
        self.in_send = True
        if self.probing:
            with SEIZING:
                pass  # the keeper has sent an interim response
        if self.seized:
            self.in_send = False
            raise ClientGoneError("the time of the request is over, and its client has an answer")

    def _end(self) -> None:
        framer = self._framer
        assert framer is not None
        last = framer.end()
        if last:
            self._send(last)
        if framer.surplus_bytes:
            logger.error(
                "the app sent %d bytes beyond its Content-Length, which were cut: %s", framer.surplus_bytes, self
            )
        if framer.is_incomplete:
            logger.error("the app sent fewer bytes than its Content-Length: %s", self)
        self.must_close = framer.must_close
        self._complete = not framer.is_incomplete

    # ------------------------------------------------------------------ when it goes wrong

    def _client_gone(self, error: BaseException) -> None:
        self.status = CLIENT_CLOSED
        self.broken = True
        logger.debug("the client left: %s", self)
        if not isinstance(error, ClientGoneError):
            logger.debug("and the app raised %r", error)

    def _failed(self, error: BaseException) -> None:
        reader = self.connection.reader
        if reader is not None and reader.refusal is not None and isinstance(error, RequestBodyError):
            self._refuse(reader.refusal)
            return
        logger.error("exception in the app: %s", self, exc_info=error)
        if not isinstance(error, Exception):
            logger.warning("%s in a handler ends the request, not the server", type(error).__name__)
        if self._complete:
            return  # in close(): the client has its answer
        self._give_up(500)

    def _refuse(self, refusal: ParseError) -> None:
        """The app did not want to hear that the body is none; the client does."""
        server = self.connection.server
        server.refusals.note(self.connection.peer, refusal.detail)
        self._give_up(refusal.status, refusal.reason)

    def _give_up(self, status: int, reason: str = "") -> None:
        """An error page; where the response has begun, a cut that the client can tell from an end."""
        self.must_close = True
        self.status = status
        framer = self._framer
        if framer is None:
            defaults = self.connection.server.default_fields
            self.answer = error_response(status, reason, method=self.head.method, defaults=defaults)
            try:
                self._send(self.answer)
            except ClientGoneError:
                self.answer = b""
                if status < 500:
                    self.status = CLIENT_CLOSED  # it was the client's doing
        else:
            framer.abort()
            self.broken = framer.ends_with_close  # a close would look like the end

    # ------------------------------------------------------------------ the app's side

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], None]:
        """
        PEP 3333's.

        Raises:
            ResponseError: status or headers that would break the message.
            RuntimeError: a second call without *exc_info*, or one after the response.
        """
        if exc_info is not None:
            try:
                if self._framer is not None:
                    if exc_info[1] is None:
                        raise RuntimeError("start_response after the response has begun")
                    raise exc_info[1].with_traceback(exc_info[2])
            finally:
                exc_info = None  # no cycle through the frame
        elif self._start is not None:
            raise RuntimeError("start_response was called twice without exc_info")
        if self._over:
            raise RuntimeError("start_response after the response")
        key = status, tuple(headers)
        try:
            start = _known_starts.get(key)
        except TypeError:  # something in it has no hash; if it is not a list for a tuple, it is found out below
            start, key = None, (status, tuple(tuple(field) for field in key[1]))  # type: ignore[misc]
        if start is None:
            start = _encode(key)
        self._start = start
        self.status = start.status
        if self.rule is None and "werkzeug.request" in self.environ:
            # Flask takes its request out of the environ before the iterable is closed; here it still is.
            self.rule = werkzeug_rule(self.environ, self.connection.server.script_name)
        return self.write

    def write(self, data: bytes) -> None:
        """
        PEP 3333's.

        Raises:
            ClientGoneError: the client has left.
            RuntimeError: after the response, or from a thread other than the handler's.
        """
        if self._over or threading.get_ident() != self.thread:
            # Another thread could not know that the connection is not another request's by now.
            raise RuntimeError("write() after the response, or from another thread than the handler's")
        if type(data) is not bytes:
            raise _not_bytes(data)
        connection = self.connection
        if connection.gone_at and connection.has_left():
            self.broken = True
            raise ClientGoneError("the client has left")
        if data:
            self._chunk(data)
            if self._framer.surplus_bytes:  # type: ignore[union-attr]  # _chunk has made it
                raise RuntimeError("write() beyond the Content-Length")
        elif self._framer is None:
            self._send(self._head(None))


def _encode(key: tuple[str, tuple[tuple[str, str], ...]]) -> Start:
    status, headers = key
    code, reason = encode_status(status)
    if code < 200 or code > 599:
        raise ResponseError(f"status {status!r}: a response of an app has 200 to 599")
    fields = tuple(encode_fields(headers))
    # Checks names and values; the exception belongs into the app, which may answer it.
    ResponseFramer("GET").head(code, fields, reason=reason)
    start = Start(code, reason, fields)
    if _is_worth_knowing(fields):
        if len(_known_starts) >= KNOWN_STARTS:
            _known_starts.clear()
        _known_starts[key] = start
    return start


def _is_worth_knowing(fields: tuple[Field, ...]) -> bool:
    """Short, and no secret of one client."""
    size = 0
    for name, value in fields:
        size += len(name) + len(value)
        if name.lower() == b"set-cookie":
            return False
    return size <= KNOWN_START_BYTES


def _not_bytes(value: object) -> TypeError:
    return TypeError(f"the app gave {type(value).__name__}, WSGI asks for bytes")
