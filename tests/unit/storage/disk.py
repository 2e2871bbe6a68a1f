"""A node's storage on a disk in memory, with a model of what it must hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from convoymq.kernels.entries import Entry, make_entry
from convoymq.model.config import RaftConfig
from convoymq.model.rounds import pass_on
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.log import GroupLog
from convoymq.storage.store import Storage
from convoymq.storage.types import Damage, EntryGone, GroupPlan, RecoveryReport, Snapshot
from tests.unit.storage.inline import InlineFlusher, InlineWorker

SMALL = RaftConfig(
    wal_max_size_bytes=64 * 1024,
    segment_max_entries=16,
    segment_max_size_bytes=32 * 1024,
    mem_table_max_bytes=8 * 1024,
    read_ahead_bytes=4096,
    snapshot_min_dead_bytes=1024,
)


class PowerLoss(BaseException):
    """The machine goes dark in the middle of an operation."""


def body_of(group: int, index: int, term: int, size: int) -> bytes:
    """A body that tells whose it is."""
    word = f"{group}.{index}.{term}|".encode()
    return (word * (size // len(word) + 1))[: size // 8 * 8]


def entry_of(group: int, index: int, term: int, size: int = 100) -> Entry:
    """A test entry."""
    return make_entry(group, index, term, 1000 + index, 1, body_of(group, index, term, size))


class Model:
    """What one group's log must hold."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        """What the log holds now."""
        self.ever: set[tuple[int, int, bytes]] = set()
        """Every entry that was ever appended."""
        self.last = 0
        self.written = 0
        self.vote = (0, 0)
        self.vote_written = (0, 0)
        self.applied = 0
        self.dead: set[int] = set()
        """Indexes <= applied whose body is not needed any more."""
        self.snapshot = 0
        self.ended = False
        """The group was removed: what is heard of it now is another's."""
        self.first_term = 1
        """Tells the entries of a group's lives apart: none of a former one has it or a higher."""
        self.successor: Model | None = None
        """What the log holds when the snapshot being installed is durable."""

    def live_ranges(self) -> list[tuple[int, int]]:
        """As a machine would say it."""
        ranges: list[tuple[int, int]] = []
        for index in range(1, self.applied + 1):
            if index not in self.dead:
                if ranges and ranges[-1][1] == index - 1:
                    ranges[-1] = (ranges[-1][0], index)
                else:
                    ranges.append((index, index))
        return ranges


@dataclass(slots=True)
class Owner:
    """See `LogOwner`: keeps everything and hears nothing, unless told otherwise."""

    plan: Callable[[int], GroupPlan | None] = lambda _: None
    needed_from: Callable[[int], int] = lambda _: 0
    on_queued: Callable[[], None] = lambda: None
    on_damaged: Callable[[Damage], None] = lambda _: None
    on_log_failed: Callable[[int, Exception], None] = pass_on


