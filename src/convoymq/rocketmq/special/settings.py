"""Configuration of special services, under RocketMQ's names: a part of the broker's."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.config.keys import Section, key


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialSettings(Section):
    """Delayed and timed messages, transactions, pop."""

    timer_delay_max_s: int = key(
        "timerMaxDelaySec", 3 * 24 * 3600, "How far ahead a time of delivery may lie.", unit="s",
        low=1, high=3 * 24 * 3600,
    )  # fmt: skip
    recall: bool = key("recallMessageEnable", False, "Producers may recall messages for a time.")
    transaction_immunity_ms: int = key(
        "transactionTimeOut", 6000, "Age of a half message at its first check.", unit="ms", low=0
    )
    transaction_interval_ms: int = key(
        "transactionCheckInterval", 30_000, "Time between two checks of one.", unit="ms", low=100
    )
    transaction_checks_max: int = key(
        "transactionCheckMax", 15, "Checks that a producer was asked; then it is given up.", low=1
    )
    retry_topic_v2: bool = key(
        "enableRetryTopicV2", False, "Retry topics of pop are %RETRY%group+topic, not "
        "%RETRY%group_topic, which two pairs of names may share.",
    )  # fmt: skip
    polls_max: int = key(
        "popPollingSize", 1024, "Pops of a group from a topic that wait for messages.", low=0,
        high=100_000,
    )  # fmt: skip
    all_polls_max: int = key(
        "maxPopPollingSize", 100_000, "All pops that wait.", low=0, high=1_000_000
    )
