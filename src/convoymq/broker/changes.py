"""Changes of the replicated tree that operators ask for: commands of `TreeView.execute`, and what
makes and checks them."""

from __future__ import annotations

from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.commands import (
    Bind,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeletePermission,
    DeletePolicy,
    DeleteTopicPermission,
    DeleteUser,
    DeleteVhost,
    ForgetNode,
    PutPermission,
    PutPolicy,
    PutSetting,
    PutTopicPermission,
    PutUser,
    PutUserLimit,
    PutVhost,
    PutVhostLimit,
)
from convoymq.metadata.global_parameters import (
    CLUSTER_NAME,
    clear_global_parameter,
    set_global_parameter,
)
from convoymq.metadata.limits import USER_LIMITS, VHOST_LIMITS, check_limit
from convoymq.metadata.rehearsal import Rehearsal
from convoymq.metadata.vhost_flags import set_protected, set_traced

__all__ = [
    "CLUSTER_NAME",
    "SHA256",
    "USER_LIMITS",
    "VHOST_LIMITS",
    "Bind",
    "Command",
    "DeclareExchange",
    "DeclareQueue",
    "DeletePermission",
    "DeletePolicy",
    "DeleteTopicPermission",
    "DeleteUser",
    "DeleteVhost",
    "ForgetNode",
    "PutPermission",
    "PutPolicy",
    "PutSetting",
    "PutTopicPermission",
    "PutUser",
    "PutUserLimit",
    "PutVhost",
    "PutVhostLimit",
    "Rehearsal",
    "check_limit",
    "clear_global_parameter",
    "hash_sha256",
    "set_global_parameter",
    "set_protected",
    "set_traced",
]
