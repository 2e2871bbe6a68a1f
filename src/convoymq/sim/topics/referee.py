"""Checks A1 to A15 of the specification's section 16, on the trace of a topic.

A weak topic promises less, and is judged by that: two members may have a partition at once (A10),
of which the one with the latest lease is looked at; what was skipped may come late (A7, A8), and a
failed message may be acknowledged when a copy of it is stored elsewhere (A13). What it keeps is the
order of a partition: where keys are not held, messages are handed out for the first time in the
order of their offsets. And nothing is lost without a record (A11).

The referee reads events, in their order, and nothing else. Each check collects violations under its
number; a run is clean when there are none. What only holds at the end of a run is checked when the
run is finished.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from convoymq.sim.topics import events

IN_FLIGHT_MS = 150
"""Time for which a request may be on its way, and its repeat behind it."""
Token = tuple[int, int]
Reader = tuple[str, int]
"""A group and its group epoch."""
Parked = tuple[int, int]
"""The version that created the partition of a parked message, and the message."""


class Referee:
    """Takes events one by one; `violations` grows."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.sends: dict[int, events.Send] = {}
        self.copies: dict[int, list[events.Stored]] = defaultdict(list)
        self.confirmed: dict[int, int] = {}
        """Times."""
        self.by_partition: dict[int, list[events.Stored]] = defaultdict(list)
        self.stored_at: dict[tuple[int, int], events.Stored] = {}
        self.spans: dict[int, tuple[int, int]] = {}
        self.created: dict[int, int] = {}
        self.closed: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        """The version that no longer has a partition."""
        self.routes: list[tuple[tuple[int, int, int], ...]] = []
        self.external: set[int] = set()
        self.lost: set[int] = set()
        self.deleted: set[int] = set()
        self.parents: dict[int, tuple[int, ...]] = {}
        self.gone_before: dict[Reader, frozenset[int]] = {}
        """Partitions that were deleted before a group began."""
        self.gens: dict[str, int] = {}
        self.begins: dict[Reader, tuple[int, str]] = {}
        self.cv: dict[str, int] = {}
        self.settled: dict[Reader, set[tuple[int, int]]] = defaultdict(set)
        """Places that are acknowledged, parked or given up."""
        self.acked_msgs: dict[Reader, dict[int, int]] = defaultdict(dict)
        """With the version that created the partition of the copy."""
        self.delivered: dict[Reader, set[tuple[int, int]]] = defaultdict(set)
        self.losses: dict[Reader, list[events.Loss]] = defaultdict(list)
        self.parked: dict[tuple[str, int, bytes], list[Parked]] = defaultdict(list)
        self.doubtful: dict[Reader, dict[Parked, int]] = defaultdict(dict)
        """Parked messages that may be lost with a partition, and the version that created it: they
        are out of reach behind it, and only there."""
        self.skipped: dict[Reader, set[int]] = defaultdict(set)
        self.first: dict[tuple[str, int, bytes], events.Deliver] = {}
        self.seen: dict[Reader, set[int]] = defaultdict(set)
        self.leases: dict[tuple[str, int], tuple[int, str, bool]] = {}
        self.effects: dict[Reader, dict[int, int]] = defaultdict(dict)
        """With the version that created the partition of the latest copy."""
        self.last_effect: dict[tuple[str, int, bytes], Token] = {}
        self.applied: dict[tuple[str, int, bytes], list[events.Effect]] = defaultdict(list)
        self._last_of_lp: dict[int, Token] = {}
        self._last_of_producer: dict[tuple[int, int], int] = {}
        self._last_in_partition: dict[tuple[int, int, int], int] = {}
        self._ended_leases: dict[tuple[str, int], int] = {}
        self.weak = False
        self.holds_keys = True
        self.granted: dict[tuple[str, int, int], str] = {}
        """Members by group, partition and lease epoch."""
        self.retried: dict[Reader, set[int]] = defaultdict(set)
        """Messages of which a copy went to the retry topic."""
        self.passed: dict[Reader, set[int]] = defaultdict(set)
        """Partitions that were skipped, also when they were read later."""
        self.missing: dict[Reader, set[int]] = defaultdict(set)
        """Of these, those that are to come."""
        self.aside: dict[Reader, dict[Parked, int]] = defaultdict(dict)
        """As `doubtful`, of skipped partitions: these messages come late."""
        self.acked: dict[Reader, set[tuple[int, int]]] = defaultdict(set)
        """Places that are acknowledged."""
        self._highest: dict[tuple[str, int, int, bytes], int] = {}
        self._gated: set[tuple[str, int, int]] = set()

    def say(self, check: str, text: str) -> None:
        """A violation."""
        self.violations.append(f"{check}: {text}")

    def take(self, event: events.Event) -> None:
        """The next event."""
        method = _METHODS.get(type(event))
        if method is not None:
            getattr(self, method)(event)

    # What a weak topic does

    def on_weak(self, event: events.Weak) -> None:
        """The topic is a weak one."""
        self.weak, self.holds_keys = True, not event.retries

    def on_retried(self, event: events.Retried) -> None:
        """A failed message is kept elsewhere."""
        self.retried[event.group, event.gen].add(event.msg)

    def on_skipped(self, event: events.Skipped) -> None:
        """A group says that it goes on without a partition."""
        if not self.weak or event.gen != self.gens[event.group]:
            self.say("A6", f"{event}: a group skips nothing here")
        self.passed[event.group, event.gen].add(event.pid)
        self.missing[event.group, event.gen].add(event.pid)
        self._set_aside((event.group, event.gen), event.pid, self.aside)

    def on_recovered(self, event: events.Recovered) -> None:
        """A group has read what it skipped."""
        self.missing[event.group, event.gen].discard(event.pid)

    # Producers and the log: A1 to A4, A14

    def on_send(self, event: events.Send) -> None:
        """A message, maybe again in another session."""
        self.sends[event.msg] = event

    def on_confirmed(self, event: events.Confirmed) -> None:
        """A3: what is confirmed is stored."""
        if event.msg not in self.copies:
            self.say("A3", f"message {event.msg} is confirmed and not stored")
        self.confirmed.setdefault(event.msg, event.t)

    def on_abandoned(self, event: events.Abandoned) -> None:
        """No producer has a reason to give up here."""
        text = f"producer {event.producer} gave logical partition {event.lp} up: {event.code}"
        self.say("A3", text)

    def on_stored(self, event: events.Stored) -> None:
        """A1 to A4 at once: the log only grows."""
        pid, msg = event.pid, event.msg
        send = self.sends.get(msg)
        if send is None:
            self.say("A3", f"{event} was never sent")
            return
        lo, hi = self.spans.get(pid, (0, 1 << 30))
        if not lo <= send.lp < hi:
            self.say("A4", f"{event} has logical partition {send.lp}, not of {lo} to {hi}")
        if pid in self.closed:
            self.say("A4", f"{event} comes after CLOSE at {self.closed[pid]}")
        self._check_single_place(event, send)
        self._check_copies(event)
        log = self.by_partition[pid]
        if event.offset != (log[-1].offset + 1 if log else 1):
            self.say("A14", f"{event} follows offset {log[-1].offset if log else 0}")
        log.append(event)
        self.copies[msg].append(event)
        self.stored_at[pid, event.offset] = event

    def _check_single_place(self, event: events.Stored, send: events.Send) -> None:
        """A4 and A1: nothing newer of this logical partition is stored anywhere."""
        last = self._last_of_lp.get(send.lp)
        token = (event.created_v, event.offset)
        if last is not None and last >= token:
            self.say("A4", f"{event} is stored after {last} of the same logical partition")
        self._last_of_lp[send.lp] = max(token, last or token)
        order = (send.producer, send.lp)
        before = self._last_of_producer.get(order, 0)
        copies = self.copies.get(event.msg)
        if event.msg < before and not copies:
            self.say("A1", f"{event} is stored after message {before} of its producer")
        self._last_of_producer[order] = max(event.msg, before)
        in_pid = (event.pid, send.producer, send.lp)
        if event.msg <= self._last_in_partition.get(in_pid, 0):
            self.say("A1", f"{event} is out of order in its partition")
        self._last_in_partition[in_pid] = event.msg

    def _check_copies(self, event: events.Stored) -> None:
        """A2: one entry, but for what a dead partition may have stored as well, and never for what
        its producer knew to be stored when it sent the request."""
        known_ms = self.confirmed.get(event.msg, event.t) + IN_FLIGHT_MS
        for copy in self.copies.get(event.msg, ()):
            unknown = self._is_unknown_between(copy, event) and event.t <= known_ms
            if copy.pid == event.pid or not unknown:
                self.say("A2", f"{event} is stored at {copy.pid}, {copy.offset} already")

    def _is_unknown_between(self, copy: events.Stored, event: events.Stored) -> bool:
        """Returns whether a partition between the two was sealed from outside."""
        lp = self.sends[event.msg].lp
        return any(
            self.spans[pid][0] <= lp < self.spans[pid][1]
            and copy.created_v <= self.created[pid] < event.created_v
            for pid in self.external
        )

    def on_sealed(self, event: events.Sealed) -> None:
        """A4, A14: CLOSE comes once, behind everything."""
        pid, close = event.pid, event.close_offset
        if pid in self.closed:
            self.say("A4", f"{pid} has a second CLOSE")
        self.closed[pid] = close
        if len(self.by_partition[pid]) != close - 1:
            self.say("A14", f"{pid} has {len(self.by_partition[pid])} messages, CLOSE at {close}")

    # Versions: A5

    def on_published(self, event: events.Published) -> None:
        """A5: consecutive versions that cover everything; sources and targets have one range."""
        if event.v != len(self.routes):
            self.say("A5", f"version {event.v} follows version {len(self.routes) - 1}")
        reached = 0
        for lo, hi, _ in event.spans:
            if lo != reached or hi <= lo:
                self.say("A5", f"version {event.v} does not cover {reached} to {lo} once")
            reached = hi
        spans = {pid: (lo, hi) for lo, hi, pid in event.spans}
        if self.routes:
            self._check_change(event, spans)
        for pid in event.targets:
            self.spans[pid], self.created[pid] = spans[pid], event.v
            self.parents[pid] = event.sources
        for pid in event.sources:
            self.ended[pid] = event.v
        self.external |= set(event.external)
        self.routes.append(event.spans)

    def _check_change(self, event: events.Published, spans: dict[int, tuple[int, int]]) -> None:
        before = {pid: (lo, hi) for lo, hi, pid in self.routes[-1]}
        if reached := max(hi for _, hi in before.values()) != max(hi for _, hi in spans.values()):
            self.say("A5", f"version {event.v} covers {reached}")
        gone = {pid for pid in before if pid not in spans}
        new = {pid for pid in spans if pid not in before}
        if gone != set(event.sources) or new != set(event.targets) or new & self.created.keys():
            self.say("A5", f"version {event.v} is not one change")
        sources = sorted(before[pid] for pid in gone)
        targets = sorted(spans[pid] for pid in new)
        joined = all(a[1] == b[0] for a, b in pairwise(sources))
        if not joined or (sources[0][0], sources[-1][1]) != (targets[0][0], targets[-1][1]):
            self.say("A5", f"version {event.v}: sources {sources}, targets {targets}")
        for pid in event.sources:
            if pid not in self.closed and pid not in event.external:
                self.say("A4", f"version {event.v} is published before {pid} is sealed")

    def on_opened(self, event: events.Opened) -> None:
        """A4: a target opens with its version."""
        if event.v >= len(self.routes):
            self.say("A4", f"{event.pid} opens before version {event.v} is published")

    def on_deleted(self, event: events.Deleted) -> None:
        """Retention goes along the lineage; that no group loses by it shows in A11."""
        if event.pid not in self.ended:
            self.say("A5", f"{event}: it is in the newest version")
        kept = [pid for pid in self.parents.get(event.pid, ()) if pid not in self.deleted]
        if kept:
            self.say("A5", f"{event}: its parents {kept} are kept")
        self.deleted.add(event.pid)
        for reader in self.gens.items():
            if event.pid in self.missing[reader]:
                # What is parked there never comes: the record of the skip says so.
                self._set_aside(reader, event.pid, self.doubtful)

    # Groups: A6 to A13

    def on_seek(self, event: events.Seek) -> None:
        """A group begins somewhere; what came before says nothing any more."""
        self.gens[event.group] = event.gen
        self.begins[event.group, event.gen] = (event.v, event.mode)
        self.gone_before[event.group, event.gen] = frozenset(self.deleted)
        self.cv[event.group] = event.v

    def on_advance(self, event: events.Advance) -> None:
        """A6."""
        if event.gen != self.gens[event.group] or event.from_v != self.cv[event.group]:
            self.say("A6", f"{event}: the group is at {self.cv[event.group]}")
        if event.to_v != event.from_v + 1 or event.to_v >= len(self.routes):
            self.say("A6", f"{event}: version {len(self.routes) - 1} is the newest")
        self.cv[event.group] = event.to_v

    def on_grant(self, event: events.Grant) -> None:
        """A10: epochs rise."""
        at = (event.group, event.pid)
        self.granted[event.group, event.pid, event.epoch] = event.member
        if at in self.leases and self.leases[at][0] >= event.epoch:
            self.say("A10", f"{event} after epoch {self.leases[at][0]}")
        ended = self._ended_leases.get(at, 0) >= event.epoch
        self.leases[at] = (event.epoch, event.member, ended)

    def on_release(self, event: events.Release) -> None:
        """A lease ends; that it was in force may be heard later."""
        at = (event.group, event.pid)
        self._ended_leases[at] = event.epoch
        epoch, member, _ = self.leases.get(at, (0, "", True))
        if epoch == event.epoch:
            self.leases[at] = (epoch, member, True)

    def on_deliver(self, event: events.Deliver) -> None:
        """A7 to A10 and A12."""
        reader = (event.group, event.gen)
        epoch, member, over = self.leases.get((event.group, event.lease_pid), (0, "", True))
        in_force = (epoch, member) == (event.epoch, event.member) and not over
        if not in_force:
            former = self.granted.get((event.group, event.lease_pid, event.epoch))
            if not self.weak or former != event.member:
                self.say("A10", f"{event}: the lease is {epoch} of {member!r}, over: {over}")
                return
            # Two have the partition: what counts is what the one does that may acknowledge.
            self.delivered[reader].add((event.pid, event.offset))
            self.seen[reader].add(event.msg)
            return
        self._check_parked(event)
        acked_in = self.acked_msgs[reader].get(event.msg)
        if self.weak and (event.pid, event.offset) not in self.acked[reader]:
            # Behind a partition that was skipped a second copy is not known as one.
            acked_in = None
        if acked_in is not None and not self._is_lost_between(event.msg, acked_in, event):
            self.say("A9", f"{event} was acknowledged before")
        self._check_gate(event)
        self.delivered[reader].add((event.pid, event.offset))
        if event.msg in self.seen[reader]:
            return
        self.seen[reader].add(event.msg)
        if not event.key and self.holds_keys:
            # A message without a key has no order to keep.
            return
        if self.weak:
            self._check_weak_order(event)
            return
        last = self.first.get((event.group, event.gen, event.key))
        if last is not None:
            if (last.created_v, last.offset) >= (event.created_v, event.offset):
                self.say("A8", f"{event} comes first after {last}")
            if not self._is_settled(reader, last.pid, last.offset):
                self.say("A8", f"{event} comes before {last} is acknowledged")
        self.first[event.group, event.gen, event.key] = event

    def _check_weak_order(self, event: events.Deliver) -> None:
        """A8 of weak topics: the order of a partition, of a key where keys are held."""
        if event.parked:
            return
        key = event.key if self.holds_keys else b""
        at = (event.group, event.gen, event.lease_pid, key)
        if event.offset <= self._highest.get(at, 0):
            self.say("A8", f"{event} comes first after offset {self._highest[at]}")
        self._highest[at] = max(event.offset, self._highest.get(at, 0))

    def _is_lost_between(
        self, msg: int, version: int, event: events.Deliver | events.Effect
    ) -> bool:
        """Returns whether a copy comes behind a lost partition, and the one that was read before it
        does not: what would have passed the second one over is lost."""
        lp = self.sends[msg].lp
        return any(
            self.spans[pid][0] <= lp < self.spans[pid][1]
            and version <= self.created[pid] < event.created_v
            for pid in self.lost
        )

    def _out_of_reach(self, reader: Reader) -> dict[Parked, int]:
        """Returns parked messages, and the version that created the first partition behind which
        they are out of reach."""
        found = dict(self.aside[reader])
        for parked, version in self.doubtful[reader].items():
            found[parked] = min(version, found.get(parked, version))
        return found

    def _check_parked(self, event: events.Deliver) -> None:
        """A12: only the head of a parked key is delivered."""
        doubtful = self._out_of_reach((event.group, event.gen))
        reached = self.created.get(event.lease_pid, 0)
        parked = self.parked.get((event.group, event.gen, event.key), ())
        waiting = [each for each in parked if doubtful.get(each, reached) >= reached]
        if event.lease_pid in self.missing[event.group, event.gen]:
            # What is parked behind it says nothing to what comes late.
            waiting = [each for each in waiting if each[0] <= reached]
        if self.weak and event.parked:
            # What was skipped has a park log of its own.
            waiting = [each for each in parked if each[0] == event.created_v]
        head = [(event.created_v, event.msg)]
        if (waiting or event.parked) and not (event.parked and head == waiting[:1]):
            self.say("A12", f"{event}: {waiting} wait in the park log")

    def _check_gate(self, event: events.Deliver) -> None:
        """A7: what came before is settled, in all partitions that had the logical partition."""
        reader = (event.group, event.gen)
        at = (event.group, event.gen, event.lease_pid)
        begin, mode = self.begins[reader]
        pid = event.lease_pid
        current = event.gen == self.gens[event.group] and mode == "linear"
        spans = self.routes[self.cv[event.group]] if self.cv[event.group] < len(self.routes) else ()
        late = pid in self.missing[reader]
        if current and not late and pid not in {p for _, _, p in spans}:
            self.say("A7", f"{event}: version {self.cv[event.group]} does not have {pid}")
        if at in self._gated:
            return
        self._gated.add(at)
        if pid not in self.spans:
            self.say("A7", f"{event}: no version has {pid}")
            return
        lo, hi = self.spans[pid]
        for parent, (low, high) in self.spans.items():
            if parent in self.passed[reader]:
                continue
            if self.created[parent] >= self.created[pid] or max(lo, low) >= min(hi, high):
                continue
            for stored in self.by_partition[parent]:
                lp = self.sends[stored.msg].lp
                settled = self._is_settled(reader, parent, stored.offset)
                if lo <= lp < hi and not settled and self._is_required(reader, stored, begin):
                    self.say("A7", f"{event} comes before {stored} is settled")
                    return

    def _is_settled(self, reader: Reader, pid: int, offset: int) -> bool:
        return (pid, offset) in self.settled[reader] or pid in self.lost

    def _is_required(self, reader: Reader, stored: events.Stored, begin: int) -> bool:
        """Returns whether a group has to read a message."""
        ended = self.ended.get(stored.pid)
        if (ended is not None and ended <= begin) or stored.pid in self.lost:
            return False
        if stored.pid in self.gone_before[reader]:
            return False
        if stored.pid in self.missing[reader] & self.deleted:
            # The record of the skip says so.
            return False
        return not any(
            loss.pid == stored.pid and loss.first <= stored.offset < loss.end
            for loss in self.losses[reader]
        )

    def on_ack(self, event: events.Ack) -> None:
        """A10: only the owner acknowledges, under the lease in force."""
        reader = (event.group, event.gen)
        epoch, _, _ = self.leases.get((event.group, event.pid), (0, "", True))
        if epoch != event.epoch or event.gen != self.gens[event.group]:
            late = event.gen < self.gens[event.group]
            if not late:
                self.say("A10", f"{event}: the lease is {epoch}")
        stored = self.stored_at.get((event.pid, event.offset))
        if stored is None:
            self.say("A11", f"{event}: nothing is stored there")
            return
        self.settled[reader].add((event.pid, event.offset))
        self.acked[reader].add((event.pid, event.offset))
        if (event.pid, event.offset) in self.delivered[reader]:
            # A second copy that is passed over is acknowledged as well.
            self.acked_msgs[reader][stored.msg] = stored.created_v

    def on_passed(self, event: events.Passed) -> None:
        """A11: only what the group has settled in another copy, or need not read, is passed
        over."""
        reader = (event.group, event.gen)
        begin, _ = self.begins[reader]
        stored = self.stored_at.get((event.pid, event.offset))
        if stored is None or not any(
            copy.created_v < stored.created_v
            and (
                self._is_settled(reader, copy.pid, copy.offset)
                or not self._is_required(reader, copy, begin)
                # That one comes late, or the record of the skip says that it does not.
                or copy.pid in self.passed[reader]
            )
            for copy in self.copies[stored.msg]
        ):
            self.say("A11", f"{event} was not read before")
        self.settled[reader].add((event.pid, event.offset))

    def on_park(self, event: events.Park) -> None:
        """A12: the park log of a key is in order."""
        reader = (event.group, event.gen)
        self.settled[reader].add((event.pid, event.offset))
        lp, created = self.sends[event.msg].lp, self.created.get(event.pid, 0)
        self.parked[event.group, event.gen, event.key].append((created, event.msg))
        # The first of them that takes nothing over cuts the park log off from all behind it.
        cut = [
            self.created[pid]
            for pid in self.missing[reader]
            if self.created[pid] >= created and self.spans[pid][0] <= lp < self.spans[pid][1]
        ]
        if cut:
            self.aside[reader][created, event.msg] = min(cut)

    def on_unpark(self, event: events.Unpark) -> None:
        """A12: the head leaves."""
        waiting = self.parked[event.group, event.gen, event.key]
        doubtful = self._out_of_reach((event.group, event.gen))
        heads = waiting[:1] + [each for each in waiting if each not in doubtful][:1]
        if self.weak:
            # What was skipped has a park log of its own.
            heads += {each[0]: each for each in reversed(waiting)}.values()
        mine = (event.created_v, event.msg)
        if mine not in heads:
            self.say("A12", f"{event}: {waiting} wait in the park log")
        if mine in waiting:
            waiting.remove(mine)
        reader = (event.group, event.gen)
        if event.skipped:
            self.skipped[reader].add(event.msg)
        else:
            self.acked_msgs[reader][event.msg] = event.created_v

    def on_loss(self, event: events.Loss) -> None:
        """Something is given up, by name."""
        reader = (event.group, event.gen)
        if event.reason == "gone":
            self._set_aside(reader, event.pid, self.doubtful)
        if event.end >= 0:
            self.losses[reader].append(event)
            for offset in range(event.first, event.end):
                self.settled[reader].add((event.pid, offset))
            return
        self.lost.add(event.pid)
        self._set_aside(reader, event.pid, self.doubtful)

    def _set_aside(self, reader: Reader, pid: int, found: dict[Reader, dict[Parked, int]]) -> None:
        """Messages that are parked in a partition that is lost or skipped, or still in one before
        it, are out of reach behind it."""
        lo, hi = self.spans.get(pid, (0, 0))
        created = self.created.get(pid, 0)
        for (group, gen, _), waiting in self.parked.items():
            if (group, gen) != reader:
                continue
            for parked in waiting:
                if parked[0] <= created and lo <= self.sends[parked[1]].lp < hi:
                    found[reader][parked] = min(created, found[reader].get(parked, created))

    def on_effect(self, event: events.Effect) -> None:
        """A13."""
        if not event.applied:
            return
        if self.weak or not event.key:
            self.effects[event.group, event.gen].setdefault(event.msg, event.created_v)
            return
        reader, key = (event.group, event.gen), (event.group, event.gen, event.key)
        token = (event.created_v, event.offset)
        if token <= self.last_effect.get(key, (-1, -1)):
            self.say("A13", f"{event} is applied after {self.last_effect[key]}")
        self.last_effect[key] = token
        version = self.effects[reader].get(event.msg)
        if version is None:
            self.applied[key].append(event)
        elif not self._is_lost_between(event.msg, version, event):
            self.say("A13", f"{event} is applied twice")
        self.effects[reader][event.msg] = event.created_v

    # The end

    def finish(self) -> None:
        """Checks what holds when a run has come to its end: A3, A11, A13, A14, A15."""
        for msg in self.sends:
            if msg not in self.copies:
                self.say("A3", f"message {msg} was sent and is stored nowhere")
        for msg in self.copies:
            if msg not in self.confirmed:
                self.say("A3", f"message {msg} is stored and was never confirmed")
        for group, gen in self.gens.items():
            reader = (group, gen)
            for msg, copies in self.copies.items():
                self._finish_message(reader, msg, [c for c in copies if c.pid not in self.lost])
            self._finish_keys(reader)

    def _finish_message(self, reader: Reader, msg: int, copies: list[events.Stored]) -> None:
        """A11, A13: each copy is settled, and one is applied unless a group goes on without it."""
        begin, _ = self.begins[reader]
        required = [copy for copy in copies if self._is_required(reader, copy, begin)]
        for copy in required:
            if (copy.pid, copy.offset) not in self.settled[reader]:
                self.say("A11", f"{copy} was never acknowledged by {reader}")
        gone = msg in self.skipped[reader]
        doubtful = self.doubtful[reader]
        gone = gone or any((each.created_v, msg) in doubtful for each in self.copies[msg])
        gone = gone or msg in self.retried[reader]
        if copies and required == copies and not gone and msg not in self.effects[reader]:
            self.say("A13", f"message {msg} was never applied by {reader}: {copies}")

    def _finish_keys(self, reader: Reader) -> None:
        """A15: the effects of a key are those of its source, in order, for every producer."""
        for (group, gen, key), applied in self.applied.items():
            if (group, gen) != reader:
                continue
            by_producer: dict[int, events.Effect] = {}
            for effect in applied:
                msg, producer = effect.msg, self.sends[effect.msg].producer
                last = by_producer.get(producer)
                # Behind a lost partition comes again what was stored before it, and what expired
                # there comes for the first time.
                late = last is not None and msg <= last.msg
                if last is not None and late:
                    late = not self._is_lost_between(last.msg, last.created_v, effect)
                if late:
                    self.say("A15", f"{key!r}: message {msg} of {producer} came late, by {reader}")
                by_producer[producer] = effect


_METHODS: dict[type, str] = {
    events.Send: "on_send",
    events.Confirmed: "on_confirmed",
    events.Abandoned: "on_abandoned",
    events.Stored: "on_stored",
    events.Sealed: "on_sealed",
    events.Published: "on_published",
    events.Opened: "on_opened",
    events.Deleted: "on_deleted",
    events.Seek: "on_seek",
    events.Advance: "on_advance",
    events.Grant: "on_grant",
    events.Release: "on_release",
    events.Deliver: "on_deliver",
    events.Ack: "on_ack",
    events.Passed: "on_passed",
    events.Park: "on_park",
    events.Unpark: "on_unpark",
    events.Loss: "on_loss",
    events.Weak: "on_weak",
    events.Retried: "on_retried",
    events.Skipped: "on_skipped",
    events.Recovered: "on_recovered",
    events.Effect: "on_effect",
}


def find_violations(trace: Iterable[events.Event], *, finished: bool = True) -> list[str]:
    """Returns the violations of a trace, in its order; nothing for a clean one."""
    referee = Referee()
    for event in trace:
        referee.take(event)
    if finished:
        referee.finish()
    return referee.violations
