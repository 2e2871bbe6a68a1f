"""What the system knows of a listening socket, and one without file descriptors."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Any


def backlog_of(sock: socket.socket) -> int:
    """The bound of its queue of accepted connections: `tcpi_sacked` of a listening socket."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, 28)[0])


def full(acceptor: Any) -> None:
    """Lets an acceptor find no file descriptor for one connection."""

    class Scarce:
        fileno = acceptor._listening.fileno

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    listening, acceptor._listening = acceptor._listening, Scarce()
    acceptor._readable()
    acceptor._listening = listening
