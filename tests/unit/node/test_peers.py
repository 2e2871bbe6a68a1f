"""What links report reaches the parts of a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import structlog

from convoymq.kernels.link_frames import FRAME_CONTROL, frame
from convoymq.model.errors import Misuse
from convoymq.node.peers import Peers
from convoymq.transport.frame_kinds import KIND_JOIN


def attached() -> Any:
    """Peers whose parts record their calls."""
    names = ("links", "control", "host", "entry", "wake", "fail", "soon")
    parts: Any = SimpleNamespace(**{name: Mock() for name in names})
    parts.peers = Peers(structlog.get_logger(), parts.wake, parts.fail, parts.soon)
    parts.peers.attach(parts.links, parts.control, parts.host, parts.entry)
    return parts


@pytest.mark.provokes("node.fault", "link.bad_frame")
def test_a_frame_that_fails_is_dropped_and_reported() -> None:
    parts = attached()
    data = frame(FRAME_CONTROL, 0, 5, 0, KIND_JOIN, 0, 0)
    for error in (KeyError("kind"), ValueError("malformed")):
        parts.control.on_frame.side_effect = error
        parts.peers.on_frame(2, data)
    assert parts.control.on_frame.mock_calls == [call(2, data)] * 2


def test_a_link_is_reported_to_every_part() -> None:
    parts = attached()
    peers, broker = parts.peers, Mock()
    parts.links.hello_of.return_value.supports = {"quorum": (1, 2)}
    peers.on_up(2, 7)
    parts.entry.poke.assert_called_once_with()
    parts.host.on_link_up.assert_called_once_with(2, 7, {"quorum": (1, 2)})
    peers.broker = broker
    peers.on_up(2, 7)
    peers.on_suspect(2)
    peers.on_unsuspect(2)
    peers.on_room(2)
    peers.on_down(2, True)
    assert broker.mock_calls == [
        call.on_node_up(2, 7), call.on_suspect(2), call.on_unsuspect(2),
        call.on_node_down(2, definite=True),
    ]  # fmt: skip
    assert parts.host.mock_calls[1:] == [
        call.on_link_up(2, 7, {"quorum": (1, 2)}), call.on_suspect(2), call.on_unsuspect(2),
        call.on_room(2), call.on_link_down(2, definite=True),
    ]  # fmt: skip
    parts.control.on_node_down.assert_called_once_with(2)
    assert parts.wake.call_count == 6


def test_another_process_with_the_number_ends_the_node() -> None:
    parts = attached()
    parts.peers.on_rejected("node 1 runs already")
    ((error,), _) = parts.fail.call_args
    assert isinstance(error, Misuse)
