"""Bugs of consumers with filters: of PICK, and of the scans that precede it."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

_filtering = late("convoymq.queues.quorum:filtering")
_picking = late("convoymq.queues.quorum:picking")
plant = planting("filters")


@plant("a message that was picked is available to others as well", "none")
def picked_stays_available() -> None:
    filtering = _filtering()
    pick = filtering.pick

    def planted(machine: Any, session: Any, op: Any) -> Any:
        known = session.consumers.get(op.get("consumer"))
        before = known.next_id if known is not None else 0
        reply = pick(machine, session, op)
        for message_id, run in machine.deliveries.holds(session.id, op.get("consumer")):
            if message_id >= before:
                machine.backlog.hold(run[3], run[4])
                machine.deliveries.give_back(run, 0, 0)
        return reply

    filtering.pick = planted


@plant("what a pick passes by in its entry leaves the queue", "none")
def passed_by_is_lost() -> None:
    filtering = _filtering()
    remove = filtering.selection.remove
    pick = filtering.pick

    def planted(machine: Any, session: Any, op: Any) -> Any:
        reply = pick(machine, session, op)
        ranges = list(op.get("ranges") or ())
        if reply[0] is None and ranges:
            index, offset, first, _ = ranges[:4]
            if first:
                remove(machine.backlog, [(index, offset, 0, first - 1)])
        return reply

    filtering.pick = planted


@plant("a pick hands out what lies last first", "none")
def picked_in_reverse() -> None:
    filtering = _filtering()
    within = filtering._within
    filtering._within = lambda *arguments: within(*arguments)[::-1]


@plant("a scan does not look at what came back", "none")
def what_came_back_is_passed_by() -> None:
    filtering = _filtering()
    sources = filtering._sources
    filtering._sources = lambda backlog, cursor, is_stirred: sources(backlog, cursor, False)


@plant("a scan goes on behind all that was there, found or not", "none")
def rest_is_passed_by() -> None:
    picking = _picking()
    find = picking.find

    async def planted(machine: Any, *arguments: Any) -> Any:
        found = await find(machine, *arguments)
        places = dict.fromkeys(found.cursor.places, (machine.index + 1, 0, 0))
        return found._replace(cursor=found.cursor._replace(places=places))

    picking.find = planted
