"""A recorded topic, copies of its trace, and the injuries that the checks A1 to A15 find."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from convoymq.model import trace as words
from convoymq.spark.audit.invariants import Invariant
from tests.unit.trace.topic_support import (
    GROUPS_PER_TOPIC,
    Routes,
    Topic,
    run,
    write_effects,
)

Row = dict[str, Any]
Rows = list[Row]
FAR_US = 10_000_000
"""Further than clocks may be apart."""
INDEXES = 10_000
"""Entries of the metadata log that one topic has at most."""


class Copy:
    """The rows of one copy of the topic, to be injured."""

    def __init__(self, routes: Rows, partitions: dict[int, Rows], topic: Topic) -> None:
        self.routes = routes
        self.partitions = partitions
        self.topic = topic
        self.effects: Rows = []
        self.source: Rows = []

    def of_kind(self, pid: int, kind: int, **wanted: Any) -> Rows:
        """Rows of a partition, in the order in which they came."""
        return [row for row in self.partitions[pid] if matches(row, kind, wanted)]

    def routes_of(self, kind: int, **wanted: Any) -> Rows:
        return [row for row in self.routes if matches(row, kind, wanted)]

    def tags_of(self, pid: int, key: bytes) -> list[int]:
        stored = self.topic.partitions[pid].stored
        return [tag for _, other, tag in stored if other == key]

    def first_key(self, pid: int) -> bytes:
        return self.topic.partitions[pid].stored[0][1]

    def offsets_of(self, pid: int, key: bytes) -> list[int]:
        return [offset for offset, k, _ in self.topic.partitions[pid].stored if k == key]


def matches(row: Row, kind: int, wanted: dict[str, Any]) -> bool:
    return row["kind"] == kind and all(row[key] == value for key, value in wanted.items())


# Injuries, by check.


def stored_out_of_order(copy: Copy) -> None:
    first, second, *_ = copy.tags_of(1, copy.first_key(1))
    rows = [copy.of_kind(1, words.TAGGED, first_id=tag)[0] for tag in (first, second)]
    rows[0]["first_id"], rows[1]["first_id"] = second, first


def stored_out_of_order_behind_a_split(copy: Copy) -> None:
    """A message in the parent came later than one in the child."""
    key = copy.first_key(2)
    last, first = copy.tags_of(0, key)[-1], copy.tags_of(2, key)[0]
    before = copy.of_kind(0, words.TAGGED, first_id=last)[0]
    behind = copy.of_kind(2, words.TAGGED, first_id=first)[0]
    before["first_id"], behind["first_id"] = first, last


def sequence_left_out(copy: Copy) -> None:
    produced(copy, 1, 2)
    produced(copy, 4, 2)


def tag_stored_twice(copy: Copy) -> None:
    first, second, *_ = copy.tags_of(1, copy.first_key(1))
    copy.of_kind(1, words.TAGGED, first_id=second)[0]["first_id"] = first


def sequence_stored_twice(copy: Copy) -> None:
    produced(copy, 1, 2)
    produced(copy, 2, 2)


def produced(copy: Copy, seq: int, count: int) -> None:
    """A producer with sequences."""
    row = copy.of_kind(1, words.KEYED)[0]
    copy.partitions[1].append(
        {**row, "kind": words.PRODUCED, "session": 77, "consumer": 1, "seq": seq, "first_id": 3,
         "count": count, "position_first": seq}
    )  # fmt: skip


def confirmed_and_not_stored(copy: Copy) -> None:
    copy.of_kind(1, words.TAGGED)[4]["seq"] = 9_000


def stored_by_nobody(copy: Copy) -> None:
    copy.partitions[1].remove(copy.of_kind(1, words.PUBLISHER)[0])


def out_of_range(copy: Copy) -> None:
    copy.of_kind(1, words.KEYED)[2]["consumer"] = 0


def behind_close(copy: Copy) -> None:
    sealed = copy.of_kind(0, words.SEALED)[0]
    last = copy.of_kind(0, words.KEYED)[-1]
    copy.partitions[0].append({**last, "first_id": sealed["first_id"] + 1})


def opened_before_closed(copy: Copy) -> None:
    copy.of_kind(2, words.OPENED)[0]["time_us"] -= FAR_US


def written_in_two_places(copy: Copy) -> None:
    for row in copy.of_kind(2, words.KEYED):
        row["time_us"] -= FAR_US


def version_left_out(copy: Copy) -> None:
    for row in copy.routes_of(words.RANGE, seq=1):
        row["seq"] = 2


def hole_in_a_version(copy: Copy) -> None:
    copy.routes.remove(copy.routes_of(words.RANGE, seq=1, consumer=1)[0])


def two_changes_in_one_version(copy: Copy) -> None:
    copy.routes_of(words.RANGE, seq=1, consumer=1)[0]["consumer"] = 6


def step_over_a_version(copy: Copy) -> None:
    copy.routes_of(words.ADVANCED)[0]["consumer"] += 1


def step_before_the_version(copy: Copy) -> None:
    copy.routes_of(words.ADVANCED)[0]["index"] = copy.routes_of(words.GROUP)[0]["index"] + 1


def step_before_the_end(copy: Copy) -> None:
    copy.of_kind(0, words.HANDED_OVER)[0]["time_us"] += FAR_US


def read_before_the_step(copy: Copy) -> None:
    copy.of_kind(2, words.HANDED_OUT)[0]["time_us"] -= FAR_US


def read_before_the_parent_is_done(copy: Copy) -> None:
    copy.of_kind(0, words.SETTLED)[-1]["time_us"] += FAR_US


def overtaken(copy: Copy) -> None:
    """Two messages of a key change places on their way to the member."""
    first, second, *_ = copy.offsets_of(2, copy.first_key(2))
    rows = [copy.of_kind(2, words.HANDED_OUT, first_id=offset)[0] for offset in (first, second)]
    rows[0]["time_us"], rows[1]["time_us"] = rows[1]["time_us"], rows[0]["time_us"]


def two_of_a_key_at_once(copy: Copy) -> None:
    """A member with one message of a key at a time gets the next one before it has settled that."""
    first, second, *_ = copy.offsets_of(2, copy.first_key(2))
    copy.of_kind(2, words.HANDED_OUT, first_id=second)[0]["flags"] |= words.ONE_OF_KEY
    copy.of_kind(2, words.SETTLED, first_id=first)[0]["time_us"] += FAR_US


def two_of_a_key_at_once_heard_of_as_they_settle(copy: Copy) -> None:
    """The same of a member that lives in its client."""
    first, second, *_ = copy.offsets_of(2, copy.first_key(2))
    row = copy.of_kind(2, words.HANDED_OUT, first_id=second)[0]
    row["flags"] |= words.ONE_OF_KEY | words.AT_SETTLING
    copy.of_kind(2, words.SETTLED, first_id=first)[0]["time_us"] += FAR_US


def left_out(copy: Copy) -> None:
    """Neither delivered nor acknowledged, and a later one of the key is."""
    offset = copy.offsets_of(2, copy.first_key(2))[0]
    for kind in (words.HANDED_OUT, words.SETTLED):
        copy.partitions[2].remove(copy.of_kind(2, kind, first_id=offset)[0])


def before_the_parents_acknowledgement(copy: Copy) -> None:
    """The child's first message of a key comes while the parent's last one is under way."""
    key = copy.first_key(3)
    last = copy.offsets_of(0, key)[-1]
    ends = copy.of_kind(0, words.SETTLED, first_id=last) + [
        row
        for row in copy.of_kind(0, words.PARKED, first_id=last)
        if row["reason"] in (words.PARK, words.PARK_BEHIND)
    ]
    ends[0]["time_us"] += FAR_US


def delivered_after_its_acknowledgement(copy: Copy) -> None:
    row = copy.of_kind(1, words.HANDED_OUT)[-3]
    copy.partitions[1].append({**row, "time_us": row["time_us"] + FAR_US})


def acknowledged_and_delivered_to_the_next_owner(copy: Copy) -> None:
    row = copy.of_kind(1, words.HANDED_OUT)[-1]
    copy.partitions[1].append({**row, "first_id": 1, "count": 1})


def granted_twice(copy: Copy) -> None:
    copy.routes.remove(copy.routes_of(words.RELEASED, consumer=1)[0])


def epoch_falls(copy: Copy) -> None:
    copy.of_kind(1, words.LEASED)[1]["consumer"] = 0


def acknowledged_by_a_former_owner(copy: Copy) -> None:
    copy.of_kind(1, words.SETTLED)[-1]["consumer"] -= 1


def delivered_to_a_stranger(copy: Copy) -> None:
    copy.of_kind(1, words.HANDED_OUT)[-1]["seq"] += 1


def delivered_when_the_lease_was_over(copy: Copy) -> None:
    copy.of_kind(1, words.HANDED_OUT)[0]["time_us"] += FAR_US


def lost(copy: Copy) -> None:
    copy.partitions[0].remove(copy.of_kind(0, words.SETTLED)[0])


def acknowledged_and_never_delivered(copy: Copy) -> None:
    copy.partitions[1].remove(copy.of_kind(1, words.HANDED_OUT)[-1])


def begun_too_late(copy: Copy) -> None:
    copy.of_kind(2, words.CURSOR)[0]["first_id"] = 3


def overtook_a_parked_one(copy: Copy) -> None:
    """A message behind the parked one is delivered as if nothing were parked."""
    first, second, *_ = [
        row for row in copy.of_kind(0, words.PARKED) if row["reason"] < words.PARK_RESUMED
    ]
    live = copy.of_kind(0, words.HANDED_OUT, first_id=first["first_id"])[0]
    time_us = second["time_us"] + 2 * (second["time_us"] - first["time_us"])
    copy.partitions[0].append({**live, "first_id": second["first_id"], "time_us": time_us})


def parked_ones_out_of_turn(copy: Copy) -> None:
    heads = copy.of_kind(0, words.HANDED_OUT, flags=words.PARKED_HEAD)
    resumed = copy.of_kind(0, words.PARKED, reason=words.PARK_RESUMED)[0]
    heads[1]["time_us"] = resumed["time_us"] + 1


def applied_twice(copy: Copy) -> None:
    row = next(row for row in copy.effects if row["applied"])
    copy.effects.append({**row, "time_us": copy.effects[-1]["time_us"] + 1})


def applied_out_of_order(copy: Copy) -> None:
    key = copy.effects[0]["key"]
    first, second, *_ = [row for row in copy.effects if row["key"] == key and row["applied"]]
    first["token"], second["token"] = second["token"], first["token"]


def never_applied(copy: Copy) -> None:
    tags = [tag for offset, _, tag in copy.topic.partitions[1].stored if offset == 5]
    copy.effects = [row for row in copy.effects if row["value"] != str(tags[0])]


def key_is_missing(copy: Copy) -> None:
    copy.partitions[1].remove(copy.of_kind(1, words.KEYED)[3])


def close_says_more(copy: Copy) -> None:
    copy.of_kind(0, words.SEALED)[0]["first_id"] += 1


def sink_ends_elsewhere(copy: Copy) -> None:
    [row for row in copy.effects if row["applied"]][-1]["value"] = "something else"


def appended_after_the_seal(copy: Copy) -> None:
    """The source takes a message that came when its keys were written elsewhere."""
    copy.of_kind(1, words.KEYED)[-1]["time_us"] += FAR_US


def second_copy_delivered(copy: Copy) -> None:
    row = copy.of_kind(2, words.HANDED_OUT)[0]
    copy.partitions[2].append({**row, "first_id": 1, "count": 1})


def second_copy_left_out(copy: Copy) -> None:
    copy.partitions[2].remove(copy.of_kind(2, words.PASSED)[0])


ROUND_INJURIES: dict[Callable[[Copy], None], Invariant] = {
    appended_after_the_seal: Invariant.TOPIC_ONE_PLACE,
    second_copy_delivered: Invariant.TOPIC_REDELIVERY,
    second_copy_left_out: Invariant.TOPIC_DELIVERY_ORDER,
}
"""Of a topic with a partition that was sealed from outside."""
INJURIES: dict[Callable[[Copy], None], Invariant] = {
    stored_out_of_order: Invariant.TOPIC_LOG_ORDER,
    stored_out_of_order_behind_a_split: Invariant.TOPIC_LOG_ORDER,
    sequence_left_out: Invariant.TOPIC_LOG_ORDER,
    tag_stored_twice: Invariant.TOPIC_STORED_ONCE,
    sequence_stored_twice: Invariant.TOPIC_STORED_ONCE,
    confirmed_and_not_stored: Invariant.TOPIC_ACCEPTED_STORED,
    stored_by_nobody: Invariant.TOPIC_ACCEPTED_STORED,
    out_of_range: Invariant.TOPIC_ONE_PLACE,
    behind_close: Invariant.TOPIC_ONE_PLACE,
    opened_before_closed: Invariant.TOPIC_ONE_PLACE,
    written_in_two_places: Invariant.TOPIC_ONE_PLACE,
    version_left_out: Invariant.TOPIC_VERSIONS,
    hole_in_a_version: Invariant.TOPIC_VERSIONS,
    two_changes_in_one_version: Invariant.TOPIC_VERSIONS,
    step_over_a_version: Invariant.TOPIC_GROUP_STEPS,
    step_before_the_version: Invariant.TOPIC_GROUP_STEPS,
    step_before_the_end: Invariant.TOPIC_GROUP_STEPS,
    read_before_the_step: Invariant.TOPIC_GATE,
    read_before_the_parent_is_done: Invariant.TOPIC_GATE,
    two_of_a_key_at_once: Invariant.TOPIC_DELIVERY_ORDER,
    two_of_a_key_at_once_heard_of_as_they_settle: Invariant.TOPIC_DELIVERY_ORDER,
    overtaken: Invariant.TOPIC_DELIVERY_ORDER,
    left_out: Invariant.TOPIC_DELIVERY_ORDER,
    before_the_parents_acknowledgement: Invariant.TOPIC_DELIVERY_ORDER,
    delivered_after_its_acknowledgement: Invariant.TOPIC_REDELIVERY,
    acknowledged_and_delivered_to_the_next_owner: Invariant.TOPIC_REDELIVERY,
    granted_twice: Invariant.TOPIC_ONE_OWNER,
    epoch_falls: Invariant.TOPIC_ONE_OWNER,
    acknowledged_by_a_former_owner: Invariant.TOPIC_ONE_OWNER,
    delivered_to_a_stranger: Invariant.TOPIC_ONE_OWNER,
    delivered_when_the_lease_was_over: Invariant.TOPIC_ONE_OWNER,
    lost: Invariant.TOPIC_NOTHING_LOST,
    acknowledged_and_never_delivered: Invariant.TOPIC_NOTHING_LOST,
    begun_too_late: Invariant.TOPIC_NOTHING_LOST,
    overtook_a_parked_one: Invariant.TOPIC_PARK_ORDER,
    parked_ones_out_of_turn: Invariant.TOPIC_PARK_ORDER,
    applied_twice: Invariant.TOPIC_EFFECTS_ONCE,
    applied_out_of_order: Invariant.TOPIC_EFFECTS_ONCE,
    never_applied: Invariant.TOPIC_EFFECTS_ONCE,
    key_is_missing: Invariant.TOPIC_COUNTS,
    close_says_more: Invariant.TOPIC_COUNTS,
    sink_ends_elsewhere: Invariant.TOPIC_END_STATE,
}


class Original:
    """One recorded topic, and what makes copies of it."""

    def __init__(self, root: Path, course: Callable[[Routes, str], Topic] = run) -> None:
        recorded = Routes(root)
        self.topic = course(recorded, "original")
        recorded.close()
        write_effects(root, self.topic)
        self.routes_file = root / words.TOPICS_QUEUE / "group-0-node-1-1-0.parquet"
        self.routes = self._read(self.routes_file)
        self.files = {
            pid: next(partition.trace.origin.directory(root).glob("*.parquet"))
            for pid, partition in self.topic.partitions.items()
        }
        self.partitions = {pid: self._read(file) for pid, file in self.files.items()}
        self.lines = {
            kind: [
                json.loads(line)
                for line in (root / f"{kind}-original.jsonl").read_text().splitlines()
            ]
            for kind in ("effects", "source")
        }

    @staticmethod
    def _read(path: Path) -> Rows:
        found: Rows = pq.read_table(path, partitioning=None).to_pylist()
        return found

    def copy(self, number: int, name: str) -> Copy:
        """A copy with Raft groups and entries of its own."""
        routes = deepcopy([row for row in self.routes if row["kind"] not in MARKS])
        for row in routes:
            row["index"] += number * INDEXES
            if row["kind"] == words.NAME:
                if row["session"] == self.topic.number:
                    row["session"] = number
                    row.update(name_columns(name))
                continue
            row["session"] = number
            if row["kind"] == words.RANGE:
                row["position_index"] += self.shift(number)
        made = Copy(routes, deepcopy(self.partitions), self.topic)
        made.effects = [{**row, "topic": name} for row in self.lines["effects"]]
        made.source = [{**row, "topic": name} for row in self.lines["source"]]
        return made

    @staticmethod
    def shift(number: int) -> int:
        return number * GROUPS_PER_TOPIC

    def groups(self, number: int) -> dict[int, int]:
        """Raft groups of a copy's partitions."""
        first = self.topic.first_group + self.shift(number)
        return {pid: first + pid for pid in self.partitions}

    def write(self, root: Path, copy: Copy, number: int, name: str) -> None:
        for pid, rows in copy.partitions.items():
            group = self.groups(number)[pid]
            queue = f"{words.PARTITION_PREFIX}{name}.{pid}"
            place = root / queue
            place.mkdir()
            write(
                self.files[pid], place / f"group-{group}-node-1-1-0.parquet", rows,
                queue=queue, group=group,
            )  # fmt: skip
        for kind, lines in (("effects", copy.effects), ("source", copy.source)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (root / f"{kind}-{name}.jsonl").write_text(text)

    def write_routes(self, root: Path, routes: Rows) -> None:
        """The metadata group's file, of all copies."""
        marks = [row for row in self.routes if row["kind"] in MARKS]
        write(self.routes_file, root / "group-0-node-1-1-0.parquet", [*routes, *marks])


MARKS = (words.COVERED, words.MEMBER)


def name_columns(name: str) -> dict[str, int]:
    raw = name.encode()[:64]
    padded = raw.ljust(64, b"\0")
    columns = ("seq", "first_id", "count", "position_index", "position_command", "position_first",
               "acquired", "delivered")  # fmt: skip
    numbers = {
        column: int.from_bytes(padded[8 * k : 8 * k + 8], "little", signed=True)
        for k, column in enumerate(columns)
    }
    return {"consumer": len(raw), **numbers}


def write(pattern: Path, path: Path, rows: Rows, **origin: Any) -> None:
    """A segment like another one, with these rows."""
    facts = json.loads(pq.read_metadata(pattern).metadata[words.METADATA_KEY])
    schema = pq.read_schema(pattern)
    end = max(facts["covered"][-1][1], *(row["index"] for row in rows))
    facts |= {"rows": len(rows), "marked": {}, "covered": [[0, end]], **origin}
    for row in rows:
        row.update(origin)
    with pq.ParquetWriter(path, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        writer.add_key_value_metadata({words.METADATA_KEY: json.dumps(facts).encode()})
