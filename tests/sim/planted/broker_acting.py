"""Bugs of groups whose slaves act for their master. Most are RocketMQ's."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

plant = planting("acting")
_roles = late("convoymq.rocketmq.acting.roles:Roles")
_group = late("convoymq.rocketmq.acting.service:Group")
_learner = late("convoymq.rocketmq.acting.learning:KeyLearner")
_key_log = late("convoymq.rocketmq.acting.key_log:KeyLog")
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

    metadata.joined = lambda own, *_rest: own


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
        self._bridge.generation = self._parts.now_ms()

    _learner().learn = planted


@plant("other replicas are not asked where they have sent to", "away,shut,camps,together,kill")
def slaves_are_not_asked() -> None:
    async def planted(self: Any, _generation: int) -> Any:
        return set(self._keys.targets), 0

    _learner()._targets = planted


@plant("replicas that start together each run special services", "together")
def started_together() -> None:
    _roles()._is_seen = property(lambda self: True, lambda self, value: None)


@plant("consumer offsets are taken over by their version", "away,shut")
def offsets_merged_by_version() -> None:
    from convoymq.rocketmq.broker.offsets import Offsets

    replace = Offsets.replace

    def planted(self: Any, table: Any, _end: Any = None) -> None:
        if table.data_version.counter > self.version.counter:
            replace(self, table)

    Offsets.merge = planted  # type: ignore[method-assign]
    Offsets.begin_acting = lambda self: None  # type: ignore[method-assign]


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


@plant("a half message is passed over after some failures", "none")
def half_message_skipped() -> None:
    special = _special()
    put = special._put
    failures: dict[Any, int] = {}

    async def planted(self: Any, part: Any, key: Any) -> bool:
        is_done = await put(self, part, key)
        if not is_done and part is self.state.transactions:
            failures[key] = failures.get(key, 0) + 1
        return bool(is_done) or failures.get(key, 0) >= 3

    special._put = planted


@plant("brokers that are not listed at the moment are not asked for keys", "crossed")
def holders_are_forgotten() -> None:
    listed = _key_log().on_listed

    def planted(self: Any, brokers: Any, now_ms: int) -> None:
        self._holders.clear()
        listed(self, brokers, now_ms)

    _key_log().on_listed = planted


@plant("an attempt without an answer is made at another target", "deaf")
def attempts_are_not_bound() -> None:
    from convoymq.rocketmq.acting.escape import Target, Targets

    def choose(self: Any, key: Any, writable: dict[str, int]) -> Any:
        chosen = sorted(name for name in writable if name != self._own)
        self._turn = getattr(self, "_turn", 0) + 1
        return Target(chosen[self._turn % len(chosen)], 0) if chosen else None

    Targets.choose = choose  # type: ignore[method-assign]


@plant("a name server is busy until each of its notifications has arrived", "hush")
def name_server_waits_while_it_notifies() -> None:
    from convoymq.rocketmq.namesrv.service import NameServer

    handlers = NameServer._handlers

    def planted(self: Any) -> Any:
        def held(handler: Any) -> Any:
            async def answer(connection: Any, command: Any) -> Any:
                import asyncio

                while len(self._tasks) > 1:
                    await asyncio.sleep(0.01)
                return handler(connection, command)

            return answer

        return {code: held(handler) for code, handler in handlers(self).items()}

    NameServer._handlers = planted  # type: ignore[method-assign]


@plant("a slave waits five seconds after its link transfers", "back")
def isolation_goes_on() -> None:
    import asyncio

    group = _group()
    wait = group._await_link

    async def planted(self: Any, step: Any) -> Any:
        found = await wait(self, step)
        if self._parts.role.id:
            await asyncio.sleep(5)
        return found

    group._await_link = planted


@plant("records of one pop leave for several brokers", "pops,away")
def pop_records_part() -> None:
    """RocketMQ's slaves choose the broker by their own address."""
    send = _bridge()._send

    async def planted(self: Any, draft: Any, key: Any, home: Any) -> Any:
        has_key = key is not None
        return await send(self, draft, key, home if has_key else await self.another(home))

    async def another(self: Any, home: int) -> int:
        from convoymq.rocketmq.acting.escape import home_number
        from convoymq.rocketmq.broker.names import TIMER_TOPIC

        _, writable = await self._writable(TIMER_TOPIC)
        return max((home_number(name) for name in writable if home_number(name) != home),
                   default=home)  # fmt: skip

    _bridge()._send, _bridge().another = planted, another


