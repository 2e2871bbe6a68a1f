"""Decides which part of a broker's work a replica does, without I/O.

| state | entered when | serves |
|---|---|---|
| isolated | start, with `totalReplicas > 1` | nothing but the members of its group |
| slave | a smaller id is there | reads if it is asked to, offsets |
| acting | it is the smallest id, and not 0 | as a slave; locks, special services by escape |
| master | id 0, after pre-online | everything |

*Special services* work for delayed, timed, half and pop messages. Inputs are the smallest id as a
name server notifies it (905), the members of the group (901, each second), the end of a
connection, and what the replication link shows. No input orders anything to be done: `next_step`
compares what should hold with what was carried out, and returns the first difference. A step that
fails is the next one again after `RETRY_MS`; one that a newer input made pointless is never
returned. The order is:

    special services → register → detach from the master → its HA address → attach → wake pulls

Two replicas must not run special services at once: a message that one delivers and one lets
escape is doubled. A name server's view alone does not prevent it. So

- an acting slave starts them only when its link to the master is silent or ended;
- both run them under a *lease*: a name server lists the replica, or all slaves of a master answer
  on their links. It lasts as long as a name server waits for a silent broker. A slave without one
  may have missed its master. After its end a master has to get online again (`needs_pre_online`),
  by which it learns what has left meanwhile;
- a replica that got online starts them when a name server has listed it since. Of two that start
  together one sees the other: a slave leaves them to the master, a master gets online again.

RocketMQ's brokers do neither. Source: docs/adr/0150.

A replica whose id name servers list at another address gets online again, and waits until the id is
free (docs/adr/0217).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from convoymq.rocketmq.remoting.values import MASTER_ID

RETRY_MS = 1000
HAND_OVER_MS = 10_000
"""So long a slave leaves special services to a master that took them over to get online."""


class State(Enum):
    """See the table of the module."""

    ISOLATED = "isolated"
    SLAVE = "slave"
    ACTING = "acting"
    MASTER = "master"


@dataclass(frozen=True, slots=True)
class RunServices:
    """Starts or ends the special services. Done when none of their work is under way."""

    run: bool


@dataclass(frozen=True, slots=True)
class Detach:
    """Closes connections to a master, and ends replication from it."""

    master: str


@dataclass(frozen=True, slots=True)
class AskHaAddress:
    """Asks a master for the address of its log (906); `Roles.on_ha_address` takes the answer."""

    master: str


@dataclass(frozen=True, slots=True)
class Attach:
    """Replicates from a master, and takes its metadata over."""

    master: str
    ha_address: str


@dataclass(frozen=True, slots=True)
class WakePulls:
    """Answers all held pulls, so that clients go back to the master."""


@dataclass(frozen=True, slots=True)
class Register:
    """Registers with all name servers: one does not list this replica."""


Step: TypeAlias = RunServices | Detach | AskHaAddress | Attach | WakePulls | Register


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """Configuration that decides roles. `lease_ms`: `brokerNotActiveTimeoutMillis`."""

    id: int
    address: str
    acting_enabled: bool = False
    replicas: int = 1
    lease_ms: int = 10_000


class Roles:
    """See the module text. All times are of one monotonic clock."""

    def __init__(self, settings: RoleSettings) -> None:
        self.settings = settings
        self.is_isolated = settings.acting_enabled and settings.replicas > 1
        self.members: dict[int, str] = {}
        """Other replicas that name servers list."""
        self.min_id = settings.id
        self.needs_pre_online = self.is_isolated
        self._is_first_view = True
        self._looked_at: Mapping[int, str] = {}
        """Members as pre-online saw them."""
        self._is_seen = not self.is_isolated
        """A name server listed this replica since it got online, with all that are there."""
        self._master: str | None = None
        self._ha_address: str | None = None
        self._listed_ms: int | None = None
        self._link_heard_ms: dict[str, int] = {}
        """master: address of a slave -> when its link was heard. Slave: that of the master."""
        self._left_until_ms: int | None = None
        self._is_superseded = False
        """Another replica ran special services meanwhile."""
        self._wakes = self._registers = False
        self._retry_ms: int | None = None
        self._services_run = False
        self._attached: Attach | None = None

    # --- what holds -------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Returns the row of the table."""
        if self.is_isolated:
            return State.ISOLATED
        if self.settings.id == MASTER_ID:
            return State.MASTER
        return State.ACTING if self.min_id == self.settings.id and self._acts else State.SLAVE

    @property
    def _acts(self) -> bool:
        return self.settings.acting_enabled

    @property
    def master(self) -> str | None:
        """Returns the address of the master that is listed, None for the master itself."""
        return self._master

    @property
    def services_run(self) -> bool:
        """Returns whether the special services were started."""
        return self._services_run

    def services_wanted(self, now_ms: int) -> bool:
        """Returns whether this replica may run the special services."""
        match self.state:
            case State.MASTER:
                return not self.needs_pre_online and self._is_seen and self._has_lease(now_ms)
            case State.ACTING if self._is_seen and self._has_lease(now_ms):
                is_left = self._left_until_ms is not None and now_ms < self._left_until_ms
                return not (is_left or self._is_superseded or self._hears_any(now_ms))
            case _:
                return False

    def _hears(self, address: str, now_ms: int) -> bool:
        heard = self._link_heard_ms.get(address)
        return heard is not None and now_ms - heard < self.settings.lease_ms

    def _hears_any(self, now_ms: int) -> bool:
        return any(self._hears(address, now_ms) for address in self._link_heard_ms)

    def _has_lease(self, now_ms: int) -> bool:
        if not self._acts or self.settings.replicas == 1:
            return True
        if self._listed_ms is not None and now_ms - self._listed_ms < self.settings.lease_ms:
            return True
        slaves = self.members.values()
        return bool(slaves) and all(self._hears(address, now_ms) for address in slaves)

    # --- inputs -----------------------------------------------------------------------------

    def on_pre_online_ended(
        self, members: Mapping[int, str], ha_address: str | None, now_ms: int
    ) -> None:
        """Goes online. `members`: others that are listed, and looked at last."""
        self.is_isolated = self.needs_pre_online = False
        self._listed_ms = now_ms
        self._registers = True
        self._looked_at, self._is_seen = dict(members), False
        self._retry_ms = None
        self._view(members, ha_address)

    def on_members(self, members: Mapping[int, str], asked_ms: int) -> None:
        """Name servers list these replicas, this one among them if it is registered.

        Args:
            members: what all name servers together list: a replica that one of them hears is alive.
            asked_ms: when they were asked.
        """
        own = self.settings.id
        if self.is_isolated:
            return
        if members.get(own, self.settings.address) != self.settings.address:
            self.is_isolated = self.needs_pre_online = True
            return
        if own in members:
            if self._listed_ms is None or asked_ms > self._listed_ms:
                self._listed_ms = asked_ms
            if not self._registers and not self._is_seen:
                self._is_seen = True
                # Replicas that start together do not see each other before one has registered.
                if own == MASTER_ID and members.keys() - self._looked_at.keys() > {own}:
                    self.needs_pre_online = True
        else:
            # Heartbeats never bring an entry back that a name server has dropped.
            self._registers = True
        if not self._acts:
            return
        if members:
            self._view({n: a for n, a in members.items() if n != own}, None)

    def on_min_id(
        self, min_id: int, address: str, offline: str | None, ha_address: str | None
    ) -> None:
        """A name server notifies of the smallest id. One of no further use changes nothing."""
        own = self.settings.id
        if self.is_isolated or not self._acts or own == MASTER_ID:
            return
        members = {n: a for n, a in self.members.items() if n >= min_id and a != offline}
        if min_id != own:
            members[min_id] = address
        self._view(members, ha_address)

    def on_registered(self, master: str | None, ha_address: str | None) -> None:
        """A name server took this slave's registration, and named its master."""
        if self.settings.id == MASTER_ID or self.is_isolated or master is None:
            return
        if not self._acts:
            self._view({MASTER_ID: master}, ha_address)
        elif ha_address is not None:
            self.on_ha_address(master, ha_address)

    def on_ha_address(self, master: str, ha_address: str) -> None:
        """A master answered where its log is."""
        if master == self._master:
            self._ha_address = ha_address

    def on_link(self, address: str, heard_ms: int) -> None:
        """A replica answers on its replication link, which transfers the log."""
        self._link_heard_ms[address] = heard_ms

    def on_link_ended(self, address: str) -> None:
        """A replication link ended."""
        self._link_heard_ms.pop(address, None)

    def on_hand_over(self, now_ms: int) -> None:
        """A master that gets online takes the special services over."""
        self._left_until_ms = now_ms + HAND_OVER_MS

    def on_superseded(self) -> None:
        """A target takes what another replica sends: special services end, and begin anew with
        what has left meanwhile."""
        self._is_superseded = self._services_run

    def _view(self, members: Mapping[int, str], ha_address: str | None) -> None:
        own = self.settings.id
        former = self.min_id
        self.members = dict(members)
        self.min_id = min((own, *members))
        master = members.get(MASTER_ID) if own != MASTER_ID else None
        if master != self._master:
            self._master, self._ha_address = master, None
            self._wakes = master is not None and not self._is_first_view
            self._retry_ms = None
        if master is not None and ha_address:
            self._ha_address = ha_address
        if former != self.min_id:
            self._retry_ms = None
        if self.min_id == MASTER_ID and own != MASTER_ID:
            self._left_until_ms = None
        self._is_first_view = False

    # --- steps ------------------------------------------------------------------------------

    def next_step(self, now_ms: int) -> Step | None:
        """Returns the step to carry out now; `done` or `failed` has to follow."""
        wanted = self.services_wanted(now_ms)
        if self.state is State.MASTER and self._services_run and not wanted:
            self.needs_pre_online = True
        if wanted != self._services_run and not wanted:
            # Never waits for a retry of something else.
            return RunServices(False)
        if self._retry_ms is not None and now_ms < self._retry_ms:
            return None
        return self._difference(now_ms, wanted)

    def _difference(self, now_ms: int, wanted: bool) -> Step | None:
        attached, master = self._attached, self._master
        if wanted != self._services_run:
            return RunServices(wanted)
        if self.is_isolated:
            return None
        if self._registers:
            return Register()
        if attached is not None and attached.master != master:
            # A master that no name server hears, or that another one displaced there, is followed
            # as long as its link is heard.
            return None if self._hears(attached.master, now_ms) else Detach(attached.master)
        if master is not None:
            if self._ha_address is None:
                return AskHaAddress(master)
            if attached != Attach(master, self._ha_address):
                return Attach(master, self._ha_address)
        return WakePulls() if self._wakes else None

    def done(self, step: Step) -> None:
        """A step was carried out."""
        self._retry_ms = None
        match step:
            case RunServices():
                self._services_run = step.run
                self._is_superseded = False
            case Detach():
                self._attached = None
                self._link_heard_ms.pop(step.master, None)
            case Attach():
                self._attached = step
            case WakePulls():
                self._wakes = False
            case Register():
                self._registers = False
            case AskHaAddress():
                pass

    def failed(self, _step: Step, now_ms: int) -> None:
        """A step could not be carried out: it is tried again before those that follow."""
        self._retry_ms = now_ms + RETRY_MS

    def check_invariants(self) -> None:
        """Raises AssertionError when what holds is contradictory."""
        own = self.settings.id
        assert own not in self.members
        assert self.min_id <= own
        assert self._master is None or own != MASTER_ID
        assert not self.is_isolated or self.needs_pre_online or not self._services_run
