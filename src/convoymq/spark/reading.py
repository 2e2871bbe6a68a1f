"""Reads of a task: fetches a range part by part, and hands on record batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from convoymq.client import errors
from convoymq.spark import clients
from convoymq.spark.errors import DataLoss, ReservationLost, SourceError
from convoymq.spark.frames import BatchMaker, frame_bytes
from convoymq.spark.partition import Browse, ReservationRange, StreamRange
from convoymq.spark.properties import mended_text

if TYPE_CHECKING:
    import pyarrow as pa

    from convoymq.client import FetchResult
    from convoymq.spark.options import Connection, Fetching

log = logging.getLogger(__name__)

T = TypeVar("T")


def read_stream(
    connection: Connection,
    fetching: Fetching,
    maker: BatchMaker,
    part: StreamRange,
    *,
    fail_on_data_loss: bool,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a range, in order, all of them.

    Raises:
        DataLoss: some are gone and `fail_on_data_loss` is set; otherwise the read goes on behind
            the gap.
    """
    fetched = _stream_frames(connection, fetching, maker.bits, part, fail_on_data_loss)
    yield from _batches(fetched, fetching, maker, part.constants)


def read_reservation(
    connection: Connection,
    fetching: Fetching,
    maker: BatchMaker,
    part: ReservationRange,
    *,
    skip_expired: bool,
) -> Iterator[pa.RecordBatch]:
    """Yields the reserved messages of a range. Raises ReservationLost unless `skip_expired`."""
    fetched = _reservation_frames(connection, fetching, maker.bits, part, skip_expired)
    yield from _batches(fetched, fetching, maker, {"queue": part.queue})


def read_browsed(
    connection: Connection, fetching: Fetching, maker: BatchMaker, part: Browse
) -> Iterator[pa.RecordBatch]:
    """Yields what is ready in a queue now; nothing is taken."""
    fetched = _browsed_frames(connection, fetching, maker.bits, part)
    yield from _batches(fetched, fetching, maker, {"queue": part.queue})


def lose(text: str, *, fails: bool) -> None:
    """Raises DataLoss, or says that the read goes on."""
    if fails:
        raise DataLoss(f"{text}. failOnDataLoss=false goes on with what there is")
    log.warning("%s", text)


def _batches(
    fetched: Iterator[FetchResult],
    fetching: Fetching,
    maker: BatchMaker,
    constants: Mapping[str, object],
) -> Iterator[pa.RecordBatch]:
    before = maker.mended.copy()
    try:
        for result in ahead(_paced(fetched, fetching), fetching):
            yield from maker.batches(result.frame, constants)
    finally:
        if mended := maker.mended - before:
            log.warning("%s", mended_text(constants, mended))


def _stream_frames(
    connection: Connection,
    fetching: Fetching,
    columns: int,
    part: StreamRange,
    fail_on_data_loss: bool,
) -> Iterator[FetchResult]:
    client = clients.connect(connection)
    client.go_closer(part.stream)
    offset = part.start
    while offset < part.end:
        try:
            result = client.fetch(
                part.stream,
                offset,
                end=part.end,
                max_rows=fetching.rows_max,
                max_bytes=fetching.part_bytes,
                columns=columns,
                compression=fetching.compression,
                local=fetching.local,
                group=part.group,
            )
        except errors.OffsetOutOfRange as error:
            last = part.shown(min(error.first, part.end) - 1)
            text = (
                f"{part.subject}: messages {part.shown(offset)} to {last} are "
                f"gone; the earliest kept is {part.shown(error.first)}"
            )
            if fail_on_data_loss or error.first <= offset:
                raise DataLoss(f"{text}. failOnDataLoss=false goes on behind the gap") from error
            log.warning("%s", text)
            offset = error.first
            continue
        except errors.NotFound as error:
            again = isinstance(error, errors.Recreated)
            fate = "was deleted and declared again" if again else "is gone"
            first, last = part.shown(offset), part.shown(part.end - 1)
            text = f"{part.subject} {fate}: messages {first} to {last} are lost"
            if fail_on_data_loss:
                raise DataLoss(f"{text}. failOnDataLoss=false goes on without them") from error
            log.warning("%s", text)
            return
        _check_progress(part.stream, result, offset, part.end)
        offset = result.next
        yield result


def _reservation_frames(
    connection: Connection,
    fetching: Fetching,
    columns: int,
    part: ReservationRange,
    skip_expired: bool,
) -> Iterator[FetchResult]:
    client = clients.connect(connection)
    client.go_closer(part.queue)
    offset = part.start
    while offset < part.end:
        try:
            result = client.reservation_fetch(
                part.queue,
                part.reservation,
                part.epoch,
                offset,
                end=part.end,
                max_rows=fetching.rows_max,
                max_bytes=fetching.part_bytes,
                columns=columns,
                compression=fetching.compression,
            )
        except errors.ReservationGone as error:
            text = (
                f"queue {part.queue}: messages {offset} to {part.end - 1} of {part.reservation} "
                f"can't be read any more: {error.text}"
            )
            if skip_expired:
                log.warning("%s", text)
                return
            raise ReservationLost(text) from error
        _check_progress(part.queue, result, offset, part.end)
        offset = result.next
        yield result


def _browsed_frames(
    connection: Connection, fetching: Fetching, columns: int, part: Browse
) -> Iterator[FetchResult]:
    client = clients.connect(connection)
    cursor = None
    while True:
        result, cursor = client.browse(
            part.queue,
            cursor,
            max_rows=fetching.rows_max,
            max_bytes=fetching.part_bytes,
            columns=columns,
            compression=fetching.compression,
        )
        if result.frame.rows:
            yield result
        if cursor is None:
            return


def _check_progress(name: str, result: FetchResult, offset: int, end: int) -> None:
    """An answer that skips or repeats rows must not become data."""
    frame = result.frame
    if frame.rows == 0 or frame.base != offset or not offset + frame.rows == frame.next <= end:
        raise SourceError(
            f"{name}: asked for messages {offset} to {end - 1}, the broker answered {frame.rows} "
            f"from {frame.base} to {frame.next - 1}"
        )


def _paced(results: Iterator[FetchResult], fetching: Fetching) -> Iterator[FetchResult]:
    """Yields the same results, no faster than `convoymq.fetch.maxBytesPerSecond`."""
    rate = fetching.rate_max
    if rate is None:
        yield from results
        return
    due = time.monotonic()
    for result in results:
        yield result
        now = time.monotonic()
        # Who was slower than the rate does not make up for it in a burst.
        due = max(due, now) + frame_bytes(result.frame) / rate
        time.sleep(max(0.0, due - now))


def ahead(items: Iterator[T], fetching: Fetching) -> Iterator[T]:
    """Yields the same items, the next one made in a thread while the last one is used."""
    if not fetching.prefetch:
        yield from items
        return
    made: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
    wanted: SimpleQueue[bool] = SimpleQueue()

    def make() -> None:
        while wanted.get():
            try:
                made.put((next(items, None), None))
            except BaseException as error:
                made.put((None, error))

    thread = threading.Thread(target=make, name="convoymq-fetch", daemon=True)
    thread.start()
    wanted.put(True)
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is None:
                return
            wanted.put(True)
            yield item
    finally:
        wanted.put(False)
        thread.join()
