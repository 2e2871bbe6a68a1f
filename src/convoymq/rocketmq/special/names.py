"""Properties that special services use, as RocketMQ names them, and small edits of them."""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Key
from convoymq.rocketmq.broker.names import TIMER_TOPIC
from convoymq.rocketmq.store.types import Draft, Message, SysFlag, encode_properties

REVIVE_TOPIC_PREFIX = "rmq_sys_REVIVE_LOG_"
REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"

DELAY = "DELAY"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE = "REAL_QID"
TAGS = "TAGS"
UNIQUE_KEY = "UNIQ_KEY"
PRODUCER_GROUP = "PGROUP"
IS_PREPARED = "TRAN_MSG"
TRANSACTION_ID = "__transactionId__"
CHECK_IMMUNITY_S = "CHECK_IMMUNITY_TIME_IN_SECONDS"
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_DELAY_S = "TIMER_DELAY_SEC"
TIMER_OUT_MS = "TIMER_OUT_MS"
TIMER_ENQUEUED_MS = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUED_MS = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
TIMER_DELETED_KEY = "TIMER_DEL_UNIQKEY"
FIRST_POP_TIME = "1ST_POP_TIME"
POP_CHECKPOINT = "POP_CK"

TRANSACTION_BITS = SysFlag.ROLLBACK
"""Of a system flag: prepared, committed, or both for rolled back."""

TIMES = (TIMER_DELIVER_MS, TIMER_DELAY_S, TIMER_DELAY_MS)
"""Properties by which a producer asks for a time."""


def whole(text: str | None, default: int) -> int:
    """Returns the whole number that a property holds; the default when it holds none."""
    try:
        return default if text is None else int(text)
    except ValueError:
        return default


def time_of(properties: Mapping[str, str], now_ms: int) -> int:
    """Returns when a message with one of `TIMES` is to be delivered; a time that is none lies too
    far ahead. `now_ms`: what delays count from."""
    for name, unit, since in (
        (TIMER_DELAY_S, 1000, now_ms), (TIMER_DELAY_MS, 1, now_ms), (TIMER_DELIVER_MS, 1, 0),
    ):  # fmt: skip
        if name in properties:
            found = whole(properties[name], -1)
            return since + unit * found if found >= 0 else 1 << 62
    raise AssertionError("no time")


def changed(
    draft: Draft, drop: tuple[str, ...], add: Mapping[str, str], properties: Mapping[str, str]
) -> Draft:
    """Gives a draft other properties; returns the draft."""
    kept = {name: value for name, value in properties.items() if name not in drop}
    draft.properties = encode_properties({**kept, **add})
    return draft


def keyed(draft: Draft, key: Key) -> Draft:
    """Gives a draft the key of the record that it comes from; returns the draft."""
    draft.properties += f"{KEY_PROPERTY}\x01{key}\x02".encode()
    return draft


def to_real_queue(message: Message, drop: tuple[str, ...], add: Mapping[str, str]) -> Draft | None:
    """Returns a message of a system topic as a draft for the queue it is meant for; None: the
    message does not say which."""
    properties = message.properties
    topic, queue = properties.get(REAL_TOPIC), whole(properties.get(REAL_QUEUE), -1)
    if topic is None or queue < 0:
        return None
    draft = message.draft()
    draft.topic, draft.queue_id = topic, queue
    return changed(draft, (REAL_TOPIC, REAL_QUEUE, *drop), add, properties)


def is_pop_record(message: Message) -> bool:
    """Returns whether a record is a checkpoint or an acknowledgement."""
    if message.topic == TIMER_TOPIC:
        return message.properties.get(REAL_TOPIC, "").startswith(REVIVE_TOPIC_PREFIX)
    return message.topic.startswith(REVIVE_TOPIC_PREFIX)
