"""Configuration of a broker in its group, under RocketMQ's names and with its defaults."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.config.keys import Section, key


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingSettings(Section):
    """The part of a replica in its group while its master is away, and after."""

    replicas: int = key(
        "totalReplicas", 1, "Replicas of the broker that are configured, alive or not. With more "
        "than one, and `enableSlaveActingMaster`, a replica gets online with the others before it "
        "serves.", low=1, high=16,
    )  # fmt: skip
    skips_pre_online: bool = key(
        "skipPreOnline", False, "A replica serves at once; what others did meanwhile is not taken "
        "over.",
    )  # fmt: skip
    remote_escape: bool = key(
        "enableRemoteEscape", False, "Delayed, timed, half and pop messages of an acting slave go "
        "to other brokers; without it, to masters of the same process only.",
    )  # fmt: skip
    poll_ms: int = key(
        "syncBrokerMemberGroupPeriod", 1000, "Time between two looks for the members of the "
        "group.", unit="ms", low=10, high=60_000,
    )  # fmt: skip
    lock_strictly: bool = key(
        "lockInStrictMode", False, "A queue is locked for a consumer when a majority of the "
        "configured replicas does so: with two replicas of which one is away, never. Turn it on "
        "when order matters more than availability.",
    )  # fmt: skip
    route_ms: int = key(
        "loadBalancePollNameServerInterval", 30_000, "How long a route is used to choose where "
        "messages escape to.", unit="ms", low=100,
    )  # fmt: skip
