"""Rules of classic queues; `queues.mirrored` has their driver, since policies may mirror them."""

from __future__ import annotations

from convoymq.queues.driver import HomeDriver
from convoymq.routing.queue_arguments import FILTER_ARGUMENTS, TAKE_OVER_ARGUMENT
from convoymq.routing.queue_types import PlacementKind, TypeRules

SINCE_VERSION_2 = ("x-dead-letter-exchange", "x-dead-letter-routing-key")
"""Arguments that the first version of the tree's rules refuses: a home of that release would take
them and do nothing."""


class ClassicDriver(HomeDriver):
    """See the module text."""

    rules = TypeRules(
        name="classic",
        placement=PlacementKind.HOME,
        serves=frozenset(
            (
                "x-expires",
                "x-message-ttl",
                "x-max-length",
                "x-max-length-bytes",
                "x-max-priority",
                "x-overflow",
                *SINCE_VERSION_2,
                "x-single-active-consumer",
                TAKE_OVER_ARGUMENT,
                "x-queue-leader-locator",
                "x-queue-master-locator",
            )
        ),
        first_versions={**dict.fromkeys(SINCE_VERSION_2, 2), "x-max-priority": 5},
        # The first is kept like any key that classic queues have never heard of. The others are
        # accepted without effect, as RabbitMQ does since 3.12.
        kept=frozenset(("x-quorum-target-group-size", "x-queue-mode", "x-queue-version")),
        foreign=frozenset(
            (
                "x-dead-letter-strategy",
                "x-max-in-memory-length",
                "x-max-in-memory-bytes",
                "x-quorum-initial-group-size",
                "x-delivery-limit",
                "x-requeue-position",
                "x-priority-mode",
                "x-message-expiry",
                "x-consumer-timeout",
                "x-consumer-disconnected-timeout",
                "x-deduplication-count",
                "x-deduplication-time",
                "x-delayed-retry-type",
                "x-delayed-retry-min",
                "x-delayed-retry-max",
                "x-max-age",
                "x-stream-max-segment-size-bytes",
                "x-stream-filter-size-bytes",
                "x-initial-cluster-size",
                *FILTER_ARGUMENTS,
            )
        ),
        # The last two are accepted without effect, as RabbitMQ does since 3.12.
        policies=frozenset(
            (
                "message-ttl",
                "expires",
                "max-length",
                "max-length-bytes",
                "overflow",
                "dead-letter-exchange",
                "dead-letter-routing-key",
                "queue-leader-locator",
                "queue-master-locator",
                "queue-mode",
                "queue-version",
            )
        ),
        policy_scope="classic_queues",
        prevailing_arguments=frozenset(("x-overflow",)),
    )
