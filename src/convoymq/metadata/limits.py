"""Limits of virtual hosts and users: which there are, and what exceeds them.

They are asked of this node's copy of the tree, and of counts that are a moment old: several who ask
at one time may exceed a limit together, as in RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.metadata.tree import Tree
from convoymq.model.refusals import queue_limit_reached
from convoymq.settings.definitions import invalid, term
from convoymq.settings.values import COUNT_MAX

MAX_CONNECTIONS = "max-connections"
MAX_QUEUES = "max-queues"
MAX_CHANNELS = "max-channels"
VHOST_LIMITS = (MAX_CONNECTIONS, MAX_QUEUES)
USER_LIMITS = (MAX_CONNECTIONS, MAX_CHANNELS)


def check_limit(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuses a limit that does not exist, or is no number. Raises ValidationFailed."""
    if name not in known:
        raise invalid(f"{term(name)} is not a limit; there are: {', '.join(known)}")
    if value is not None and (type(value) is not int or abs(value) > COUNT_MAX):
        raise invalid(f"{name} should be a number, actually was {term(value)}")


def limit_of(limits: Mapping[str, int] | None, name: str) -> int | None:
    """Returns the limit of that name; None without one."""
    value = limits.get(name) if limits else None
    return value if value is not None and value >= 0 else None


def check_queue_limit(tree: Tree, vhost: str, name: str) -> None:
    """Refuses a new queue where there are as many as may be. Raises PreconditionFailed."""
    place = tree.vhost(vhost)
    limit = limit_of(place.limits, MAX_QUEUES)
    if limit is not None and name not in place.queues and len(place.queues) >= limit:
        raise queue_limit_reached(name, vhost, limit)
