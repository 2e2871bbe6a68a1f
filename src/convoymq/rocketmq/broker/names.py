"""Names of topics and groups: which are allowed, and which are the broker's own."""

from __future__ import annotations

import re

from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.command import Refusal

RETRY_PREFIX = "%RETRY%"
DEAD_LETTER_PREFIX = "%DLQ%"
TEMPLATE = "TBW102"
"""Topics that do not exist are made as this one is, where a sender asks for it."""
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECKED_TOO_OFTEN_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST = "SELF_TEST_TOPIC"
OFFSET_MOVED = "OFFSET_MOVED_EVENT"
BENCHMARK = "BenchmarkTest"
TRACE = "RMQ_SYS_TRACE_TOPIC"
TIMER_TOPIC = "rmq_sys_wheel_timer"
SYSTEM_PREFIX = "rmq_sys_"

NOT_SENDABLE = frozenset((
    SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, CHECKED_TOO_OFTEN_TOPIC, SELF_TEST, OFFSET_MOVED,
))  # fmt: skip
SYSTEM_TOPICS = NOT_SENDABLE | {TEMPLATE, BENCHMARK, TRACE, "CHECKPOINT_TOPIC"}

TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
SYSTEM_GROUPS = (
    *("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY"),
    *("CID_ONSAPI_PULL", "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER", TRANSACTION_GROUP),
)
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
GIVEN_PREFIX = f"{SYSTEM_GROUP_PREFIX}GIVEN_"
"""Before the name of a group: offsets up to which another replica's pops were learned."""

_ALLOWED = re.compile(r"[%|a-zA-Z0-9_-]+")
_TOPIC_LENGTH_MAX = 127
_RETRY_LENGTH_MAX = 255
_GROUP_LENGTH_MAX = 120

MORE = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
"""RocketMQ ends some remarks with it; clients show them."""


def is_system(topic: str) -> bool:
    """Returns whether a topic is a broker's own."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX)


def check_topic(topic: str) -> None:
    """Raises Refusal for a name that no topic may have."""
    limit, kind = _TOPIC_LENGTH_MAX, ""
    if topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
        limit, kind = _RETRY_LENGTH_MAX, "DLQ or Retry topic"
    _check(topic, "topic", limit, kind)


def check_group(group: str) -> None:
    """Raises Refusal for a name that no group may have."""
    _check(group, "group", _GROUP_LENGTH_MAX, "")


def _check(name: str, what: str, limit: int, kind: str) -> None:
    if not name.strip():
        raise _invalid(f"The specified {what} is blank.")
    if _ALLOWED.fullmatch(name) is None:
        raise _invalid(
            f"The specified {what}: {name:.256}, contains illegal characters, "
            "allowing only ^[%|a-zA-Z0-9_-]+$"
        )
    if len(name) > limit:
        text = f"is {kind}: {name:.256}, and it's" if kind else f": {name:.256}, is"
        raise _invalid(
            f"The specified {what}{' ' * bool(kind)}{text} longer than {what} max length: {limit}"
        )


def _invalid(text: str) -> Refusal:
    return Refusal(Answer.INVALID_PARAMETER, text)


def group_of_retry(topic: str) -> str:
    """Returns the group of a retry topic; pop's have the topic behind `+`."""
    return topic.removeprefix(RETRY_PREFIX).partition("+")[0]
