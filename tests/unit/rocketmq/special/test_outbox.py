from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.special.outbox import BATCH_MAX, RETRY_LAST_MS, Outbox


def key(offset: int) -> Key:
    return Key("b", "t", 0, offset)


def test_a_message_that_fails_is_tried_again_and_holds_up_its_topic_only() -> None:
    box = Outbox()
    for offset, topic in enumerate("aabb"):
        box.add(key(offset), topic)
    a, b = box.take(0)
    assert (a.topic, b.topic) == ("a", "b")
    assert box.take(0) == []
    box.settle(a, 1, 0)
    box.settle(b, 2, 0)
    assert box.take(99) == []
    (again,) = box.take(100)
    assert again.keys == [key(1)]
    box.settle(again, 1, 100)
    assert len(box) == 0


def test_the_wait_between_tries_grows_up_to_a_bound() -> None:
    """RocketMQ gives a half message up after ten tries, a timed one after three."""
    box, now_ms, waits = Outbox(), 0, []
    box.add(key(0), "a")
    for _ in range(30):
        (batch,) = box.take(now_ms)
        box.settle(batch, 0, now_ms)
        begin_ms = now_ms
        while not (taken := box.take(now_ms)):
            now_ms += 50
        waits.append(now_ms - begin_ms)
        box.settle(taken[0], 0, now_ms)
        now_ms += RETRY_LAST_MS
    assert waits[0] == 100
    assert max(waits) <= RETRY_LAST_MS
    assert key(0) in box


def test_room_and_batches_are_bounded() -> None:
    box = Outbox(BATCH_MAX + 1)
    for offset in range(BATCH_MAX + 1):
        assert not box.is_full
        box.add(key(offset), "a")
    assert box.is_full
    (batch,) = box.take(0)
    assert len(batch.keys) == BATCH_MAX
    box.settle(batch, BATCH_MAX, 0)
    assert not box.is_full


def test_a_batch_of_before_a_stop_is_passed_over() -> None:
    box = Outbox()
    box.add(key(0), "a")
    (old,) = box.take(0)
    box.clear()
    box.add(key(0), "a")
    (new,) = box.take(0)
    box.settle(old, 1, 0)
    assert key(0) in box
    assert box.is_in_flight
    box.settle(new, 1, 0)
    assert key(0) not in box


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 2)),
            st.tuples(st.just("take"), st.integers(0, 5)),
            st.tuples(st.just("forget"), st.integers(0, 60)),
        ),
        max_size=80,
    )
)
def test_each_topic_keeps_its_order(steps: list[tuple[str, int]]) -> None:
    """Whatever fails: a topic's messages are stored in the order in which they were entered."""
    box, count, now_ms = Outbox(), 0, 0
    stored: list[tuple[str, int]] = []
    forgotten: set[int] = set()
    for what, number in steps:
        now_ms += RETRY_LAST_MS
        if what == "add":
            box.add(key(count), f"t{number}")
            count += 1
        elif what == "forget":
            box.forget(key(number))
            forgotten.add(number)
        else:
            for batch in box.take(now_ms):
                done = batch.keys[:number]
                stored += [(batch.topic, found.offset) for found in done]
                box.settle(batch, len(done), now_ms)
        box.check_invariants()
    for topic in ("t0", "t1", "t2"):
        order = [offset for name, offset in stored if name == topic]
        assert order == sorted(set(order))
    assert len(stored) + len(box) + len(forgotten) >= count
