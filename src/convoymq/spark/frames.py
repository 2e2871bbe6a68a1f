"""Columnar frames as Arrow record batches, and back: by slicing buffers, never row by row.

The bytes of a columnar frame are Arrow's own, so an array is made of where they lie. A batch for
Spark is a slice of at most 10,000 rows and about 4 MiB: Spark does not cut batches itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema

from convoymq.client.arrow import binary_array, fixed_array, header_array, text_array
from convoymq.kernels import columns as bits
from convoymq.spark.properties import PROPERTY_KINDS, Mended, decode_properties, shown_text
from convoymq.spark.schema import LOG_APPEND_TIME, Column

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from convoymq.kernels.column_frame import ColumnFrame

BATCH_ROWS_MAX = 10_000
BATCH_BYTES_MAX = 4 << 20

_INT32_BYTES = 4


class BatchMaker:
    """Makes record batches of one schema of frames. Picklable.

    Args:
        schema: what is asked for, checked against `columns`.
        columns: the table of the format.
    """

    def __init__(self, schema: StructType, columns: Mapping[str, Column]) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._fields = tuple((field.name, field.type) for field in self._schema)
        self.mended: Mended = Counter()
        """Values that are not in the batches as their senders sent them."""
        #: Columns with one value in every row, as long as they were needed so far.
        self._repeated: dict[str, tuple[object, pa.Array]] = {}
        needed = 0
        for name, _ in self._fields:
            needed |= columns[name].bits
        # A frame has a column at least, even where only the number of rows counts.
        self.bits = needed or bits.OFFSET
        """Columns to fetch."""

    def batches(
        self, frame: ColumnFrame, constants: Mapping[str, object]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the frame's rows as batches for Spark.

        Args:
            constants: values of the columns that are not in the frame: the names of the stream or
                queue, the partition.
        """
        if not frame.rows:
            return
        arrays = [self._array(name, kind, frame, constants) for name, kind in self._fields]
        whole = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        start = 0
        for end in _cuts(frame):
            yield whole.slice(start, end - start)
            start = end

    def _array(
        self, name: str, wanted: pa.DataType, frame: ColumnFrame, constants: Mapping[str, object]
    ) -> pa.Array:
        rows = frame.rows
        match name:
            case "key":
                return binary_array(frame.buffers(bits.KEY), rows, wanted)
            case "value":
                return binary_array(frame.buffers(bits.VALUE), rows, wanted)
            case "offset":
                return fixed_array(frame.offsets(), rows, wanted)
            case "timestamp":
                return fixed_array(frame.buffers(bits.TIMESTAMP)[0], rows, wanted)
            case "timestampType":
                return self._repeat(name, LOG_APPEND_TIME, wanted, rows)
            case "headers":
                return header_array(frame.buffers(bits.HEADERS), rows, wanted)
            case "exchange":
                return _name(frame.buffers(bits.EXCHANGE), rows, wanted, name, self.mended)
            case "routing_key":
                return _name(frame.buffers(bits.ROUTING_KEY), rows, wanted, name, self.mended)
            case "delivery_count":
                return fixed_array(frame.buffers(bits.DELIVERY_COUNT)[0], rows, wanted)
            case "redelivered":
                return fixed_array(frame.buffers(bits.REDELIVERED)[0], rows, wanted)
            case "properties":
                return _properties(frame, rows, wanted, self.mended)
            case "content_header":
                return text_array(frame.buffers(bits.PROPERTIES), rows, wanted)
            case _:
                return self._repeat(name, constants[name], wanted, rows)

    def _repeat(self, name: str, value: object, kind: pa.DataType, rows: int) -> pa.Array:
        known, array = self._repeated.get(name, (None, None))
        if array is None or known != value or len(array) < rows:
            array = pa.repeat(pa.scalar(value, kind), max(rows, BATCH_ROWS_MAX))
            self._repeated[name] = (value, array)
        return array.slice(0, rows)


def frame_bytes(frame: ColumnFrame) -> int:
    """Returns the number of bytes of all columns."""
    size = 0
    column = 1
    while column <= frame.columns:
        if frame.columns & column:
            size += sum(map(len, frame.buffers(column)))
        column <<= 1
    return size


