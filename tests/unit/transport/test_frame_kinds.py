"""The table of frames between nodes: what is on the wire stays, and a kind is added by one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from convoymq.kernels import link_frames
from convoymq.kernels.link_frames import FRAME_APPEND, FRAME_APPEND_REPLY, FRAME_CONTROL, frame
from convoymq.transport import frame_kinds
from convoymq.transport.frame_kinds import (
    CONTROL_KINDS,
    FREE,
    LINK_FRAMES,
    URGENT_SIZE_MAX,
    is_urgent,
    link_frame,
)
from tests.process_state import registries_restored

ROOT = Path(__file__).parents[3]
RELEASED_TYPES = {
    1: "APPEND", 2: "APPEND_REPLY", 3: "COMMIT", 4: "FORWARD", 5: "APPLIED", 6: "DELIVER",
    7: "RAFT", 8: "CONTROL", 9: "HEARTBEAT", 10: "HELLO", 11: "RELAY", 12: "GOODBYE", 13: "CREDIT",
}  # fmt: skip
RELEASED_KINDS = {
    1: "classic", 2: "reply", 3: "reply_exists", 4: "list", 5: "close_connection", 6: "alarm",
    7: "queue_counts", 8: "classic_counts", 9: "join", 10: "reservation", 11: "stream",
    12: "sessions", 13: "found", 14: "recovery", 15: "metadata_end", 20: "group_admin",
    21: "operator", 22: "prefetch", 23: "topic_group", 24: "topic_scaling",
    25: "ring", 30: "migration",
}  # fmt: skip


def test_numbers_of_released_kinds_stay() -> None:
    """Nodes of two releases talk to each other during a rolling upgrade."""
    types = {number: kind.name for number, kind in LINK_FRAMES.items() if number < FREE}
    kinds = {number: kind.name for number, kind in CONTROL_KINDS.items() if number < FREE}
    assert types.items() >= RELEASED_TYPES.items()
    assert kinds.items() >= RELEASED_KINDS.items()
    for number, name in RELEASED_TYPES.items():
        assert getattr(link_frames, f"FRAME_{name}") == number
    for number, name in RELEASED_KINDS.items():
        assert getattr(frame_kinds, f"KIND_{name.upper()}") == number


def test_behaviour_of_released_kinds_stays() -> None:
    released = [kind for number, kind in CONTROL_KINDS.items() if number < FREE]
    assert {k.name for k in LINK_FRAMES.values() if k.urgent and k.number < FREE} == {
        "APPEND_REPLY", "CONTROL", "HEARTBEAT", "CREDIT",
    }  # fmt: skip
    assert [kind.name for kind in released if not kind.urgent] == [
        "classic",
        "migration",
        "ring",
        "mirror_clients",
        "read_model",
    ]
    assert {k.name for k in released if not k.waits} == {"join", "found", "recovery", "operator"}
    assert {k.name for k in released if k.raw} == {
        "classic",
        "reply",
        "ring",
        "mirror_stored",
        "mirror_clients",
    }
    assert {k.name for k in released if k.since_0_3} == {"group_admin", "operator", "prefetch"}


@pytest.mark.parametrize(
    ("type", "kind", "size", "urgent"),
    [
        (FRAME_APPEND, 0, 48, False),
        (FRAME_APPEND_REPLY, 0, 48, True),
        (FRAME_CONTROL, frame_kinds.KIND_LIST, URGENT_SIZE_MAX, True),
        (FRAME_CONTROL, frame_kinds.KIND_LIST, URGENT_SIZE_MAX + 1, False),
        (FRAME_CONTROL, frame_kinds.KIND_CLASSIC, 48, False),
    ],
)
def test_priority_is_said_by_the_kind_and_bounded_by_the_size(
    type: int, kind: int, size: int, urgent: bool
) -> None:
    header = frame(type, 0, 0, 0, kind, 0, 0, body_length=size - link_frames.HEADER_SIZE)
    assert is_urgent(header) == urgent


def test_a_kind_is_registered_by_one_line() -> None:
    with registries_restored():
        toy = link_frame(FREE + 1, "TOY", "toy of a test", urgent=True)
        assert is_urgent(frame(toy, 0, 0, 0, 0, 0, 0))
        with pytest.raises(AssertionError, match="SECOND and TOY"):
            link_frame(FREE + 1, "SECOND", "toy of a test")


def test_the_page_of_formats_lists_every_kind() -> None:
    page = (ROOT / "docs" / "formats" / "entries-and-frames.md").read_text()
    types = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", page, re.M))
    kinds = re.findall(r"^\| (\d+) \| `(\w+)` \| `([\w.]+)` \| (\w*) ?\| (\w*) ?\|", page, re.M)
    expected = {str(n): kind.name for n, kind in LINK_FRAMES.items() if n < FREE}
    assert types.items() >= expected.items()
    assert sorted(kinds) == sorted(
        (
            str(number),
            kind.name,
            kind.owner,
            "" if kind.urgent else "yes",
            "" if kind.waits else "yes",
        )
        for number, kind in CONTROL_KINDS.items()
        if number < FREE
    )


def test_owners_are_rooms_or_modules() -> None:
    source = ROOT / "src" / "convoymq"
    for kind in CONTROL_KINDS.values():
        if kind.number < FREE:
            path = source / kind.owner.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), kind