class SomePace:
    """Hurries now and then; its rests take no time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def is_urgent(self) -> bool:
        return self._random.random() < 0.5

    def rest(self, count: int) -> None:
        pass


class Node:
    """One storage on a disk, used at random; `crash` takes the power away."""

    def __init__(
        self, seed: int = 0, config: RaftConfig = SMALL, disk: MemoryDirectory | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.pace = SomePace(seed)
        self.config = config
        self.disk = disk or MemoryDirectory()
        self.models: dict[int, Model] = {}
        self.groups = [1, 2, 3, 4]
        self.sizes = [0, 8, 100, 1000, 3000]
        """Of bodies that `step` appends."""
        self.removed: set[int] = set()
        """Groups whose removal is durable."""
        self.removing: set[int] = set()
        self.rejoining: set[int] = set()
        """Groups that were removed and opened again; their removal is not durable yet."""
        self._removals: dict[int, object] = {}
        self.start()

    def start(self) -> RecoveryReport:
        """Opens the storage as a new process would."""
        self.flusher = InlineFlusher()
        self.worker = InlineWorker()
        self.storage = Storage(self.disk, self.flusher, self.worker, self.config)
        self.storage.pace = self.pace
        self.report = self.storage.recover()
        self.storage.owner = Owner(plan=self.plan)
        for group, log in self.storage.logs.items():
            self._listen(group, log)
        for group in self.removing & set(self.storage.logs):
            self.storage.remove_group(group)
        for group in list(self.rejoining):
            # The removal was lost, or has been found with part of what followed it.
            model = self.models[group]
            assert model.written == 0
            assert model.vote_written == (0, 0)
            self.log(group)
            self.rejoin(group)
        return self.report

    def _listen(self, group: int, log: GroupLog) -> None:
        model = self.models.setdefault(group, Model())

        def written(owner: int, index: int, term: int) -> None:
            assert owner == group
            assert not model.ended
            assert index <= model.last
            assert model.entries[index].term == term
            model.written = max(model.written, index)

        def vote_written(owner: int, term: int, voted_for: int) -> None:
            assert owner == group
            assert not model.ended
            model.vote_written = max(model.vote_written, (term, voted_for))

        log.on_written = written
        log.on_vote_written = vote_written

    def log(self, group: int) -> GroupLog:
        """The group's log, listened to."""
        fresh = group not in self.storage.logs
        log = self.storage.open_group(group)
        if fresh:
            self._listen(group, log)
        return log

    def plan(self, group: int) -> GroupPlan | None:
        """What a replica would answer."""
        model = self.models[group]
        log = self.storage.logs[group]
        applied = model.applied

        def take() -> Snapshot:
            return Snapshot(
                index=applied,
                term=log.term_at(applied),
                membership=b"m%d" % group,
                state=b"state of %d at %d" % (group, applied),
            )

        return GroupPlan(
            live_ranges=model.live_ranges(),
            applied=applied,
            keep_from=applied - 2,
            take_snapshot=take if applied > 0 else None,
        )

    def append(self, group: int, count: int = 1, size: int = 100, term: int = 0) -> None:
        """Appends entries to a group's log and its model."""
        log = self.log(group)
        model = self.models[group]
        for _ in range(count):
            index = model.last + 1
            entry = entry_of(group, index, term or max(log.last_term, model.first_term), size)
            model.entries[index] = entry
            model.ever.add((index, entry.term, entry.data))
            model.last = index
            log.append(entry)

    def truncate(self, group: int, index: int) -> None:
        """Removes the tail and appends one entry of a higher term, as a follower does."""
        log, model = self.log(group), self.models[group]
        index = max(index, model.applied + 1, log.first_index, log.snapshot_index + 1)
        if index > model.last:
            return
        term = log.last_term + 1
        for gone in range(index, model.last + 1):
            del model.entries[gone]
        model.last = index - 1
        model.written = min(model.written, index - 1)
        log.truncate_from(index)
        self.append(group, 1, term=term)

    def vote(self, group: int) -> None:
        """Saves a vote in a new term."""
        log, model = self.log(group), self.models[group]
        model.vote = (log.term + 1, self.random.randrange(4))
        log.save_vote(*model.vote)

    def install(self, group: int) -> None:
        """Receives a snapshot from a leader whose log went another way above what is applied."""
        log, model, rnd = self.log(group), self.models[group], self.random
        index = rnd.randint(model.applied + 1, max(model.applied + 1, model.last) + 5)
        term = max(log.last_term, model.first_term) + 1
        new = Model()
        new.applied = new.last = new.written = index
        new.vote, new.vote_written = model.vote, model.vote_written
        live = sorted(rnd.sample(range(1, index + 1), min(index, rnd.randrange(30))))
        new.dead = set(range(1, index + 1)) - set(live)
        new.ever = model.ever
        for i in live:
            entry = model.entries.get(i) if i <= model.applied else None
            new.entries[i] = entry or entry_of(group, i, term, rnd.choice([40, 900]))
            new.ever.add((i, new.entries[i].term, new.entries[i].data))
        model.successor = new
        receiver = log.receive_snapshot(index, term)
        receiver.add_entries([new.entries[i] for i in live[: len(live) // 2]])
        receiver.add_entries([new.entries[i] for i in live[len(live) // 2 :]])

        def done(error: BaseException | None) -> None:
            model.successor = None
            if error is None:
                self._succeed(model, new)

        receiver.finish(b"m%d" % group, b"state of %d at %d" % (group, index), done)

    def _succeed(self, model: Model, new: Model) -> None:
        for name in ("entries", "last", "written", "applied", "dead"):
            setattr(model, name, getattr(new, name))

    def wipe(self, group: int) -> None:
        """Empties a group's log."""
        model = self.models[group]
        new = Model()
        model.successor = new

        def done(error: BaseException | None) -> None:
            model.successor = None
            if error is None:
                self._succeed(model, new)

        self.log(group).wipe(done)

    def remove(self, group: int) -> None:
        """Removes a group for ever; another takes its place in the test."""
        self.groups[self.groups.index(group)] = max(self.groups) + 1
        self.removing.add(group)
        self.storage.remove_group(group)
        self.storage.wal.tell(lambda: self.removed.add(group))

    def rejoin(self, group: int) -> None:
        """Removes a group and opens it again at once."""
        self.models[group].ended = True
        self.storage.remove_group(group)
        self.rejoining.add(group)
        removal = object()
        self._removals[group] = removal

        def durable() -> None:
            if self._removals[group] is removal:
                self.rejoining.discard(group)

        self.storage.wal.tell(durable)
        self._begin_again(group)

    def _begin_again(self, group: int) -> None:
        model = Model()
        model.first_term = self.models[group].first_term + 1000
        self.models[group] = model
        self.log(group)

    def apply(self, group: int) -> None:
        """The machine moves on and settles some of its entries."""
        model = self.models[group]
        model.applied = self.random.randint(model.applied, max(model.applied, model.written))
        for index in range(1, model.applied + 1):
            if index not in model.dead and self.random.random() < 0.7:
                model.dead.add(index)

    def drain(self, group: int) -> None:
        """The machine has applied and settled all that is written; the storage clears up."""
        self.run()
        model = self.models[group]
        model.applied = model.written
        model.dead = set(range(1, model.applied + 1))
        self.storage.tick()
        self.run()

    def run(self) -> None:
        """Lets everything that is under way finish."""
        self.storage.kick()
        while self.flusher.run() or self.worker.run():
            pass

    def crash(self, keep: Callable[[], bool] | None = None) -> RecoveryReport:
        """Loses power, starts again, checks, and takes what was found as the state."""
        self.disk.operation = None
        self.disk.crash(keep or (lambda: self.random.random() < 0.5))
        return self.restart()

    def restart(self) -> RecoveryReport:
        """Starts again, checks, and takes what was found as the state: a process that was killed
        leaves what it has written in the page cache."""
        self.disk.operation = None
        report = self.start()
        self.check_recovered()
        return report

    def check_recovered(self) -> None:
        """After a crash: everything confirmed is there, and nothing that never was."""
        assert not self.report.damages, self.report.damages
        for group in self.removed:
            assert group not in self.storage.logs
        for group, model in self.models.items():
            if group in self.removing:
                continue
            log = self.storage.logs.get(group)
            if model.successor is not None:
                new, model.successor = model.successor, None
                if log is not None:
                    replaced = new.last and log.snapshot_index == new.last
                    if replaced or (not new.last and log.last_index == 0):
                        self._succeed(model, new)
            if log is None:
                assert model.written == 0
                assert model.vote_written == (0, 0)
                first_term = model.first_term
                model.__init__()  # type: ignore[misc]
                model.first_term = first_term
                self._listen(group, self.log(group))
                continue
            log.check_invariants()
            assert log.last_index >= model.written
            assert model.vote_written <= (log.term, log.voted_for) <= model.vote
            assert log.first_index <= log.snapshot_index + 1
            model.vote = model.vote_written = (log.term, log.voted_for)
            entries = {}
            for index in range(1, log.last_index + 1):
                needed = log.first_index <= index or (
                    index <= model.applied and index not in model.dead
                )
                try:
                    entry = log.entry(index)
                except EntryGone:
                    assert not needed, f"group {group}: entry {index} is lost"
                    if index in model.entries:
                        entries[index] = model.entries[index]
                    continue
                assert (index, entry.term, entry.data) in model.ever
                assert index > model.written or entry.data == model.entries[index].data
                if index >= log.first_index:
                    assert log.term_at(index) == entry.term
                entries[index] = entry
            model.entries = entries
            model.last = model.written = log.last_index
            snapshot = log.read_snapshot()
            if snapshot is not None:
                assert snapshot.index == log.snapshot_index <= model.applied
                assert snapshot.state == b"state of %d at %d" % (group, snapshot.index)
                assert log.snapshot_membership == b"m%d" % group

    def check(self) -> None:
        """While running: the log equals the model."""
        for group, model in self.models.items():
            if group in self.removing or model.successor is not None:
                continue
            log = self.log(group)
            log.check_invariants()
            assert log.last_index == model.last
            assert log.written_index == model.written
            for index in range(1, model.last + 1):
                needed = log.first_index <= index or (
                    index <= model.applied and index not in model.dead
                )
                if needed:
                    assert log.entry(index).data == model.entries[index].data
            if log.first_index <= log.last_index:
                got = log.entries(log.first_index, 3000)
                assert [e.index for e in got] == list(
                    range(log.first_index, log.first_index + len(got))
                )
                assert all(e.data == model.entries[e.index].data for e in got)

    def step(self) -> None:
        """Does one random thing."""
        rnd = self.random
        group = rnd.choice(self.groups)
        if group in self.models and self.models[group].successor is not None:
            group = 0
        choice = rnd.random() if group else rnd.uniform(0.62, 0.95)
        if group:
            self.log(group)
        if choice < 0.35:
            self.append(group, rnd.randint(1, 8), rnd.choice(self.sizes))
        elif choice < 0.42:
            log = self.log(group)
            self.append(group, 1, term=max(log.last_term, self.models[group].first_term) + 1)
        elif choice < 0.48:
            self.truncate(group, self.models[group].last - rnd.randint(0, 6))
        elif choice < 0.54:
            self.vote(group)
        elif choice < 0.62:
            self.apply(group)
        elif choice < 0.72:
            self.storage.kick()
        elif choice < 0.82:
            self.flusher.run()
        elif choice < 0.92:
            self.worker.run()
        elif choice < 0.95:
            self.storage.tick()
        elif choice < 0.97:
            model = self.models[group]
            if model.last:
                self.log(group).forget(rnd.randint(0, model.last))
        elif choice < 0.985:
            self.install(group)
        elif choice < 0.987:
            self.wipe(group)
        elif choice < 0.989:
            self.remove(group)
        elif choice < 0.991:
            self.rejoin(group)
        else:
            self.storage.wal.seal()


def run_until_power_loss(node: Node, steps: int, operation: int) -> bool:
    """Random steps; the power goes at the given file operation. False when it never came."""
    left = [operation]

    def hook(name: str, path: str) -> None:
        if name == "pread":
            return
        left[0] -= 1
        if left[0] == 0:
            raise PowerLoss

    node.disk.operation = hook
    try:
        for _ in range(steps):
            node.step()
        node.run()
    except PowerLoss:
        return True
    finally:
        node.disk.operation = None
    return False


def emptied(node: Node) -> None:
    """Has what the WAL holds emptied."""
    node.run()
    generation = node.storage.turn_wal()
    node.run()
    for _ in range(4):
        node.storage.tick()
        node.run()
    assert node.storage.has_emptied(generation)
