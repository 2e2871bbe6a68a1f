"""Effects between a classic queue and other nodes: the same at both ends, or refused."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.kernels.batch import CommandBuilder, PublishTarget, commands, record
from convoymq.kernels.link_frames import HEADER_SIZE
from convoymq.model.errors import PeerError
from convoymq.queues.classic.effect_frames import decode_effect, encode_effect
from convoymq.queues.classic.machine import APPLIED, DELIVER, GOT, Effect

SESSION = 2 << 56 | 7


def sent(effect: Effect) -> Effect:
    head, block = encode_effect(effect)
    return decode_effect(bytes(HEADER_SIZE) + head + block, effect[1], len(head))


def block_of(bodies: list[bytes]) -> tuple[bytes, int]:
    """Returns the ENQUEUE command of some records, as its entry and its place."""
    builder = CommandBuilder()
    target = PublishTarget(builder, SESSION, None)
    for body in bodies:
        target.publish([body], len(body), 0)
    entry = builder.take_entry(1, 1, 1, 0)
    return entry.data, commands(entry.data)[0][6]


def test_a_delivery_brings_just_its_records() -> None:
    place = block_of([b"a", b"b", b"c", b"d"])
    kind, session, tag, first_id, (data, at), first, count, *said = sent(
        (DELIVER, SESSION, 5, 77, place, 1, 2, [1, 0])
    )
    assert (kind, session, tag, first_id, first, count, said) == (
        DELIVER,
        SESSION,
        5,
        77,
        0,
        2,
        [[1, 0]],
    )
    assert [record(data, at, i) for i in range(count)] == [b"b", b"c"]


@pytest.mark.parametrize("found", [True, False])
def test_what_a_get_brings_may_be_nothing(found: bool) -> None:
    place = block_of([b"a", b"b"]) if found else None
    kind, session, block, index, *rest = sent((GOT, SESSION, place, 1, 9, 2, 30))
    assert (kind, session, index, rest) == (GOT, SESSION, 0, [9, 2, 30])
    assert (record(*block, 0) if block else None) == (b"b" if found else None)


@pytest.mark.parametrize(
    "effect", [(APPLIED, SESSION, 9, [3]), (250, SESSION), (DELIVER + 90, SESSION, "x")]
)
def test_plain_effects_arrive_as_they_were(effect: Effect) -> None:
    assert sent(effect) == effect


@pytest.mark.parametrize(
    "head", [b"", b"\xc1", b"\x01", *map(msgspec.msgpack.encode, ([], 3, [DELIVER, 1], [GOT]))]
)
def test_a_malformed_head_is_the_peers_fault(head: bytes) -> None:
    with pytest.raises(PeerError, match="malformed effect"):
        decode_effect(bytes(HEADER_SIZE) + head, SESSION, len(head))
