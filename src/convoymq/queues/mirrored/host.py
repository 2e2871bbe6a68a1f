# cython: annotation_typing=False
"""All classic queues of a node, with those of their mirrors that it has.

What this node has of a queue follows from the record in the tree, whichever changes it missed:

| the recorded view                  | here                                                      |
| none                               | a plain queue at its home, a handle elsewhere             |
| has this run of the node as master | a `MasterQueue`, opened from the mirror's copy or the disk |
| has this run of the node           | a `MirrorCopy`, and a handle                              |
| has an earlier run, or none        | a handle; the files are void, or the last copy            |

A ring whose members all belong to earlier runs of their nodes is over: all were restarted. The last
master founds another from its files; a mirror that was synchronised does so when the master's
node stays away for `restart_wait_ms`.

Frames between nodes, beside those of plain classic queues: STORED, a mirror's word for its master
(`c` = number of the broadcast, `d` = mirror), and CLIENTS, a msgpack list (ASK, master, places of
clients) to a new master, which answers (TAKEN, master) or (NOT_YET, master). SYNC and CANCEL_SYNC
ask a master to begin or end a synchronisation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import msgspec

from convoymq.kernels.link_frames import HEADER_SIZE, frame_header
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import PeerError, PreconditionFailed, StorageFault
from convoymq.model.rounds import pass_on, run_each
from convoymq.model.tables import Table
from convoymq.queues.classic.host import COUNTS_TIMEOUT_S
from convoymq.queues.classic.limits import priority_max
from convoymq.queues.classic.log import ClassicLog
from convoymq.queues.classic.queue import ClassicQueue, LocalQueue
from convoymq.queues.classic.remote_queue import RemoteQueue
from convoymq.queues.driver import HostParts
from convoymq.queues.mirrored.client import MirroredClient
from convoymq.queues.mirrored.copy import (
    MirrorCopy,
    read_age,
    read_member,
    write_member,
    write_seen,
)
from convoymq.queues.mirrored.damage import DamagedCopies
from convoymq.queues.mirrored.handle import WAIT_MS_MAX, MirroredHandle, Place
from convoymq.queues.mirrored.log import BroadcastLog
from convoymq.queues.mirrored.master import Mark, MasterQueue
from convoymq.queues.mirrored.policy import (
    CopyAge,
)
from convoymq.queues.mirrored.ring_end import RingEnd
from convoymq.replication.ring.views import Member
from convoymq.shells.ring.shell import RingMember, RingParts, RingShell
from convoymq.storage.types import Directory, Worker
from convoymq.transport.frame_kinds import KIND_MIRROR_CLIENTS, KIND_MIRROR_STORED

ASK, TAKEN, NOT_YET, SYNC, CANCEL_SYNC = 1, 2, 3, 4, 5


class MirroredHost(DamagedCopies):
    """See the module text."""

    client_class = MirroredClient
    log_class = BroadcastLog
    master_class = MasterQueue

    def __init__(self, parts: HostParts, worker: Worker | None = None) -> None:
        """See `ClassicHost`."""
        self._parts = parts
        self.sync_batch_size = parts.settings.mirror_sync_batch_size
        self.sync_bytes_per_s = parts.mirror_sync_bytes_per_s
        self.counts_timeout_s = COUNTS_TIMEOUT_S
        super().__init__(parts, worker)
        self._opening: set[int] = set()
        """Groups whose master is being opened."""
        self._void: dict[int, int] = {}
        """Group -> number of the member of this node whose copy was given up."""
        self._files_kept: dict[int, int] = {}
        """Group that this run has led -> master of the view that deposed it: its files stay until
        another one leads."""
        self._watched: dict[int, None] = {}
        """Groups with a ring in which this node may have to do something about its own copy."""
        self.without_master: dict[MirroredHandle, None] = {}
        """Handles that may wait for a master."""
        self._seen: tuple[tuple[int, str], ...] = ()
        """Running nodes and their names at the last tick."""
        self._shell = RingShell(
            RingParts(
                node=parts.node_id,
                incarnation=parts.incarnation,
                clock=parts.clock,
                control=parts.control,
                propose=self._submit,
                has_majority=parts.has_majority,
                wanted=parts.wanted,
                await_room=parts.await_room,
                keeps=self._is_whole,
            )
        )
        parts.control.handle_raw(KIND_MIRROR_STORED, self._on_stored_frame)
        parts.control.handle_raw(KIND_MIRROR_CLIENTS, self._on_clients_frame)

    # --- makers --------------------------------------------------------------------------

    def make_local(
        self,
        record: QueueRecord,
        arguments: Table,
        settings: Mapping[str, object],
        directory: Directory,
    ) -> LocalQueue:
        """See `ClassicHost`."""
        return self.master_class(self, record, arguments, settings, directory)

    def make_remote(
        self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]
    ) -> RemoteQueue:
        """See `ClassicHost`."""
        return MirroredHandle(self, record, arguments, settings)

    # --- queues --------------------------------------------------------------------------

    def open(
        self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]
    ) -> ClassicQueue:
        """See `ClassicHost`."""
        self._start_ticking()
        if record.view is None:
            opened = super().open(record, arguments, settings)
            if isinstance(opened, MasterQueue):
                self.follow_policy(opened)
            return opened
        handle = self._handle(record, arguments, settings)
        self.follow(record, arguments, settings)
        return handle

    def _handle(
        self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]
    ) -> ClassicQueue:
        """Returns the handle that clients of this node have; makes it."""
        known = self.get(record.group)
        if known is not None and known.ended is None:
            return known
        made = MirroredHandle(self, record, arguments, settings)
        self.queues[record.group] = made
        if record.view is not None and not self._serves(record):
            made.lose_master()
            made.seek_master()
        return made

    def _serves(self, record: QueueRecord) -> bool:
        """Returns whether the recorded master can be reached on another node."""
        view = record.view
        assert view is not None
        home = record.home
        return view.is_live(view.master) and home != self.node_id and self.is_up(home)

    def find(self, record: QueueRecord, arguments: Table) -> ClassicQueue | None:
        """See `QueueHost`."""
        if record.view is None:
            return super().find(record, arguments)
        known = self.get(record.group)
        is_mirror = record.group in self._copies and self._serves(record)
        if known is not None or (self.node_id in record.members and not is_mirror):
            return known
        # At a mirror, a handle that a crash of the master ended is gone.
        handle = self._handle(record, arguments, {})
        if not self._serves(record) and not self._may_get_master(record):
            handle.end(self.home_down(record), published_ok=False)
        return handle

    def get(self, group: int) -> ClassicQueue | None:
        """See `QueueHost`."""
        return self._fronts.get(group) or super().get(group)

    def handles(self) -> Iterable[ClassicQueue]:
        """See `QueueHost`."""
        return [self._fronts.get(group, queue) for group, queue in self.queues.items()]

    def delete(self, group: int) -> None:
        """See `QueueHost`."""
        super().delete(group)
        front = self._fronts.pop(group, None)
        if front is not None:
            front.master = None
            front.delete()
        self._forget_ring(group)
        self._records.pop(group, None)
        self._watched.pop(group, None)
        self._failures.forget(group)

    def _forget_ring(self, group: int) -> None:
        """Leaves the ring of a queue; a copy is void."""
        self._shell.close(group)
        self._rings.pop(group, None)
        self._void.pop(group, None)
        copy = self._copies.pop(group, None)
        if copy is not None:
            copy.end(removes=True)

    def copy_of(self, group: int) -> CopyAge:
        """See `QueueHost`."""
        ring = self._rings.get(group)
        return read_age(self._directory, group) if ring is None else CopyAge(ring.member)

    def remove_orphans(self, known: set[int]) -> None:
        """See `QueueHost`."""
        for group in [group for group in self._copies if group not in known]:
            self._forget_ring(group)
        super().remove_orphans(known)

    def stop(self) -> None:
        """See `QueueHost`."""
        self._settle_all()
        for group in list(self._rings):
            master = self.master_of(group)
            if master is not None:
                self.contain(master, master.tell_stopping)
        self._shell.end_of_round()
        for copy in self._copies.values():
            copy.end(removes=False)
        self._copies.clear()
        super().stop()
        self._shell.stop()

    # --- following the tree --------------------------------------------------------------

    def follow(self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]) -> None:
        """See `QueueHost`."""
        view = record.view
        if view is None or self._stopped:
            return
        # A handle that was found before keeps the queue from being opened.
        self._start_ticking()
        group = record.group
        known = self._records.get(group)
        if known is not None and known[0].view is not None:
            if known[0].view.version > view.version:
                return
            if known[0].view.version < view.version:
                self._proposed.discard(group)
        self._records[group] = (record, arguments, settings)
        self._watched[group] = None
        if group in self._rings:
            # The core takes the view before anything that follows from it.
            self._shell.take_record(record)
        own = view.live_at(self.node_id)
        if own is None or own.number != view.master:
            # Another node opens it.
            self.crashes.forget(group)
        if own is None or own.incarnation != self._parts.incarnation:
            self._leave(record)
            self._found_again(record)
        elif self._void.get(group) == own.number:
            self._withdraw(record, own)
        elif own.number == view.master:
            self._lead(record, own)
        else:
            self._mirror(record, own)
        handle = self._fronts.get(group) or self.queues.get(group)
        if isinstance(handle, MirroredHandle):
            handle.follow(record)

    def _open_ring(self, record: QueueRecord, own: Member) -> RingMember:
        known, view = self._rings.get(record.group), record.view
        assert view is not None
        number = own.number
        age = CopyAge(number, view.version, number in view.synchronised, number == view.master)
        write_seen(self._directory, self.writer, record.group, age)
        self._files_kept.pop(record.group, None)
        if known is not None and known.member == own.number:
            return known
        self._shell.close(record.group)
        opened = self._shell.open(record, own.number, RingEnd(self, record.group))
        self._rings[record.group] = opened
        return opened

    def _lead(self, record: QueueRecord, own: Member) -> None:
        assert record.view is not None
        master = self.master_of(record.group)
        if master is None:
            self._open_master(record)
            return
        master.wake()
        self._note_failures(master, record.view)
        master.record = record
        member = self._open_ring(record, own)
        if master.member is not member:
            master.attach(member)
            if read_member(self._directory, record.group) == own.number:
                master.mark = Mark.WRITTEN
            else:
                self._mark(master, member)
        master.take_view(record.view)
        self.follow_policy(master)
        if record.group not in self._proposed and not record.view.newcomers:
            # No more mirrors come: all are synchronised at a time.
            master.tell_depth()

    def _open_master(self, record: QueueRecord) -> None:
        """The copy of this node, or what a former run left, becomes the queue."""
        group = record.group
        if group in self._opening or self.crashes.waits(group):
            return
        self._opening.add(group)
        copy = self._copies.get(group)
        if copy is not None:
            # What it has got is written to the files that the master is opened from.
            self.writer.barrier(lambda: self._open_from(group, copy))
        else:
            self._open_from(group, None)

    def _open_from(self, group: int, copy: MirrorCopy | None) -> None:
        self._opening.discard(group)
        if self._stopped or group not in self._records or self._copies.get(group) is not copy:
            return
        record, arguments, settings = self._records[group]
        own = record.view.live_at(self.node_id) if record.view is not None else None
        if own is None or record.view is None or record.view.master != own.number:
            return
        sessions = None
        if copy is not None:
            copy.end(removes=False)
            del self._copies[group]
            sessions = copy.known()
        front = self.queues.get(group)
        others = set(record.view.synchronised) - {own.number}

        def make(_group: int) -> None:
            master = self.master_class(
                self, record, arguments, settings, self._directory, sessions=sessions
            )
            if master.is_damaged and others:
                master.log.close()
                raise StorageFault("its files are damaged")
            if isinstance(front, MirroredHandle) and front.ended is None:
                self._fronts[group] = front
                master.clients = front.clients
            self.queues[group] = master
            if copy is not None:
                master.succeed(copy.served)
            self._lead(record, own)
            self._note_open(master)
            master.wait_for_mirrors()
            self.note(
                "queue.mirror_promoted", vhost=record.vhost, queue=record.name, group=group,
                messages=master.depth, synchronised=copy is None or copy.is_synchronised,
            )  # fmt: skip

        def fail(_group: int, error: Exception) -> None:
            if others:
                self._directory.remove(str(group))
                self._give_up(group, own.number, error)
                return
            closed = MirroredHandle(self, record, arguments, settings)
            self._crashed(closed, error)

        run_each((group,), make, fail)
        self._on_routes()
        if group in self._fronts:
            self._fronts[group].follow(record)
            self._fronts[group].seek_master()

    def _mirror(self, record: QueueRecord, own: Member) -> None:
        assert record.view is not None
        group = record.group
        copy = self._copies.get(group)
        if copy is not None and copy.member != own.number:
            copy.end(removes=True)
            copy = None
        if self.master_of(group) is not None:
            self._depose(record)
        if copy is None:
            copy = self._copies[group] = self._new_copy(record, own)
        if group not in self.queues:
            _, arguments, settings = self._records[group]
            self._handle(record, arguments, settings)
        self._open_ring(record, own)
        copy.is_synchronised = own.number in record.view.synchronised
        self._take_over(record, own)

    def _new_copy(self, record: QueueRecord, own: Member) -> MirrorCopy:
        group = record.group

        def new_log() -> ClassicLog:
            self._directory.remove(str(group))
            log = self.make_log(record, self._directory, sync=True)
            write_member(self._directory, self.writer, group, own.number, 0, on_marked)
            return log

        def on_marked(error: Exception | None) -> None:
            # All nodes may stop, and nobody would know then whose copy it is.
            if error is not None:
                self._on_copy_failed(group, own.number, error)

        self.note("queue.mirror_started", vhost=record.vhost, queue=record.name, group=group)
        return MirrorCopy(
            own.number,
            priority_max(self._records[group][1]),
            new_log,
            lambda sender, number: self._say_stored(group, sender, number),
            lambda: self._on_equal(group, own.number),
            lambda error: self._on_copy_failed(group, own.number, error),
        )

    def _mark(self, master: MasterQueue, member: RingMember) -> None:
        """Has a master's files say durably that they are the ring's: it may have mirrors then."""

        def on_marked(error: Exception | None) -> None:
            if master.member is not member or master.ended is not None:
                return
            # `_on_tick` tries again.
            master.mark = Mark.MISSING if error is not None else Mark.WRITTEN
            self.follow_policy(master)

        view = master.record.view
        assert view is not None
        master.mark = Mark.UNDER_WAY
        number, version = member.member, view.version
        write_member(self._directory, self.writer, master.group, number, version, on_marked)

    def _leave(self, record: QueueRecord) -> None:
        """Ends what a run of this node has of a queue whose view does not have it."""
        assert record.view is not None
        group = record.group
        if group in self._copies:
            self.note("queue.mirror_stopped", vhost=record.vhost, queue=record.name, group=group)
        master = self.master_of(group)
        if master is not None:
            keeps = self._is_wanted(master, record)
            self._depose(record, keeps=keeps)
            if keeps:
                self._files_kept[group] = record.view.master
        elif self._files_kept.get(group, record.view.master) != record.view.master:
            del self._files_kept[group]
            self._directory.remove(str(group))
        self._forget_ring(group)

    def _is_wanted(self, master: MasterQueue, record: QueueRecord) -> bool:
        """Returns whether nobody leads in place of a master that was taken for failed: the mirror
        that is about to may be lost as well."""
        view = record.view
        assert view is not None
        own = view.live_at(self.node_id)
        # Without a ring it was the queue until now: a view of this node's former run came late.
        number = master.member.member if master.member is not None else own and own.number
        return number == view.master

    def _depose(self, record: QueueRecord, *, keeps: bool = False) -> None:
        """Another member leads a queue that this node has led: its copy is void. `keeps`: none does
        yet, and the queue may go on with it (`_found_again`)."""
        group = record.group
        master = self.queues.pop(group)
        assert isinstance(master, MasterQueue)
        _, arguments, settings = self._records[group]
        front = self._fronts.pop(group, None) or MirroredHandle(
            self, master.record, arguments, settings
        )
        front.take_clients(master)
        self.queues[group] = front
        self._ended_left += master.left()
        self.memory.forget(group)
        master.crash(self.home_down(record))
        if not keeps:
            master.log.remove()
        self._on_routes()
        self.note("queue.master_deposed", vhost=record.vhost, queue=record.name, group=group)

    # --- mirrors -------------------------------------------------------------------------

    def on_broadcast(self, group: int, sender: int, number: int, payload: bytes) -> None:
        """A broadcast of a queue's ring has come."""
        copy = self._copies.get(group)
        if copy is None:
            return

        def take(_copy: MirrorCopy) -> None:
            copy.on_broadcast(sender, number, payload)

        run_each(
            (copy,), take, lambda _copy, error: self._on_copy_failed(group, copy.member, error)
        )

    def _say_stored(self, group: int, sender: int, number: int) -> None:
        ring = self._rings.get(group)
        if ring is None or ring.view.master != sender or not ring.view.is_live(sender):
            return
        self._control.send_raw(
            ring.view.node_of(sender), KIND_MIRROR_STORED, (), a=group, c=number, d=ring.member
        )

    def _on_stored_frame(self, node: int, data: bytes) -> None:
        _, _, _, _, group, _, number, mirror = frame_header(data)
        master = self.master_of(group)
        if master is None or master.member is None:
            return
        view = master.member.view
        if view.is_live(mirror) and view.node_of(mirror) == node:
            if number > master.log.last_number:
                raise PeerError(f"mirror {mirror} has stored {number}, which was never sent")
            self.contain(master, lambda: master.on_stored(mirror, number))

    def _on_equal(self, group: int, number: int) -> None:
        ring = self._rings.get(group)
        if ring is not None and number not in ring.view.synchronised:
            self._propose(group, ring.view.with_synchronised(number))

    def _on_copy_failed(self, group: int, number: int, error: Exception) -> None:
        """A copy cannot be written or followed: it is given up, and begins anew later."""
        copy = self._copies.get(group)
        if copy is not None and copy.member == number:
            copy.end(removes=True)
            del self._copies[group]
            self._give_up(group, number, error)

    # --- clients -------------------------------------------------------------------------

    def ask_master(self, handle: MirroredHandle, number: int, places: list[Place]) -> None:
        """Asks a new master to take the clients of a handle over."""
        home = handle.record.home
        if self.is_paused:
            # The tree may name another one when the node has a majority again.
            return
        if home != self.node_id:
            if self.is_up(home):
                body = msgspec.msgpack.encode([ASK, number, places])
                self._control.send_raw(home, KIND_MIRROR_CLIENTS, (body,), a=handle.group)
            return
        master = self.master_of(handle.group)
        if master is None or master.member is None or master.member.member != number:
            return
        if self._resume(master, places):
            handle.master = master
            handle.on_master(number)

    def _resume(self, master: MasterQueue, places: list[Place]) -> bool:
        """Has a master go on with sessions; returns False when it fails by that."""
        self.contain(master, lambda: master.resume_all(places))
        return master.ended is None

    def ask_sync(self, handle: MirroredHandle, *, cancels: bool) -> None:
        """Asks the master of a queue to begin or end a synchronisation."""
        body = msgspec.msgpack.encode([CANCEL_SYNC if cancels else SYNC, 0, []])
        home = handle.record.home
        self._control.send_raw(home, KIND_MIRROR_CLIENTS, (body,), a=handle.group)

    def _on_clients_frame(self, node: int, data: bytes) -> None:
        group = frame_header(data)[4]
        try:
            kind, number, places = msgspec.msgpack.decode(
                data[HEADER_SIZE:], type=tuple[int, int, list[Place]]
            )
        except msgspec.DecodeError as error:
            raise PeerError(f"malformed clients of a mirrored queue: {error}") from error
        if kind == ASK:
            self._on_ask(node, group, number, places)
            return
        master = self.master_of(group)
        if kind in (SYNC, CANCEL_SYNC):
            if master is not None:
                with contextlib.suppress(PreconditionFailed):
                    master.synchronise(cancels=kind == CANCEL_SYNC)
            return
        handle = self.get(group)
        if not isinstance(handle, MirroredHandle) or node != handle.record.home:
            return
        if kind == TAKEN:
            self.contain(handle, lambda: handle.on_master(number))
        else:
            handle.seek_later()

    def _on_ask(self, node: int, group: int, number: int, places: list[Place]) -> None:
        master = None if self._stopped or self.is_paused else self.master_of(group)
        answer = NOT_YET
        if master is not None and master.is_member(number):
            if any(place[0] >> 56 != node for place in places):
                raise PeerError(f"node {node} speaks for a session of another one")
            master.senders.add(node)
            # What waits for the node was for its clients before, and may not come after the answer.
            if self._resume(master, places) and node not in self._held_back:
                answer = TAKEN
        body = msgspec.msgpack.encode([answer, number, []])
        self._control.send_raw(node, KIND_MIRROR_CLIENTS, (body,), a=group)

    def _on_frame(self, node: int, data: bytes) -> None:
        _, _, _, _, group, _, session, _ = frame_header(data)
        if session:
            handle = self.get(group)
            if isinstance(handle, MirroredHandle) and (
                handle.record.home != node or handle.waits_since_ms is not None
            ):
                # Of a former master, or of before it took the clients over: it comes again.
                if session not in handle.clients:
                    self._end_ghost(node, group, session)
                return
        super()._on_frame(node, data)

    # --- other nodes ---------------------------------------------------------------------

    def _may_get_master(self, record: QueueRecord) -> bool:
        """Returns whether a queue without a master may have one soon."""
        view = record.view
        if view is None:
            return False
        return any(
            self.is_up(view.node_of(number))
            for number in view.live
            if number != view.master or view.node_of(number) == self.node_id
        )

    def _home_lost(self, queue: RemoteQueue) -> None:
        if isinstance(queue, MirroredHandle) and self._may_get_master(queue.record):
            queue.lose_master()
        else:
            super()._home_lost(queue)

    def _on_lost_effect(self, queue: RemoteQueue, session: int, reason: tuple[str, ...]) -> None:
        is_waiting = isinstance(queue, MirroredHandle) and queue.waits_since_ms is not None
        if not reason and self._may_get_master(queue.record):
            self._home_lost(queue)
        elif not is_waiting:
            super()._on_lost_effect(queue, session, reason)

    def on_node_up(self, node: int) -> None:
        """See `QueueHost`."""
        super().on_node_up(node)
        self._shell.on_node_up(node)
        for queue in list(self.handles()):
            if isinstance(queue, MirroredHandle) and queue.record.home == node:
                queue.seek_master()

    def on_node_down(self, node: int) -> None:
        """See `QueueHost`."""
        super().on_node_down(node)
        self._shell.on_node_down(node)

    def on_suspect(self, node: int) -> None:
        """See `QueueHost`."""
        super().on_suspect(node)
        self._shell.on_suspect(node)

    # --- rounds --------------------------------------------------------------------------

    def end_of_round(self) -> None:
        """See `QueueHost`."""
        super().end_of_round()
        if not self._stopped:
            self._shell.end_of_round()

    def _on_tick(self) -> None:
        seen = tuple((node, self.node_name(node)) for node in self._parts.running_nodes())
        if seen != self._seen:
            self._seen = seen
            for queue in self._running():
                if isinstance(queue, MasterQueue) and queue.is_mirrored:
                    queue.wake()
        super()._on_tick()
        for group in list(self._watched):
            record = self._records[group][0]
            if not self._see_to(record):
                self._watched.pop(group, None)
        now = self.clock.monotonic_ms()
        run_each(list(self.without_master), lambda queue: self._look_after(queue, now), pass_on)

    def see_to_mirrors(self, master: MasterQueue) -> bool:
        """Does what a master's mirrors need; returns whether something may be left to do."""
        master.tell_depth()
        if master.member is not None and master.mark is Mark.MISSING:
            self._mark(master, master.member)
        return self.follow_policy(master)

    def _see_to(self, record: QueueRecord) -> bool:
        """Does what is to be done about this node's copy; returns whether something may be to do
        before the next view."""
        view, group = record.view, record.group
        assert view is not None
        own = view.live_at(self.node_id)
        if own is None or own.incarnation != self._parts.incarnation:
            self._found_again(record)
            return own is not None or read_member(self._directory, group) is not None
        if self._void.get(group) == own.number:
            self._withdraw(record, own)
            return True
        if group in self._copies:
            self._take_over(record, own)
            return not view.is_live(view.master)
        return False

    def _look_after(self, queue: MirroredHandle, now_ms: int) -> None:
        """Looks for the master of a handle without one; gives it up after a while."""
        if queue.waits_since_ms is None or self.get(queue.group) is not queue:
            self.without_master.pop(queue, None)
        elif queue.ended is None and now_ms - queue.waits_since_ms > WAIT_MS_MAX:
            queue.waits_since_ms = None
            super()._home_lost(queue)
        else:
            queue.seek_master()

    # --- texts ---------------------------------------------------------------------------

    def process_name(self, group: int, member: Member) -> str:
        """Returns what lists show in place of RabbitMQ's process ids."""
        return f"<{self.node_name(member.node)}.{member.incarnation}.{group}.{member.number}>"
