"""An encoding of messages: cards with a title.

body    u8 length of the title, title (UTF-8), text
"""

from __future__ import annotations

from msgspec.structs import replace

from convoymq.messages.amqp091 import NO_PROPERTIES, Properties
from convoymq.messages.encodings import Encoding
from convoymq.messages.record import content_of
from convoymq.model.errors import PeerError
from convoymq.model.tables import EMPTY

NUMBER = 127
TITLE = "title"


class Card:
    """See `Encoding`."""

    name = "card"

    def to_amqp091(self, properties: Properties, body: bytes) -> tuple[Properties, bytes]:
        """The title becomes a header, beside those that queues have written."""
        if not body or len(body) < 1 + body[0]:
            raise PeerError("the card is cut off")
        headers = (properties.headers or EMPTY).with_field(TITLE, body[1 : 1 + body[0]].decode())
        return replace(properties, headers=headers), body[1 + body[0] :]


ENCODING: Encoding = Card()


def card_of(title: bytes, text: bytes) -> tuple[bytes, int]:
    """Returns a card as queues keep it, and the bytes of its body."""
    body = bytes((len(title),)) + title + text
    return content_of(NO_PROPERTIES, body, NUMBER), len(body)
