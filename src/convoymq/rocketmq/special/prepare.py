"""Messages before they are stored: some are meant for later, or are half of a transaction."""

from __future__ import annotations

from collections.abc import Callable

from convoymq.rocketmq.broker.names import (
    CHECKED_TOO_OFTEN_TOPIC,
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.command import Refusal
from convoymq.rocketmq.special.names import (
    DELAY,
    IS_PREPARED,
    REAL_QUEUE,
    REAL_TOPIC,
    TIMER_DELETED_KEY,
    TIMER_OUT_MS,
    TIMES,
    TRANSACTION_BITS,
    changed,
    time_of,
    whole,
)
from convoymq.rocketmq.special.transactions import to_half
from convoymq.rocketmq.special.wheel import DELAY_MAX_S, PRECISION_MS
from convoymq.rocketmq.store.types import (
    Draft,
    SysFlag,
    decode_properties,
)

_READY = frozenset((TIMER_TOPIC, HALF_TOPIC, CHECKED_TOO_OFTEN_TOPIC))
"""Special services put messages there as they are."""


class Preparation:
    """Redirects drafts to the topics of special services.

    Args:
        levels: number of delay levels.
        may_time: whether there is a timer wheel.
        is_full: whether no more messages may wait in a topic.
        half_refusal: why half messages are refused; empty if they are taken.
    """

    def __init__(
        self,
        levels: int,
        now_ms: Callable[[], int],
        *,
        may_time: bool = True,
        delay_max_s: int = DELAY_MAX_S,
        is_full: Callable[[str], bool] = lambda _topic: False,
        half_refusal: str = "",
    ) -> None:
        self._levels = levels
        self._now_ms = now_ms
        self._may_time = may_time
        self._delay_max_s = delay_max_s
        self._is_full = is_full
        self._half_refusal = half_refusal

    def __call__(self, draft: Draft) -> Draft:
        """Returns the draft, changed. Raises Refusal."""
        if draft.topic in _READY:
            return draft
        properties = decode_properties(draft.properties)
        kind = draft.sys_flag & TRANSACTION_BITS
        if properties.get(IS_PREPARED, "").lower() == "true" and kind not in (
            SysFlag.COMMIT,
            SysFlag.ROLLBACK,
        ):
            if self._half_refusal:
                raise Refusal(Answer.NO_PERMISSION, self._half_refusal)
            self._check_room(HALF_TOPIC)
            return to_half(draft, properties)
        if kind not in (0, SysFlag.COMMIT):
            return draft
        level = whole(properties.get(DELAY), 0)
        if level > 0:
            return self._delayed(draft, level, properties)
        if TIMER_OUT_MS not in properties and any(name in properties for name in TIMES):
            return self._timed(draft, properties)
        return draft

    def _check_room(self, topic: str) -> None:
        if self._is_full(topic):
            raise Refusal(Answer.SYSTEM_BUSY, f"too many messages wait in {topic}")

    def _delayed(self, draft: Draft, level: int, properties: dict[str, str]) -> Draft:
        level = min(level, self._levels)
        add = {DELAY: str(level), REAL_TOPIC: draft.topic, REAL_QUEUE: str(draft.queue_id)}
        draft.topic, draft.queue_id = SCHEDULE_TOPIC, level - 1
        return changed(draft, TIMES, add, properties)

    def _timed(self, draft: Draft, properties: dict[str, str]) -> Draft:
        if not self._may_time:
            raise Refusal(
                Answer.SYSTEM_ERROR,
                "accurate timer message is not enabled, timerWheelEnable is false",
            )
        now_ms = self._now_ms()
        deliver_ms = time_of(properties, now_ms)
        if deliver_ms <= now_ms and TIMER_DELETED_KEY not in properties:
            return draft
        if not 0 < deliver_ms - now_ms <= self._delay_max_s * 1000:
            raise Refusal(
                Answer.MESSAGE_ILLEGAL,
                "timer message illegal, the delay time should not be bigger than the max delay "
                f"{self._delay_max_s * 1000}ms; or if set del msg, the delay time should be bigger "
                "than the current time",
            )
        self._check_room(TIMER_TOPIC)
        out_ms = (deliver_ms - 1) // PRECISION_MS * PRECISION_MS
        add = {
            TIMER_OUT_MS: str(out_ms),
            REAL_TOPIC: draft.topic,
            REAL_QUEUE: str(draft.queue_id),
        }
        draft.topic, draft.queue_id = TIMER_TOPIC, 0
        return changed(draft, (), add, properties)
