"""The administration socket of a node: a Unix socket in its data directory.

It answers from the moment the node has links, also when no group has a majority and the HTTP API is
not open. Whoever may open the socket file (mode 0600) may administer the node: there is no other
authentication.

A request reaches its handler with `uid` and `pid`: the user and the process that ask, as the system
says. What a client writes there is replaced.

Protocol: a request is one line of JSON `{"op": name, …}`; answers are lines of JSON, any number of
`{"progress": text}` and then one of `{"result": value}` or `{"error": text}`. One request a
connection. By hand, because an idle node imports no web server for it (ADR 0194).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from convoymq.model.errors import BrokerError, Misuse, Unavailable

SOCKET_NAME = "admin.sock"
REQUEST_BYTES_MAX = 48 << 20
"""Definitions of a whole cluster fit, as text within a request."""
REQUEST_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 16
_CREDENTIALS = struct.Struct("iii")
"""`struct ucred` of SO_PEERCRED: pid, uid, gid."""

Progress = Callable[[str], None]
Handler = Callable[[dict[str, object], Progress], Awaitable[object]]
"""Called with the request; returns the result. Raises BrokerError."""


class AdminSocket:
    """Serves requests by their `op`."""

    def __init__(self, directory: Path, handlers: dict[str, Handler]) -> None:
        self._directory = directory
        self._handlers = handlers
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> AdminSocket:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begins to listen. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / SOCKET_NAME)
        with _short_path(self._directory) as path:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            mask = os.umask(0o177)
            try:
                listener.bind(path)
            except OSError:
                listener.close()
                raise
            finally:
                os.umask(mask)
        self._server = await asyncio.start_unix_server(
            self._accept, sock=listener, limit=REQUEST_BYTES_MAX
        )

    async def stop(self) -> None:
        """Stops listening and ends requests under way."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / SOCKET_NAME)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.close()
            return
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(content: dict[str, object]) -> None:
            writer.write(json.dumps(content, default=str).encode() + b"\n")

        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await reader.readline()
            request = json.loads(line)
            handler = self._handlers.get(request["op"])
            request["pid"], request["uid"] = _peer_of(writer)
        except (TimeoutError, ValueError, KeyError, TypeError, RecursionError):
            say({"error": "not a request: one line of JSON with an op"})
            await writer.drain()
            return
        if handler is None:
            say({"error": f"unknown op {request['op']!r}"})
        else:
            try:
                result = await handler(request, lambda text: say({"progress": text}))
                say({"result": result})
            except BrokerError as error:
                say({"error": error.text})
        await writer.drain()


def ask(
    directory: Path, request: Mapping[str, object], progress: Progress, timeout: float = 300.0
) -> Any:
    """Sends a request to the node that runs in a data directory and returns its result.

    Raises:
        Unavailable: no node runs there, or it does not answer.
        Misuse: it refuses; the text says why.
    """
    try:
        with (
            _short_path(directory) as path,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link,
        ):
            link.settimeout(timeout)
            link.connect(path)
            link.sendall(json.dumps(request).encode() + b"\n")
            for line in link.makefile("rb"):
                answer = json.loads(line)
                if "progress" in answer:
                    progress(str(answer["progress"]))
                elif "error" in answer:
                    raise Misuse(str(answer["error"]))
                else:
                    return answer["result"]
    except FileNotFoundError:
        raise Unavailable(f"no node runs in {directory}: start it first") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"the node in {directory} does not answer: {error}") from None
    raise Unavailable(f"the node in {directory} closed the connection")


def _peer_of(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Returns (process, user) at the other end, as the system knows them. Raises OSError."""
    found = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    pid, uid, _gid = _CREDENTIALS.unpack(found)
    return pid, uid


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """Gives a path of the socket that fits into a socket address, however deep it lies."""
    handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)
