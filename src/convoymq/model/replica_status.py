"""Columns of `quorum_status`: the state of each replica of a quorum queue."""

REPLICA_COLUMNS = (
    "Node Name", "Raft State", "Membership", "Last Log Index", "Last Written", "Last Applied",
    "Commit Index", "Snapshot Index", "Term", "Machine Version",
)  # fmt: skip
"""As `rabbitmq-queues` names them."""
