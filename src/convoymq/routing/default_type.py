"""Type of a queue whose declaration gives none."""

from __future__ import annotations

from convoymq.model.tables import Table
from convoymq.routing.queue_arguments import TYPE_ARGUMENT
from convoymq.routing.queue_types import PlacementKind
from convoymq.routing.types import QueueType


def with_default_type(
    arguments: Table,
    *,
    durable: bool,
    exclusive: bool,
    auto_delete: bool,
    server_named: bool,
    vhost_default: QueueType | None,
    node_default: QueueType,
) -> Table:
    """Returns the arguments with `x-queue-type` filled in; to be called before every declare.

    The virtual host's default comes before the node's. A replicated type is taken where the
    properties fit it, whatever the arguments: one that it does not serve is refused by name, rather
    than making a queue that is not replicated. Everything else becomes classic, which is written as
    no argument at all. A redeclare gets the same treatment, so it compares equal.
    """
    if TYPE_ARGUMENT in arguments:
        return arguments
    wanted = vhost_default or node_default
    fits = durable and not exclusive and not auto_delete and not server_named
    if wanted is QueueType.CLASSIC or not wanted.is_served:
        return arguments
    if fits or wanted.placement is not PlacementKind.RAFT:
        return arguments.with_field(TYPE_ARGUMENT, wanted.value)
    return arguments
