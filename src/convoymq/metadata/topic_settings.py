"""Settings of ordered topics: how long messages are kept, and groups without members; whether the
topic scales by itself; what becomes of messages without a key, and what mode `weak` does.

They are named as the keys of policies are. Those of partitions become arguments of their queues.
Those of the autoscaler can be changed later.
"""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.model.durations import duration_ms
from convoymq.model.errors import PreconditionFailed
from convoymq.settings.definitions import contradiction, term
from convoymq.settings.table import AUTOSCALE_KEYS, SETTINGS
from convoymq.settings.values import Setting

MAX_AGE = "max-age"
MAX_LENGTH_BYTES = "max-length-bytes"
SEGMENT_BYTES = "stream-max-segment-size-bytes"
GROUP_TTL = "group-ttl"
NULL_KEY = "null-key"
WEAK_WAIT = "weak-wait"
LOST_AFTER = "lost-after"
RETRY_EXCHANGE = "retry-exchange"
REFUSE, SPREAD = "refuse", "spread"
"""Values of `null-key`: messages without a key are refused, or go to one partition after the other;
with `sticky` they go where a number leads that each channel or session draws once."""
STRICT, WEAK = "strict", "weak"
"""Modes of a topic."""
WEAK_WAIT_MS = 30_000
LOST_AFTER_MS = 24 * 3_600_000
PARTITION_SETTINGS = (MAX_AGE, MAX_LENGTH_BYTES, SEGMENT_BYTES)
"""Settings of a topic that each of its partitions has as an argument."""
SEAL_AFTER = "seal-after"
WEAK_SETTINGS = (WEAK_WAIT, LOST_AFTER, RETRY_EXCHANGE)
"""Settings of weak topics only."""
TOPIC_SETTINGS = (
    *PARTITION_SETTINGS, GROUP_TTL, SEAL_AFTER, NULL_KEY, *WEAK_SETTINGS, *AUTOSCALE_KEYS
)  # fmt: skip
Settings = Mapping[str, Setting]


def check_settings(settings: Settings, mode: str = STRICT) -> None:
    """Refuses settings that no topic of a mode has, and values that they cannot have. Raises
    PreconditionFailed."""
    for name, value in settings.items():
        if name not in TOPIC_SETTINGS:
            raise PreconditionFailed(
                f"{term(name)} is not a setting of topics; there are: {', '.join(TOPIC_SETTINGS)}"
            )
        if not SETTINGS[name].values.accepts(value):
            raise PreconditionFailed(f"{term(value)} is not a valid {name} of a topic")
        if mode != WEAK and (name in WEAK_SETTINGS or (name, value) == (NULL_KEY, SPREAD)):
            raise PreconditionFailed(f"{name} {term(value)} is for topics of mode weak")
    if reason := contradiction(settings):
        raise PreconditionFailed(reason)


def changed_settings(
    settings: Settings, changes: Mapping[str, Setting | None], mode: str = STRICT
) -> dict[str, Setting]:
    """Returns the settings of a topic with some of its autoscaler changed; None takes one away.
    Raises PreconditionFailed."""
    for name in changes:
        if name not in AUTOSCALE_KEYS:
            raise PreconditionFailed(
                f"{term(name)} is not a setting of the autoscaler; there are: "
                f"{', '.join(AUTOSCALE_KEYS)}"
            )
    joined = {**settings, **changes}
    made = {name: value for name, value in joined.items() if value is not None}
    check_settings(made, mode)
    return made


def duration_of(settings: Settings, name: str) -> int | None:
    """Returns a duration in ms; None where there is none."""
    value = settings.get(name)
    return duration_ms(value) if isinstance(value, str) else None


def length_of(settings: Settings) -> int | None:
    """Returns the bytes that a range of keys may keep; None: any number."""
    value = settings.get(MAX_LENGTH_BYTES)
    return value if isinstance(value, int) else None


def null_key_of(settings: Settings, mode: str) -> str:
    """Returns what becomes of messages without a key."""
    value = settings.get(NULL_KEY)
    if isinstance(value, str):
        return value
    return SPREAD if mode == WEAK else REFUSE


def retry_exchange_of(settings: Settings, mode: str) -> str:
    """Returns the exchange that messages go to which no handler of a group could deal with; empty:
    they are parked with their keys."""
    value = settings.get(RETRY_EXCHANGE)
    return value if mode == WEAK and isinstance(value, str) else ""


def weak_wait_of(settings: Settings) -> int:
    """Returns for how many ms a weak topic waits for a partition that nobody answers for."""
    return duration_of(settings, WEAK_WAIT) or WEAK_WAIT_MS


def lost_after_of(settings: Settings) -> int:
    """Returns for how many ms a weak topic keeps a partition that it has sealed from outside and
    that nobody answers for; then what it holds is given up."""
    return duration_of(settings, LOST_AFTER) or LOST_AFTER_MS