@plant("a slave that begins to act pops from the offsets of before", "pops,away,camps,back")
def pops_begin_at_old_offsets() -> None:
    from convoymq.rocketmq.broker.offsets import Offsets

    Offsets.learn_given = lambda *_: None  # type: ignore[assignment,method-assign]


@plant("acknowledgements of the master's pops have no key", "pops,away,together,back")
def acknowledgements_have_no_key() -> None:
    from convoymq.rocketmq.special import pop_service

    module: Any = pop_service
    keyed = module.keyed
    module.keyed = lambda draft, key: keyed(draft, key) if key.is_position else draft


@plant("a pop at an acting slave stores no record of it", "pops,away")
def pop_without_a_record() -> None:
    from convoymq.rocketmq.special.pop_service import PopService

    put = PopService._put

    async def planted(self: Any, drafts: Any, home: Any) -> None:
        if home is None:
            await put(self, drafts, home)

    PopService._put = planted  # type: ignore[method-assign]


@plant("a consumer ahead of an acting slave is answered at once", "ahead,away")
def ahead_is_not_held() -> None:
    from convoymq.rocketmq.broker.pull import Puller

    look = Puller._look

    def planted(self: Any, pull: Any, topic: Any) -> Any:
        from convoymq.rocketmq.remoting.codes import Answer

        answer, code = look(self, pull, topic)
        if self._parts.role.is_acting and code is Answer.PULL_NOT_FOUND:
            answer.code = code = Answer.PULL_RETRY_IMMEDIATELY
        return answer, code

    Puller._look = planted  # type: ignore[method-assign]


@plant("a target confirms what it has no room for", "brim")
def no_room_is_stored() -> None:
    from convoymq.rocketmq.acting.bridge import Intake
    from convoymq.rocketmq.broker.types import STORED
    from convoymq.rocketmq.store.types import Placed, PutStatus

    take = Intake.take

    async def planted(self: Any, draft: Any, key: Any) -> Any:
        placed = await take(self, draft, key)
        return placed if placed.status in STORED else Placed(PutStatus.PUT_OK)

    Intake.take = planted  # type: ignore[method-assign]


@plant("two brokers of one id go on, and slaves follow either", "twin")
def ids_are_not_looked_at() -> None:
    from convoymq.replication.group.slave import Slave
    from convoymq.rocketmq.ha.service import GroupReplication
    from convoymq.rocketmq.namesrv.tables import RouteTables

    roles = _roles()
    difference, on_members = roles._difference, roles.on_members

    def changes_over(self: Any, now_ms: int, wanted: bool) -> Any:
        from convoymq.rocketmq.acting.roles import Detach

        attached, master = self._attached, self._master
        is_ready = wanted == self._services_run and not self._registers
        if is_ready and attached is not None and master not in (None, attached.master):
            return Detach(attached.master)
        return difference(self, now_ms, wanted)

    def listed(self: Any, members: Any, asked_ms: int) -> None:
        own = self.settings.id
        if members.get(own, self.settings.address) != self.settings.address:
            members = {number: address for number, address in members.items() if number != own}
        on_members(self, members, asked_ms)

    RouteTables.holder = lambda self, replica: None  # type: ignore[method-assign]
    GroupReplication.check_master = lambda self, address: None  # type: ignore[method-assign]
    Slave._is_of_another = lambda self, common, address: False  # type: ignore[method-assign]
    roles._difference, roles.on_members = changes_over, listed
    _without_taken_ids()


def _without_taken_ids() -> None:
    from convoymq.rocketmq.acting import preonline

    module: Any = preonline
    begin = preonline.pre_online

    def planted(own_id: int, _own: str, *, skips: bool = False) -> Any:
        steps = begin(own_id, "", skips=skips)
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as stop:
                return stop.value
            result = yield step
            if isinstance(step, preonline.AskMembers) and result is not None:
                result = {n: address for n, address in result.items() if n != own_id}

    module.pre_online = planted


@plant("offsets that an acting slave took are not sent to a master that returned first", "alone")
def unsent_offsets_stay() -> None:
    from convoymq.rocketmq.broker.offsets import Offsets
    from convoymq.rocketmq.broker.values import OffsetTable

    Offsets.to_send = lambda self: OffsetTable()  # type: ignore[method-assign]
