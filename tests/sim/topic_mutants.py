"""Rules of ordered topics, each switched off by a small patch; the simulator must notice.

`python -m tests.sim.topic_mutants [NAME] [--first=S] [--limit=N]` switches rules off, one after the
other, runs seeds until one of them notices, and prints a row of the table in docs/simulation.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from convoymq.sim.loads import run_seed
from convoymq.sim.topics import world as worlds
from convoymq.sim.topics.members import SimMember
from convoymq.sim.topics.partitions import SimPartition
from convoymq.topics.machine.partition import PartitionMachine
from convoymq.topics.rules import controller as controllers
from convoymq.topics.rules.changes import Seal
from convoymq.topics.rules.commands import LATEST, OpenCursor, Produce
from convoymq.topics.rules.controller import Controller
from convoymq.topics.rules.coordinator import Coordinator
from convoymq.topics.rules.dedup import DedupTable
from convoymq.topics.rules.group import GroupState, Recover
from convoymq.topics.rules.leaseholder import Leaseholder
from convoymq.topics.rules.lineage import Mode, PartitionState
from convoymq.topics.rules.member import GroupMember
from convoymq.topics.rules.park_versions import ParkVersions
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.server_lease import ServerLeases
from convoymq.topics.rules.topic import RecordSeal, TopicState

LIMIT = 40
Patch = tuple[object, str, object]
MUTANTS: dict[str, Mutant] = {}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule that is switched off: in words, as patches, and with the faults that bring it out."""

    name: str
    text: str
    patches: Callable[[], list[Patch]]
    faults: str | None
    first: int


