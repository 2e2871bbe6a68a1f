"""Brokers of any names and ids in this process, with a real name server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from tests.patience import PATIENCE_S
from tests.rocketmq.broker_client import Client, configuration
from tests.running import until


class Groups:
    """A name server and brokers of any names and ids."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_ms = lambda: int(asyncio.get_running_loop().time() * 1000)
        self.name_server = NameServer(
            NamesrvSettings(port=0, host="127.0.0.1", kv_path=str(directory / "kv.json"),
                            scan_ms=20, support_acting_master=True), self.now_ms
        )  # fmt: skip
        self.address = ""
        self.brokers: list[Broker] = []
        self.clients: list[Client] = []
        self.ports: dict[Broker, int] = {}

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self.name_server.start()}"

    async def broker(self, name: str, number: int = 0, **settings: object) -> Broker:
        """Starts a broker; again with the same files if it was stopped."""
        chosen = {
            "brokerName": name, "brokerId": number, "namesrvAddr": self.address,
            "brokerRole": "SLAVE" if number else "ASYNC_MASTER", "slaveReadEnable": True,
            "enableSlaveActingMaster": True, "enableRemoteEscape": True, "totalReplicas": 2,
            "brokerHeartbeatInterval": 50, "brokerNotActiveTimeoutMillis": 5000,
            "syncBrokerMemberGroupPeriod": 50, "loadBalancePollNameServerInterval": 100,
            "compatibleWithOldNameSrv": False,
        } | settings  # fmt: skip
        made = Broker(configuration(self.directory / f"{name}-{number}", **chosen))
        self.brokers.append(made)
        self.ports[made] = await made.start()
        return made

    async def online(self, name: str, number: int = 0, **settings: object) -> Broker:
        """Starts a broker and waits until clients find it."""
        made = await self.broker(name, number, **settings)
        await until(lambda: made.group.state is not State.ISOLATED)

        async def is_listed() -> bool:
            members = await made.registrar.servers.members()
            return members is not None and members.get(number) == made.role.address

        await eventually(is_listed)
        await until(lambda: made.group.state is not State.ACTING or made.group.services_run)
        return made

    def client(self, broker: Broker) -> Client:
        made = Client(self.ports[broker])
        self.clients.append(made)
        return made

    async def stop_broker(self, broker: Broker) -> None:
        self.brokers.remove(broker)
        await broker.stop()

    async def stop(self) -> None:
        for client in self.clients:
            await client.remoting.stop()
        for broker in self.brokers:
            await broker.stop()
        await self.name_server.stop()


async def eventually(condition: Callable[[], object]) -> None:
    """Waits for a condition that has to be awaited."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # type: ignore[misc]
            await asyncio.sleep(0.01)
