"""Bugs of quorum queues and reservations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.sim.planted import parts
from tests.sim.planted.registry import late, plant

_backlog = late("convoymq.queues.quorum.backlog:Backlog")
_consumers = late("convoymq.queues.quorum.consumers:Consumers")
_deliveries = late("convoymq.queues.quorum.deliveries:Deliveries")
_client = late("convoymq.queues.quorum.client:QuorumClient")


def _assign(*, rotates: bool = True, counts_others: bool = True) -> Callable[[Any], None]:
    """`Deliveries.assign` with rules left out."""

    def planted(self: Any) -> None:
        backlog, consumers = self.backlog, self.consumers
        while consumers.priorities and backlog.ready():
            level = consumers.levels[consumers.priorities[0]]
            consumer = level.popleft()
            turn = consumer.room()
            if level:
                share = backlog.ready() // (16 * (len(level) + 1 if counts_others else 1))
                turn = min(turn, max(1, min(256, share)))
            while turn and backlog.ready():
                turn -= self.hand_out(consumer, turn, True)
            if consumer.room() <= 0:
                consumer.queued = False
                if not level:
                    consumers.drop_level(consumers.priorities[0])
            elif rotates:
                level.append(consumer)
            else:
                level.appendleft(consumer)

    return planted


_consumer = late("convoymq.queues.quorum.consumers:Consumer")


def _fresh_first() -> Any:
    """`Backlog.take` that serves what is fresh before what came back."""
    take = _backlog().take

    def planted(self: Any, limit: int) -> Any:
        if not self.fresh.messages:
            return take(self, limit)
        kept, self.returned = self.returned, type(self.returned)(True)
        try:
            return take(self, limit)
        finally:
            self.returned = kept

    return planted


@plant("pending acknowledgements and publishes are not sent again", "break,crash,kill")
def no_resend_after_failover() -> None:
    from convoymq.queues.quorum.client import QuorumClient

    QuorumClient.resend = lambda self, after=None, *, now=False: None  # type: ignore[method-assign]


@plant("a resent publish is enqueued a second time", "break,crash,kill")
def duplicates_enqueued() -> None:
    machine = parts.machine()
    accept = machine._accept

    def planted(self: Any, session_id: int, seq: int, kind: int, count: int, arg: int) -> Any:
        session = accept(self, session_id, seq, kind, count, arg)
        if session is None and session_id in self.sessions and kind == 1:
            known = self.sessions[session_id]
            return known if seq <= known.seq else None
        return session

    machine._accept = planted


@plant("a snapshot leaves out the sessions", "crash,kill,membership")
def snapshot_without_sessions() -> None:
    import msgspec

    machine = parts.machine()
    snapshot = machine.snapshot

    def planted(self: Any) -> bytes:
        state = msgspec.msgpack.decode(snapshot(self))
        state.update(sessions=[], service=[], waiting=[])
        return msgspec.msgpack.encode(state)

    machine.snapshot = planted


@plant("a returned message stays checked out as well", "none")
def returned_but_still_held() -> None:
    deliveries = _deliveries()
    release = deliveries.release

    def planted(self: Any, consumer: Any, kind: int, failed: int, first: int, last: int) -> None:
        kept = [held for held in consumer.checked_out.held() if first <= held[0] <= last]
        release(self, consumer, kind, failed, first, last)
        if kind == 3:
            for message_id, run in kept:
                consumer.checked_out.add(message_id, *run)

    deliveries.release = planted


@plant("a returned message goes behind fresh ones and loses its count", "none")
def returned_as_fresh() -> None:
    def planted(self: Any, run: Any, failed: int) -> None:
        index, offset, first, count, size = run[:5]
        self.unacked -= count
        self.unacked_bytes -= size
        self.returns += count
        self.fresh.push(index, offset, first, count, size, 0, 0)

    _backlog().give_back = planted


@plant("messages whose time is over are given", "none", unaided=True)
def expired_are_given() -> None:
    _deliveries().expire = lambda self: None


@plant("the time limit of a queue is forgotten where a message has its own", "none", unaided=True)
def own_expiration_comes_before_the_queue_s() -> None:
    machine = parts.machine()
    mark_for = machine.mark_for

    def planted(self: Any, level: int, expiration: int) -> Any:
        ttl = self.backlog.message_ttl_ms
        self.backlog.message_ttl_ms = -1 if expiration >= 0 else ttl
        try:
            return mark_for(self, level, expiration)
        finally:
            self.backlog.message_ttl_ms = ttl

    machine.mark_for = planted


@plant("a full queue takes publishes again below its limit, not at 80 %", "none", unaided=True)
def full_queue_takes_too_early() -> None:
    _backlog().has_room = lambda self: not self.exceeds()


@plant("bytes do not count toward the length of a queue", "none", unaided=True)
def bytes_do_not_count() -> None:
    _backlog().length_bytes = lambda self: 0


@plant("what is too much is dropped although it waits for a time", "none", unaided=True)
def what_waits_is_dropped_first() -> None:
    from convoymq.queues.quorum.dead_letters import OVER_LENGTH

    deliveries = _deliveries()
    keep_length = deliveries.keep_length

    def planted(self: Any) -> None:
        backlog = self.backlog
        while not backlog.refuses and backlog.exceeds() and backlog.waiting.messages:
            self.dead_letters.leave(backlog.waiting.take(1), OVER_LENGTH)
        keep_length(self)

    deliveries.keep_length = planted


@plant("a scheduled message comes before its time", "none", unaided=True)
def scheduled_message_comes_early() -> None:
    from convoymq.queues.quorum.waiting import Waiting

    take_due = Waiting.take_due

    def planted(self: Any, now_ms: int, runs_max: int) -> Any:
        return take_due(self, now_ms + 50, runs_max)

    Waiting.take_due = planted  # type: ignore[method-assign]


@plant("a retry does not wait", "none", unaided=True)
def retry_does_not_wait() -> None:
    from convoymq.queues.quorum.delayed import Delayed

    Delayed.retries = lambda self, run, failed: False  # type: ignore[method-assign]


@plant("a scheduled message that is cancelled is counted, and comes", "none", unaided=True)
def cancelled_message_comes() -> None:
    from convoymq.queues.quorum.delayed import Delayed

    Delayed.cancel = lambda self, op: {"cancelled": len(op["messages"])}  # type: ignore[method-assign,arg-type]


@plant("what comes back goes where RabbitMQ puts it, whatever the queue says", "none", unaided=True)
def position_is_ignored() -> None:
    machine = parts.machine()
    follow = machine._follow_settings

    def planted(self: Any) -> None:
        follow(self)
        self.backlog.requeue_position = 0

    machine._follow_settings = planted


@plant("a queue expires although somebody consumes from it", "none", unaided=True)
def used_queue_expires() -> None:
    machine = parts.machine()

    def planted(self: Any) -> int | None:
        unused: int = self.consumers.last_active_ms + self._expires_ms
        return None if self._expires_ms < 0 or self.operations.by_id else unused

    machine._unused_due_ms = planted


@plant("a queue may be deleted although somebody consumes from it", "none", unaided=True)
def queue_in_use_is_deleted() -> None:
    from convoymq.queues.quorum import questions

    check = questions._check_delete

    def planted(machine: Any, op: Any) -> Any:
        return check(machine, {**op, "if_unused": False})

    questions._check_delete = planted


@plant("nodes may be away for as long as by default, whatever a policy says", "suspect,isolate")
def time_for_nodes_is_ignored() -> None:
    parts.machine()._disconnect_timeout_ms = lambda self: self.settings["disconnect_timeout_ms"]


@plant("a moved message is not named: what is sent again is there twice", "kill,transfer")
def moved_messages_have_no_name() -> None:
    from convoymq.sim import operations

    names = iter(range(1 << 40))
    stream: Any = operations._Stream

    def planted(self: Any, producer: bytes, sequence: int) -> None:
        self._producer = (b"%d" % next(names), sequence)

    stream.name_next = planted


@plant("a dead letter is done when its target refuses it", "none", unaided=True)
def refused_dead_letters_are_done() -> None:
    from convoymq.queues.dead_letter_worker import DeadLetterWorker

    answered = DeadLetterWorker.answered

    def planted(self: Any, first: int, last: int, group: int, ok: bool, now_ms: int) -> int:
        return answered(self, first, last, group, True, now_ms)

    DeadLetterWorker.answered = planted  # type: ignore[method-assign]


@plant("dead letters that wait are lost with their leader", "kill,crash", unaided=True)
def a_new_leader_forgets_dead_letters() -> None:
    from convoymq.kernels import batch
    from convoymq.queues.quorum.dead_letter_mover import DeadLetterMover

    on_leader = DeadLetterMover.on_leader

    def planted(self: Any, replica: Any) -> None:
        on_leader(self, replica)
        if replica is not None:
            letters = replica.machine.dead_letters
            if letters.next_number:
                body = batch.pack_ranges([0, letters.next_number])
                replica.propose(batch.CMD_SETTLE, 0, 1, 0, body)

    DeadLetterMover.on_leader = planted  # type: ignore[method-assign]


@plant("a snapshot leaves out the message-ids that are remembered", "crash,kill,membership")
def snapshot_without_message_ids() -> None:
    import msgspec

    machine = parts.machine()
    snapshot = machine.snapshot

    def planted(self: Any) -> bytes:
        state = msgspec.msgpack.decode(snapshot(self))
        if "deduplication" in state:
            state["deduplication"][1] = b""
        return msgspec.msgpack.encode(state)

    machine.snapshot = planted


@plant("message-ids are remembered beyond their time", "none", unaided=True)
def message_ids_outlive_their_time() -> None:
    from convoymq.queues.quorum.deduplication import Deduplication

    Deduplication.forget_old = lambda self: None  # type: ignore[method-assign]


@plant("a reservation takes messages that stay in the queue as well", "none", "reservations")
def reserved_but_still_ready() -> None:
    from convoymq.queues.quorum.reservation_holder import ReservationHolder

    reservation_take = ReservationHolder.reservation_take

    def planted(self: Any, reservation: Any, limit: int) -> int:
        before = reservation.next
        taken: int = reservation_take(self, reservation, limit)
        for _, run in reservation.held.between(before, before + min(taken, 1), 1):
            self._backlog.returned.push(*run)
        return taken

    ReservationHolder.reservation_take = planted  # type: ignore[method-assign]


@plant("a release leaves the epoch as it was", "none", "reservations")
def release_in_the_same_epoch() -> None:
    from convoymq.queues.reservations import Reservations

    release = Reservations._release

    def planted(self: Any, name: str, *arguments: Any) -> Any:
        known = self.by_name.get(name)
        epoch = known.epoch if known is not None else 0
        release(self, name, *arguments)
        known.epoch = epoch
        return known.answer()

    Reservations._release = planted  # type: ignore[method-assign]


@plant("a take that is repeated takes more", "none", "reservations")
def repeated_take_takes_more() -> None:
    from convoymq.queues.reservations import Reservations

    take = Reservations._take

    def planted(self: Any, reservation: Any, limit: int, after: int) -> Any:
        return take(self, reservation, limit, max(after, reservation.next))

    Reservations._take = planted  # type: ignore[method-assign]


@plant("an expired reservation gives nothing back", "none", "reservations")
def expired_reservation_keeps_all() -> None:
    from convoymq.queues.reservations import Reservations

    def planted(self: Any, time_ms: int) -> list[Any]:
        expired = [
            reservation for reservation in self.by_name.values() if reservation.due_ms <= time_ms
        ]
        for reservation in expired:
            self._forget(reservation)
        return expired

    Reservations.expire = planted  # type: ignore[method-assign]


@plant("a snapshot leaves out the reservations", "crash,kill,membership", "reservations")
def snapshot_without_reservations() -> None:
    import msgspec

    machine = parts.machine()
    snapshot = machine.snapshot

    def planted(self: Any) -> bytes:
        state = msgspec.msgpack.decode(snapshot(self))
        state.pop("reservations", None)
        return msgspec.msgpack.encode(state)

    machine.snapshot = planted


@plant("reserved messages are not kept in the log", "none", "reservations")
def reserved_entries_are_not_live() -> None:
    machine = parts.machine()
    live_ranges = machine.live_ranges

    def planted(self: Any) -> Any:
        kept, self.reservations = self.reservations, type(self.reservations)(self)
        try:
            return live_ranges(self)
        finally:
            self.reservations = kept

    machine.live_ranges = planted


@plant("a settle acknowledges one message too many", "none", "reservations")
def settles_one_too_many() -> None:
    from convoymq.queues.reservations import Reservations

    settle = Reservations._settle

    def planted(self: Any, reservation: Any, upto: int) -> Any:
        return settle(
            self, reservation, min(upto + 1, reservation.next) if upto > reservation.first else upto
        )

    Reservations._settle = planted  # type: ignore[method-assign]


@plant("the consumer that was served is served again at once", "none", unaided=True)
def service_queue_not_rotated() -> None:
    _deliveries().assign = _assign(rotates=False)


@plant("a turn is the same however many others wait", "none", unaided=True)
def turn_ignores_others() -> None:
    _deliveries().assign = _assign(counts_others=False)


@plant("a turn is as long when its consumer settles slowly", "none", unaided=True)
def slow_consumers_are_quick() -> None:
    consumer = _consumer()
    settled = consumer.settled

    def planted(self: Any, messages: int, time_ms: int, version: int) -> None:
        settled(self, messages, self.turn_ms, version)

    consumer.settled = planted


@plant("a consumer that holds messages for long is served as a quick one", "none", unaided=True)
def stuck_consumers_are_quick() -> None:
    _consumer().turn_of = lambda self, time_ms: self.turn_limit


@plant("a turn does not end where what is settled at once is complete", "none", unaided=True)
def batches_are_not_completed() -> None:
    _consumer().missing_in_batch = lambda self: self.settled_at_once


@plant("a turn that ran out of messages does not go on with the next one", "none", unaided=True)
def turns_do_not_go_on() -> None:
    deliveries = _deliveries()
    assign = deliveries.assign

    def planted(self: Any) -> None:
        given = {id(c): c.next_id for c in self.consumers.all()}
        assign(self)
        for level in self.consumers.levels.values():
            if level[0].next_id > given[id(level[0])]:
                level.rotate(-1)

    deliveries.assign = planted


@plant("a snapshot forgets which consumers are quick", "crash,kill,membership")
def quick_consumers_are_forgotten() -> None:
    consumer = _consumer()
    pack = consumer.pack
    consumer.pack = lambda self, version: pack(self, min(version, 2))


@plant("a consumer of low priority is served before one of high priority", "none", unaided=True)
def priority_upside_down() -> None:
    consumers = _consumers()
    serve_last = consumers.serve_last

    def planted(self: Any, consumer: Any) -> None:
        serve_last(self, consumer)
        self.priorities.sort()

    consumers.serve_last = planted


@plant("a change of credit allows one message more than it says", "none", unaided=True)
def window_overrun_after_credit() -> None:
    machine = parts.machine()
    command = machine._session_command

    def planted(self: Any, session: Any, kind: int, flags: int, count: int, arg: int, *rest: Any):  # type: ignore[no-untyped-def]
        command(self, session, kind, flags, count, arg, *rest)
        if kind == 7 and arg in session.consumers:
            session.consumers[arg].window += 1
            self.consumers.refresh(session.consumers[arg])

    machine._session_command = planted


@plant("a message of a group is given while another one is out", "none", unaided=True)
def groups_are_not_blocked() -> None:
    from convoymq.kernels.group_table import GroupTable
    from convoymq.queues.quorum.groups import Groups

    def planted(
        self: Any, data: bytes, index: int, offset: int, first: int, count: int, *rest: int
    ) -> list[int]:
        alone = (
            GroupTable().enqueue(data, index, offset, record, 1, *rest)
            for record in range(first, first + count)
        )
        return [word for each in alone for word in each]

    Groups.enqueue = planted  # type: ignore[method-assign]


@plant("a message of a group that comes back goes behind the others", "none", unaided=True)
def groups_return_as_others() -> None:
    from convoymq.queues.quorum.groups import Groups

    Groups.parts = lambda self, run: [(run, False)]  # type: ignore[method-assign]


@plant("what clients give back does not count in a queue that follows 4.1", "none", unaided=True)
def returns_are_not_counted() -> None:
    machine = parts.machine()
    follow = machine._follow_settings

    def planted(self: Any) -> None:
        follow(self)
        self.backlog.counts_returns = False

    machine._follow_settings = planted


@plant(
    "looking at messages counts as trying them in a queue that follows 4.1", "none", unaided=True
)
def looks_count() -> None:
    from convoymq.queues.quorum import deliveries

    deliveries.FLAG_UNTRIED = 0


@plant("turns do not count while one class has the queue for itself", "none", unaided=True)
def turns_of_one_class_do_not_count() -> None:
    from convoymq.queues.quorum.order import Order

    Order.took = lambda self, count: None  # type: ignore[method-assign]


@plant("two classes of priorities are served one to one", "none", unaided=True)
def classes_in_turn() -> None:
    from convoymq.queues.quorum import order

    order.HIGH_IN_A_ROW = 1
    order.TURNS = 2


@plant("what an ended session gave back goes behind what is fresh", "none", unaided=True)
def ended_session_returns_behind_fresh() -> None:
    machine, deliveries, backlog = parts.machine(), _deliveries(), _backlog()
    end_sessions, hand_out = machine._end_sessions, deliveries.hand_out
    take, late = backlog.take, _fresh_first()

    def ending(self: Any, sessions: Any, *, failed: bool) -> None:
        self.deliveries.planted = not self.backlog.returned.messages
        end_sessions(self, sessions, failed=failed)

    def giving(self: Any, *arguments: Any) -> int:
        if getattr(self, "planted", False) and self.backlog.returned.messages:
            backlog.take = late
        else:
            self.planted = False
        try:
            return int(hand_out(self, *arguments))
        finally:
            backlog.take = take

    machine._end_sessions = ending
    deliveries.hand_out = giving


@plant(
    "the next single active consumer begins while the one before it holds messages",
    "suspect,isolate,crash",
    unaided=True,
)
def next_active_does_not_wait() -> None:
    consumers = _consumers()
    choose_active = consumers.choose_active

    def planted(self: Any) -> None:
        kept, self.strict = self.strict, False
        choose_active(self)
        self.strict = kept

    consumers.choose_active = planted


@plant("without a limit, what is given back goes to the head", "none", unaided=True)
def unlimited_returns_go_to_the_head() -> None:
    backlog = _backlog()
    backlog.requeue = lambda self, run, failed, counted: self.give_back(run, failed, counted)


@plant("what was given back to the tail overtakes what was fresh then", "none", unaided=True)
def tail_overtakes_fresh() -> None:
    from convoymq.queues.quorum.runs import Tail

    Tail.ahead = lambda self, left: 0  # type: ignore[method-assign]


@plant("basic.get passes over what came back", "none", unaided=True)
def get_passes_over_returned() -> None:
    machine, backlog = parts.machine(), _backlog()
    get, late, take = machine._get, _fresh_first(), backlog.take

    def planted(self: Any, session: Any, settled: bool) -> None:
        backlog.take = late
        try:
            get(self, session, settled)
        finally:
            backlog.take = take

    machine._get = planted


@plant("what a consumer held comes back youngest first", "none", unaided=True)
def returned_in_reverse() -> None:
    def planted(self: Any, consumer: Any, failed: int) -> None:
        for run in reversed(consumer.checked_out.remove_all()):
            self.give_back(run, failed)

    _deliveries().give_back_all = planted


@plant("an ended session does not count as a failed delivery", "none", unaided=True)
def ended_session_is_no_failure() -> None:
    machine = parts.machine()
    end_sessions = machine._end_sessions

    def planted(self: Any, sessions: Any, *, failed: bool) -> None:
        end_sessions(self, sessions, failed=False)

    machine._end_sessions = planted


@plant("consumers of a suspected node are served on", "suspect,isolate,freeze", unaided=True)
def suspected_node_is_served() -> None:
    machine = parts.machine()
    node_down, serve_last = machine._node_down, _consumers().serve_last

    def planted(self: Any, node: int, gone: bool) -> None:
        node_down(self, node, gone)
        kept, self.down_nodes = self.down_nodes, {}
        for session in self._sessions_of(node):
            for consumer in session.consumers.values():
                serve_last(self.consumers, consumer)
        self.down_nodes = kept

    machine._node_down = planted


@plant("a node that stays away keeps its messages", "isolate,freeze,partition", unaided=True)
def lost_node_keeps_its_messages() -> None:
    machine = parts.machine()
    tick = machine._tick

    def planted(self: Any) -> None:
        for state in self.down_nodes.values():
            state[1] = 1
        tick(self)

    machine._tick = planted


@plant("consumers of a node that is back are not served", "suspect,isolate,freeze", unaided=True)
def node_up_serves_nobody() -> None:
    machine, consumers = parts.machine(), _consumers()
    node_up = machine._node_up

    def planted(self: Any, node: int, incarnation: int) -> None:
        kept, consumers.serve_last = consumers.serve_last, lambda self, consumer: None
        try:
            node_up(self, node, incarnation)
        finally:
            consumers.serve_last = kept

    machine._node_up = planted


@plant("a consumer becomes active while the one before it holds messages", "none", unaided=True)
def two_single_active_consumers() -> None:
    consumers = _consumers()
    choose_active = consumers.choose_active

    def planted(self: Any) -> None:
        best, active = self.best_waiting(), self.active
        if active is not None and best is not None and best.priority > active.priority:
            self.serve_no_more(active)
            active.state = 1
            self.waiting.append(active)
            self.active = None
        choose_active(self)

    consumers.choose_active = planted


@plant("who waits longest becomes active, whatever the priorities", "none", unaided=True)
def activation_ignores_priority() -> None:
    def planted(self: Any) -> Any:
        for consumer in self.waiting:
            if consumer.session.node not in self.machine.down_nodes:
                return consumer
        return None

    _consumers().best_waiting = planted


@plant(
    "a leader that starts to send for a node sends new messages only", "crash,kill", unaided=True
)
def proxy_sends_only_what_is_new() -> None:
    from convoymq.queues.group_queue import GroupQueue

    def planted(self: Any, node: int, machine: Any) -> None:
        if self._transport.is_connected(node):
            self._proxied.add(node)

    GroupQueue._start_proxy = planted  # type: ignore[method-assign]


@plant("followers send for other nodes too", "none", unaided=True)
def followers_send_too() -> None:
    from convoymq.queues.group_queue import GroupQueue

    on_effects = GroupQueue.on_effects

    def planted(self: Any, effects: Any, replica: Any) -> None:
        on_effects(self, effects, replica)
        if not replica.is_leader:
            for effect in effects:
                if effect[0] == 2 and effect[1] >> 56 != self.node:
                    self._forward(effect[1] >> 56, effect)

    GroupQueue.on_effects = planted  # type: ignore[method-assign]


@plant("only leaders pass messages on, also to clients of their own node", "none", unaided=True)
def followers_keep_to_themselves() -> None:
    from convoymq.queues.quorum.queue import QuorumQueue

    deliver = QuorumQueue._deliver

    def planted(self: Any, client: Any, effect: Any) -> None:
        if self._host.replica(self.group).is_leader:
            deliver(self, client, effect)

    QuorumQueue._deliver = planted  # type: ignore[method-assign]


@plant("a client passes on what comes a second time", "crash,kill,membership", unaided=True)
def client_passes_on_repeats() -> None:
    client = _client()
    on_deliver = client.on_deliver

    def planted(self: Any, delivery: Any, since: int) -> None:
        known = self._consumers.get(delivery.consumer)
        if delivery.consumer and known is not None:
            known.next_id = min(known.next_id, delivery.first_id)
        on_deliver(self, delivery, since)

    client.on_deliver = planted


@plant("a client does not ask for what it missed", "break,loss,crash,kill", unaided=True)
def client_skips_gaps() -> None:
    client = _client()
    on_deliver = client.on_deliver

    def planted(self: Any, delivery: Any, since: int) -> None:
        on_deliver(self, delivery, 0)

    client.on_deliver = planted


@plant("a replica that is behind answers as if it knew all", "break,loss,slow,delay", unaided=True)
def lagging_replica_answers() -> None:
    from convoymq.queues.quorum.queue import QuorumQueue

    def planted(self: Any, client: Any, consumer: int, from_id: int) -> None:
        replica = self._host.replica(self.group)
        if replica is not None:
            machine = replica.machine
            kept, machine.effects = machine.effects, []
            machine.deliveries.redeliver(client.session, consumer, from_id)
            effects, machine.effects = machine.effects, kept
            if self._carry_out(client, effects, from_id):
                client.on_asked(consumer, from_id, complete=True)
                return
        if self.leader is not None and self.leader != self.node:
            from convoymq.kernels import link_frames

            frame = link_frames.frame(
                link_frames.FRAME_DELIVER, 0, self.group, client.session, consumer, from_id, 0
            )
            self._transport.send(self.leader, frame)

    QuorumQueue.ask = planted  # type: ignore[method-assign]


@plant("what is sent again is not flagged as redelivered", "break,crash,kill", unaided=True)
def redelivered_flag_lost() -> None:
    deliveries = _deliveries()
    redeliver = deliveries.redeliver

    def planted(self: Any, session: int, consumer: int, from_id: int) -> None:
        effects = self.machine.effects
        at = len(effects)
        redeliver(self, session, consumer, from_id)
        effects[at:] = [(*effect[:8], 0, 0) for effect in effects[at:]]

    deliveries.redeliver = planted


@plant(
    "the state is not sent again after a snapshot, nor when a leader starts to send for a node",
    "wipe,crash,membership",
    unaided=True,
)
def snapshot_install_says_nothing() -> None:
    machine = parts.machine()
    machine.resend = lambda self, session_node: None


@plant("a session that was left behind never ends", "none")
def left_behind_for_ever() -> None:
    from convoymq.queues.session_audit import SessionAudit

    SessionAudit.answered = lambda self, question, unknown: {}  # type: ignore[method-assign]


@plant("an opening number opens a session again", "loss,break,slow")
def opened_again() -> None:
    from convoymq.queues.sessions import Openings

    Openings.may_take = lambda self, number: True  # type: ignore[method-assign]
    Openings.take = lambda self, number: True  # type: ignore[method-assign]


@plant("a node that comes back leaves the sessions of its former life", "crash,kill")
def former_sessions_go_on() -> None:
    parts.machine()._older_sessions = lambda self, node, incarnation: []


@plant("annotations are lost when another node leads", "kill,crash", unaided=True)
def a_new_leader_forgets_annotations() -> None:
    from convoymq.queues.quorum.queue import QuorumQueue

    lead = QuorumQueue._lead

    def planted(self: Any, replica: Any) -> None:
        notes = replica.machine.backlog.notes
        notes.by_place = {place: (b"", avoids) for place, (_, avoids) in notes.by_place.items()}
        lead(self, replica)

    QuorumQueue._lead = planted  # type: ignore[method-assign]


@plant("a drain is answered before its deliveries", "none", unaided=True)
def drains_are_answered_early() -> None:
    client = _client()

    def planted(self: Any, consumer: int, known: Any) -> None:
        while known.grants and known.grants[0][1] >= 0:
            _, granted, ready = known.grants.popleft()
            self._events.on_credit(self, consumer, granted, ready)

    client._answer_grants = planted


@plant("credit that is asked for again counts twice", "kill,crash", unaided=True)
def credit_counts_twice() -> None:
    from convoymq.queues.outcomes import CMD_GRANT, limit_of

    client = _client()
    resend = client.resend

    def planted(self: Any, after: int | None = None, *, now: bool = False) -> None:
        resend(self, after, now=now)
        for number, known in self._consumers.items():
            if number and known.grants and not self.closed:
                limit = limit_of(known.next_id + 100)
                self._target.command(CMD_GRANT, 0, 0, number, limit)

    client.resend = planted


@plant("a message goes again to the consumer that calls it undeliverable", "none", unaided=True)
def undeliverable_here_again() -> None:
    consumers = _consumers()

    def planted(self: Any, _others: Any) -> Any:
        levels = (self.levels[priority] for priority in self.priorities)
        return next((consumer for level in levels for consumer in level), None)

    consumers.next_without = planted


@plant("the time that a consumer gives for a message is ignored", "none", unaided=True)
def due_times_are_ignored() -> None:
    from convoymq.queues.quorum.delayed import Delayed

    retries = Delayed.retries

    def planted(self: Any, run: Any, failed: int, due_ms: int = 0) -> bool:
        return retries(self, run, failed)

    Delayed.retries = planted  # type: ignore[method-assign]


@plant("what nobody may get waits for ever", "none", unaided=True)
def undeliverable_anywhere_stays() -> None:
    deliveries = _deliveries()
    check = deliveries._check_avoided

    def planted(self: Any) -> None:
        if len(list(self.consumers.all())) != 1:
            check(self)

    deliveries._check_avoided = planted
