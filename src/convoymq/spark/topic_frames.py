"""Columnar frames of a topic's partition as record batches: order keys, places and order tokens.

The order key of a message is its header `x-order-key`, or else its routing key, as the broker takes
it. Nothing is done row by row: hashes are computed once for each key of a frame, and tokens are
joined from text that is made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from convoymq.client.arrow import binary_array, header_array
from convoymq.kernels import columns as bits
from convoymq.kernels.ordered_runs import order_hash
from convoymq.spark.frames import BatchMaker
from convoymq.spark.partition import TopicRange
from convoymq.spark.schema import TOPIC_COLUMNS
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET
from convoymq.topics.rules.order_token import OrderToken

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from convoymq.kernels.column_frame import ColumnFrame

ORDER_KEY = "x-order-key"
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_LOW_DIGITS = 4
_LOW = 16**_LOW_DIGITS


class TopicBatchMaker(BatchMaker):
    """Makes record batches of frames of a topic's partitions. Picklable."""

    def __init__(self, schema: StructType) -> None:
        super().__init__(schema, TOPIC_COLUMNS)
        self._part: TopicRange | None = None
        self._keys: tuple[ColumnFrame, pa.Array] | None = None

    def of(self, part: TopicRange) -> TopicBatchMaker:
        """Returns one for the frames of a part."""
        made = copy(self)
        made._part = part
        made.mended = Counter()
        return made

    def _array(
        self, name: str, wanted: pa.DataType, frame: ColumnFrame, constants: Mapping[str, object]
    ) -> pa.Array:
        part = self._part
        assert part is not None
        match name:
            case "key":
                return self._order_keys(frame)
            case "lp":
                return logical_partitions(self._order_keys(frame), part.logical, part.hash_seed)
            case "offset":
                found = super()._array(name, wanted, frame, constants)
                return pc.add(found, pa.scalar(FIRST_USER_OFFSET, wanted))
            case "order_token":
                first = frame.base + FIRST_USER_OFFSET
                return order_tokens(part.created_version, first, frame.rows)
            case _:
                return super()._array(name, wanted, frame, constants)

    def _order_keys(self, frame: ColumnFrame) -> pa.Array:
        if self._keys is None or self._keys[0] is not frame:
            self._keys = (frame, order_keys(frame))
        return self._keys[1]


def order_keys(frame: ColumnFrame) -> pa.Array:
    """Returns the order keys of a frame's messages; null where there is none."""
    rows = frame.rows
    ends, data = frame.buffers(bits.ROUTING_KEY)
    keys = binary_array([memoryview(b""), ends, data], rows, pa.binary())
    headers = header_array(frame.buffers(bits.HEADERS), rows, _HEADERS)
    names, values = headers.values.field("key"), headers.values.field("value")
    filled = pc.greater(pc.fill_null(pc.binary_length(values), 0), 0)
    found = pc.indices_nonzero(pc.and_(pc.equal(names, ORDER_KEY), filled))
    if len(found):
        at = pc.list_parent_indices(headers).take(found)
        # By the first header of that name; null without one.
        header = pc.index_in(pa.array(range(rows), at.type), at)
        keys = pc.coalesce(values.take(found).take(header), keys)
    return pc.if_else(pc.equal(pc.binary_length(keys), 0), pa.scalar(None, keys.type), keys)


def logical_partitions(keys: pa.Array, logical: int, seed: int) -> pa.Array:
    """Returns the logical partition of each key; null where there is none."""
    encoded = keys.dictionary_encode()
    places = [order_hash(key, seed) % logical for key in encoded.dictionary.to_pylist()]
    return pa.array(places, pa.int32()).take(encoded.indices)


def order_tokens(created_version: int, first: int, rows: int) -> pa.Array:
    """Returns the order tokens of messages with offsets from `first` on, as text."""
    parts = []
    end = first + rows
    while first < end:
        high, low = divmod(first, _LOW)
        count = min(_LOW - low, end - first)
        prefix = str(OrderToken(created_version, high * _LOW))[:-_LOW_DIGITS]
        lows = _low_digits().slice(low, count)
        parts.append(pc.binary_join_element_wise(prefix, lows, ""))
        first += count
    return pa.concat_arrays(parts) if parts else pa.array([], pa.string())


@cache
def _low_digits() -> pa.Array:
    """The last digits of tokens."""
    return pa.array([f"{number:0{_LOW_DIGITS}x}" for number in range(_LOW)], pa.string())
