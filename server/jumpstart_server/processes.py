"""The supervisor's view of its processes: what it knows of each, and the channel to it."""

from __future__ import annotations

import asyncio
import socket

from jumpstart.report import BootReport
from jumpstart_server.lifecycle import Worker
from jumpstart_server.messages import Captured, Channel, Fork, Message, Reopen, Stats, encode


class Mold:
    """The process that workers are forked from."""

    def __init__(self, pid: int, generation: int, sock: socket.socket, channel: Channel) -> None:
        self.pid = pid
        self.generation = generation
        self.channel = channel
        self.is_ready = False
        self._sock = sock

    def fork(self, slot: int, control: socket.socket, *, replay: bool) -> None:
        """
        Ask for a worker whose end of the control pair is *control*. Only this and `reopen` write to this socket.

        Raises:
            OSError: the mold is gone.
        """
        socket.send_fds(self._sock, [encode(Fork(slot, replay))], [control.fileno()])

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
        accepting: it was told to accept.
        complaint: what it said when it failed to boot.
        answers: questions that it has not answered yet, by number.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.report: BootReport | None = None
        self.stats: Stats | None = None
        self.answers: dict[int, asyncio.Future[Stats | Captured]] = {}
        self.accepting = False
        self.stopped_accepting = False
        self.complaint = ""
        self._channel: Channel | None = None
        self._unsent: list[Message] = []

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
