"""Rules of classic queues; `queues.mirrored` has their driver, since policies may mirror them."""

from __future__ import annotations

from convoymq.queues.driver import HomeDriver
from convoymq.routing.queue_types import PlacementKind, rules_in_table


class ClassicDriver(HomeDriver):
    """See the module text."""

    rules = rules_in_table(
        "classic",
        PlacementKind.HOME,
        "classic_queues",
        prevailing_arguments=frozenset(("x-overflow",)),
    )
