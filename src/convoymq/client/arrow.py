"""Streams as Arrow: record batches whose buffers are those of the fetched frames, never row by row.

For programs with pyarrow, pandas, Polars or DuckDB (`Client.read`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from convoymq.kernels import columns as bits

if TYPE_CHECKING:
    import pandas
    import polars

    from convoymq.client.client import Client
    from convoymq.kernels.column_frame import ColumnFrame

HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string(), False), ("value", pa.binary())]))
COLUMNS: dict[str, tuple[int, pa.DataType]] = {
    "offset": (bits.OFFSET, pa.int64()),
    "timestamp": (bits.TIMESTAMP, pa.timestamp("us", "UTC")),
    "key": (bits.KEY, pa.binary()),
    "value": (bits.VALUE, pa.binary()),
    "headers": (bits.HEADERS, HEADERS_TYPE),
}
"""Column of a batch -> bit of a frame, type."""
_INT32_BYTES = 4


class StreamRead:
    """Messages of a stream, from one offset to another: an iterable of record batches, each time
    read anew. Both ends are fixed when it is made. Made by `Client.read`."""

    def __init__(
        self,
        client: Client,
        stream: str,
        start: int,
        end: int,
        columns: Sequence[str],
        local: bool,
    ) -> None:
        """Raises ValueError: there is no such column."""
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown or not columns:
            raise ValueError(f"columns are of {', '.join(COLUMNS)}, not {unknown}")
        self.stream = stream
        self.start = start
        self.end = end
        self.schema = pa.schema([(name, COLUMNS[name][1]) for name in columns])
        self._client = client
        self._local = local

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        needed = 0
        for name in self.schema.names:
            needed |= COLUMNS[name][0]
        offset = self.start
        while offset < self.end:
            found = self._client.fetch(
                self.stream, offset, end=self.end, columns=needed, local=self._local
            )
            if found.frame.rows:
                yield self._batch(found.frame)
            if found.next <= offset:
                # What was there at the beginning has left the stream.
                break
            offset = found.next

    def _batch(self, frame: ColumnFrame) -> pa.RecordBatch:
        arrays = [column_array(frame, name) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def reader(self) -> pa.RecordBatchReader:
        """Returns the batches as a reader, which DuckDB and Polars take without a copy."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_arrow(self) -> pa.Table:
        """Returns all messages as a table."""
        return pa.Table.from_batches(iter(self), self.schema)

    def to_pandas(self) -> pandas.DataFrame:
        """Returns all messages as a data frame of pandas."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """Returns all messages as a data frame of Polars."""
        import polars

        found = polars.from_arrow(self.to_arrow())
        assert isinstance(found, polars.DataFrame)
        return found


def column_array(frame: ColumnFrame, name: str) -> pa.Array:
    """Returns a column of `COLUMNS` of a frame."""
    column, kind = COLUMNS[name]
    match name:
        case "offset":
            return fixed_array(frame.offsets(), frame.rows, kind)
        case "timestamp":
            return fixed_array(frame.buffers(column)[0], frame.rows, kind)
        case "headers":
            return header_array(frame.buffers(column), frame.rows, kind)
        case _:
            return binary_array(frame.buffers(column), frame.rows, kind)


def fixed_array(buffer: memoryview, rows: int, kind: pa.DataType) -> pa.Array:
    """Returns numbers as an array."""
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(buffer)])


def binary_array(buffers: list[memoryview], rows: int, kind: pa.DataType) -> pa.Array:
    """Returns validity, offsets and bytes of a column as an array."""
    validity, offsets, data = buffers
    parts = [_validity(validity), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, rows, parts)


def text_array(buffers: list[memoryview], rows: int, kind: pa.DataType) -> pa.Array:
    """Returns offsets and bytes of a column without nulls as an array."""
    offsets, data = buffers
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def header_array(buffers: list[memoryview], rows: int, kind: pa.DataType) -> pa.Array:
    """Returns the seven buffers of the headers' column as an array."""
    validity, lists, name_offsets, names, value_validity, value_offsets, values = buffers
    entries = len(name_offsets) // _INT32_BYTES - 1
    struct = kind.value_type
    pairs = pa.StructArray.from_arrays(
        [
            text_array([name_offsets, names], entries, struct.field("key").type),
            binary_array(
                [value_validity, value_offsets, values], entries, struct.field("value").type
            ),
        ],
        fields=list(struct),
    )
    return pa.Array.from_buffers(
        kind, rows, [_validity(validity), pa.py_buffer(lists)], children=[pairs]
    )


def _validity(buffer: memoryview) -> pa.Buffer | None:
    return pa.py_buffer(buffer) if len(buffer) else None
