"""Handlers of the HTTP API's paths: one module per subject, joined into `ROUTES`."""

from __future__ import annotations

from convoymq.edges.http.handlers import (
    bindings,
    broker_groups,
    cluster,
    connections,
    copies,
    definitions,
    events,
    exchanges,
    health,
    login,
    messages,
    nodes,
    permissions,
    policies,
    queues,
    replicas,
    scheduled,
    selections,
    shovels,
    topics,
    users,
    vhosts,
)
from convoymq.edges.http.routes import Route

ROUTES: tuple[Route, ...] = (
    *cluster.routes,
    *nodes.routes,
    *policies.routes,
    *shovels.routes,
    *definitions.routes,
    *copies.routes,
    *connections.routes,
    *exchanges.routes,
    *messages.routes,
    *scheduled.routes,
    *queues.routes,
    *replicas.routes,
    *selections.routes,
    *topics.routes,
    *broker_groups.routes,
    *bindings.routes,
    *vhosts.routes,
    *users.routes,
    *permissions.routes,
    *health.routes,
    *login.routes,
    *events.routes,
)

__all__ = ["ROUTES"]
