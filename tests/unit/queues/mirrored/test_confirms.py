"""Writes of a master that wait for its disk and its mirrors."""

from __future__ import annotations

from convoymq.queues.mirrored.confirms import Confirms, Write


class Book:
    def __init__(self) -> None:
        self.confirms = Confirms()
        self.done: list[tuple[int, bool]] = []

    def add(self, number: int) -> Write:
        return self.confirms.add(number, lambda e: self.done.append((number, e is None)))


def test_a_write_waits_for_the_slowest_mirror() -> None:
    book = Book()
    book.confirms.expect(2, 0)
    book.confirms.expect(3, 0)
    book.confirms.on_written(book.add(1), None)
    book.confirms.on_stored(2, 5)
    assert not book.done
    book.confirms.on_stored(3, 1)
    assert book.done == [(1, True)]


def test_a_write_waits_for_the_own_disk() -> None:
    book = Book()
    book.confirms.expect(2, 0)
    write = book.add(1)
    book.confirms.on_stored(2, 1)
    assert not book.done
    book.confirms.on_written(write, None)
    assert book.done == [(1, True)]


def test_writes_are_done_in_their_order() -> None:
    book = Book()
    book.confirms.expect(2, 0)
    first, second = book.add(1), book.add(2)
    book.confirms.on_stored(2, 2)
    book.confirms.on_written(second, None)
    assert not book.done
    book.confirms.on_written(first, None)
    assert book.done == [(1, True), (2, True)]


def test_a_mirror_that_is_gone_is_not_waited_for() -> None:
    book = Book()
    book.confirms.expect(2, 0)
    book.confirms.on_written(book.add(1), None)
    book.confirms.forget(2)
    assert book.done == [(1, True)]
    # What it says later means nothing.
    book.confirms.on_stored(2, 9)
    assert not book.confirms.stored


def test_a_mirror_is_not_waited_for_before_it_takes_part() -> None:
    book = Book()
    book.confirms.on_written(book.add(4), None)
    book.confirms.expect(2, 4)
    assert book.done == [(4, True)]
    assert book.confirms.has_stored(4)
    assert not book.confirms.has_stored(5)


def test_a_failed_write_is_refused_at_once() -> None:
    book = Book()
    book.confirms.expect(2, 0)
    first, second = book.add(1), book.add(2)
    book.confirms.on_written(second, OSError())
    assert book.done == [(2, False)]
    book.confirms.on_written(first, None)
    book.confirms.on_stored(2, 1)
    assert book.done == [(2, False), (1, True)]
