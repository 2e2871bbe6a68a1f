"""Settings of a quorum queue, on which all its replicas agree."""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.model.compatibility import COMPATIBILITY, RELEASE_4_1
from convoymq.queues.group_machine import Settings
from convoymq.queues.quorum.backlog import AS_RABBITMQ, FRONT, ORIGINAL, TAIL
from convoymq.settings import table

REJECT_PUBLISH = "reject-publish"
DELIVERY_LIMIT_DEFAULT = 20
DELIVERY_LIMIT_MAX = 0xFFFFFFFF
"""A message's failed deliveries are counted in 32 bits."""
DISCONNECT_TIMEOUT_MS_DEFAULT = 60_000
DISCONNECTED_TIMEOUT = "consumer_disconnected_timeout_ms"
POSITIONS = {"original": ORIGINAL, "front": FRONT, "tail": TAIL}
"""Of the setting `requeue_position`, as users write them."""
COUNTS_RETURNS = "counts_returns"
"""Setting that a queue keeps from its declaration on: 1 = all that a client gives back has failed
(RabbitMQ 4.0 to 4.2)."""
FROZEN = "frozen"
"""Setting of a queue that is being migrated: the group of its successor; 0 = it is not. Since
version 5 of the machine."""
KEEPS_ALL = "keeps_all"
"""Setting of a queue that gets the messages of another one: 1 = nothing expires. Since version 5 of
the machine."""
LINK_RESUME_TIMEOUT = "link_resume_timeout_ms"
"""Setting: how long a queue keeps what links of clients held whose connections ended; 0 = it does
not. Since version 6 of the machine."""
NONE = -1
"""No limit; also what a setting is that no CONFIG ever named."""


def with_defaults(settings: Mapping[str, int] | None) -> Settings:
    """Returns all settings, where only some are given."""
    return {
        # Failed deliveries that a message may have; -1 = no limit.
        "delivery_limit": DELIVERY_LIMIT_DEFAULT,
        # After this time the messages of a suspected node's consumers return.
        "disconnect_timeout_ms": DISCONNECT_TIMEOUT_MS_DEFAULT,
        # RabbitMQ's quorum queues ignore the flag of basic.consume.
        "exclusive_honoured": False,
        "single_active": False,
        # The next consumer begins when the one before it holds nothing any more (ADR 0027).
        "single_active_strict": True,
        **(settings or {}),
    }


def settings_of_release(release: str) -> Settings:
    """Returns the settings that a queue is made with which follows the rules of a release of
    RabbitMQ (ADR 0086)."""
    if release != RELEASE_4_1:
        return {}
    return {COUNTS_RETURNS: 1, "two_priority_classes": 1}


#: Settings that version 2 of the machine brought, and what they are until CONFIG says otherwise.
SINCE_VERSION_2: Mapping[str, int] = {
    # What becomes of messages that leave unacknowledged: 0 dropped, 1 published at most once, 2 at
    # least once.
    "dead_letters": 0,
    "message_ttl_ms": NONE,
    "expires_ms": NONE,
    "max_length": NONE,
    "max_length_bytes": NONE,
    # 1: beyond a limit publishers are refused; otherwise what is next is dropped.
    "reject_publish": NONE,
    # What comes back waits before it is delivered again: 0 nothing, 1 all, 2 what has failed, 3
    # what has not; for the least time times the number of failures, up to the most.
    "delayed_retry": 0,
    "delayed_retry_min_ms": 0,
    "delayed_retry_max_ms": 0,
    # Comes before disconnect_timeout_ms.
    DISCONNECTED_TIMEOUT: NONE,
    # Where a message goes that comes back: `Backlog.give_back`.
    "requeue_position": AS_RABBITMQ,
    # 1: priorities make two classes, served 2:1 (RabbitMQ 4.0 to 4.2); 0: 32 strict levels.
    "two_priority_classes": 0,
    # 1: what has expired leaves wherever it stands; 0: when it is next.
    "expire_by_due": 0,
    # Which message-ids are remembered; 0: none (`queues.quorum.deduplication`).
    "deduplication_count": NONE,
    "deduplication_time_ms": NONE,
}
#: Settings that CONFIG may change, beside those of later versions.
CHANGEABLE = frozenset(("delivery_limit", *SINCE_VERSION_2))
_OF_LATER_VERSIONS = frozenset((FROZEN, KEEPS_ALL, LINK_RESUME_TIMEOUT))


def check_changes(settings: Mapping[str, int]) -> None:
    """Raises ValueError for what CONFIG cannot change."""
    for name, value in settings.items():
        if name not in CHANGEABLE | _OF_LATER_VERSIONS or not isinstance(value, int):
            raise ValueError(f"a queue cannot change its setting '{name}' to {value!r}")


def machine_settings(settings: Mapping[str, object]) -> Settings:
    """Returns the machine's part of the effective settings of its queue, by the keys of policies.
    What they do not mention has its default."""
    given = table.machine_settings(table.QUORUM, settings)
    if settings.get(COMPATIBILITY) == RELEASE_4_1 and "priority-mode" not in settings:
        given["two_priority_classes"] = 1
    limit = given.pop("delivery_limit", DELIVERY_LIMIT_DEFAULT)
    return {
        **SINCE_VERSION_2,
        **given,
        **_delayed_retry(given),
        "delivery_limit": max(-1, min(limit, DELIVERY_LIMIT_MAX)),
        "reject_publish": 1 if settings.get("overflow") == REJECT_PUBLISH else NONE,
        "dead_letters": dead_letter_strategy(settings)[0],
        "requeue_position": POSITIONS.get(str(settings.get("requeue-position")), AS_RABBITMQ),
    }


def _delayed_retry(given: Settings) -> Settings:
    """Returns the settings of retries; without a least time there is no delay."""
    kind, least = given.get("delayed_retry", 0), given.get("delayed_retry_min_ms", 0)
    if not kind or least <= 0:
        return {"delayed_retry": 0, "delayed_retry_min_ms": 0, "delayed_retry_max_ms": 0}
    return {"delayed_retry_max_ms": max(least, given.get("delayed_retry_max_ms", 0))}


def dead_letter_strategy(settings: Mapping[str, object]) -> tuple[int, str]:
    """Returns (value of the setting `dead_letters`, why it is another one than was asked for, or
    "")."""
    at_least_once = settings.get("dead-letter-strategy") == "at-least-once"
    if "dead-letter-exchange" not in settings:
        return 0, "dead-letter-strategy needs a dead-letter-exchange" if at_least_once else ""
    if not at_least_once:
        return 1, ""
    if settings.get("overflow") != REJECT_PUBLISH:
        return 1, "at-least-once needs overflow reject-publish"
    return 2, ""
