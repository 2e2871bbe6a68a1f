"""Parked messages that get another body."""

from __future__ import annotations

import pytest

from convoymq.broker.topics.parked import with_body
from convoymq.client.topic_messages import COLUMNS, contents_of
from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.column_writer import ColumnWriter
from convoymq.kernels.columns import PROPERTIES
from convoymq.management.messages import build_record


def parked(body: bytes) -> bytes:
    """A message as it is parked."""
    properties = {"headers": {"x-order-key": "k", "other": "kept"}, "content_type": "text/plain"}
    builder = CommandBuilder()
    target = PublishTarget(builder, 0, None)
    target.publish((build_record("t", "route", properties, body),), len(body), 0)
    builder.discard_unsent()
    return batch.slice_records(bytes(target.pending[0].bytes()), 0, 0, 1)


def columns(message: bytes) -> ColumnFrame:
    writer = ColumnWriter(COLUMNS | PROPERTIES, 1, 1 << 20)
    assert writer.append(message, 0, 0, 1, 7, 0) == 1
    return ColumnFrame(bytes(writer.finish(8)))


@pytest.mark.parametrize("body", [b"", b"better", b"x" * 300_000])
def test_another_body_leaves_the_rest_as_it_was(body: bytes) -> None:
    before = columns(parked(b"worse"))
    after = columns(with_body(parked(b"worse"), body))
    (content,) = contents_of(after)
    assert content.body == body
    assert content.key == b"k"
    assert content.headers == contents_of(before)[0].headers
    flags = [bytes(frame.buffers(PROPERTIES)[1])[12:] for frame in (before, after)]
    assert flags[0] == flags[1]
