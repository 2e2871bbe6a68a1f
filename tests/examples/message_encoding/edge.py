"""The line protocol, for cards: `PUBLISH q title text`."""

from __future__ import annotations

from convoymq.edges.edge import NodeParts
from convoymq.edges.sasl import LoginConfig
from tests.examples.message_encoding.card import card_of
from tests.examples.protocol_edge.config import LineConfig
from tests.examples.protocol_edge.edge import LineEdge


def open_edge(parts: NodeParts) -> CardEdge:
    """Makes the edge."""
    config = parts.config
    return CardEdge(parts.broker, config.of(LineConfig), config.of(LoginConfig))


class CardEdge(LineEdge):
    """Stores what it gets as cards; nothing is made of them but what their reader speaks."""

    prefaces = (b"CARDS\n",)

    def content(self, text: bytes) -> tuple[bytes, int]:
        """See `LineEdge`."""
        title, _, text = text.partition(b" ")
        return card_of(title, text)
