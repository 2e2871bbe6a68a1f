"""The state of a broker's replication for `mqadmin haStatus` (907)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import MASTER_ID

if TYPE_CHECKING:
    from convoymq.rocketmq.ha.service import GroupReplication

RATE_MS = 1_000


class _SlaveState(msgspec.Struct, rename="camel", kw_only=True):
    """A slave, as its master knows it."""

    addr: str
    slave_ack_offset: int
    diff: int
    in_sync: bool
    transferred_byte_in_second: int
    transfer_from_where: int


class _MasterState(msgspec.Struct, rename="camel", kw_only=True):
    """A master, as its slave knows it."""

    master_addr: str | None = None
    transferred_byte_in_second: int = 0
    max_offset: int = 0
    last_read_timestamp: int = 0
    last_write_timestamp: int = 0
    master_flush_offset: int = 0
    """Nothing here needs one: logs are compared."""


class _State(msgspec.Struct, rename="camel", kw_only=True):
    master: bool
    master_commit_log_max_offset: int = 0
    in_sync_slave_nums: int = 0
    ha_connection_info: list[_SlaveState] = []
    ha_client_runtime_info: _MasterState = msgspec.field(default_factory=_MasterState)


class Rates:
    """Growth of offsets between the last two looks, a second or more apart."""

    def __init__(self) -> None:
        self._looked_ms = 0
        self._offsets: dict[int, int] = {}
        self._found: dict[int, int] = {}

    def look(self, now_ms: int, offsets: Callable[[], dict[int, int]]) -> None:
        """Compares with the last look, if that was long enough ago."""
        passed_ms = now_ms - self._looked_ms
        if passed_ms < RATE_MS:
            return
        before, self._offsets, self._looked_ms = self._offsets, offsets(), now_ms
        self._found = {
            link: max(0, offset - before[link]) * 1000 // passed_ms
            for link, offset in self._offsets.items() if link in before
        }  # fmt: skip

    def of(self, link: int) -> int:
        """Returns bytes a second of a link."""
        return self._found.get(link, 0)


class HaStatus:
    """Answers 907."""

    def __init__(self, replication: GroupReplication) -> None:
        self._of = replication
        self._rates = Rates()

    def look(self, now_ms: int) -> None:
        """Looks at what was transferred."""
        self._rates.look(now_ms, self._offsets)

    def _offsets(self) -> dict[int, int]:
        if self._of.master is None:
            return {MASTER_ID: self._of.end}
        return {view.link: view.sent for view in self._of.links()}

    def on_status(self, _connection: Connection, command: Command) -> Command:
        """Answers the request."""
        found = self._slave() if self._of.master is None else self._master()
        return command.answer(body=json.dumps(found))

    def _master(self) -> _State:
        end, views = self._of.end, self._of.links()
        return _State(
            master=True, master_commit_log_max_offset=end,
            in_sync_slave_nums=sum(view.in_sync for view in views),
            ha_connection_info=[
                _SlaveState(
                    addr=view.address or view.host, slave_ack_offset=view.acked,
                    diff=end - view.acked, in_sync=view.in_sync,
                    transferred_byte_in_second=self._rates.of(view.link),
                    transfer_from_where=view.sent,
                )
                for view in views
            ],
        )  # fmt: skip

    def _slave(self) -> _State:
        heard_ms, reported_ms = self._of.master_times_ms()
        return _State(
            master=False,
            ha_client_runtime_info=_MasterState(
                master_addr=self._of.ha_address, max_offset=self._of.end,
                transferred_byte_in_second=self._rates.of(MASTER_ID),
                last_read_timestamp=heard_ms, last_write_timestamp=reported_ms,
            ),
        )  # fmt: skip
