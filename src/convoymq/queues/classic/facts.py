"""Fields of a classic queue that the management API shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues.classic.backing import RUN_BYTES
from convoymq.queues.dead_letter_publisher import AT_MOST_ONCE_NAME, DISABLED_NAME
from convoymq.queues.interface import Row

if TYPE_CHECKING:
    from convoymq.queues.classic.queue import LocalQueue


def facts_of(queue: LocalQueue) -> Row:
    """Returns the fields of a queue at its home."""
    machine = queue.machine
    active = machine.active
    unsettled_bytes = machine.unsettled_bytes
    capacity = float(machine.takes_more)
    return {
        **_backing_facts(queue),
        "messages": machine.ready_count + machine.unsettled_count + machine.aside.count,
        "messages_ready": machine.ready_count,
        "messages_unacknowledged": machine.unsettled_count,
        "message_bytes": machine.ready_bytes + unsettled_bytes,
        "message_bytes_ready": machine.ready_bytes,
        "message_bytes_unacknowledged": unsettled_bytes,
        "messages_dlx": machine.leaving.count,
        "message_bytes_dlx": machine.leaving.bytes,
        "dead_letter_strategy": (AT_MOST_ONCE_NAME if queue.limits.dead_letters else DISABLED_NAME),
        "consumers": machine.consumer_count,
        "consumer_capacity": capacity,
        "consumer_utilisation": capacity,
        "owner": queue.record.owner,
        "memory": machine.footprint,
        "state": "stopped" if queue.ended else "down" if queue.host.is_paused else "running",
        "node": queue.host.node_name(queue.record.home),
        "reservations": machine.reservations.infos(),
        "single_active_consumer_tag": (
            active.tag if active is not None and not active.cancelled else None
        ),
        "message_stats": {
            "publish": machine.published,
            "deliver_get": machine.delivered,
            "ack": machine.acknowledged,
        },
    }


def _backing_facts(queue: LocalQueue) -> Row:
    machine, rates = queue.machine, queue.rates
    if not queue.host.ticked.is_awake(queue):
        rates = rates.after(queue.host.now_ms())
    backing = machine.backing
    lengths = backing.lengths()
    here = lengths["q1"] + lengths["q4"]
    here_bytes = min(backing.memory_bytes, machine.ready_bytes)
    paged_out = machine.ready_count - here
    is_short = queue.host.memory.is_short
    target = queue.host.memory.share(queue.group) // RUN_BYTES if is_short else "infinity"
    return {
        "messages_ram": here + machine.unsettled_count,
        "messages_ready_ram": here,
        "messages_unacknowledged_ram": machine.unsettled_count,
        "messages_paged_out": paged_out,
        "message_bytes_ram": here_bytes,
        "message_bytes_paged_out": max(0, machine.ready_bytes - here_bytes),
        "backing_queue_status": {
            "mode": "default",
            "version": 2,
            **{name: n for name, n in lengths.items() if name != "delta"},
            "delta": ["delta", "undefined", lengths["delta"], 0, "undefined"],
            "len": machine.ready_count,
            "target_ram_count": target,
            "next_seq_id": machine.next_position,
            "num_pending_acks": machine.unsettled_count,
            "avg_ingress_rate": rates.ingress,
            "avg_egress_rate": rates.egress,
            "avg_ack_ingress_rate": rates.ack_ingress,
            "avg_ack_egress_rate": rates.ack_egress,
        },
    }
