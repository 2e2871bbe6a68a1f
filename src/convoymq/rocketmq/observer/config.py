"""Section of a node's configuration: which broker groups it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from convoymq.model.config.keys import Section, key


@dataclass(frozen=True, slots=True, kw_only=True)
class RocketmqConfig(Section):
    """Broker groups of RocketMQ's protocol"""

    NAME: ClassVar[str] = "rocketmq"

    name_servers: str = key(
        "rocketmq.namesrv", "",
        "Name servers, `host:port` with `;` between: `/api/broker-groups` and `convoy ctl "
        "list_broker_groups` show what is registered there (docs/rocketmq.md#monitoring).",
    )  # fmt: skip
    timeout_ms: int = key(
        "rocketmq.timeout", 3000,
        "Time for all answers to one request: who is silent is shown as silent.",
        unit="ms", low=100, high=60_000,
    )  # fmt: skip
    access_key: str = key(
        "rocketmq.access_key",
        "",
        "Account that requests to brokers with `aclEnable` are signed for.",
    )
    secret_key: str = key("rocketmq.secret_key", "", "Its secret.", secret=True)
    authorities: str = key(
        "rocketmq.cacertfile", "",
        "PEM file with the authorities of name servers and brokers: connections to them have TLS.",
    )  # fmt: skip


SECTION = RocketmqConfig
