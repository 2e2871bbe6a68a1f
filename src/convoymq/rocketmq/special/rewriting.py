"""Records that clients get in another form than the log has: with the topic that they know."""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.kernels import rocketmq_records as records
from convoymq.rocketmq.store.types import Message, encode_properties, with_room_for_crc

RECORD_BYTES_MAX = 1 << 30


def rewritten(message: Message, topic: str, queue: int, properties: Mapping[str, str]) -> bytes:
    """Returns the record of a message with another topic, queue and properties; all else, its
    offsets and times too, is as it was."""
    draft = message.draft()
    draft.topic, draft.queue_id = topic, queue
    # The checksum was that of the record in the log.
    draft.properties = with_room_for_crc(encode_properties(dict(properties)), appends_crc=False)
    block, _ = records.encode(
        [draft], 0, RECORD_BYTES_MAX, RECORD_BYTES_MAX, message.physical,
        {(topic, queue): message.queue_offset}, message.stored_ms, message.store_host,
        False,
    )  # fmt: skip
    return bytes(block)
