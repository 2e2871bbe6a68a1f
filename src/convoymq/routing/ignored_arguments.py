"""Arguments of a declaration that do nothing: misspelt ones, those of other brokers, and values
that cannot be used. RabbitMQ takes those without effect, too. They are kept and shown, so nobody is
refused."""

from __future__ import annotations

from convoymq.model.tables import Table
from convoymq.routing.choosing import HASH_HEADER, HASH_PROPERTY
from convoymq.routing.policies import usable_value
from convoymq.routing.queue_arguments import TYPE_ARGUMENT
from convoymq.routing.queue_types import rules_of
from convoymq.routing.types import ALTERNATE_EXCHANGE, DELAYED_TYPE, ExchangeType
from convoymq.settings.table import BY_ARGUMENT


def ignored_of_queue(queue_type: str, arguments: Table) -> list[str]:
    """Returns the arguments of a queue of a type that have no effect, in alphabetical order."""
    rules = rules_of(queue_type)
    if rules is None:
        return []
    return sorted(
        key
        for key, field in arguments.items()
        if key != TYPE_ARGUMENT
        and (
            key in rules.kept
            or not rules.takes(key)
            or (key in BY_ARGUMENT and usable_value(BY_ARGUMENT[key], field) is None)
        )
    )


def ignored_of_exchange(exchange_type: str, arguments: Table) -> list[str]:
    """Returns the arguments of an exchange of a type that have no effect, in alphabetical order."""
    served = {ALTERNATE_EXCHANGE}
    if exchange_type == ExchangeType.DELAYED.value:
        served.add(DELAYED_TYPE)
        rule = arguments.get(DELAYED_TYPE)
        exchange_type = rule.term() if rule is not None else exchange_type
    if exchange_type == ExchangeType.CONSISTENT_HASH.value:
        served |= {HASH_HEADER, HASH_PROPERTY}
    return sorted(key for key in arguments if key not in served)
