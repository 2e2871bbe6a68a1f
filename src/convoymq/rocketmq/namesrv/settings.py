"""Configuration of a name server, under RocketMQ's names."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.config.keys import key
from convoymq.rocketmq.exposition import ServerSettings

UNSERVED = (
    *("rocketmqHome", "configStorePath", "productEnvName", "clusterTest"),
    *("enableControllerInNamesrv",),
    *("defaultThreadPoolNums", "clientRequestThreadPoolNums", "defaultThreadPoolQueueCapacity"),
    *("clientRequestThreadPoolQueueCapacity", "unRegisterBrokerQueueCapacity"),
    *("serverWorkerThreads", "serverCallbackExecutorThreads", "serverSelectorThreads"),
    *("serverOnewaySemaphoreValue", "serverAsyncSemaphoreValue", "serverSocketSndBufSize"),
    *("serverSocketRcvBufSize", "writeBufferHighWaterMark", "writeBufferLowWaterMark"),
    *("serverSocketBacklog", "serverNettyWorkerGroupEnable", "serverPooledByteBufAllocatorEnable"),
    *("enableShutdownGracefully", "shutdownWaitTimeSeconds", "useEpollNativeSelector"),
)  # fmt: skip
"""Sizes of thread pools, queues and buffers that do not exist here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesrvSettings(ServerSettings):
    """A name server's configuration."""

    port: int = key("listenPort", 9876, "Port of the name server.", low=0, high=65535)
    host: str = key("bindAddress", "0.0.0.0", "Address that it listens on.")
    kv_path: str = key(
        "kvConfigPath", "", "File of the keys and values; without it, `namesrv/kvConfig.json` in "
        "the home directory.",
    )  # fmt: skip
    scan_ms: int = key(
        "scanNotActiveBrokerInterval", 5000, "Longest time between two looks for silent brokers.",
        unit="ms", low=10, high=3_600_000,
    )  # fmt: skip
    support_acting_master: bool = key(
        "supportActingMaster", False,
        "Routes name the slave that acts as master where the master is gone.",
    )  # fmt: skip
    notify_min_id: bool = key(
        "notifyMinBrokerIdChanged", True,
        "Brokers are told when the smallest id of their group changes. RocketMQ's own default is "
        "false: its slaves find out by asking, once a second.",
    )  # fmt: skip
    wait_for_service: bool = key(
        "needWaitForService", False,
        "Routes are refused until brokers had the time to register after a start.",
    )  # fmt: skip
    wait_s: int = key(
        "waitSecondsForService", 45, "How long they are refused.", unit="s", low=0, high=3600
    )
    topic_list: bool = key("enableTopicList", True, "Lists of topics by cluster are answered.")
    all_topic_list: bool = key("enableAllTopicList", True, "Lists of all topics are answered.")
    order_enabled: bool = key(
        "orderMessageEnable", False, "Routes hold the configuration of ordered topics."
    )
    order_to_broker: bool = key(
        "returnOrderTopicConfigToBroker", True,
        "Brokers that register are given the configuration of ordered topics.",
    )  # fmt: skip
    delete_unregistered_topics: bool = key(
        "deleteTopicWithBrokerRegistration", False,
        "A topic that is missing from a broker's registration is forgotten.",
    )  # fmt: skip
    idle_s: int = key(
        "serverChannelMaxIdleTimeSeconds", 120,
        "A connection on which nothing arrives for so long is closed.",
        unit="s", low=1, high=86_400,
    )  # fmt: skip
    black_list: str = key(
        "configBlackList", "configBlackList;configStorePath;kvConfigPath",
        "Keys that no request may change, separated by `;`.",
    )  # fmt: skip

    def refused_keys(self) -> frozenset[str]:
        """Returns the keys that no request may change."""
        return frozenset((*self.black_list.split(";"), "configBlackList", "kvConfigPath"))
