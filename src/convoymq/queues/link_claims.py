"""Claims and tags of publishers' links to quorum queues (ADR 0202).

A PRODUCER command names the key of a link and the tag of the message that comes next, and in place
of the first sequence `TAGGED` and the link's epoch. The op `CLAIM` of RESERVATION (link, tags)
begins an epoch, and is answered with it and the indices of the tags that the queue has.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

CLAIM = "claim_link"
FENCED = "link_taken"
"""Refusal of a message of an older epoch."""
KEY_BYTES = 16
TAGGED = 1 << 63
TAGS_MAX = 8_192
"""Of one link; the oldest are forgotten."""


def digest_of(tag: bytes) -> bytes:
    """Returns the form in which queues remember a delivery-tag."""
    return blake2b(tag, digest_size=KEY_BYTES).digest()


def claim_of(key: bytes, tags: Iterable[bytes]) -> dict[str, object]:
    """Returns the op that claims a link and asks for tags."""
    return {"op": CLAIM, "link": key, "tags": b"".join(map(digest_of, tags))}
