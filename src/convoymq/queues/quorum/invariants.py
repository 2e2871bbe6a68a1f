"""What must hold for a quorum queue's machine between any two entries."""

from __future__ import annotations

from convoymq.queues.quorum.machine import (
    CANCELLED,
    POLLER,
    QUIESCING,
    UP,
    WAITING,
    QuorumMachine,
)
from convoymq.queues.sessions import REPLIES_KEPT_MAX


def check_invariants(machine: QuorumMachine) -> None:
    """Asserts what the module docstring promises. Cost: O(runs); tests call it after every step."""
    unacked = 0
    unacked_bytes = 0
    count = 0
    served = machine.service_queue()
    assert len(served) == len(set(served)), "a consumer is in the service queue twice"
    serving = set(served)
    actives = []
    places: list[tuple[int, int, int, int]] = []
    for session in machine.sessions.values():
        assert session.applied_at == -1
        assert session.id not in machine.closed
        assert len(session.replies) <= REPLIES_KEPT_MAX
        for number, consumer in session.consumers.items():
            assert consumer.number == number
            assert (number == 0) == (consumer.state == POLLER)
            held = consumer.checked_out.held()
            assert sum(run[3] for _, run in held) == consumer.checked_out.messages
            assert sum(run[4] for _, run in held) == consumer.checked_out.size
            last = -1
            for message_id, run in held:
                assert message_id > last, "message ids overlap"
                assert run[3] > 0
                last = message_id + run[3] - 1
                places.append((run[0], run[1], run[2], run[3]))
            assert last < consumer.next_id
            unacked += consumer.checked_out.messages
            unacked_bytes += consumer.checked_out.size
            key = (session.id, number)
            may = (
                consumer.state == UP
                and session.node not in machine.down_nodes
                and consumer.window > consumer.checked_out.messages
            )
            assert may == (key in serving) == consumer.queued, (key, may, key in serving)
            assert (consumer.state == WAITING) == any(c is consumer for c in machine.waiting)
            if consumer.state == CANCELLED:
                assert consumer.checked_out.messages, "a cancelled consumer stays for nothing"
            if consumer.state < CANCELLED:
                count += 1
            if consumer.state in (UP, QUIESCING):
                actives.append(consumer)
    machine.stages.check()
    count += len(machine.stages)
    for stage in machine.stages.by_name.values():
        held = stage.held.held()
        assert stage.held.messages == stage.next - stage.first
        assert not held or held[0][0] == stage.first
        for i, (message_id, run) in enumerate(held):
            after = held[i + 1][0] if i + 1 < len(held) else stage.next
            assert message_id + run[3] == after, "a stage has a gap"
            places.append((run[0], run[1], run[2], run[3]))
        unacked += stage.held.messages
        unacked_bytes += stage.held.size
    assert unacked == machine.unacked
    assert unacked_bytes == machine.unacked_bytes
    assert count == machine.consumer_count
    if machine.single_active:
        assert len(actives) + len(machine.stages) <= 1
        assert machine.active is (actives[0] if actives else None)
    else:
        assert not machine.waiting
        assert machine.active is None
    assert not (serving and machine.ready), "a message and a consumer wait for each other"
    for fifo in (machine.fresh, machine.returned):
        runs = fifo.runs()
        assert sum(run[3] for run in runs) == fifo.messages
        assert sum(run[4] for run in runs) == fifo.size
        places += [(run[0], run[1], run[2], run[3]) for run in runs]
    for run in machine.fresh.runs():
        assert run[5] == run[6] == 0
    places.sort()
    for i in range(1, len(places)):
        before = places[i - 1]
        assert before[:2] != places[i][:2] or before[2] + before[3] <= places[i][2], (
            "a message is in two places"
        )
    live = list(machine.live_ranges())
    for i in range(1, len(live)):
        assert live[i - 1][1] + 1 < live[i][0]
    for index in {place[0] for place in places}:
        assert any(low <= index <= high for low, high in live)
    dropped = sum(machine.dropped.values())
    total = machine.ready + unacked + machine.acked + machine.purged + dropped
    assert machine.deleted or total == machine.published, "messages appeared or vanished"
