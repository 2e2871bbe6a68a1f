"""Connections of pika that a test has opened and not closed.

Pika's connection and its loop refer to each other. What a test abandons, because a node was killed
under it or an assertion failed, is therefore collected much later, in some other test of the
process, and that test fails for the open sockets.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pika  # type: ignore[import-untyped]

_numbers = itertools.count()
_opened: weakref.WeakKeyDictionary[pika.BlockingConnection, int] = weakref.WeakKeyDictionary()
_init = pika.BlockingConnection.__init__


def _counted(self: pika.BlockingConnection, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    _opened[self] = next(_numbers)


def watch() -> None:
    """Counts the connections that are opened from now on."""
    pika.BlockingConnection.__init__ = _counted


@contextmanager
def closed_at_the_end() -> Iterator[None]:
    """Closes the sockets of connections that are opened meanwhile and still have theirs."""
    first = next(_numbers)
    yield
    for connection, number in list(_opened.items()):
        if number > first:
            del _opened[connection]
            _close(connection)


def _close(connection: pika.BlockingConnection) -> None:
    implementation: Any = connection._impl
    # Without the closing handshake: the node may be gone, or stopped.
    with suppress(AttributeError, AssertionError, OSError):
        implementation._transport._sock.close()
    with suppress(AttributeError, AssertionError, OSError):
        implementation.ioloop.close()
