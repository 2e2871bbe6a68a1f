"""Configuration of a bridge."""

from __future__ import annotations

import re
from dataclasses import dataclass

from convoymq.client import ClientConfig
from convoymq.model.config.keys import key
from convoymq.rocketmq.remoting.tls import ClientTlsSettings

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings(ClientTlsSettings):
    """A bridge between ConvoyMQ and RocketMQ, in one direction or both."""

    name: str = key(
        "bridgeName", "bridge",
        "What both sides know the bridge by: its consumer group, its reservation, its producers. "
        "A bridge that is started again under its name goes on where it was.",
    )  # fmt: skip
    name_servers: str = key("namesrvAddr", "", "RocketMQ's name servers, host:port, `;` between.")
    access_key: str = key(
        "accessKey", "", "Account at RocketMQ's brokers, where they want signatures."
    )
    secret_key: str = key("secretKey", "", "Its secret.", secret=True)
    servers: str = key("servers", "127.0.0.1:5672", "ConvoyMQ's nodes, host:port, `,` between.")
    user: str = key("user", "guest", "User at ConvoyMQ.")
    password: str = key("password", "guest", "Its password.", secret=True)
    vhost: str = key("vhost", "/", "Virtual host.")
    from_rocketmq_topic: str = key("fromRocketmqTopic", "", "Topic of RocketMQ that is read.")
    to_queue: str = key("toQueue", "", "Queue or stream that gets its messages.")
    to_topic: str = key("toTopic", "", "Ordered topic that gets them instead.")
    from_queue: str = key("fromQueue", "", "Queue that is read.")
    from_topic: str = key("fromTopic", "", "Ordered topic that is read instead.")
    to_rocketmq_topic: str = key("toRocketmqTopic", "", "Topic of RocketMQ that gets its messages.")
    to_rocketmq_broker: str = key(
        "toRocketmqBroker", "",
        "Name of the broker that stores them; needed where the topic is on several. One log knows "
        "what it has.",
    )  # fmt: skip
    window: int = key(
        "window", 500, "Messages that are under way at once, in each direction; of a topic of "
        "RocketMQ by queue.", low=1, high=16_384,
    )  # fmt: skip
    window_bytes: int = key(
        "windowBytes", 4 << 20, "Likewise, about so many bytes.", low=1, high=64 << 20
    )
    retry_ms: int = key(
        "retryInterval", 1000, "Time until what failed is tried again.", unit="ms", low=10,
        high=600_000,
    )  # fmt: skip
    poll_ms: int = key(
        "pollInterval", 200, "Time between two looks at an empty queue.", unit="ms", low=10,
        high=600_000,
    )  # fmt: skip
    refused: str = key(
        "refused", "stop",
        "A message that the other side refuses ends the bridge, or goes to the place for dead "
        "letters of the side that it comes from.",
        choices=("stop", "deadLetter"),
    )  # fmt: skip
    dead_letter_rocketmq_topic: str = key(
        "deadLetterRocketmqTopic", "", "Topic of RocketMQ for what ConvoyMQ refuses."
    )
    dead_letter_queue: str = key(
        "deadLetterQueue", "", "Quorum queue or stream for what RocketMQ refuses."
    )

    @property
    def to_convoymq(self) -> bool:
        """Returns whether a topic of RocketMQ is read."""
        return bool(self.from_rocketmq_topic)

    @property
    def to_rocketmq(self) -> bool:
        """Returns whether a queue or an ordered topic is read."""
        return bool(self.from_queue or self.from_topic)

    @property
    def account(self) -> tuple[str, str] | None:
        """Returns the account at RocketMQ's brokers, if there is one."""
        return (self.access_key, self.secret_key) if self.access_key else None

    def client_config(self) -> ClientConfig:
        """Returns where ConvoyMQ is. Raises ValueError."""
        servers = tuple(each.strip() for each in self.servers.split(","))
        return ClientConfig(
            servers, self.user, self.password, self.vhost, timeout=10.0, name=f"bridge {self.name}"
        )

    def check(self) -> None:
        """Raises ValueError."""
        ClientTlsSettings.check(self)
        self.client_config()
        if not _NAME.fullmatch(self.name):
            raise ValueError("bridgeName: 1 to 64 letters, digits, `_` and `-`")
        if not self.name_servers.strip("; "):
            raise ValueError("namesrvAddr: a bridge needs a name server of RocketMQ")
        if not self.to_convoymq and not self.to_rocketmq:
            raise ValueError("fromRocketmqTopic, fromQueue or fromTopic: nothing is to be moved")
        if self.to_convoymq and bool(self.to_queue) == bool(self.to_topic):
            raise ValueError("fromRocketmqTopic: needs either toQueue or toTopic")
        if self.to_rocketmq and (bool(self.from_queue) == bool(self.from_topic)):
            raise ValueError("fromQueue and fromTopic: one of them")
        if self.to_rocketmq and not self.to_rocketmq_topic:
            raise ValueError("toRocketmqTopic: needed with fromQueue and fromTopic")
        if self.to_convoymq and self.to_rocketmq and (
            self.from_rocketmq_topic, self.to_queue, self.to_topic
        ) == (self.to_rocketmq_topic, self.from_queue, self.from_topic):  # fmt: skip
            raise ValueError("fromRocketmqTopic: what comes from there would come back for ever")
        if self.refused == "deadLetter":
            if self.to_convoymq and not self.dead_letter_rocketmq_topic:
                raise ValueError("refused=deadLetter: needs deadLetterRocketmqTopic")
            if self.to_rocketmq and not self.dead_letter_queue:
                raise ValueError("refused=deadLetter: needs deadLetterQueue")
