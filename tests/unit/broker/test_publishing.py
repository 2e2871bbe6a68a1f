"""What publishing says of the whole cluster."""

from __future__ import annotations

from typing import Any, cast

from convoymq.broker.publishing import Publishing
from convoymq.metadata.machine import MetadataMachine


def test_messages_of_amqp_10_wait_for_the_last_node() -> None:
    """A node of an older release takes their records for damaged (ADR 0196)."""
    tree = MetadataMachine()
    nothing = cast(Any, None)
    publishing = Publishing(tree, nothing, nothing, nothing, nothing, nothing, nothing)
    tree.version = 6
    assert not publishing.serves_encodings
    tree.version = 7
    assert publishing.serves_encodings
