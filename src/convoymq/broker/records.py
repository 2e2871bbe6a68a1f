"""Records of the replicated tree, as protocols see them in `broker.tree`."""

from __future__ import annotations

from convoymq.metadata.records import (
    NodeRecord,
    PermissionSet,
    QueueRecord,
    TopicPermission,
    TopicRecord,
    User,
    Vhost,
)

__all__ = [
    "NodeRecord",
    "PermissionSet",
    "QueueRecord",
    "TopicPermission",
    "TopicRecord",
    "User",
    "Vhost",
]
