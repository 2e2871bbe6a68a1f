"""A replica in its group: carries out the steps of `roles.py` and `preonline.py`.

Three loops: the members of the group are asked for each second, the steps of a change are carried
out in order as soon as something was heard, and a slave copies its master's metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, assert_never

import structlog

from convoymq.model.errors import BrokerError, PeerError, Unavailable
from convoymq.rocketmq.acting import preonline, roles
from convoymq.rocketmq.acting.bridge import Bridge, Intake
from convoymq.rocketmq.acting.key_log import KeyLog
from convoymq.rocketmq.acting.learning import ASK_TIMEOUT_S, KeyLearner
from convoymq.rocketmq.acting.lock_requests import LockRequests
from convoymq.rocketmq.acting.metadata import Metadata
from convoymq.rocketmq.acting.roles import Roles, RoleSettings, State
from convoymq.rocketmq.acting.settings import ActingSettings
from convoymq.rocketmq.remoting.client import split_address
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import MASTER_ID

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker
    from convoymq.rocketmq.ha.service import SlaveView
    from convoymq.rocketmq.special.service import SpecialServices

log = structlog.get_logger()

TICK_S = 0.05
COPY_S = 10.0
COPY_CHANGES_S = 1.0
COPY_TIMES = 20
"""A copy takes at most one of so many parts of the time."""


class Group:
    """See the module text. Without `enableSlaveActingMaster` it only starts special services, and
    has a slave follow its master.

    Args:
        neighbours: other brokers of this process.
    """

    def __init__(
        self,
        parts: Broker,
        settings: ActingSettings,
        follower: SpecialServices | None = None,
        neighbours: Callable[[], Sequence[Intake]] = tuple,
    ) -> None:
        self.failures = 0
        """Steps that were tried in vain."""
        self._parts = parts
        self._settings = settings
        own = parts.settings
        role = parts.role
        self._roles = Roles(
            RoleSettings(
                id=role.id,
                address=role.address,
                acting_enabled=own.acting_master,
                replicas=settings.replicas,
                lease_ms=max(own.not_active_timeout_ms - 2 * own.heartbeat_ms, own.heartbeat_ms),
            )
        )
        self._name_servers = parts.registrar.servers
        self._heard = asyncio.Event()
        self._keys = KeyLog(role.name, parts.store, parts.file("escapeKeys.json"))
        self.intake = Intake(parts, self._keys)
        parts.escape = self.bridge = Bridge(
            parts, settings, self._name_servers, self._keys, neighbours
        )
        self.bridge.on_superseded = self._on_superseded
        self.learner = KeyLearner(
            parts, settings, self._keys, self.bridge, follower, lambda: self._roles.members
        )
        locks = LockRequests(
            parts, settings.replicas, lambda: self._roles.members, is_strict=settings.lock_strictly
        )
        parts.puller.guards.append(locks.guard)
        self._metadata = Metadata(parts, follower)
        self._followed: str | None = None
        """The master that this slave copies."""
        self._listed: dict[int, str] = {}
        """Other members, as pre-online sees them."""
        self._copied_s = self._copies_s = float("-inf")
        """Time of the last whole copy of metadata, and of the next copy."""
        parts.register(Request.NOTIFY_MIN_BROKER_ID_CHANGE, self._on_min_id)
        parts.register(Request.EXCHANGE_BROKER_HA_INFO, self._exchange)
        parts.register(Request.HAND_OVER_SERVICES, self._hand_over)
        parts.registrar.on_master.append(self._on_registered)
        self._reflect()

    @property
    def state(self) -> State:
        """Returns the role of this replica."""
        return self._roles.state

    def start(self) -> None:
        """Begins."""
        if not self._roles.is_isolated:
            self._parts.replication.begin()
        if self._parts.role.id != MASTER_ID:
            # Its end may have been cut just before a crash.
            self._metadata.on_cut()
            self._parts.replication.on_cut = self._metadata.on_cut
        works = [self._poll(), self._carry_out(), self._copy()]
        if self._learns:
            works.append(self.learner.complete())
        for work in works:
            self._parts.tasks.spawn(work)

    @property
    def master(self) -> str | None:
        """Returns the address of the master that this slave copies."""
        return self._followed

    @property
    def services_run(self) -> bool:
        """Returns whether special services run here."""
        return self._roles.services_run

    @property
    def members(self) -> dict[int, str]:
        """Returns the other replicas that name servers list."""
        return self._roles.members

    @property
    def _learns(self) -> bool:
        """Returns whether another replica may let messages escape."""
        return self._parts.settings.acting_master and self._settings.replicas > 1

    @property
    def _ha(self) -> str:
        return self._name_servers.own.ha_address

    def persist(self) -> None:
        """Writes the file of keys. Raises StorageFault."""
        self._keys.persist()

    def _wake(self) -> None:
        self._reflect()
        self._heard.set()

    def _reflect(self) -> None:
        """Enters the role into the broker's parts."""
        role, core = self._parts.role, self._roles
        before = role.is_isolated, role.is_acting, role.min_id
        role.is_isolated = core.is_isolated
        role.is_acting = core.state is State.ACTING
        role.min_id = core.min_id
        role.min_address = core.members.get(core.min_id, role.address)
        if before != (role.is_isolated, role.is_acting, role.min_id):
            log.info("rocketmq.role", broker=role.name, id=role.id, state=core.state.value,
                     min_id=core.min_id)  # fmt: skip
            if role.is_acting and not before[1]:
                self._metadata.assume_topics()
                self._parts.offsets.begin_acting()
            if self._parts.trace is not None and role.is_acting != before[1]:
                self._parts.trace.acting(begins=role.is_acting)

    # --- inputs --------------------------------------------------------------------------

    def _on_min_id(self, connection: Connection, command: Command) -> Command:
        fields = command.fields
        if fields.get("brokerName", self._parts.role.name) == self._parts.role.name:
            self._roles.on_min_id(
                command.number("minBrokerId"), command.needed("minBrokerAddr"),
                fields.get("offlineBrokerAddr"), fields.get("haBrokerAddr"),
            )  # fmt: skip
            self._wake()
        return command.answer()

    def _on_registered(self, master: str, ha_address: str) -> None:
        self._roles.on_registered(master, ha_address or None)
        self._wake()

    def _on_superseded(self) -> None:
        self._roles.on_superseded()
        self._wake()

    async def _poll(self) -> None:
        """Asks name servers for the members of the group."""
        if not self._parts.settings.acting_master:
            return
        while True:
            asked_ms = self._parts.steady_ms()
            try:
                members = await self._name_servers.members()
            except PeerError as error:
                log.info("rocketmq.member_silent", address="name server", reason=error.text)
                members = None
            if members is not None:
                self._parts.replication.set_alive(len(members) or None)
                self._roles.on_members(members, asked_ms)
                self._wake()
                # A broker may get messages of another slave, and end, within seconds of its start.
                await self.learner.look_for_holders()
            passed_ms = self._parts.steady_ms() - asked_ms
            await asyncio.sleep(max(0, self._settings.poll_ms - passed_ms) / 1000)

    def _look_at_links(self) -> None:
        """Enters the state of replication links."""
        core, now_ms = self._roles, self._parts.steady_ms()
        replication = self._parts.replication
        if self._parts.role.id != MASTER_ID:
            silent_ms = replication.master_silent_ms()
            if self._followed is not None and silent_ms is not None:
                core.on_link(self._followed, now_ms - silent_ms)
            elif self._followed is not None:
                core.on_link_ended(self._followed)
            return
        for number, address in core.members.items():
            link = self._link_of(number, address)
            if link is None:
                core.on_link_ended(address)
            else:
                core.on_link(address, now_ms - link.silent_ms)

    def _link_of(self, number: int | None, address: str) -> SlaveView | None:
        """Returns a slave's link: one of RocketMQ's shows its host only."""
        host, _ = split_address(address)
        return next(
            (
                link
                for link in self._parts.replication.links()
                if link.slave == number or (link.slave is None and link.host == host)
            ),
            None,
        )

    # --- steps of a change ------------------------------------------------------------------------

    async def _carry_out(self) -> None:
        while True:
            if self._roles.needs_pre_online and not self._roles.services_run:
                await self._get_online()
            self._look_at_links()
            step = self._roles.next_step(self._parts.steady_ms())
            if step is None:
                self._heard.clear()
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._heard.wait()
                except TimeoutError:
                    pass
                continue
            try:
                await self._do(step)
            except BrokerError as error:
                self.failures += 1
                log.warning("rocketmq.step_failed", step=type(step).__name__, reason=error.text)
                self._roles.failed(step, self._parts.steady_ms())
            else:
                self._roles.done(step)
            self._reflect()

    async def _do(self, step: roles.Step) -> None:
        parts = self._parts
        match step:
            case roles.RunServices(run=True):
                await self._await_log()
                if self._learns:
                    await self.learner.learn()
                for service in parts.specials:
                    service.start()
                log.info("rocketmq.services_started", broker=parts.role.name, id=parts.role.id)
            case roles.RunServices():
                for service in parts.specials:
                    await service.stop()
                log.info("rocketmq.services_stopped", broker=parts.role.name, id=parts.role.id)
            case roles.Register():
                await parts.registrar.register_all()
            case roles.Detach():
                parts.remoting.close(step.master)
                self._followed = None
                parts.replication.set_master(None)
                log.info("rocketmq.detached", master=step.master)
            case roles.AskHaAddress():
                self._roles.on_ha_address(step.master, await self._ha_address(step.master))
            case roles.Attach():
                self._attach(step.master, step.ha_address)
            case roles.WakePulls():
                parts.wake_pulls()
            case _:
                assert_never(step)

    async def _await_log(self) -> None:
        """Waits until special services have followed the log to its end: what a slave has copied
        and not stored yet tells what has left, and what a master lacks, its slaves have. Raises
        Unavailable: a disk is full, or slow, or the log was not compared with enough slaves."""
        if self._parts.role.id == MASTER_ID and not self._parts.replication.begin():
            raise Unavailable("the log may lack messages that slaves have")
        store, end = self._parts.store, self._parts.replication.whole_end
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                while store.dispatched < end:
                    await asyncio.sleep(TICK_S / 5)
        except TimeoutError:
            text = f"the log ends at {end}, and is stored up to {store.dispatched}"
            raise Unavailable(text) from None

    def _attach(self, master: str, ha_address: str) -> None:
        self._followed = master
        self._parts.replication.set_master(ha_address, master)
        self._copied_s = self._copies_s = float("-inf")
        log.info("rocketmq.attached", master=master, ha_address=ha_address)

    async def _ha_address(self, master: str) -> str:
        """Returns where a master's log is, "" if it does not say. Raises Unavailable."""
        answer = await self._ask(master, Request.EXCHANGE_BROKER_HA_INFO, {})
        return answer.fields.get("masterHaAddress", "")

    async def _ask(self, address: str, code: int, fields: dict[str, str]) -> Command:
        connection = await self._parts.remoting.connected(address, ASK_TIMEOUT_S)
        return await connection.request(request(code, fields), ASK_TIMEOUT_S)

    # --- pre-online -------------------------------------------------------------------------------

    async def _get_online(self) -> None:
        begun_ms = self._parts.steady_ms()
        while True:
            role, skips = self._parts.role, self._settings.skips_pre_online
            steps = preonline.pre_online(role.id, role.address, skips=skips)
            online = await self._run(steps)
            if online.is_fresh(self._parts.steady_ms()):
                break
        self._parts.replication.begin()
        self._roles.on_pre_online_ended(online.members, online.ha_address, self._parts.steady_ms())
        self._reflect()
        log.info("rocketmq.online", broker=self._parts.role.name, id=self._parts.role.id,
                 state=self._roles.state.value,
                 took_ms=self._parts.steady_ms() - begun_ms)  # fmt: skip

    async def _run(self, steps: preonline.Steps) -> preonline.Online:
        result: preonline.Result = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as stop:
                online: preonline.Online = stop.value
                return online
            try:
                result = await self._do_online(step)
            except (BrokerError, TimeoutError) as error:
                self.failures += 1
                log.info("rocketmq.pre_online_waits", step=type(step).__name__, reason=str(error))
                result = None

    async def _do_online(self, step: preonline.Step) -> preonline.Result:
        parts = self._parts
        match step:
            case preonline.Wait():
                await asyncio.sleep(step.ms / 1000)
                return None
            case preonline.AskMembers():
                members = await self._name_servers.members()
                self._listed = members or {}
                return members
            case preonline.IdTaken():
                log.error("rocketmq.id_taken", broker=parts.role.name, id=parts.role.id,
                          holder=step.address)  # fmt: skip
                self._parts.replication.step_down()
                return None
            case preonline.TellHaAddress():
                fields = {
                    "masterHaAddress": self._ha,
                    "masterFlushOffset": str(parts.store.max_offset),
                    "masterAddress": parts.role.address,
                }
                answer = await self._ask(step.address, Request.EXCHANGE_BROKER_HA_INFO, fields)
                if answer.code != Answer.SUCCESS:
                    raise Unavailable(answer.remark or f"answer {answer.code}")
                return True
            case preonline.CompareTails():
                return await parts.replication.compare_with(step.address)
            case preonline.AwaitLink():
                return await self._await_link(step)
            case preonline.TakeOver():
                return await self._take_over(step.address)
            case preonline.Join():
                await self._metadata.join(step.address)
                return None
            case preonline.AskMaster():
                return await self._ha_address(step.address)
            case preonline.Follow():
                self._attach(step.address, step.ha_address)
                return True
            case _:
                assert_never(step)

    async def _await_link(self, step: preonline.AwaitLink) -> bool:
        replication = self._parts.replication
        number = self._parts.role.id
        slaves = {address: n for n, address in self._listed.items()}
        async with asyncio.timeout(step.timeout_ms / 1000):
            while True:
                if number != MASTER_ID:
                    is_there = replication.master_silent_ms() is not None
                else:
                    is_there = self._link_of(slaves.get(step.address), step.address) is not None
                if is_there:
                    return True
                await asyncio.sleep(TICK_S / 5)

    async def _take_over(self, member: str) -> int | None:
        """Takes special services and metadata over; returns when that began."""
        begun_ms = self._parts.steady_ms()
        fields = {"brokerName": self._parts.role.name}
        answer = await self._ask(member, Request.HAND_OVER_SERVICES, fields)
        if answer.code not in (Answer.SUCCESS, Answer.REQUEST_CODE_NOT_SUPPORTED):
            raise Unavailable(f"{member} hands nothing over: {answer.remark}")
        return begun_ms if await self._metadata.take_over(member) else None

    async def _hand_over(self, connection: Connection, command: Command) -> Command:
        """A master gets online: this slave's special services end before it is answered."""
        self._roles.on_hand_over(self._parts.steady_ms())
        self._wake()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                while self._roles.services_run:
                    await asyncio.sleep(TICK_S / 5)
        except TimeoutError:
            raise Unavailable("special services still run here") from None
        return command.answer()

    def _exchange(self, connection: Connection, command: Command) -> Command:
        """Tells a slave where this master's log is, or follows a master that says so (906)."""
        parts = self._parts
        ha_address = command.fields.get("masterHaAddress")
        if ha_address is None:
            if parts.role.id != MASTER_ID:
                return command.answer()
            fields = {
                "masterHaAddress": self._ha,
                "masterFlushOffset": str(parts.store.max_offset),
                "masterAddress": parts.role.address,
            }
            return command.answer(fields=fields)
        if parts.role.id != MASTER_ID:
            address = command.needed("masterAddress")
            parts.replication.check_master(address)
            self._attach(address, ha_address)
            self._wake()
        return command.answer()

    # --- a slave copies metadata -----------------------------------------------------------------

    def _other_slaves(self) -> list[str]:
        if self._parts.role.id == MASTER_ID:
            return []
        return [a for number, a in self._roles.members.items() if number != MASTER_ID]

    async def _copy(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            begun_s = loop.time()
            if self._roles.is_isolated or begun_s < self._copies_s:
                continue
            master = self._roles.master
            sources = [master] if master is not None else self._other_slaves()
            for address in sources:
                try:
                    if master is None:
                        await self._metadata.join(address)
                    elif begun_s - self._copied_s >= COPY_S:
                        self._copied_s = begun_s
                        await self._metadata.copy(address)
                    else:
                        await self._metadata.copy_changes(address)
                except BrokerError as error:
                    log.info("rocketmq.member_silent", address=address, reason=error.text)
            took_s = loop.time() - begun_s
            self._copies_s = begun_s + max(COPY_CHANGES_S, COPY_TIMES * took_s)
