"""The machine under a broker or a name server: clocks, disk, threads, ports. The simulator has its
own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from convoymq.rocketmq.clocks import steady_ms, wall_ms
from convoymq.storage.files import RealDirectory
from convoymq.storage.threads import ThreadWorker
from convoymq.storage.types import Directory, Worker
from convoymq.transport.listening import listen


class Listening(Protocol):
    """A port that is served."""

    def close(self) -> None:
        """Accepts no more."""


class Machine:
    """The computer that this process runs on."""

    def wall_ms(self) -> int:
        """Returns milliseconds since 1970."""
        return wall_ms()

    def steady_ms(self) -> int:
        """Returns milliseconds of a clock that never jumps."""
        return steady_ms()

    def directory(self, path: str | Path) -> Directory:
        """Returns a directory, which is made if it does not exist."""
        return RealDirectory(path)

    def worker(self) -> Worker:
        """Returns a thread for slow work, whose results come to the running loop."""
        return ThreadWorker(asyncio.get_running_loop().call_soon_threadsafe)

    def disk_used(self, path: str | Path) -> float:
        """Returns the share of a disk that is in use."""
        usage = shutil.disk_usage(path)
        return usage.used / usage.total

    async def listen(
        self, accept: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[Sequence[Listening], int]:
        """Serves a port, 0 takes a free one; returns its number. Raises OSError."""
        sockets = listen(host, port)
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(accept, sock=sock) for sock in sockets]
        return servers, int(sockets[0].getsockname()[1])


MACHINE = Machine()
