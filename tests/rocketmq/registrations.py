"""Bodies of registrations as brokers send them."""

from __future__ import annotations

import struct
import zlib

from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.values import RegisterBrokerBody, TopicConfig


def compressed(registration: RegisterBrokerBody) -> bytes:
    """The body of a broker that has no static topics."""
    table = registration.topic_config_serialize_wrapper
    parts = [json.dumps(table.data_version), len(table.topic_config_table)]
    parts += [text_of(topic) for topic in table.topic_config_table.values()]
    parts += [json.dumps(registration.filter_server_list), 0]
    return zlib.compress(b"".join(map(packed, parts)))


def packed(part: bytes | int) -> bytes:
    if isinstance(part, int):
        return struct.pack(">i", part)
    return struct.pack(">i", len(part)) + part


def text_of(topic: TopicConfig) -> bytes:
    numbers = (topic.read_queue_nums, topic.write_queue_nums, topic.perm)
    text = " ".join(map(str, (topic.topic_name, *numbers, topic.topic_filter_type))).encode()
    return text + b" " + json.dumps(topic.attributes) if topic.attributes else text
