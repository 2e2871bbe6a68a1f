"""Recalls of messages for a time (370): a message for the same time takes another one back.

A send of a message for a time is answered with a *handle*: `v1 topic broker time uniqueKey`, in
base64. The message that recalls has its time, so that both are in one slot (`wheel.py`).
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from convoymq.rocketmq.broker.names import RETRY_PREFIX
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.special.names import (
    PRODUCER_GROUP,
    REAL_TOPIC,
    TAGS,
    TIMER_DELETED_KEY,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    UNIQUE_KEY,
    whole,
)
from convoymq.rocketmq.special.settings import SpecialSettings
from convoymq.rocketmq.store.types import Draft, decode_properties, encode_properties

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

VERSION = "v1"
TAG = "_RECALL_TAG_"


def handle_of(draft: Draft, broker: str) -> str | None:
    """Returns the handle of a message for a time; None: it cannot be recalled."""
    properties = decode_properties(draft.properties)
    topic, unique = properties.get(REAL_TOPIC, RETRY_PREFIX), properties.get(UNIQUE_KEY)
    out_ms = whole(properties.get(TIMER_OUT_MS), -1)
    if topic.startswith(RETRY_PREFIX) or unique is None or out_ms < 0:
        return None
    # One more: a whole second belongs to the slot before it.
    words = (VERSION, topic, broker, str(out_ms + 1), unique)
    return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


class Recalls:
    """Serves the request."""

    def __init__(self, parts: Broker, settings: SpecialSettings) -> None:
        self._parts = parts
        self._settings = settings
        parts.register(Request.RECALL_MESSAGE, self._recall)

    async def _recall(self, _connection: Connection, command: Command) -> Command:
        parts = self._parts
        if not self._settings.recall:
            raise Refusal(Answer.NO_PERMISSION, "recall failed, operation is forbidden")
        if not parts.role.is_master:
            raise Refusal(Answer.SLAVE_NOT_AVAILABLE, "recall failed, broker service not available")
        topic = command.needed("topic")
        if parts.topics.get(topic) is None:
            raise Refusal(Answer.TOPIC_NOT_EXIST, f"recall failed, the topic[{topic}] not exist")
        deliver_ms, unique = self._parse(command.needed("recallHandle"), topic)
        properties = {
            TAGS: TAG, UNIQUE_KEY: unique, TIMER_DELETED_KEY: f"{topic}+{unique}",
            TIMER_DELIVER_MS: str(deliver_ms),
        }  # fmt: skip
        if group := command.fields.get("producerGroup"):
            properties[PRODUCER_GROUP] = group
        draft = Draft(topic, 0, b"0", encode_properties(properties), born_ms=parts.now_ms())
        (placed,) = await parts.put([draft])
        if placed.physical < 0:
            raise Refusal(Answer.SYSTEM_ERROR, f"recall failed, {placed.status.name}")
        return command.answer(fields={"msgId": unique})

    def _parse(self, text: str, topic: str) -> tuple[int, str]:
        """Returns the time and the unique key of a handle. Raises Refusal."""
        try:
            words = base64.b64decode(text, b"-_", validate=True).decode().split(" ")
        except (binascii.Error, UnicodeDecodeError):
            words = []
        if len(words) < 5 or words[0] != VERSION:
            raise Refusal(Answer.ILLEGAL_OPERATION, "recall handle is invalid")
        if words[1] != topic:
            raise Refusal(Answer.ILLEGAL_OPERATION, "recall failed, topic not match")
        if words[2] != self._parts.role.name:
            raise Refusal(Answer.ILLEGAL_OPERATION, "recall failed, broker service not available")
        left_ms = whole(words[3], -1) - self._parts.now_ms()
        if not 0 < left_ms < self._settings.timer_delay_max_s * 1000:
            raise Refusal(Answer.ILLEGAL_OPERATION, "recall failed, timestamp invalid")
        return int(words[3]), words[4]
