"""Runs of dispositions and flows that the kernel reads are what the table of performatives reads,
one by one; what is left out needs a closer look."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp10.frames import AMQP, FrameReader, frame
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Composite,
    Disposition,
    Error,
    Flow,
    Modified,
    Rejected,
    Released,
    Transfer,
    read,
)
from convoymq.edges.amqp10.serial import WINDOW_MAX, ahead
from convoymq.kernels.amqp10_settlements import read_settlements
from convoymq.messages.amqp10.values import Described, Symbol, ULong
from convoymq.model.errors import BrokerError

FRAME_MAX = 4096
IDS = st.integers(0, 4) | st.integers(250, 260) | st.integers(WINDOW_MAX - 2, WINDOW_MAX)
PLAIN_STATES: list[Composite] = [
    Accepted(),
    Rejected(),
    Released(),
    Modified(),
    Modified(delivery_failed=True),
    Modified(undeliverable_here=True),
]
PLAIN_FLOWS = st.builds(
    Flow,
    next_incoming_id=IDS,
    incoming_window=IDS,
    next_outgoing_id=IDS,
    outgoing_window=IDS,
    handle=st.integers(0, 1),
    delivery_count=IDS,
    link_credit=IDS,
    available=st.none() | IDS,
)
PERFORMATIVES = st.one_of(
    st.builds(
        Disposition,
        role=st.sampled_from([True, True, True, False]),
        first=IDS,
        last=st.none() | IDS,
        settled=st.sampled_from([True, True, True, False]),
        state=st.sampled_from([*PLAIN_STATES, Accepted(), Accepted(), Accepted(), None])
        | st.just(Rejected(error=Error(condition=Symbol("a:b")))),
        batchable=st.booleans(),
    ),
    PLAIN_FLOWS,
    st.builds(
        Flow,
        next_incoming_id=st.none() | IDS,
        incoming_window=IDS,
        next_outgoing_id=IDS,
        outgoing_window=IDS,
        handle=st.none() | st.integers(0, 1),
        delivery_count=st.none() | IDS,
        link_credit=st.none() | IDS,
        drain=st.booleans(),
        echo=st.booleans(),
        properties=st.none() | st.just({Symbol("a"): 1}),
    ),
    st.builds(Transfer, handle=st.integers(0, 1)),
)


def is_plain(each: Composite, next_outgoing_id: int) -> bool:
    """Returns whether the kernel has to take a performative."""
    if isinstance(each, Disposition):
        wide = each.last is not None and ahead(each.last, each.first) < 0
        return each.role and each.settled and not wide and each.state in PLAIN_STATES
    return (
        isinstance(each, Flow)
        and None not in (each.next_incoming_id, each.handle)
        and None not in (each.delivery_count, each.link_credit)
        and ahead(next_outgoing_id, each.next_incoming_id or 0) >= 0
        and not (each.drain or each.echo or each.properties)
    )


def fields_of(flow: Flow) -> tuple[Any, ...]:
    return (
        *(flow.next_incoming_id, flow.incoming_window),
        *(flow.next_outgoing_id, flow.outgoing_window),
        *(flow.handle, flow.delivery_count, flow.link_credit),
    )


def expected(found: list[Composite], next_outgoing_id: int) -> tuple[int, set[int], Any, Any]:
    """Returns how many of the first ones make a run, the ids that they settle, with what, and the
    last flow."""
    ids: set[int] = set()
    state = flow = None
    for number, each in enumerate(found):
        if not is_plain(each, next_outgoing_id):
            return number, ids, state, flow
        if isinstance(each, Disposition):
            if state is not None and each.state != state:
                return number, ids, state, flow
            state = each.state
            last = each.first if each.last is None else each.last
            ids |= {(each.first + k) & WINDOW_MAX for k in range(ahead(last, each.first) + 1)}
        else:
            assert isinstance(each, Flow)
            if flow is not None and each.handle != flow.handle:
                return number, ids, state, flow
            flow = each
    return len(found), ids, state, flow


def kernel(data: bytes, next_outgoing_id: int) -> tuple[int, set[int], Any, Any]:
    """Returns the same of the kernel, with a place instead of a number."""
    made = read_settlements(bytearray(data), 0, FRAME_MAX, 3, next_outgoing_id)
    if made is None:
        return 0, set(), None, None
    at, ranges, outcome, flow = made
    ids = {
        (first + k) & WINDOW_MAX
        for first, last in ranges
        for k in range(min(ahead(last, first), 1000) + 1)
    }
    return at, ids, read(outcome)[0] if outcome else None, flow


@given(st.lists(PERFORMATIVES, max_size=8), IDS)
def test_runs_are_those_of_the_table(found: list[Composite], next_outgoing_id: int) -> None:
    frames = [frame(3, each.encoded()) for each in found]
    count, ids, state, flow = expected(found, next_outgoing_id)
    at = sum(len(each) for each in frames[:count])
    wanted = at, ids, state, None if flow is None else fields_of(flow)
    assert kernel(b"".join(frames), next_outgoing_id) == wanted


@given(st.lists(PERFORMATIVES, min_size=1, max_size=4), st.data())
def test_what_is_broken_is_left_out_or_reads_alike(
    found: list[Composite], data: st.DataObject
) -> None:
    whole = b"".join(frame(3, each.encoded()) for each in found)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = whole[:at] + data.draw(st.binary(max_size=2)) + whole[at + 1 :]
    for each in (broken, whole[:at]):
        taken, ids, state, flow = kernel(each, 0)
        reader, again = FrameReader(FRAME_MAX), list[Composite]()
        reader.feed(each[:taken])
        while (one := reader.frame()) is not None:
            assert (one.type, one.channel) == (AMQP, 3)
            performative, payload = read(one.body)
            assert payload == b""
            again.append(performative)
        assert reader.waiting == 0
        count, *rest = expected(again, 0)
        assert count == len(again)
        assert rest[:2] == [ids, state]
        assert (fields_of(rest[2]) if rest[2] is not None else None) == flow


def test_neighbours_are_one_range() -> None:
    def settled(first: int, last: int | None = None) -> bytes:
        return frame(3, Disposition(role=True, first=first, last=last, settled=True,
                                    state=Accepted()).encoded())  # fmt: skip

    data = settled(WINDOW_MAX - 1, WINDOW_MAX) + settled(0) + settled(1, 300) + settled(302)
    made = read_settlements(bytearray(data), 0, FRAME_MAX, 3, 0)
    assert made is not None
    assert made[:2] == (len(data), [(WINDOW_MAX - 1, 300), (302, 302)])


@pytest.mark.parametrize(
    "whole",
    [
        frame(
            4,
            Flow(
                next_incoming_id=0,
                incoming_window=1,
                next_outgoing_id=0,
                outgoing_window=1,
                handle=0,
                delivery_count=0,
                link_credit=9,
            ).encoded(),
        ),
        frame(3, b""),
        frame(3, Disposition(role=True, first=0, settled=True, state=Accepted()).encoded() + b"x"),
        frame(
            3,
            Disposition(
                role=True, first=0, settled=True, state=Described(ULong(0x34), [b"tx"])
            ).encoded(),
        ),
        frame(3, b"\0\x53\x15\xc0\xff"),
        frame(3, b"\0\x53\x13\x45"),
        b"\0\0\0\x04\2\0\0\3\0\x53\x15\x45",
    ],
)
def test_the_rest_is_left_out(whole: bytes) -> None:
    for size in range(len(whole) + 1):
        assert read_settlements(bytearray(whole[:size]), 0, FRAME_MAX, 3, 0) is None
    with_room = frame(3, Disposition(role=True, first=0, settled=True, state=Accepted()).encoded())
    assert read_settlements(bytearray(with_room), 0, len(with_room) - 1, 3, 0) is None


def test_states_that_break_their_table_are_left_out() -> None:
    head = b"\0\x53\x15\xc0"
    for state in (
        b"\0\x53\x24\xc0\x02\x01\x41",
        b"\0\x53\x27\xc0\x04\x03\x41\x41\x41",
        b"\0\x53\x27\xc0\x03\x01\x41\x41",
        b"\0\x53\x28\x45",
        b"\0\x53\x24\x40",
    ):
        items = b"\x41\x43\x40\x41" + state
        body = head + bytes((len(items) + 1, 5)) + items
        assert read_settlements(bytearray(frame(3, body)), 0, FRAME_MAX, 3, 0) is None
        try:
            found = read(body)[0]
        except BrokerError:
            continue
        assert not is_plain(found, 0)