def mutant(
    text: str, faults: str | None = None, first: int = 1
) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    """Registers the patches of a function under its name."""

    def register(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        name = patches.__name__
        MUTANTS[name] = Mutant(name, text, patches, faults, first)
        return patches

    return register


CHANGES = "split,merge,move"
NETWORK = f"{CHANGES},loss,repeat,leader"
WINDOWED = f"{CHANGES},window,loss"


@mutant("the route is published, and targets are opened, before the sources are sealed", NETWORK)
def publish_first() -> list[Patch]:
    open_targets = Controller._open_targets

    def seal_sources(self: Any, change: Any, now_ms: int, expired: Any) -> None:
        self._create_targets(change, now_ms)
        for pid in change.sources:
            if pid not in change.seals:
                self._propose(RecordSeal(change.change_id, pid, Seal(1, DedupTable().pack())))
        if change.is_sealed and change.is_ready:
            self._to_phase(change, controllers.Phase.SEALED, now_ms)

    def opened(self: Any, change: Any, now_ms: int) -> None:
        for pid in change.sources:
            self._tell(pid, self._seal_of(change), now_ms)
        open_targets(self, change, now_ms)

    return [(Controller, "_seal_sources", seal_sources), (Controller, "_open_targets", opened)]


@mutant("targets begin without the duplicate table of their sources", NETWORK)
def no_dedup_seed() -> list[Patch]:
    return [(controllers, "seed_of", lambda lo, hi, sources: DedupTable().pack())]


@mutant("only the highest sequence is compared: gaps are accepted", NETWORK)
def gaps_accepted() -> list[Patch]:
    compare = staticmethod(lambda seq, last: Code.OK if seq > last else Code.DUPLICATE)
    return [(DedupTable, "compare", compare)]


@mutant("duplicates are not detected", NETWORK)
def no_duplicate_detection() -> list[Patch]:
    return [(DedupTable, "compare", staticmethod(lambda seq, last: Code.OK))]


@mutant("CLOSE is forgotten by one message in ten", CHANGES)
def close_not_durable() -> list[Patch]:
    refusal = PartitionMachine.refusal

    def planted(self: Any, command: Produce) -> Code:
        code = refusal(self, command)
        forgets = (command.seq * 7 + command.lp * 3) % 10 == 0
        return Code.OK if code is Code.CLOSED and forgets else code

    return [(PartitionMachine, "refusal", planted)]


@mutant("a group advances when everything is delivered, not acknowledged", CHANGES)
def advance_on_delivered() -> list[Patch]:
    answer_fetch = SimPartition._answer_fetch

    def fetched(self: Any, fetch: Any, group: str, reply: Any) -> bool:
        def told(answer: Any) -> None:
            read = self.__dict__.setdefault("read", {})
            own = self.machine.groups.get(group)
            if own is not None and answer.code is Code.OK:
                at = (group, own.group_epoch)
                read[at] = max(read.get(at, 0), answer.next_offset)
                own.cursor.advance(min(read[at], self.machine.end_offset))
            reply(answer)

        return answer_fetch(self, fetch, group, told)

    return [(SimPartition, "_answer_fetch", fetched)]


@mutant("a merge is complete when any of its sources is drained", CHANGES)
def any_source_is_enough() -> list[Patch]:
    is_left = Coordinator._is_left

    def planted(self: Any, pid: int) -> bool:
        sealed = self.lineage.partition(pid).sealed_version
        others = () if sealed is None else self.lineage.sources(sealed - 1)
        drained = any(other in self.known.handed for other in others if other != pid)
        return is_left(self, pid) or drained

    def any_drained(self: Any, sources: Any) -> bool:
        return any(self.is_drained(pid) for pid in sources)

    return [(Coordinator, "_is_left", planted), (Coordinator, "all_drained", any_drained)]


@mutant("DAG: only open children wait for their parents, sealed ones are given out", CHANGES, 5)
def sealed_children_are_not_gated() -> list[Patch]:
    readable, open_cursor = Coordinator.readable, Coordinator._open

    def planted(self: Any) -> list[int]:
        pids = set(readable(self))
        if self.state.mode is Mode.DAG:
            pids |= {
                pid
                for pid, each in self.lineage.partitions.items()
                if each.state is PartitionState.SEALED
                and pid not in self.known.handed
                and not self._is_behind(pid)
            }
        return sorted(pids)

    def opened(self: Any, pid: int, now_ms: int) -> None:
        partition = self.lineage.partition(pid)
        if self.state.mode is Mode.DAG and partition.state is PartitionState.SEALED:
            self._tell(pid, OpenCursor(self.state.name, self.state.group_epoch, 0), now_ms)
        else:
            open_cursor(self, pid, now_ms)

    return [(Coordinator, "readable", planted), (Coordinator, "_open", opened)]


@mutant(
    "DAG: an empty sealed partition is drained although its parents are not", f"{CHANGES},empty"
)
def drained_is_not_recursive() -> list[Patch]:
    is_left = Coordinator._is_left

    def planted(self: Any, pid: int) -> bool:
        partition = self.lineage.partition(pid)
        empty = partition.close_offset is not None and partition.close_offset <= 1
        return is_left(self, pid) or (self.state.mode is Mode.DAG and empty)

    return [(Coordinator, "_is_left", planted)]


@mutant("an owner whose lease is over goes on, and its acknowledgements count", f"{CHANGES},pause")
def old_owner_goes_on() -> list[Patch]:
    return [
        (PartitionMachine, "holds_lease", staticmethod(lambda own, epoch: True)),
        (Leaseholder, "may_start", lambda self, held, now_ms: True),
    ]


@mutant(
    "DAG: a lost partition is left behind although its parents are not",
    f"{CHANGES},outage,cutoff",
    150,
)
def lost_is_not_recursive() -> list[Patch]:
    is_left = Coordinator._is_left

    def planted(self: Any, pid: int) -> bool:
        return is_left(self, pid) or self._is_gone(pid)

    return [(Coordinator, "_is_left", planted)]


@mutant("a new child is read from its end", CHANGES)
def child_starts_at_latest() -> list[Patch]:
    start_of = PartitionMachine._start_of

    def planted(self: Any, start: int) -> int:
        return start_of(self, start if start or not self.created_version else LATEST)

    return [(PartitionMachine, "_start_of", planted)]


@mutant("parked keys stay behind when a partition is handed over", f"{CHANGES},park")
def parked_keys_are_not_handed_over() -> list[Patch]:
    take_over = PartitionMachine._take_over

    def planted(self: Any, own: Any, packed: bytes) -> None:
        take_over(self, own, packed)
        own.parked.keys.clear()
        own.parked.bytes_used = 0

    return [(PartitionMachine, "_take_over", planted)]


@mutant("later messages of a parked key go on", f"{CHANGES},park")
def parked_keys_go_on() -> list[Patch]:
    set_parked = GroupMember._set_parked

    def planted(slow: Any, parked: bool, head: Any) -> None:
        set_parked(slow, False, head)

    return [(GroupMember, "_set_parked", staticmethod(planted))]


@mutant("a key that resumes is live before its park log is empty", f"{CHANGES},park")
def live_before_the_park_log_is_empty() -> list[Patch]:
    set_parked = GroupMember._set_parked

    def planted(slow: Any, parked: bool, head: Any) -> None:
        set_parked(slow, parked and head is None, head)

    return [(GroupMember, "_set_parked", staticmethod(planted))]


@mutant(
    "a partition is sealed from outside while its server may accept messages",
    "split,move,cutoff",
    33,
)
def external_seal_does_not_wait() -> list[Patch]:
    return [(ServerLeases, "is_over", lambda self, server, now_ms: server in self._given_up)]


@mutant("a server accepts messages without a lease", "split,move,cutoff", 34)
def server_without_lease() -> list[Patch]:
    return [(ServerLeases, "holds", lambda self, server, now_ms: True)]


@mutant(
    "without a seed, the first sequence that comes is taken", "split,move,outage,loss,repeat", 3
)
def first_sequence_is_taken() -> list[Patch]:
    decide = DedupTable.decide

    def planted(
        self: Any, producer: int, epoch: int, lp: int, seq: int, base: int
    ) -> tuple[Code, int]:
        if self.is_seedless(lp) and (producer, lp) not in self.rows:
            return Code.OK, seq
        return decide(self, producer, epoch, lp, seq, base)

    return [(DedupTable, "decide", planted)]


@mutant("what a dead partition may have stored is handed out twice", "split,move,outage,loss", 7)
def no_filter_after_external_seal() -> list[Patch]:
    return [(PartitionMachine, "_pass_repeats", lambda self, group, own, key, runs: False)]


@mutant("a merge that is overdue is published with a source that is not sealed", "merge,silent")
def amended_merge_keeps_its_sources() -> list[Patch]:
    def planted(self: Any, change: Any) -> None:
        missing = {pid: Seal(1, DedupTable().pack()) for pid in change.sources}
        self.change = replace(change, seals={**missing, **change.seals})

    return [(TopicState, "_amend", planted)]


@mutant("a source that was left out, and sealed late, is not moved", "merge,silent", 2000)
def left_out_source_is_forgotten() -> list[Patch]:
    return [(Controller, "_reconcile", lambda self, now_ms: None)]


@mutant("retention deletes what a group has not read", f"{CHANGES},empty,trim,pause")
def deleted_before_all_have_passed() -> list[Patch]:
    def retire(self: Any, versions: Any) -> None:
        self.lineage.retire(())

    def delete(self: Any, expired: Any, versions: Any) -> None:
        self.lineage.delete(expired.__contains__, ())

    return [(TopicState, "retire", retire), (TopicState, "_delete", delete)]


@mutant("a group that goes back does not hold what is retired", f"{CHANGES},empty,seek,pause", 13)
def deletes_behind_a_seek() -> list[Patch]:
    def delete(self: Any, expired: Any, versions: Any) -> None:
        self.lineage.delete(expired.__contains__, ())

    return [(TopicState, "_delete", delete)]


@mutant("a partition is deleted before what comes before it", f"{CHANGES},empty")
def deletes_children_first() -> list[Patch]:
    def delete(self: Any, expired: Any, versions: Any) -> None:
        retired = [p for p in self.lineage.partitions.values() if p.pid in expired]
        for each in retired:
            if each.state is PartitionState.RETIRED and each.parents:
                each.state = PartitionState.DELETED

    return [(TopicState, "_delete", delete)]


@mutant("a group that had expired goes on behind what was deleted", f"{CHANGES},expire,pause")
def expired_group_comes_back_in_silence() -> list[Patch]:
    return [(GroupState, "has_lost_data", lambda self, kept: False)]


@mutant("producers that are not silent are forgotten", f"{NETWORK},forget,restart", 25)
def producers_are_forgotten_too_early() -> list[Patch]:
    expire = DedupTable.expire
    return [(DedupTable, "expire", lambda self, before, now: expire(self, now, now))]


@mutant("a group that has expired advances behind what is deleted", f"{CHANGES},expire,pause")
def expired_group_advances() -> list[Patch]:
    advance = GroupState._advance

    def planted(self: Any, group_epoch: int, expect: int, to: int, latest: int) -> bool:
        expired, self.expired = self.expired, False
        moved = advance(self, group_epoch, expect, to, latest)
        self.expired = expired
        return moved

    return [(GroupState, "_advance", planted)]


@mutant("data that expires unread is passed over in silence", f"{CHANGES},trim")
def expired_in_silence() -> list[Patch]:
    trim = PartitionMachine.trim

    def planted(self: Any, command: Any) -> Any:
        answer = trim(self, command)
        for own in self.groups.values():
            if own.expired:
                own.cursor.advance(self.log_start)
                own.expired = False
        return answer

    return [(PartitionMachine, "trim", planted)]


def _plans(**fields: Any) -> Patch:
    """Has the plan of every seed have these fields."""
    draw = worlds.draw_plan

    def planted(seed: int, kinds: Any = None) -> Any:
        return replace(draw(seed, kinds), **fields)

    return worlds, "draw_plan", planted


SLOW_OWNER = "abort,controller,empty,lanes,loss,move,park,pause,seek,trim"
ONE_OWNER = {
    "slow_handlers": True, "lanes": 1, "weak": False, "retries": False, "keys": 6, "members": 1,
    "dag": (False, False),
}  # fmt: skip
"""Has one member with much that is fetched and not begun."""


@mutant("who may have fetched what is lost keeps its lease", SLOW_OWNER, 55)
def owner_goes_on_after_a_loss() -> list[Patch]:
    apply = PartitionMachine.apply

    def planted(self: Any, command: Any) -> Any:
        outcome = apply(self, command)
        for own in self.groups.values():
            own.fenced = False
        return outcome

    return [_plans(**ONE_OWNER), (PartitionMachine, "apply", planted)]


@mutant("a group goes on behind a loss while its owner is fenced", SLOW_OWNER, 55)
def drained_while_the_owner_is_fenced() -> list[Patch]:
    drained = PartitionMachine.drained

    def planted(self: Any, group: str, **more: Any) -> bool:
        own = self.groups.get(group)
        if own is None or not own.fenced:
            return drained(self, group, **more)
        own.fenced = False
        found = drained(self, group, **more)
        own.fenced = True
        return found

    return [_plans(**ONE_OWNER), (PartitionMachine, "drained", planted)]


@mutant("a fenced lease is not told as revoked", f"{CHANGES},trim,pause,coordinator,loss", 2)
def fenced_lease_is_not_revoked() -> list[Patch]:
    on_answer = Coordinator.on_answer

    def planted(self: Any, pid: int, command: Any, answer: Any, now_ms: int) -> None:
        on_answer(self, pid, command, answer, now_ms)
        self.known.fenced.clear()

    return [(Coordinator, "on_answer", planted)]


@mutant("what was drained before a seek counts after it", f"{CHANGES},seek")
def drained_marks_survive_a_seek() -> list[Patch]:
    def planted(self: Any) -> None:
        self.group_epoch = self.state.group_epoch
        self.known.leased.clear()

    return [(Coordinator, "_renew_knowledge", planted)]


@mutant("a lease is renewed while its end is being committed", f"{CHANGES},pause,coordinator", 180)
def renewed_while_it_expires() -> list[Patch]:
    return [(Coordinator, "may_renew", lambda self, pid, epoch: True)]


@mutant("the coordinator does not wait for a lease to run out", f"{CHANGES},pause,consumer")
def expires_too_early() -> list[Patch]:
    expire = Coordinator._expire_members

    def planted(self: Any, now_ms: int) -> None:
        ttl_ms, self.ttl_ms = self.ttl_ms, self.ttl_ms // 4
        expire(self, now_ms)
        self.ttl_ms = ttl_ms

    return [(Coordinator, "_expire_members", planted)]


@mutant("a member that is only silent is taken for dead", f"{CHANGES},pause,consumer,window")
def silent_members_are_taken_for_dead() -> list[Patch]:
    pause = SimMember.pause

    def planted(self: Any, until: int) -> None:
        pause(self, until)
        seat = self.world.metadata.groups[self.group]
        self.world.after(5, seat.on_dead, self.member)

    return [(SimMember, "pause", planted)]


@mutant("a client that asks for one message of a key has several", f"{CHANGES},window")
def several_of_a_key_at_once() -> list[Patch]:
    hand_out_next = GroupMember._hand_out_next

    def planted(self: Any, share: Any, *arguments: Any) -> Any:
        share.order = None
        return hand_out_next(self, share, *arguments)

    return [(GroupMember, "_hand_out_next", planted)]


@mutant("the next message of a key does not wait for the acknowledgement to be in force", WINDOWED)
def next_before_the_window_is_acknowledged() -> list[Patch]:
    on_acknowledged = GroupMember.on_acknowledged

    def planted(self: Any, pid: int, epoch: int, first: int, last: int, now_ms: int) -> None:
        on_acknowledged(self, pid, epoch, first, last, now_ms)
        if pid in self.held:
            self.held[pid].settled(first, last)

    return [(GroupMember, "on_acknowledged", planted)]


@mutant("what waits behind a returned message overtakes it", f"{WINDOWED},park")
def returned_messages_are_overtaken() -> list[Patch]:
    on_returned = GroupMember.on_returned

    def planted(
        self: Any, pid: int, epoch: int, first: int, last: int, now_ms: int, **how: bool
    ) -> None:
        on_returned(self, pid, epoch, first, last, now_ms, **how)
        if pid in self.held:
            self.held[pid].settled(first, last)
            for slow in self.held[pid].keys.values():
                slow.waiting.sort(key=lambda single: (single.failures, single.offset))

    return [(GroupMember, "on_returned", planted)]


@mutant("a view of parked keys is taken whenever it comes", f"{NETWORK},park,leader,unheard", 60)
def old_views_of_parked_keys_are_taken() -> list[Patch]:
    def take_view(self: Any, version: int) -> tuple[bytes, ...]:
        self.known = version
        return ()

    return [(ParkVersions, "take_view", take_view)]


@mutant("a weak topic skips a source without a record", f"{CHANGES},outage,leader")
def skips_in_silence() -> list[Patch]:
    is_left = Coordinator._is_left
    skip = Coordinator._skip_silent
    silent: set[tuple[int, int]] = set()

    def planted_skip(self: Any, pid: int, now_ms: int) -> None:
        propose = self._propose

        def note(command: Any, now_ms: int) -> None:
            silent.add((id(self.state), command.pid))

        self._propose = note
        try:
            skip(self, pid, now_ms)
        finally:
            self._propose = propose

    def planted_left(self: Any, pid: int) -> bool:
        return (id(self.state), pid) in silent or is_left(self, pid)

    return [
        _plans(weak=True, retries=True),
        (Coordinator, "_skip_silent", planted_skip),
        (Coordinator, "_is_left", planted_left),
    ]


@mutant("what a weak topic skipped is never read", f"{CHANGES},outage,leader")
def never_reads_late() -> list[Patch]:
    def planted(self: Any, pid: int, now_ms: int) -> None:
        self._propose(Recover(pid, self.state.group_epoch), now_ms)

    return [_plans(weak=True, retries=True), (Coordinator, "_look_for", planted)]


@mutant(
    "what a skipped partition had handed over unheard stays there",
    f"{CHANGES},park,mute,coordinator",
)
def never_comes_back() -> list[Patch]:
    return [
        _plans(weak=True, retries=False),
        (PartitionMachine, "_come_back", staticmethod(lambda own, taken: None)),
    ]


@mutant(
    "what a skipped partition had handed over comes back where a target began with it",
    f"{CHANGES},park,mute,coordinator",
    2050,
)
def comes_back_twice() -> list[Patch]:
    come_back = PartitionMachine._come_back
    return [
        _plans(weak=True, retries=False),
        (PartitionMachine, "_come_back", staticmethod(lambda own, taken: come_back(own, ()))),
    ]


@mutant("what a weak topic skipped may be deleted before it is read", f"{CHANGES},outage,empty")
def skipped_is_not_kept() -> list[Patch]:
    return [
        _plans(weak=True, retries=True),
        (GroupState, "held_version", lambda self, lineage: self.cv),
    ]


@mutant("a weak topic passes over expired messages before that is recorded", f"{CHANGES},trim")
def passes_unrecorded() -> list[Patch]:
    return [
        _plans(weak=True, retries=True),
        (Coordinator, "has_recorded", lambda self, pid, first, end: True),
    ]


@mutant("a failed message is acknowledged before its copy is stored", f"{CHANGES},park")
def acknowledged_without_copy() -> list[Patch]:
    retry = SimPartition.retry

    def planted(self: Any, park: Any, reply: Any) -> None:
        trace, self.world.trace = self.world.trace, []
        try:
            retry(self, park, reply)
        finally:
            self.world.trace = trace

    return [_plans(weak=True, retries=True), (SimPartition, "retry", planted)]


@mutant("a weak topic takes the newest message first", f"{CHANGES},park")
def newest_first() -> list[Patch]:
    hand_out_next = GroupMember._hand_out_next

    def planted(self: Any, share: Any, *arguments: Any) -> Any:
        share.buffer.rotate(1)
        return hand_out_next(self, share, *arguments)

    return [_plans(weak=True, retries=True), (GroupMember, "_hand_out_next", planted)]


@contextmanager
def planted(found: Mutant) -> Iterator[None]:
    """The rule is switched off inside."""
    patches = found.patches()
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


NOTICED = re.compile(r"AssertionError: A([1-9]|1[0-5]): |NotLive: ")
"""How failures begin that are found by the referee, or by waiting for what does not come."""


class Broken(Exception):
    """The patches of a mutant do not fit the code any more: it fails otherwise than by a check."""


def hunt(found: Mutant, first: int, limit: int) -> tuple[int, str] | None:
    """Runs seeds until one notices: (its number from the first one, what was noticed), or None.
    Raises Broken."""
    faults = None if found.faults is None else found.faults.split(",")
    with planted(found):
        for seed in range(first, first + limit):
            result = run_seed(seed, faults, load="topics")
            if result.failure is not None:
                if NOTICED.match(result.failure) is None:
                    raise Broken(f"{found.name}, seed {seed}: {result.detail}")
                return seed - first + 1, result.failure
    return None


def main(arguments: list[str]) -> int:
    """See the module docstring; 1 when a mutant was not noticed."""
    names = [a for a in arguments if not a.startswith("--")] or list(MUTANTS)
    options = dict(a[2:].split("=") for a in arguments if "=" in a)
    missed = 0
    for name in names:
        found = MUTANTS[name]
        first = int(options.get("first", found.first))
        caught = hunt(found, first, int(options.get("limit", LIMIT)))
        row = ("not noticed", "") if caught is None else (str(caught[0]), caught[1][:110])
        missed += caught is None
        print(f"| `{name}` | {found.text} | {row[0]} | {row[1]} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
