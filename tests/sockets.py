"""What the system knows of a listening socket."""

from __future__ import annotations

import socket
import struct


def backlog_of(sock: socket.socket) -> int:
    """The bound of its queue of accepted connections: `tcpi_sacked` of a listening socket."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, 28)[0])
