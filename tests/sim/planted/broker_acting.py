"""Bugs of groups whose slaves act for their master. Most are RocketMQ's."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

plant = planting("acting")
_roles = late("convoymq.rocketmq.acting.roles:Roles")
_group = late("convoymq.rocketmq.acting.service:Group")
_bridge = late("convoymq.rocketmq.acting.bridge:Bridge")
_special = late("convoymq.rocketmq.special.service:SpecialServices")
FAULTS = "away,isolate,kill"


@plant("an acting slave refuses the ends of transactions", FAULTS)
def end_refused_while_acting() -> None:
    special = _special()
    end = special._end_transaction

    async def planted(self: Any, connection: Any, command: Any) -> Any:
        from convoymq.rocketmq.remoting.codes import Answer

        if self._parts.role.is_acting:
            return command.answer(Answer.SLAVE_NOT_AVAILABLE, remark="slave mode")
        return await end(self, connection, command)

    special._end_transaction = planted


@plant("a message escapes without its key", FAULTS)
def escape_without_a_key() -> None:
    bridge = _bridge()
    send = bridge._send

    async def planted(self: Any, draft: Any, key: Any, **rest: Any) -> Any:
        draft.properties = draft.properties.replace(b"ESCAPE_KEY", b"ESCAPE_NOT")
        return await send(self, draft, None, **rest)

    bridge._send = planted


@plant("a master takes no topics and groups over", FAULTS)
def topics_not_taken_over() -> None:
    from convoymq.rocketmq.acting import metadata

    metadata.joined = lambda own, _version, _other, _other_version: own


@plant("a lock does not keep others from pulling", "none")
def lock_without_a_fence() -> None:
    from convoymq.rocketmq.acting.locks import LockTable

    LockTable.may_consume = lambda self, *_args, **_rest: True  # type: ignore[method-assign]


@plant("every lock has the same epoch", "none")
def locks_without_epochs() -> None:
    from convoymq.rocketmq.acting.locks import LockTable

    lock = LockTable.lock

    def planted(self: Any, group: str, client: str, queue: Any, _epoch: int, now_ms: int) -> bool:
        known = self._locks.get(group, {}).get(queue)
        if known is not None and known.client is None:
            known.epoch = 0
        return lock(self, group, client, queue, 1, now_ms)

    LockTable.lock = planted  # type: ignore[method-assign]


@plant("one replica is enough for a lock", "exile")
def lock_without_a_majority() -> None:
    from convoymq.rocketmq.acting.locks import Ballot

    Ballot.granted = lambda self: self.asked  # type: ignore[method-assign]


@plant("a slave acts while it hears its master", "unlisted")
def acts_while_the_master_is_heard() -> None:
    _roles()._hears_any = lambda self, now_ms: False


@plant("a master without a lease goes on", "exile")
def master_without_a_lease() -> None:
    _roles()._has_lease = lambda self, now_ms: True


@plant("special services begin without the keys of other brokers", "away,shut")
def keys_are_not_learned() -> None:
    async def planted(self: Any) -> None:
        self.bridge.generation = self._parts.now_ms()

    _group()._learn_keys = planted


@plant("replicas that start together each run special services", "together")
def started_together() -> None:
    _roles()._is_seen = property(lambda self: True, lambda self, value: None)


@plant("consumer offsets are taken over by their version", "away,shut")
def offsets_merged_by_version() -> None:
    from convoymq.rocketmq.broker.offsets import Offsets

    replace = Offsets.replace

    def planted(self: Any, table: Any) -> None:
        if table.data_version.counter > self.version.counter:
            replace(self, table)

    Offsets.merge = planted  # type: ignore[method-assign]


@plant("targets take attempts of replicas that were superseded", "camps,freeze")
def generations_are_not_looked_at() -> None:
    from convoymq.rocketmq.acting.escape import Generations

    Generations.takes = lambda self, broker, generation: True  # type: ignore[method-assign]


@plant("a replica that was superseded goes on with its generation", "camps")
def superseded_for_ever() -> None:
    _roles().on_superseded = lambda self: None


@plant("timed messages that are not due yet wait for their master", "none")
def not_yet_due_waits() -> None:
    from convoymq.rocketmq.special.state import SpecialState

    tick = SpecialState.tick

    def planted(self: Any, now_ms: int) -> Any:
        if not self.wheel.may_roll:
            self.wheel._slots.clear()
            self.wheel._order.clear()
            self.wheel.count = 0
        return tick(self, now_ms)

    SpecialState.tick = planted  # type: ignore[method-assign]
