"""Requests for changes that are repeated under the id of the first one: its answer was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from convoymq.metadata.machine import TopicRecord
from convoymq.model.errors import PreconditionFailed
from convoymq.topics.rules.changes import Kind
from convoymq.topics.shell import views
from convoymq.topics.shell.rows import ChangeRow


class Asked(NamedTuple):
    """A change as somebody asks for it."""

    change_id: str
    kind: Kind
    sources: tuple[int, ...]
    """In any order."""
    cuts: tuple[int, ...] = ()
    """Of a split; empty: in the middle."""
    to_node: int = 0
    """Of a move; 0 = any."""


def repeat_of(record: TopicRecord, asked: Asked) -> ChangeRow | None:
    """Returns the change that has this id, whether it runs or has ended; None: there is none, as
    far as the topic's history is kept. Raises PreconditionFailed when it is another one than is
    asked for."""
    latest = record.state.change
    left_out: Iterable[int] = ()
    nodes: Mapping[int, int] = {}
    if latest is not None and latest.change_id == asked.change_id:
        row: ChangeRow | None = views.change_row(latest)
        left_out, nodes = latest.left_out, record.places
    else:
        row = views.past_change_row(record.state.lineage, asked.change_id)
    if row is None:
        return None
    # A merge whose sources do not all answer goes on without some, as a move if one is left.
    kind = Kind.MERGE.value if left_out else row["kind"]
    sources = sorted({*row["sources"], *left_out})
    is_same = (
        kind == asked.kind.value
        and sources == sorted(set(asked.sources))
        and _has_cuts(row, asked)
        and all(nodes.get(span["pid"], asked.to_node) == asked.to_node for span in row["targets"])
    )
    if not is_same:
        pids = ", ".join(str(pid) for pid in sources)
        raise PreconditionFailed(
            f"change '{asked.change_id}' of topic '{record.name}' in vhost '{record.vhost}' is the "
            f"{kind} of {pids}, and not what is asked for: another change needs another id"
        )
    return row


def _has_cuts(row: ChangeRow, asked: Asked) -> bool:
    if asked.kind is not Kind.SPLIT:
        return True
    begins = sorted(span["lo"] for span in row["targets"])
    end = max(span["hi"] for span in row["targets"])
    return tuple(begins[1:]) == (asked.cuts or (middle(begins[0], end),))


def middle(lo: int, hi: int) -> int:
    """Returns where a range is split when nobody says where."""
    return lo + (hi - lo) // 2
