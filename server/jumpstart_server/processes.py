"""The supervisor's view of its processes: what it knows of each, the channel to it, and how one is started."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from jumpstart.report import BootReport
from jumpstart_server.advise import MemoryOfRequests
from jumpstart_server.children import Children
from jumpstart_server.heartbeat import Pulse
from jumpstart_server.lifecycle import LifecycleError, State, Worker
from jumpstart_server.messages import Captured, Channel, Fork, Message, Reopen, Start, Stats, encode
from jumpstart_server.spawn import Interpreter, start_interpreter

logger = logging.getLogger(__name__)


@dataclass
class Launcher:
    """
    Starts processes; one for all tenants.

    Attributes:
        started: when the command began, on the monotonic clock.
        waiting: an interpreter that was started ahead and becomes the first process.
        gone: set whenever a process is found gone.
        spawn_task: runs a coroutine beside the others; what it raises ends the server.
    """

    children: Children
    spawn_task: Callable[[Coroutine[Any, Any, None]], None]
    started: float
    waiting: Interpreter | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def launch(self, start: Start, sockets: Sequence[socket.socket]) -> Interpreter:
        """
        Take the interpreter that waits already, or start one, and tell it its role.

        Raises:
            OSError: there is no process to be had.
        """
        interpreter, self.waiting = self.waiting or start_interpreter(start.settings.target), None
        interpreter.release()
        self.children.ours.add(interpreter.pid)
        try:
            interpreter.tell(encode(start), [sock.fileno() for sock in sockets])
        except OSError as error:
            logger.warning("process %d ended before it was told its role: %s", interpreter.pid, error)
        return interpreter


class Mold:
    """The process that workers are forked from."""

    def __init__(self, pid: int, generation: int, sock: socket.socket, channel: Channel) -> None:
        self.pid = pid
        self.generation = generation
        self.channel = channel
        self.is_ready = False
        self._sock = sock

    def fork(self, order: Fork, control: socket.socket) -> None:
        """
        Ask for a worker whose end of the control pair is *control*. Only this and `reopen` write to this socket.

        Raises:
            OSError: the mold is gone.
        """
        socket.send_fds(self._sock, [encode(order)], [control.fileno()])

    def reopen(self) -> None:
        """
        Ask it to open its log files anew.

        Raises:
            OSError: the mold is gone.
        """
        self._sock.sendall(encode(Reopen()))


class Member:
    """
    A worker of ours.

    Attributes:
        worker: what the rules know about it.
        stopped_accepting: it drains, and has taken all connections that waited.
        complaint: what it said when it failed to boot.
        pulse: its signs of life, once it serves.
        memory: what its requests take.
        has_served: it did until it was told to drain.
        is_killed: it was, for it took too long to drain.
        is_hung: it will not hear of a drain.
        replaces: the worker in whose place it is started, while that one serves on.
        answers: questions that it has not answered yet, by number.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.report: BootReport | None = None
        self.stats: Stats | None = None
        self.answers: dict[int, asyncio.Future[Stats | Captured]] = {}
        self.replaces: Member | None = None
        self.pulse = Pulse(0.0, 0.0)
        self.memory = MemoryOfRequests()
        self.has_served = False
        self.is_killed = False
        self.is_hung = False
        self.stopped_accepting = False
        self.complaint = ""
        self._channel: Channel | None = None
        self._unsent: list[Message] = []

    @property
    def is_accepting(self) -> bool:
        return self.worker.state is State.SERVING

    @property
    def pid(self) -> int:
        """
        Raises:
            LifecycleError: it has not said hello yet.
        """
        if self.worker.pid is None:
            raise LifecycleError(f"{self.name} is asked for its pid")
        return self.worker.pid

    @property
    def name(self) -> str:
        """As log lines have it."""
        return f"worker={self.worker.slot} gen={self.worker.generation} pid={self.worker.pid}"

    def connect(self, channel: Channel) -> None:
        """The channel is open: send what had to wait for it."""
        self._channel = channel
        for message in self._unsent:
            channel.send(message)

    def send(self, message: Message) -> None:
        """Queue *message*; one for a worker that is gone is dropped."""
        if self._channel is None:
            self._unsent.append(message)
        else:
            self._channel.send(message)

    def hang_up(self) -> None:
        """Close the channel; the worker, or whoever inherited its end, sees that we are gone."""
        if self._channel is not None:
            self._channel.close()

    def answer(self, number: int, message: Stats | Captured) -> None:
        """Give *message* to whoever asked for it; nobody did when *number* is 0."""
        waiting = self.answers.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
