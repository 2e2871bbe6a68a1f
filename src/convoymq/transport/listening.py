"""Listening sockets of one host; `localhost` is the loopback addresses of both families."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

SocketAddress = Sequence[object]
"""As `socket` gives it: host, port and, for IPv6, more."""

BACKLOG = 1024
"""Connections that the system accepts ahead of the process, unless somebody says otherwise."""

ACCEPTS_PER_TURN = 64
ACCEPT_PAUSE_S = 1.0
LEFT_S = 0.005
"""Time between two looks at a connection that is left to another process."""
LEFT_MAX_S = 0.1
"""A connection that no other process has accepted by then is accepted all the same."""

HANG_UP_CHECK_S = 1.0
"""Time between two checks that the clients of connections that are not read are still there."""

_LOCALHOST = {"localhost": ("127.0.0.1", "::1")}
_TRIES = 20
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_GONE = frozenset(
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "EPERM", "EPROTO", "ENOPROTOOPT", "EOPNOTSUPP", "ENETDOWN"),
        *("ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENONET"),
    )
    if hasattr(errno, name)
)
"""Of the connection that waited, not of the listening socket: see accept(2), error handling."""
_NO_FAMILY = frozenset((errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT))


def listen(host: str, port: int, backlog: int | None = BACKLOG) -> list[socket.socket]:
    """Returns non-blocking sockets that listen on the same port of the host's addresses.

    `::` listens for IPv4 too. Port 0 takes one that is free for all of them.

    Args:
        backlog: connections that the system accepts ahead; None: the sockets are only bound.

    Raises:
        OSError: an address cannot be bound; nothing is left open.
    """
    hosts = addresses_of(host)
    for _ in range(_TRIES):
        try:
            return _listen(hosts, port, backlog)
        except OSError as error:
            if port or len(hosts) == 1 or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port is free on all of {', '.join(hosts)}")


class Acceptor:
    """Accepts connections on a listening socket, from now on until `close`.

    Args:
        accepted: takes a connection, which still blocks, and its peer's address.
        failed: hears why no connection can be taken for `ACCEPT_PAUSE_S`: no file descriptor is
            free, or no memory.
        may_accept: returns whether a connection shall not be left to another process that accepts
            on the same socket.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        accepted: Callable[[socket.socket, SocketAddress], None],
        failed: Callable[[OSError], None],
        may_accept: Callable[[], bool] | None = None,
    ) -> None:
        self._loop = loop
        self._listening = listening
        self._accepted = accepted
        self._failed = failed
        self._may_accept = may_accept
        self._left_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._resume()

    def close(self) -> None:
        """Accepts no more, and closes the socket."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()

    def _resume(self) -> None:
        self._timer = None
        if self._left_since is not None and not is_readable(self._listening):
            # Another process has accepted it.
            self._left_since = None
        self._loop.add_reader(self._listening.fileno(), self._readable)

    def _readable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._closed or self._is_left():
                return
            try:
                sock, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                self._left_since = None
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                if error.errno not in _NO_ROOM:
                    raise
                # Who calls waits in the kernel's queue meanwhile; trying at once would only spin.
                self._pause(ACCEPT_PAUSE_S)
                self._failed(error)
                return
            self._left_since = None
            self._accepted(sock, peer)

    def _is_left(self) -> bool:
        """Returns whether a connection is left to another process, and looks again soon."""
        if self._may_accept is None or self._may_accept():
            return False
        now = self._loop.time()
        if self._left_since is None:
            self._left_since = now
        elif now - self._left_since >= LEFT_MAX_S:
            return False
        self._pause(LEFT_S)
        return True

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._timer = self._loop.call_later(seconds, self._resume)


class HangUpWatch:
    """Asks every `HANG_UP_CHECK_S` which clients of blocked connections have gone: a connection
    that is not read does not show its end either.

    Args:
        blocked: returns descriptor -> what to call when its client has gone; -1 has no socket.
    """

    def __init__(self, blocked: Callable[[], Mapping[int, Callable[[], None]]]) -> None:
        self._blocked = blocked
        self._timer: asyncio.TimerHandle | None = None

    def set(self, on: bool) -> None:
        """Begins, and asks at once, or ends."""
        if on and self._timer is None:
            self._ask()
        elif not on and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HANG_UP_CHECK_S, self._ask)
        blocked = self._blocked()
        for fd in hung_up(blocked.keys() - {-1}):
            blocked[fd]()


def is_readable(sock: socket.socket) -> bool:
    """Returns whether a listening socket has a connection waiting."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def descriptor_of(transport: asyncio.BaseTransport | None) -> int:
    """Returns the descriptor of a transport's socket; -1 without one."""
    sock = None if transport is None else transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def hung_up(fds: Iterable[int]) -> list[int]:
    """Returns those of these sockets whose peer has closed its side, whatever is still unread."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, getattr(select, "POLLRDHUP", 0))
    return [fd for fd, _ in poll.poll(0)]


def addresses_of(host: str) -> tuple[str, ...]:
    """Returns the addresses that `listen` binds for a configured host."""
    hosts = _LOCALHOST.get(host, (host,))
    if len(hosts) > 1 and not has_ipv6():
        return hosts[:1]
    return hosts


@cache
def has_ipv6() -> bool:
    """Returns whether the system has an IPv6 loopback address."""
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        if error.errno in _NO_FAMILY:
            return False
        raise
    return True


def plain_address(address: str) -> str:
    """Returns an IPv4 address that an IPv6 socket shows (`::ffff:192.0.2.1`) as IPv4 writes it."""
    if address.startswith("::ffff:") and "." in address:
        return address.removeprefix("::ffff:")
    return address


def _listen(hosts: tuple[str, ...], port: int, backlog: int | None) -> list[socket.socket]:
    made: list[socket.socket] = []
    try:
        for host in hosts:
            made.append(_bind(host, port))
            port = made[0].getsockname()[1]
        for sock in made:
            if backlog is not None:
                sock.listen(backlog)
            sock.setblocking(False)
    except OSError:
        for sock in made:
            sock.close()
        raise
    return made


def _bind(host: str, port: int) -> socket.socket:
    ipv6 = ":" in host
    sock = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        shown = f"[{host}]" if ipv6 else host
        raise OSError(error.errno, f"{error.strerror} ({shown}:{port})") from None
    return sock
