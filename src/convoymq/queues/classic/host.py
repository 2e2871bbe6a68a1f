# cython: annotation_typing=False
"""All classic queues of a node: those that live here, and the handles of those that live elsewhere.

Between nodes, raw CONTROL frames carry what the local case passes by reference. Towards the home
node (`c` = 0): a FORWARD frame as the builder sealed it. From the home node (`c` = session): an
effect (`effect_frames`). When a link breaks both ends forget what hung on it: the home node returns
what was checked out over it, the other side refuses pending publishes and cancels its consumers.
LOST does the same for one queue.

A queue that raises is stopped (`_stop_failed`); the others of the node go on. It is opened anew
after a while (`crashes`), from what is on disk.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import call

from convoymq.kernels.batch import (
    CMD_SESSION_CLOSE,
    COMMAND_SIZE,
    CommandBuilder,
    commands,
)
from convoymq.kernels.link_frames import HEADER_SIZE, frame_header
from convoymq.metadata.machine import QueueRecord
from convoymq.model.clock import Timer
from convoymq.model.errors import NotFound, PeerError
from convoymq.model.refusals import commands_lost, crashed, home_node_down, queue_subject, timed_out
from convoymq.model.rounds import pass_on, run_each
from convoymq.model.tables import Table
from convoymq.queues.classic.client import ClassicClient
from convoymq.queues.classic.crashes import Crashes, facts
from convoymq.queues.classic.effect_frames import decode_effect, encode_effect
from convoymq.queues.classic.log import BATCH_BYTES, FILE_BYTES_MAX, ClassicLog
from convoymq.queues.classic.log_writer import LogWriter
from convoymq.queues.classic.machine import Effect
from convoymq.queues.classic.memory import Memory
from convoymq.queues.classic.queue import ClassicQueue, LocalQueue
from convoymq.queues.classic.remote_queue import RemoteQueue
from convoymq.queues.classic.resting import Ticked
from convoymq.queues.driver import HostParts
from convoymq.queues.held_back import HeldBack
from convoymq.queues.interface import Row
from convoymq.queues.mirrored.policy import CopyAge
from convoymq.storage.threads import ThreadWorker
from convoymq.storage.types import Directory, Worker
from convoymq.transport.frame_kinds import KIND_CLASSIC, KIND_CLASSIC_COUNTS, KIND_RESERVATION

FLOW_ON_BYTES = 64 << 20
"""Bytes waiting for the disk above which publishers are stopped, until a quarter is left; less
where the memory target is low."""
TICK_MS = 1000
PASSES_MAX = 4
GHOSTS_MAX = 10_000
SEQ_MAX = (1 << 63) - 1
"""Behind every command of a session: it ends the session whatever came before."""
COUNTS_TIMEOUT_S = 5.0
RESERVATION_TIMEOUT_S = 15.0
NODE_MASK = 0xFF << 56
UNSAFE = 0
"""Kind of the pseudo effect (kind, session, seq): the disk refused."""
LOST = 255
"""Kind of the pseudo effect (kind, session, reason): the home node does not know the queue, has
stopped it, or misses commands of the session. A node before 0.4.0 gives no reason."""


class ClassicHost:
    """The classic queues of one node."""

    client_class: type[ClassicClient] = ClassicClient
    """Class of the clients of its queues."""
    log_class: type[ClassicLog] = ClassicLog
    gather_ms = 2
    """Commands for a queue gather for so long while a write of it is under way."""
    is_paused = False
    """The queues stand still (`queues.mirrored.partitions`)."""

    def __init__(self, parts: HostParts, worker: Worker | None = None) -> None:
        """
        Args:
            worker: carries out work on files, closed by `stop`; None: a thread.
        """
        self.node_id = parts.node_id
        self.queues: dict[int, ClassicQueue] = {}
        self.ticked = Ticked(self.queues)
        self._was_short = False
        """Memory was short at the last tick."""
        self.changed = parts.changed
        self._directory = parts.open_directory("classic")
        """Files of the queues, one folder per group id."""
        self.file_bytes_max = FILE_BYTES_MAX
        """A file of a queue's log is full at this size."""
        self.batch_bytes = BATCH_BYTES
        """So much of it is read at a time."""
        self.memory = Memory(parts.memory_target_bytes)
        self._flow_on_bytes = min(FLOW_ON_BYTES, parts.memory_target_bytes // 4)
        self.clock = parts.clock
        self.crashes = Crashes(parts.clock)
        """Queues of this node that were stopped, or could not be opened."""
        self.note = parts.note
        self.dead_letters = parts.dead_letters
        self._control = control = parts.control
        self.new_session = parts.new_session
        self.node_name = parts.node_name_of
        self._reports = parts.reports
        self._call_soon = parts.call_soon
        self._on_routes = parts.on_routes
        self._wanted = parts.wanted
        self._await_room = parts.await_room
        self._held_back: HeldBack[tuple[int, Effect]] = HeldBack(
            control.transport, parts.await_room, self
        )
        """(group, effect). Their messages are not copied; consumers' windows bound them."""
        self._dirty: list[ClassicQueue] = []
        self._gathering: dict[LocalQueue, None] = {}
        """Queues whose open batch waits for more."""
        #: Nodes whose link broke.
        self._unlinked: set[int] = set()
        self._flowing = False
        self._stopped = False
        self._lost_groups = parts.lost_groups
        #: What left queues that are deleted.
        self._ended_left: Counter[tuple[str, str]] = Counter()
        self._timer: Timer | None = None
        #: Sessions that were ended because nobody here has them.
        self._ghosts: set[tuple[int, int]] = set()
        worker = worker or ThreadWorker(parts.call_soon, name="classic-log")
        self.writer = LogWriter(worker, self._on_written)
        control.handle_raw(KIND_CLASSIC, self._on_frame)
        control.handle(KIND_CLASSIC_COUNTS, self._on_counts)

    # --- queues --------------------------------------------------------------------------

    def open(
        self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]
    ) -> ClassicQueue:
        """Opens a queue's handle on this node; one that has ended when it cannot be opened."""
        known = self.queues.get(record.group)
        if known is not None and known.ended is None:
            return known
        if record.home != self.node_id:
            queue = self.queues[record.group] = self.make_remote(record, arguments, settings)
            return queue

        if self.crashes.waits(record.group):
            return self.queues[record.group]

        def make(_record: QueueRecord) -> None:
            made = self.make_local(record, arguments, settings, self._directory)
            self.queues[record.group] = made
            if made.durable and not made.machine.next_position:
                self._note_lost(made)
            self._note_open(made)

        def fail(_record: QueueRecord, error: Exception) -> None:
            closed = self.make_remote(record, arguments, settings)
            closed.end(crashed(closed.subject), published_ok=False)
            self.queues[record.group] = closed
            self._crashed(closed, error)

        self._start_ticking()
        run_each((record,), make, fail)
        return self.queues[record.group]

    def _start_ticking(self) -> None:
        if self._timer is None:
            self.ticked.last_ms = self.clock.now_ms()
            self._timer = self.clock.call_later(TICK_MS, self._on_tick)

    def _note_open(self, queue: LocalQueue) -> None:
        """A queue is open; one that had crashed may be used again."""
        self.ticked.wake(queue)
        self.ticked.let_rest(queue, self.clock.now_ms())
        if self.crashes.end(queue.group):
            self._note("queue.restarted", queue, messages=queue.machine.ready_count)
            self._on_routes()

    def _note_lost(self, queue: LocalQueue) -> None:
        """Names a queue without files, if this node's disk is newer than the queue."""
        if queue.group <= self._lost_groups():
            self._note("queue.lost_with_disk", queue)

    def make_local(
        self,
        record: QueueRecord,
        arguments: Table,
        settings: Mapping[str, object],
        directory: Directory,
    ) -> LocalQueue:
        """Returns a queue that lives here, recovered."""
        return LocalQueue(self, record, arguments, settings, directory)

    def make_remote(
        self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]
    ) -> RemoteQueue:
        """Returns the handle of a queue that lives elsewhere."""
        return RemoteQueue(self, record, arguments, settings)

    def make_log(self, record: QueueRecord, directory: Directory, *, sync: bool) -> ClassicLog:
        """Returns the log of a queue."""
        return self.log_class(
            directory,
            str(record.group),
            self.writer,
            sync=sync,
            file_bytes_max=self.file_bytes_max,
            batch_bytes=self.batch_bytes,
        )

    @property
    def crashed(self) -> Iterable[int]:
        """See `QueueHost`."""
        return self.crashes.groups

    def due(self) -> list[int]:
        """See `QueueHost`."""
        return self.crashes.due()

    def _stop_failed(self, queue: ClassicQueue, error: Exception) -> None:
        """An error of our own in one queue: it stops, its clients are answered."""
        if queue.ended is not None:
            # While it was being stopped, or it is gone: it has nobody left.
            self._note("queue.crashed", queue, **facts(error))
            return
        lost = self._sessions_elsewhere(queue) if isinstance(queue, LocalQueue) else ()
        if isinstance(queue, LocalQueue):
            self._ended_left += queue.left()
            self.memory.forget(queue.group)
        else:
            self.queues.pop(queue.group, None)
        refusal = crashed(queue.subject)
        try:
            queue.crash(refusal)
        finally:
            self._on_routes()
            for session in lost:
                self._send_effect(queue.group, (LOST, session, refusal.text))
            self._crashed(queue, error)

    def contain(self, queue: ClassicQueue, step: Callable[[], None]) -> None:
        """Does something for a queue outside of a round; an error stops the queue."""
        run_each((queue,), lambda _queue: step(), self._stop_failed)

    def _sessions_elsewhere(self, queue: LocalQueue) -> list[int]:
        """Returns a session of every other node that may have some in a queue. What a node sent may
        not have been applied: LOST is for all sessions of the node, whichever it names."""
        nodes = {node: node << 56 for node in queue.senders}
        nodes |= {session >> 56: session for session in queue.machine.sessions}
        return [session for node, session in sorted(nodes.items()) if node != self.node_id]

    def _crashed(self, queue: ClassicQueue, error: Exception) -> None:
        known = facts(error)
        if queue.record.home != self.node_id:
            self._note("queue.crashed", queue, **known)
            return
        crash = self.crashes.add(queue.group, known["reason"])
        self.changed.add(queue.group)
        self._note("queue.crashed", queue, **known, again_ms=crash.delay_ms)
        if self.writer.is_idle:
            self.crashes.let_reopen(crash)
        else:
            # What was handed over may still be on its way to the files.
            self.writer.barrier(lambda: self.crashes.let_reopen(crash))

    def note_client_failed(
        self, queue: ClassicQueue, client: ClassicClient, error: Exception
    ) -> None:
        """Logs an error in what a channel did with an answer of a queue."""
        self._note("queue.client_failed", queue, session=client.session, **facts(error))

    def _note(self, event: str, queue: ClassicQueue, **fields: object) -> None:
        place = {"vhost": queue.vhost, "queue": queue.name, "group": queue.group}
        self.note(event, **place, **fields)

    def find(self, record: QueueRecord, arguments: Table) -> ClassicQueue | None:
        """See `QueueHost`; None when its files are damaged, or it was not opened here yet."""
        known = self.queues.get(record.group)
        if known is not None or record.home == self.node_id:
            return known
        # Its home alone looks at the settings.
        queue = self.make_remote(record, arguments, {})
        self.queues[record.group] = queue
        if not self.is_up(record.home):
            queue.end(self.home_down(record), published_ok=False)
            queue.is_lost = record.is_fleeting and record.home in self._unlinked
        return queue

    def follow(self, record: QueueRecord, arguments: Table, settings: Mapping[str, object]) -> None:
        """See `QueueHost`. A queue with a home stays there."""

    def get(self, group: int) -> ClassicQueue | None:
        """See `QueueHost`."""
        return self.queues.get(group)

    def handles(self) -> Iterable[ClassicQueue]:
        """See `QueueHost`."""
        return self.queues.values()

    def rows(self, groups: Collection[int] | None = None) -> Iterator[Row]:
        """See `QueueHost`."""
        # A copy: between two rows queues may come and go.
        for group in list(self.queues if groups is None else groups):
            queue = self.queues.get(group)
            reason = self.crashes.reason(group)
            if reason is not None:
                stopped = {self.node_id: reason}
                yield {"state": "crashed", "stopped_members": stopped, "group": group}
            elif isinstance(queue, LocalQueue):
                yield {**queue.info(), "group": group}

    def sessions(self) -> Iterable[int]:
        """See `QueueHost`."""
        return [session for queue in self.queues.values() for session in queue.clients]

    def backlog_bytes(self) -> int:
        """See `QueueHost`."""
        return self.writer.backlog_bytes

    def delete(self, group: int) -> None:
        """The queue is gone from the tree."""
        queue = self.queues.pop(group, None)
        self.memory.forget(group)
        if self.crashes.forget(group):
            # Counted and answered when it crashed.
            with contextlib.suppress(OSError):
                self._directory.remove(str(group))
        elif isinstance(queue, LocalQueue):
            self._ended_left += queue.left()
            queue.delete()
        elif queue is not None:
            queue.delete()

    def dead_lettered(self) -> Counter[tuple[str, str]]:
        """See `QueueHost`."""
        found = Counter(self._ended_left)
        for queue in self._running():
            if left := queue.left():
                found.update(left)
        return found

    def copy_of(self, group: int) -> CopyAge:
        """See `QueueHost`."""
        return CopyAge()

    def remove_orphans(self, known: set[int]) -> None:
        """Deletes the files of queues that the tree does not know any more."""
        for name in self._directory.list():
            if name.isdigit() and int(name) not in known:
                self._directory.remove(name)

    def stop(self) -> None:
        """Writes what waits and closes the files. What other nodes send after that is answered with
        LOST."""
        self._settle_all()
        self._stopped = True
        run_each(self._running(), lambda queue: queue.stop(), self._stop_failed)
        self.writer.close()

    def _running(self) -> list[LocalQueue]:
        """Returns the queues that are open here. A copy: queues may come and go."""
        return [q for q in self.queues.values() if isinstance(q, LocalQueue) and q.ended is None]

    def _settle_all(self) -> None:
        """Ends the timer and the last round, in which nothing gathers any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_gathered()
        self.end_of_round()

    # --- rounds --------------------------------------------------------------------------

    def gather(self, queue: LocalQueue) -> bool:
        """Leaves a queue's batch open until its write is done, or `gather_ms`; returns False when
        the host is about to stop."""
        if self._timer is None:
            return False
        queue.builder.held = True
        if not self._gathering:
            self.clock.call_later(self.gather_ms, self._on_gathered)
        self._gathering[queue] = None
        return True

    def _on_gathered(self) -> None:
        gathering, self._gathering = self._gathering, {}
        for queue in gathering:
            if queue.builder.held:
                self.mark_dirty(queue)

    def mark_dirty(self, queue: ClassicQueue) -> None:
        """The queue's open batch is not empty."""
        self._dirty.append(queue)
        self._wanted()

    def end_of_round(self) -> None:
        """Seals and passes on every open batch, and what the answers to them caused."""
        if not self._dirty or self._stopped:
            return
        now = self.clock.now_ms()
        for _ in range(PASSES_MAX):
            dirty, self._dirty = self._dirty, []
            run_each(dirty, lambda queue: queue.end_of_round(now), self._stop_failed)
            if not self._dirty:
                break
        else:
            self._wanted()
        self._check_flow()

    # --- effects -------------------------------------------------------------------------

    def dispatch(self, queue: ClassicQueue, effect: Effect) -> None:
        """Carries an effect out, or sends it to the session's node."""
        session: int = effect[1]
        client = queue.clients.get(session)
        if client is not None:
            queue.tell(client, lambda told: told.on_effect(effect))
        elif session >> 56 != self.node_id:
            self._send_effect(queue.group, effect)

    def dispatch_gap(self, queue: ClassicQueue, session: int) -> None:
        """Commands of a session are missing, and it is over."""
        error = commands_lost(queue.subject)
        self.note("queue.commands_lost", vhost=queue.vhost, queue=queue.name, peer=session >> 56)
        client = queue.clients.get(session)
        if client is not None:
            queue.tell(client, lambda told: told.cancel_all("lost"))
            queue.tell(client, lambda told: told.end(error, published_ok=False))
        elif session >> 56 != self.node_id:
            self._send_effect(queue.group, (LOST, session, error.text))

    def dispatch_unsafe(self, queue: ClassicQueue, session: int, seq: int) -> None:
        """The disk refused what a session sent up to `seq`."""
        client = queue.clients.get(session)
        if client is not None:
            queue.tell(client, lambda told: told.on_unsafe(seq))
        elif session >> 56 != self.node_id:
            self._send_effect(queue.group, (UNSAFE, session, seq))

    def on_unused(self, queue: ClassicQueue) -> None:
        """The last consumer left."""
        self._reports.on_unused(queue.record)

    def on_expired(self, queue: ClassicQueue) -> None:
        """Unused for too long."""
        self._reports.on_expired(queue.record)

    def on_disk_error(self, queue: ClassicQueue, error: Exception) -> None:
        """Files cannot be written."""
        self._reports.on_disk_error(queue.record, error)

    # --- other nodes ---------------------------------------------------------------------

    def now_ms(self) -> int:
        """Wall clock."""
        return self.clock.now_ms()

    def is_up(self, node: int) -> bool:
        """Returns whether a node can be reached."""
        return node == self.node_id or self._control.transport.is_connected(node)

    def check_home(self, queue: ClassicQueue) -> None:
        """Raises NotFound when the queue's home node is away."""
        if self.is_paused or not self.is_up(queue.record.home):
            raise self.home_down(queue.record)

    def home_down(self, record: QueueRecord) -> NotFound:
        """Returns the refusal of what asks for a queue whose home node is away, or serves it not in
        time."""
        subject = queue_subject(record.vhost, record.name)
        if self.is_up(record.home) and not self.is_paused:
            return timed_out(subject)
        durable = not record.is_fleeting
        return home_node_down(subject, self.node_name(record.home), durable=durable)

    def has_room(self, queue: RemoteQueue) -> bool:
        """Returns whether the link to the queue's home node takes commands; if not, `queue.on_room`
        is called when it does, or `queue.on_lost`."""
        home = queue.record.home
        if home not in self._control.transport.full:
            return True
        self._await_room(home, queue)
        return False

    def soon(self, call: Callable[[], None]) -> None:
        """Runs a callback on the loop."""
        self._call_soon(call)

    def on_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        self._held_back.send(node, lambda held: self._send_now(*held))

    def on_lost(self, node: int) -> None:
        """A node is suspected, or gone, which `on_node_down` says. A suspected one may speak again,
        and nothing would repeat what waits for it."""
        self.on_room(node)

    def send_commands(self, queue: ClassicQueue, batch: bytes) -> None:
        """Sends a sealed batch to the queue's home node."""
        # Also to a suspected node: it may speak again, and nothing else would repeat the batch.
        self._control.send_raw(queue.record.home, KIND_CLASSIC, (batch,), a=queue.group)

    async def remote_counts(self, queue: ClassicQueue) -> tuple[int, int]:
        """Returns (ready, consumers) from the home node. Raises Unavailable or NotFound."""
        found = await self._control.request(
            queue.record.home, KIND_CLASSIC_COUNTS, queue.group, COUNTS_TIMEOUT_S
        )
        return int(found[0]), int(found[1])

    async def ask_reservation(self, record: QueueRecord, request: list[object]) -> object:
        """Asks a queue's home node about a reservation (`reservation_reads.serve`). Raises
        Unavailable and Refused."""
        return await self._control.request(
            record.home, KIND_RESERVATION, [record.group, *request], RESERVATION_TIMEOUT_S
        )

    def on_node_up(self, node: int) -> None:
        """A node is linked, or speaks again. Handles of queues that were lost with it refuse
        everything: others take their place."""
        self._unlinked.discard(node)
        for group, queue in list(self.queues.items()):
            if isinstance(queue, RemoteQueue) and queue.record.home == node and queue.ended:
                del self.queues[group]

    def on_suspect(self, node: int) -> None:
        """See `QueueHost`. Nothing is lost as long as the link stands."""

    def on_node_down(self, node: int) -> None:
        """The link to a node broke."""
        now = self.clock.now_ms()
        self._unlinked.add(node)
        self._held_back.forget(node)

        def lose(queue: ClassicQueue) -> None:
            if isinstance(queue, LocalQueue):
                if queue.ended is None:
                    queue.node_down(node, now)
            elif isinstance(queue, RemoteQueue) and queue.record.home == node:
                self._home_lost(queue)

        run_each(list(self.queues.values()), lose, self._stop_failed)

    def _home_lost(self, queue: RemoteQueue) -> None:
        del self.queues[queue.group]
        queue.home_lost()

    def _send_effect(self, group: int, effect: Effect) -> None:
        if not self._held_back.add(effect[1] >> 56, (group, effect)):
            self._send_now(group, effect)

    def _send_now(self, group: int, effect: Effect) -> None:
        session = effect[1]
        head, block = encode_effect(effect)
        self._control.send_raw(
            session >> 56, KIND_CLASSIC, (head, block), c=session, d=len(head), a=group
        )

    def _on_frame(self, node: int, data: bytes) -> None:
        _, _, _, _, group, _, session, head_length = frame_header(data)
        if session:
            self._on_effect_frame(node, data, group, session, head_length)
        else:
            self._on_commands(node, group, data)

    def _on_commands(self, node: int, group: int, data: bytes) -> None:
        start = 2 * HEADER_SIZE
        if len(data) < start + COMMAND_SIZE:
            raise PeerError(f"commands from node {node} are cut off")
        queue = self.queues.get(group)
        if not isinstance(queue, LocalQueue) or queue.ended is not None or self._stopped:
            sessions = {command[2] for command in commands(data[HEADER_SIZE:])}
            for session in sorted(sessions):
                if session >> 56 == node:
                    self._send_effect(group, (LOST, session))
            return
        queue.senders.add(node)
        queue.is_urgent = True
        builder = queue.builder
        self.contain(queue, lambda: builder.adopt(data, start, len(data)))

    def _end_ghost(self, node: int, group: int, session: int) -> None:
        """Ends a session that only its home has: a late frame of a broken link began it. Its
        messages would wait for ever."""
        ghost = (node, session)
        if session >> 56 != self.node_id or not session & ~NODE_MASK or ghost in self._ghosts:
            return
        if len(self._ghosts) >= GHOSTS_MAX:
            self._ghosts.clear()
        self._ghosts.add(ghost)
        closing = CommandBuilder()
        closing.add(CMD_SESSION_CLOSE, 0, session, SEQ_MAX, 0, 0, b"")
        self._control.send_raw(node, KIND_CLASSIC, (closing.take_forward(group, 0),), a=group)

    def _on_effect_frame(
        self, node: int, data: bytes, group: int, session: int, head_length: int
    ) -> None:
        queue = self.queues.get(group)
        if not isinstance(queue, RemoteQueue) or queue.ended is not None:
            self._end_ghost(node, group, session)
            return
        known = queue
        self.contain(known, lambda: self._take_effect(known, data, session, head_length))

    def _take_effect(self, queue: RemoteQueue, data: bytes, session: int, head_length: int) -> None:
        effect = decode_effect(data, session, head_length)
        kind = effect[0]
        if kind == LOST:
            self._on_lost_effect(queue, session, effect[2:])
        elif session not in queue.clients:
            self._end_ghost(queue.record.home, queue.group, session)
        elif kind == UNSAFE:
            self.dispatch_unsafe(queue, session, effect[2])
        else:
            self.dispatch(queue, effect)

    def _on_lost_effect(self, queue: RemoteQueue, session: int, reason: tuple[str, ...]) -> None:
        node = session & NODE_MASK
        if session not in queue.clients and session != node:
            # Of a handle that was lost before this one was made.
            return
        if queue.known_seqs[0]:
            # It is being migrated: the tree says what becomes of it.
            return
        del self.queues[queue.group]
        self._on_routes()
        if reason:
            queue.crash(NotFound(reason[0], subject=queue.subject))
        else:
            queue.home_lost()

    async def _on_counts(self, node: int, group: int) -> tuple[int, int]:
        queue = self.queues.get(group)
        if not isinstance(queue, LocalQueue):
            raise NotFound("the queue is not here")
        return await queue.counts()

    # --- disk ----------------------------------------------------------------------------

    def _on_written(self, callbacks: list[Callable[[], None]]) -> None:
        run_each(callbacks, call, pass_on)
        self._check_flow()
        self._wanted()

    def holds(self, queue: LocalQueue) -> bool:
        """Returns whether publishers of a queue wait: for the disk, or because it is paused."""
        return self.is_paused or (self._flowing and queue.writes)

    def _tell_flow(self, queue: LocalQueue) -> None:
        queue.tell_all(lambda client: client.on_flow(self.holds(queue)))

    def _check_flow(self) -> None:
        backlog = self.writer.backlog_bytes
        blocked = backlog > self._flow_on_bytes // (4 if self._flowing else 1)
        if blocked == self._flowing:
            return
        self._flowing = blocked
        for queue in self._running():
            if queue.writes or not blocked:
                self._tell_flow(queue)

    def _on_tick(self) -> None:
        self._timer = self.clock.call_later(TICK_MS, self._on_tick)
        now = self.clock.now_ms()
        is_short, was_short = self.memory.is_short, self._was_short
        self._was_short = is_short
        for group in self.memory.large() if is_short and not was_short else ():
            if group in self.queues:
                self.queues[group].wake()
        moving = self.ticked.begin(now)

        def tick(queue: LocalQueue) -> None:
            queue.tick(now)
            self.ticked.let_rest(queue, now)

        run_each(moving, tick, self._stop_failed)
        self.memory.divide({queue.group: queue.egress_bytes() for queue in moving})
