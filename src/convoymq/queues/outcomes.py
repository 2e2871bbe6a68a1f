"""Commands of consumers with credit, and of those that say what becomes of what they give back.

| command | flags                                     | count  | body                           |
|---------|-------------------------------------------|--------|--------------------------------|
| GRANT   | 1 drain, 2 unasked                        | 0      | limit, u64                     |
| MODIFY  | 1 failed, 2 untried, 4 undeliverable,     | ranges | ranges; due ms, u64; length,   |
|         | 8 rejected                                |        | u32; annotations               |

Both name their consumer in `arg`. Queues understand them since the versions of their machines that
say so (ADR 0200, ADR 0201).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from convoymq.kernels import batch
from convoymq.messages.amqp10.message import annotated
from convoymq.messages.amqp10.values import Described, Symbol, decode, encode
from convoymq.model.errors import BrokerError, Misuse
from convoymq.queues.interface import Delivery

CMD_GRANT = 24
CMD_MODIFY = 25

FLAG_DRAIN = 1
"""Of GRANT: what the consumer does not get at once it does not get by this grant."""
FLAG_UNASKED = 2
"""Of GRANT: it repeats one that was answered; nobody waits for another answer."""

FLAG_SUSPEND = 1
"""Of CANCEL: what the consumer holds is kept for the next one of its link."""
FLAG_FAILED = 1
"""Of RETURN and MODIFY: their processing has failed."""
FLAG_UNTRIED = 2
"""Of RETURN and MODIFY: nobody has tried to process them. They do not count where all others do."""
FLAG_UNDELIVERABLE = 4
"""Of MODIFY: not to this consumer again."""
FLAG_REJECTED = 8
"""Of MODIFY: they leave, and do not come back."""

ANNOTATION_BYTES_MAX = 64 << 10
"""Annotations of one message. Above that they stay as they were."""
LIMIT_MAX = 1 << 62

_TAIL = 12


class Modified(NamedTuple):
    """The body of a MODIFY."""

    ranges: list[int]
    due_ms: int
    annotations: bytes


def limit_of(limit: int) -> bytes:
    """Returns the body of a GRANT."""
    return min(max(limit, 0), LIMIT_MAX).to_bytes(8, "little")


def pack_modified(ranges: Sequence[int], due_ms: int, annotations: bytes) -> bytes:
    """Returns the body of a MODIFY."""
    assert len(annotations) <= ANNOTATION_BYTES_MAX
    tail = due_ms.to_bytes(8, "little") + len(annotations).to_bytes(4, "little")
    return bytes(batch.pack_ranges(ranges)) + tail + annotations


def unpack_modified(data: bytes, offset: int, count: int) -> Modified:
    """Returns the body of the MODIFY at an offset. Raises ValueError."""
    ranges = batch.ranges(data, offset, count)
    tail = batch.command_body(data, offset)[16 * count :]
    size = int.from_bytes(tail[8:_TAIL], "little")
    if len(tail) < _TAIL + size:
        raise ValueError("annotations lie outside their command")
    due_ms = int.from_bytes(tail[:8], "little")
    return Modified(ranges, due_ms, tail[_TAIL : _TAIL + size])


def merged(said: bytes, more: bytes) -> bytes:
    """Returns annotations with others added, which replace those of the same keys; as they were
    where they would be too large. Raises PeerError, Misuse: they are no map."""
    if not more:
        return said
    made = encode({**_map_of(said), **_map_of(more)})
    return made if len(made) <= ANNOTATION_BYTES_MAX else said


def _map_of(annotations: bytes) -> dict[object, object]:
    if not annotations:
        return {}
    value, _ = decode(annotations, 0, len(annotations))
    if not isinstance(value, dict):
        raise Misuse("annotations are a map")
    return value


def annotations_of(error: bytes) -> bytes:
    """Returns an encoded error of AMQP 1.0 as annotations of the message that was rejected. Raises
    PeerError, Misuse: it is none."""
    if not error:
        return b""
    value, _ = decode(error, 0, len(error))
    fields = value.value if isinstance(value, Described) else value
    if not isinstance(fields, list):
        raise Misuse("an error is a list")
    names = ("x-opt-rejected-condition", "x-opt-rejected-description")
    said = {Symbol(name): field for name, field in zip(names, fields, strict=False) if field}
    return encode(said) if said else b""


def with_headers(delivery: Delivery) -> Iterator[Delivery]:
    """Yields the messages of a delivery with its annotations as headers, for protocols that know no
    others; damaged ones as they are."""
    for skip in range(delivery.messages):
        one = delivery.without(skip).upto(1)
        try:
            record = annotated(batch.record(one.block, one.command, one.first), one.annotations)
        except (BrokerError, ValueError):
            yield one._replace(annotations=b"")
            continue
        builder = batch.CommandBuilder()
        target = batch.PublishTarget(builder, 0, None)
        target.publish((record,), 0, 0, 0)
        builder.discard_unsent()
        block = bytes(target.pending[0].bytes())
        yield one._replace(block=block, command=0, first=0, annotations=b"")


class Annotated:
    """Annotations of the deliveries that a client's consumers hold: what a consumer says of them is
    added to what was said before, and the queue keeps the sum."""

    def __init__(self) -> None:
        #: Consumer -> message id -> annotations; of deliveries that have some.
        self._known: dict[int, dict[int, bytes]] = {}

    def delivered(self, consumer: int, first_id: int, count: int, annotations: bytes) -> None:
        """Takes note of a delivery with annotations."""
        known = self._known.setdefault(consumer, {})
        known.update(dict.fromkeys(range(first_id, first_id + count), annotations))

    def forget(self, consumer: int, ranges: Sequence[int]) -> None:
        """Deliveries are settled."""
        known = self._known.get(consumer)
        if not known:
            return
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            for number in [each for each in known if first <= each <= last]:
                del known[number]
        if not known:
            del self._known[consumer]

    def clear(self) -> None:
        """Every delivery is back in its queue."""
        self._known.clear()

    def commands(
        self, consumer: int, ranges: Sequence[int], due_ms: int, annotations: bytes
    ) -> list[tuple[int, bytes]]:
        """Returns (count of ranges, body) of the MODIFYs that say this of deliveries, which the
        consumer holds no more. Raises PeerError, Misuse: see `merged`."""
        made = [
            (len(part) // 2, pack_modified(part, due_ms, merged(said, annotations)))
            for part, said in self._parts(consumer, ranges)
        ]
        self.forget(consumer, ranges)
        return made

    def _parts(self, consumer: int, ranges: Sequence[int]) -> Iterator[tuple[list[int], bytes]]:
        """Yields (ranges, annotations), in the order of the ids of each range: of what was
        delivered with the same annotations."""
        known = self._known.get(consumer, {})
        part: list[int] = []
        told = b""
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            at = first
            for number in sorted(each for each in known if first <= each <= last):
                for start, end, said in (
                    (at, number - 1, b""),
                    (number, number, known[number]),
                ):
                    if start > end:
                        continue
                    if part and said != told:
                        yield part, told
                        part = []
                    told = said
                    part += (start, end)
                at = number + 1
            if at <= last:
                if part and told:
                    yield part, told
                    part = []
                told = b""
                part += (at, last)
        if part:
            yield part, told
