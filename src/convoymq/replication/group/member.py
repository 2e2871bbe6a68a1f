"""The common part of a master and a slave: the book of lives, and the answer about their tail."""

from __future__ import annotations

from collections.abc import Callable

from convoymq.replication.group.lives import Book
from convoymq.replication.group.tails import whole_end
from convoymq.replication.group.types import Ask, Log, Tail


class Member:
    """A member of a group with its book.

    Args:
        save: persists a book; it is durable on return.
    """

    def __init__(self, book: Book, save: Callable[[Book], None]) -> None:
        self._book = book
        self._save = save

    @property
    def book(self) -> Book:
        """Returns what is persisted."""
        return self._book

    def _write(self, book: Book) -> None:
        if book != self._book:
            self._save(book)
            self._book = book


def tail_of(
    log: Log, ask: Ask, member: int, session: int, book: Book, *, takes_writes: bool
) -> Tail:
    """Answers a question about a log."""
    end = whole_end(log)
    has_range = log.min_offset <= ask.start < ask.end <= end
    return Tail(
        min_offset=log.min_offset,
        max_offset=end,
        member=member,
        session=session,
        takes_writes=takes_writes,
        lives=book.lives,
        checksum=log.crc32c(ask.start, ask.end) if has_range else None,
    )
