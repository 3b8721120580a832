"""
The watch points of the effect guard: where a process can be seen to do something to others.

A Python audit hook sees new connections, files, processes and signals. It does not see bytes that go out on a
connection that is open, rows that a driver in C writes, or work that is handed to another thread: for those a few
methods are replaced, of the standard library now and of other libraries when the app imports them. All ask for the
guard of the current request (`jumpstart/guard.py`) and, where there is none, do what they did before.

What comes of a refusal to what real requests share is minded: a kept-alive connection is asked for before its state
changes, and no thread that may live on for others takes the guard along.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from jumpstart import effect_databases
from jumpstart.context import current, request_context
from jumpstart.errors import EffectRefused
from jumpstart.guard import Effect, Guard, names
from jumpstart.imports import when_imported
from jumpstart.watching import Method, before, guard_of_request, replace

_lock = threading.Lock()
_is_installed = False


def install() -> None:
    """Watch from now on, in this process and those that it forks; does nothing when it was called before."""
    global _is_installed
    with _lock:
        if _is_installed:
            return
        _is_installed = True
    _watch_sockets()
    _watch_threads()
    _watch_files()
    replace(logging.Handler, "handle", _handle)
    for module, watch in {**_LIBRARIES, **effect_databases.LIBRARIES}.items():
        when_imported(module, watch)
    sys.addaudithook(_hook)


# --- the audit hook -------------------------------------------------------------------------------------------------

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _hook(event: str, args: tuple[Any, ...]) -> None:
    check = _EVENTS.get(event)
    if check is None:
        return
    request = current()
    if request is not None and request.guard is not None:
        check(request.guard, *args)


def _path(path: Any, folder: int = -1) -> str:
    """An absolute path; *folder* is a descriptor or -1. Empty for what is no file, such as a pipe."""
    if isinstance(path, int):
        found = _link(f"/proc/self/fd/{path}")
        return found if found.startswith("/") else ""
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0:
        return str(Path(_link(f"/proc/self/fd/{folder}") or "/", text))
    return text


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _check_path(guard: Guard, path: Any, folder: Any = -1, *, follow: bool = False) -> None:
    text = _path(path, folder)
    if text:
        guard.check_write(text, follow=follow)


def _opened(guard: Guard, path: Any, mode: Any, flags: Any) -> None:
    # A descriptor is open already, and what opened it was asked about.
    if isinstance(flags, int) and flags & _WRITING and not isinstance(path, int):
        _check_path(guard, path, follow=True)


def _moved(guard: Guard, source: Any, target: Any, source_folder: int = -1, target_folder: int = -1) -> None:
    _check_path(guard, source, source_folder)
    _check_path(guard, target, target_folder)


def _linked(guard: Guard, source: Any, target: Any, source_folder: int = -1, target_folder: int = -1) -> None:
    _check_path(guard, target, target_folder)


def _symlinked(guard: Guard, source: Any, target: Any, folder: int = -1) -> None:
    _check_path(guard, target, folder)


def _made(guard: Guard, path: Any, mode: int = 0, folder: int = -1) -> None:
    _check_path(guard, path, folder)


def _changed(guard: Guard, path: Any, *args: Any) -> None:
    folder = args[-1] if len(args) > 1 else -1
    _check_path(guard, path, folder if isinstance(folder, int) else -1, follow=True)


def _changed_content(guard: Guard, path: Any, *args: Any) -> None:
    _check_path(guard, path, follow=True)


def _sqlite_opened(guard: Guard, database: Any) -> None:
    """To open one reads; to open one that is not there makes it."""
    text = os.fsdecode(database) if isinstance(database, (str, bytes, os.PathLike)) else ""
    if text.startswith("file:"):
        text = text[5:].partition("?")[0]
    if text and ":memory:" not in text and not Path(text).exists():
        guard.check_write(text)


def _connected(guard: Guard, sock: socket.socket, address: Any) -> None:
    try:
        _check_endpoint(guard, sock.family, address, Effect.CONNECT)
    except EffectRefused:
        if sock.family != socket.AF_UNIX and sock.type == socket.SOCK_STREAM:
            sock.close()  # `socket.create_connection` would do so for an OSError only
        raise


def _bound(guard: Guard, sock: socket.socket, address: Any) -> None:
    """To bind a Unix socket makes a file."""
    if sock.family == socket.AF_UNIX and (path := os.fsdecode(address)) and not path.startswith("\0"):
        guard.check_write(path)


def _sent_message(guard: Guard, sock: socket.socket, address: Any = None) -> None:
    if address is None:
        _check_peer(guard, sock)
    else:
        _check_endpoint(guard, sock.family, address, Effect.SEND)


def _check_endpoint(guard: Guard, family: int, address: Any, effect: Effect) -> None:
    if family == socket.AF_UNIX:
        guard.check_socket(os.fsdecode(address), effect)
    elif family in (socket.AF_INET, socket.AF_INET6):
        host, port = address[:2]
        guard.check_address(os.fsdecode(host) if host else "0.0.0.0", int(port), effect)
    elif family != getattr(socket, "AF_NETLINK", None):  # the kernel's, which is asked about interfaces
        guard.refuse(effect, f"{address!r} (family {family})")


def _check_peer(guard: Guard, sock: socket.socket) -> None:
    try:
        peer = sock.getpeername()
    except OSError:
        return  # not connected: the call itself fails, or names an address, which is audited
    _check_endpoint(guard, sock.family, peer, Effect.SEND)


def _started(guard: Guard, *args: Any) -> None:
    words = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[0] if args else ()
    guard.refuse(Effect.PROCESS, _program(words) if args else "(a fork of this one)")


def _spawned(guard: Guard, mode: int, path: Any, args: Any, env: Any = None) -> None:
    _started(guard, path, args)


def _program(words: Any) -> str:
    """What is started, without its arguments and variables: those may hold a password."""
    if isinstance(words, (str, bytes)):  # a line for a shell
        return next((word for word in os.fsdecode(words).split() if "=" not in word), "(nothing)")
    first = [os.fsdecode(word) for word in words[:3]]
    if len(first) == 3 and first[1] == "-c" and first[0].endswith("sh"):
        return f"{first[0]} -c {_program(first[2])}"
    return first[0] if first else "(nothing)"


def _signalled(guard: Guard, pid: int, number: int) -> None:
    if number:  # 0 only asks whether the process is there
        guard.refuse(Effect.SIGNAL, f"{_signal_name(number)} to {pid}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _thread_started(guard: Guard, function: Any, *args: Any) -> None:
    """Of `_thread` itself; `threading.Thread.start` was asked before, and then there is no guard any more."""
    guard.refuse(Effect.THREAD, getattr(function, "__qualname__", None) or repr(function))


_EVENTS: dict[str, Callable[..., None]] = {
    "open": _opened,
    "os.remove": _check_path,
    "os.rmdir": _check_path,
    "os.mkdir": _made,
    "os.rename": _moved,
    "os.link": _linked,
    "os.symlink": _symlinked,
    "os.truncate": _changed_content,
    "os.chmod": _changed,
    "os.chown": _changed,
    "os.utime": _changed,
    "os.setxattr": _changed_content,
    "os.removexattr": _changed_content,
    "sqlite3.connect": _sqlite_opened,
    "socket.bind": _bound,
    "socket.connect": _connected,
    "socket.sendto": _sent_message,
    "socket.sendmsg": _sent_message,
    "subprocess.Popen": _started,
    "os.system": _started,
    "os.exec": _started,
    "os.fork": _started,
    "os.forkpty": _started,
    "os.posix_spawn": _started,
    "os.spawn": _spawned,
    "pty.spawn": _started,
    "os.kill": _signalled,
    "os.killpg": _signalled,
    "signal.pthread_kill": _signalled,
    "_thread.start_new_thread": _thread_started,
    "_thread.start_joinable_thread": _thread_started,
}


# --- files that are not audited, or not well -------------------------------------------------------------------------


def _watch_files() -> None:
    for name in ("mkfifo", "mknod"):
        replace(os, name, before(_made_node))
    replace(os, "open", before(_opened_in_folder))
    for name in ("write", "pwrite", "writev", "pwritev", "sendfile", "posix_fallocate"):
        replace(os, name, before(_wrote))
    for name in ("copy_file_range", "splice"):
        replace(os, name, before(lambda guard, source, target, *args, **kwargs: _wrote(guard, target)))


def _made_node(guard: Guard, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
    _check_path(guard, path, -1 if dir_fd is None else dir_fd)


def _opened_in_folder(
    guard: Guard, path: Any, flags: int, *args: Any, dir_fd: int | None = None, **kwargs: Any
) -> None:
    if dir_fd is not None and flags & _WRITING:  # the audit does not say in which folder
        _check_path(guard, path, dir_fd, follow=True)


def _wrote(guard: Guard, descriptor: int, *args: Any, **kwargs: Any) -> None:
    """On a descriptor that is open. Pipes are let be: standard output may be one."""
    path = _link(f"/proc/self/fd/{descriptor}")
    if path.startswith("socket:"):
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            _check_peer(guard, sock)
    elif path.startswith("/") and not path.endswith(" (deleted)"):
        guard.check_write(path)


def _watch_dbm(module: ModuleType) -> None:
    """Its drivers open files in C."""

    def check(guard: Guard, file: Any, flag: str = "r", *args: Any, **kwargs: Any) -> None:
        if flag[:1] != "r":
            _check_path(guard, file, follow=True)

    replace(module, "open", before(check))


def _handle(original: Method) -> Method:
    """
    Log lines are for the server's own people: files may be written and rotated for them.

    A handler that would send one to somebody (a mail, a post) is refused; the line is lost, and the request goes on.
    """

    def handle(handler: logging.Handler, record: logging.LogRecord) -> Any:
        request = current()
        if request is None or request.guard is None:
            return original(handler, record)
        relaxed = msgspec.structs.replace(request, guard=request.guard.of_logging())
        with contextlib.suppress(EffectRefused), request_context(relaxed):
            return original(handler, record)
        return False

    return handle


# --- sockets --------------------------------------------------------------------------------------------------------


def _watch_sockets() -> None:
    # The methods are C's, but the class is Python's. What is audited anyway is left alone.
    for name in ("send", "sendall", "sendfile"):
        replace(socket.socket, name, before(lambda guard, sock, *args, **kwargs: _check_peer(guard, sock)))
    replace(socket, "getaddrinfo", _note_names)


def _note_names(original: Method) -> Method:
    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(host, *args, **kwargs)
        if isinstance(host, str):
            names.note(host.lower().rstrip("."), {str(each[4][0]) for each in found})
        return found

    return getaddrinfo


def _watch_ssl(module: ModuleType) -> None:
    for name in ("send", "write"):  # they write through an object in C; sendall sends
        replace(module.SSLSocket, name, before(lambda guard, sock, *args, **kwargs: _check_peer(guard, sock)))


def _watch_http_client(module: ModuleType) -> None:
    """Before a connection that is kept alive has changed its state: else it would be useless to the next request."""

    def check(guard: Guard, connection: Any, *args: Any, **kwargs: Any) -> None:
        if connection.sock is not None:
            _check_peer(guard, connection.sock)
        elif type(connection).connect.__module__ in ("http.client", "urllib3.connection"):  # and not a Unix socket's
            guard.check_address(connection.host, connection.port)

    replace(module.HTTPConnection, "putrequest", before(check))


def _check_transport(guard: Guard, transport: Any) -> None:
    peer = transport.get_extra_info("peername")
    sock = transport.get_extra_info("socket")
    if peer and sock is not None:
        _check_endpoint(guard, sock.family, peer, Effect.SEND)


def _watch_streams(module: ModuleType) -> None:
    for name in ("write", "writelines"):  # transports of uvloop have no method that could be replaced
        replace(
            module.StreamWriter,
            name,
            before(lambda guard, writer, *_, **__: _check_transport(guard, writer.transport)),
        )


def _watch_transports(module: ModuleType) -> None:
    """asyncio's own; a send that is refused further down would take the connection along."""
    for name in ("write", "writelines"):
        replace(module._SelectorSocketTransport, name, before(lambda guard, it, *_, **__: _check_transport(guard, it)))