def _cuts(frame: ColumnFrame) -> Iterator[int]:
    """Yields where batches end: as many rows as fit into both bounds, but at least one."""
    tables = [
        frame.buffers(column)[1].cast("i")
        for column in (bits.KEY, bits.VALUE)
        if frame.columns & column
    ]
    start = 0
    while start < frame.rows:
        end = min(start + BATCH_ROWS_MAX, frame.rows)
        for table in tables:
            # The last row whose end lies within the bound.
            fits = bisect_right(table, table[start] + BATCH_BYTES_MAX, start, end + 1) - 1
            end = min(end, fits)
        end = max(end, start + 1)
        yield end
        start = end


def _name(
    buffers: list[memoryview], rows: int, kind: pa.DataType, name: str, mended: Mended
) -> pa.Array:
    """Returns ends and bytes of a column of short strings as text: they need not be UTF-8."""
    offsets, data = buffers
    texts = binary_array([memoryview(b""), offsets, data], rows, pa.binary())
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        return pa.array([shown_text(each, name, mended) for each in texts.to_pylist()], kind)


def _properties(frame: ColumnFrame, rows: int, kind: pa.StructType, mended: Mended) -> pa.Array:
    offsets, data = frame.buffers(bits.PROPERTIES)
    ends = offsets.cast("i")
    decoded = [decode_properties(data[ends[i] : ends[i + 1]], mended) or {} for i in range(rows)]
    arrays = [
        _name(frame.buffers(column), rows, kind.field(name).type, name, mended)
        for name, column in (("exchange", bits.EXCHANGE), ("routing_key", bits.ROUTING_KEY))
    ]
    for name in PROPERTY_KINDS:
        arrays.append(pa.array([row.get(name) for row in decoded], kind.field(name).type))
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


# --- from Arrow to a frame -------------------------------------------------------------------


def binary_buffers(array: pa.Array) -> list[pa.Buffer | bytes]:
    """Validity, offsets from 0 on and bytes of an array of binary or text.

    Cost: no copy unless the array is a slice that begins inside another.
    """
    rows = len(array)
    _validity, offsets, data = array.buffers()
    if rows == 0:
        return [b"", bytes(_INT32_BYTES), b""]
    position = array.offset * _INT32_BYTES
    table = offsets.slice(position, (rows + 1) * _INT32_BYTES)
    ends = memoryview(table).cast("i")
    first, last = ends[0], ends[rows]
    if first:
        numbers = pa.Array.from_buffers(pa.int32(), rows + 1, [None, table])
        table = pc.subtract(numbers, pa.scalar(first, pa.int32())).buffers()[1]
        table = table.slice(0, (rows + 1) * _INT32_BYTES)
    body = data.slice(first, last - first) if data is not None else b""
    return [validity_bits(array), table, body]


def header_buffers(array: pa.Array) -> list[pa.Buffer | bytes]:
    """Returns the seven buffers of a list of (key, value) structs."""
    rows = len(array)
    # Flattening drops what lies under nulls; the offsets must then be counted anew.
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    ends = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)])
    table = ends.cast(pa.int32()).buffers()[1].slice(0, (rows + 1) * _INT32_BYTES)
    pairs = array.flatten()
    # Flattened once more: a null pair has a null key and a null value.
    fields = dict(zip((field.name for field in pairs.type), pairs.flatten(), strict=True))
    names = plain_binary(fields["key"])
    values = plain_binary(fields["value"])
    if names.null_count:
        raise ValueError("the key of a header is null")
    _, name_offsets, name_bytes = binary_buffers(names)
    return [validity_bits(array), table, name_offsets, name_bytes, *binary_buffers(values)]


def validity_bits(array: pa.Array) -> pa.Buffer | bytes:
    """Returns one bit per row, from bit 0 on; empty where nothing is null."""
    if not array.null_count:
        return b""
    valid = pc.is_valid(array)
    return valid.buffers()[1].slice(0, (len(array) + 7) // 8)


def plain_binary(array: pa.Array) -> pa.Array:
    """Text and binary of any width as binary with 32-bit offsets."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array if array.type == pa.binary() else array.cast(pa.binary())