def _watch_anyio(module: ModuleType) -> None:
    def check(guard: Guard, stream: Any, *args: Any, **kwargs: Any) -> None:
        _check_transport(guard, stream._transport)

    replace(module.SocketStream, "send", before(check))


def _watch_tls_transports(module: ModuleType) -> None:
    """Before the bytes are encrypted: a record that is left out would spoil the connection for all who use it."""
    for name in ("write", "writelines"):
        replace(module._SSLProtocolTransport, name, before(lambda guard, it, *_, **__: _check_transport(guard, it)))


def _watch_anyio_tls(module: ModuleType) -> None:
    def check(guard: Guard, stream: Any, *args: Any, **kwargs: Any) -> None:
        transport = getattr(stream.transport_stream, "_transport", None)
        if transport is not None:
            _check_transport(guard, transport)

    replace(module.TLSStream, "send", before(check))


def _watch_anyio_connect(module: ModuleType) -> None:
    """It tries addresses in tasks of their own, and a refusal there would come wrapped in an exception group."""

    def check(guard: Guard, remote_host: Any, remote_port: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_address(str(remote_host), int(remote_port))

    replace(module, "connect_tcp", before(check))


def _watch_uvloop(module: ModuleType) -> None:
    """It connects and starts processes in C, and audits neither."""

    def connect(
        guard: Guard,
        loop: Any,
        protocol_factory: Any,
        host: Any = None,
        port: Any = None,
        *,
        sock: Any = None,
        **_: Any,
    ) -> None:
        if sock is None and host is not None:
            guard.check_address(os.fsdecode(host), int(port or 0))

    def connect_unix(guard: Guard, loop: Any, protocol_factory: Any, path: Any = None, **_: Any) -> None:
        if path is not None:
            guard.check_socket(os.fsdecode(path))

    def datagrams(
        guard: Guard, loop: Any, protocol_factory: Any, local_addr: Any = None, remote_addr: Any = None, **_: Any
    ) -> None:
        if remote_addr is not None:
            guard.check_address(remote_addr[0], int(remote_addr[1]))
        elif local_addr is not None:  # its transport sends to any address, in C
            guard.refuse(Effect.CONNECT, f"any address by UDP from {local_addr!r}")

    def start(guard: Guard, loop: Any, protocol_factory: Any, *args: Any, **_: Any) -> None:
        guard.refuse(Effect.PROCESS, _program(args[0] if len(args) == 1 else args))

    for name, check in (
        ("create_connection", connect),
        ("create_unix_connection", connect_unix),
        ("create_datagram_endpoint", datagrams),
        ("subprocess_exec", start),
        ("subprocess_shell", start),
    ):
        replace(module.Loop, name, before(check))


def _watch_aiohttp(module: ModuleType) -> None:
    """Its connections are written to through uvloop's transports, if that is the loop."""

    def check(guard: Guard, connector: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(connector, "path", None)
        url = request.proxy or request.url
        if isinstance(path, str):
            guard.check_socket(path)
        else:
            guard.check_address(url.host or "", url.port or 0)

    replace(module.BaseConnector, "connect", before(check))


# --- threads and pools ----------------------------------------------------------------------------------------------


def _watch_threads() -> None:
    replace(threading.Thread, "start", _start_thread)


def _start_thread(original: Method) -> Method:
    """
    A new thread has a context of its own: the guard would not see what it does.

    Nor may it take the guard along: it may be one that serves real requests from a queue for ever after. Where each job
    brings its own context, as with anyio, the thread is started, outside of the request.
    """

    def start(thread: threading.Thread) -> Any:
        guard = guard_of_request()
        if guard is None:
            return original(thread)
        if not _gives_each_job_its_context(thread):
            guard.refuse(Effect.THREAD, thread.name)
        return contextvars.Context().run(original, thread)

    return start


def _gives_each_job_its_context(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    names = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(name.startswith(("anyio.", "jumpstart", "aiosqlite.")) for name in names)


def _watch_thread_pools(module: ModuleType) -> None:
    def make(original: Method) -> Method:
        def submit(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if guard_of_request() is None:
                return original(pool, function, *args, **kwargs)
            # The job has the guard; the thread, should one be started, has not.
            carried = contextvars.copy_context()
            return contextvars.Context().run(original, pool, carried.run, function, *args, **kwargs)

        return submit

    replace(module.ThreadPoolExecutor, "submit", make)


def _watch_futures(module: ModuleType) -> None:
    """What is called when a job is done runs in the thread of the pool, outside of the job."""

    def make(original: Method) -> Method:
        def add_done_callback(future: Any, function: Any) -> Any:
            # asyncio's and anyio's own only wake who waits, and bring contexts of their own.
            is_library = str(getattr(function, "__module__", "")).startswith(("asyncio", "anyio", "concurrent.futures"))
            if is_library or guard_of_request() is None:
                return original(future, function)
            carried = contextvars.copy_context()
            return original(future, lambda done: carried.copy().run(function, done))

        return add_done_callback

    replace(module.Future, "add_done_callback", make)


def _watch_process_pools(module: ModuleType) -> None:
    def check(guard: Guard, pool: Any, function: Any = None, *args: Any, **kwargs: Any) -> None:
        guard.refuse(Effect.PROCESS, f"of a pool, for {getattr(function, '__qualname__', function)}")

    replace(module.ProcessPoolExecutor, "submit", before(check))


def _watch_helper_processes(module: ModuleType) -> None:
    """Of its locks, shared memory and fork server."""

    def check(guard: Guard, path: Any, *args: Any, **kwargs: Any) -> None:
        guard.refuse(Effect.PROCESS, os.fsdecode(path))

    replace(module, "spawnv_passfds", before(check))


def _watch_multiprocessing(module: ModuleType) -> None:
    def check(guard: Guard, process: Any, *args: Any, **kwargs: Any) -> None:
        guard.refuse(Effect.PROCESS, process.name)

    replace(module.BaseProcess, "start", before(check))


def _watch_multiprocessing_pools(module: ModuleType) -> None:
    """A job goes to processes, or with ``ThreadPool`` to threads, through threads of the pool."""

    def check(guard: Guard, pool: Any) -> None:
        guard.refuse(Effect.PROCESS, f"of a {type(pool).__qualname__}")

    replace(module.Pool, "_check_running", before(check))  # every way to hand it a job comes by


_LIBRARIES: dict[str, Callable[[ModuleType], None]] = {
    "ssl": _watch_ssl,
    "http.client": _watch_http_client,
    "asyncio.streams": _watch_streams,
    "asyncio.selector_events": _watch_transports,
    "asyncio.sslproto": _watch_tls_transports,
    "anyio": _watch_anyio_connect,
    "anyio._backends._asyncio": _watch_anyio,
    "anyio.streams.tls": _watch_anyio_tls,
    "uvloop": _watch_uvloop,
    "aiohttp.connector": _watch_aiohttp,
    "concurrent.futures._base": _watch_futures,
    "concurrent.futures.thread": _watch_thread_pools,
    "concurrent.futures.process": _watch_process_pools,
    "multiprocessing.process": _watch_multiprocessing,
    "multiprocessing.pool": _watch_multiprocessing_pools,
    "multiprocessing.util": _watch_helper_processes,
    "dbm": _watch_dbm,
}
"""Module → what to do with it when it has been imported."""
