"""Configuration of a broker, under RocketMQ's names and with its defaults."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from convoymq.model.config.keys import key
from convoymq.model.config.values import parse_bytes
from convoymq.rocketmq.broker.upstream_keys import UPSTREAM_KEYS
from convoymq.rocketmq.exposition import ServerSettings

UNSERVED = UPSTREAM_KEYS
"""Keys of RocketMQ's. Those that no section has are passed over: sizes of its thread pools and
queues, and features that do not exist here."""

ASYNC_MASTER = "ASYNC_MASTER"
SYNC_MASTER = "SYNC_MASTER"
SLAVE = "SLAVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings(ServerSettings):
    """A broker's configuration: what the other sections do not have."""

    name: str = key("brokerName", "broker-a", "Name of the broker, which its replicas share.")
    cluster: str = key("brokerClusterName", "DefaultCluster", "Cluster that it belongs to.")
    id: int = key("brokerId", 0, "0 for the master, another number for each slave.", low=0)
    role: str = key(
        "brokerRole", ASYNC_MASTER,
        "Whether a master waits for its slaves before it confirms a message.",
        choices=(ASYNC_MASTER, SYNC_MASTER, SLAVE),
    )  # fmt: skip
    port: int = key("listenPort", 10911, "Port for clients. Two below it is a second one, for "
                    "sends and administration only.", low=0, high=65535)  # fmt: skip
    host: str = key("bindAddress", "0.0.0.0", "Address that it listens on.")
    address: str = key(
        "brokerIP1", "", "Address that clients are given; without one, that of this machine."
    )
    ha_address: str = key(
        "brokerIP2", "", "Address that slaves are given; without one, that of clients."
    )
    ha_port: int = key("haListenPort", 10912, "Port for slaves.", low=0, high=65535)
    name_servers: str = key(
        "namesrvAddr", "", "Name servers, `host:port` with `;` between; none: clients are told "
        "the broker's address by hand.",
    )  # fmt: skip
    register_ms: int = key(
        "registerNameServerPeriod", 30_000, "Time between two registrations.", unit="ms",
        low=10_000, high=60_000,
    )  # fmt: skip
    register_timeout_ms: int = key(
        "registerBrokerTimeoutMills", 24_000, "How long an answer to one is waited for.",
        unit="ms", low=1,
    )  # fmt: skip
    heartbeat_ms: int = key(
        "brokerHeartbeatInterval", 1000, "Time between two signs of life to name servers, where "
        "a slave may act as master.", unit="ms", low=10,
    )  # fmt: skip
    heartbeat_timeout_ms: int = key(
        "sendHeartbeatTimeoutMillis", 1000, "How long one may take.", unit="ms", low=1
    )
    not_active_timeout_ms: int = key(
        "brokerNotActiveTimeoutMillis", 10_000, "A name server that gets none for so long forgets "
        "the broker.", unit="ms", low=100,
    )  # fmt: skip
    acting_master: bool = key(
        "enableSlaveActingMaster", False, "A slave acts as master where the master is away."
    )
    old_name_servers: bool = key(
        "compatibleWithOldNameSrv", True, "Name servers may be older than RocketMQ 5."
    )
    permission: int = key(
        "brokerPermission", 6, "4: messages may be read, 2: written, 6: both.", low=0, high=7
    )
    default_topic_queues: int = key(
        "defaultTopicQueueNums", 8, "Queues of a topic that a sender makes.", low=1, high=65_536
    )
    auto_create_topics: bool = key(
        "autoCreateTopicEnable", True, "A topic that does not exist is made by the first send."
    )
    auto_create_groups: bool = key(
        "autoCreateSubscriptionGroup", True, "A group that does not exist is made by its consumers."
    )
    cluster_topic: bool = key(
        "clusterTopicEnable", True, "The topic with the cluster's name may be read and written."
    )
    broker_topic: bool = key(
        "brokerTopicEnable", True, "The topic with the broker's name may be read and written."
    )
    trace_topic: bool = key("traceTopicEnable", False, "There is a topic of clients' traces.")
    trace_topic_name: str = key("msgTraceTopicName", "RMQ_SYS_TRACE_TOPIC", "Its name.")
    trace_on: bool = key("traceOn", True, "Clients are told to trace their messages.")
    region: str = key("regionId", "DefaultRegion", "Region that clients are told.")
    revive_queues: int = key("reviveQueueNum", 8, "Queues of the log of pop.", low=1, high=1024)
    timer_wheel: bool = key("timerWheelEnable", True, "Messages may have any time of delivery.")
    validate_system_topics: bool = key(
        "validateSystemTopicWhenUpdateTopic", True, "Requests may not change a broker's own topics."
    )
    reject_transactions: bool = key("rejectTransactionMessage", False, "Half messages are refused.")
    long_polling: bool = key(
        "longPollingEnable", True, "A pull that finds nothing waits for as long as its consumer "
        "says.",
    )  # fmt: skip
    short_polling_ms: int = key(
        "shortPollingTimeMills", 1000, "How long it waits otherwise.", unit="ms", low=1
    )
    lite_pull: bool = key("litePullMessageEnable", True, "Consumers may pull without a heartbeat.")
    slave_reads: bool = key(
        "slaveReadEnable", False, "Slaves answer pulls. An acting master needs it."
    )
    check_offsets_in_slave: bool = key(
        "offsetCheckInSlave",
        False,
        "Slaves send consumers to an offset that exists, as masters do.",
    )
    property_filter: bool = key(
        "enablePropertyFilter", False, "Consumers may filter by SQL92 expressions."
    )
    filter_retries: bool = key(
        "filterSupportRetry", False, "Messages that come back are filtered as well."
    )
    store_replies: bool = key(
        "storeReplyMessageEnable", True, "Replies to requests are stored besides being sent."
    )
    reset_in_broker: bool = key(
        "useServerSideResetOffset", True, "A reset of offsets is kept here until consumers pull; "
        "otherwise they are told at once, and have to be there.",
    )  # fmt: skip
    offset_version_step: int = key(
        "consumerOffsetUpdateVersionStep", 500, "Commits between two versions of the offsets.",
        low=1,
    )  # fmt: skip
    persist_offsets_ms: int = key(
        "flushConsumerOffsetInterval", 5000, "Time between two writes of offsets to the file.",
        unit="ms", low=10,
    )  # fmt: skip
    client_timeout_ms: int = key(
        "channelExpiredTimeout", 120_000, "A client that sends no heartbeat for so long is "
        "forgotten.", unit="ms", low=100,
    )  # fmt: skip
    request_mode: str = key(
        "defaultMessageRequestMode", "PULL", "How consumers take messages that ask for their "
        "queues.", choices=("PULL", "POP"),
    )  # fmt: skip
    pop_share_queues: int = key(
        "defaultPopShareQueueNum", -1, "Neighbours that a consumer shares its queues with in pop; "
        "-1: all.", low=-1,
    )  # fmt: skip
    pull_bytes_max: int = key(
        "maxTransferBytesOnMessageInMemory", 256 << 10, "Bytes of one answer to a pull.",
        parse=parse_bytes, low=1024, high=128 << 20,
    )  # fmt: skip
    pull_count_max: int = key(
        "maxTransferCountOnMessageInMemory", 32, "Messages of one.", low=1, high=10_000
    )
    query_count_max: int = key(
        "defaultQueryMaxNum", 32, "Messages of an answer to a query by unique key.", low=1,
        high=10_000,
    )  # fmt: skip
    flush_timeout_ms: int = key(
        "syncFlushTimeout", 5000, "How long a send waits for the disk.", unit="ms", low=1
    )
    slave_timeout_ms: int = key(
        "slaveTimeout", 3000, "How long it waits for slaves.", unit="ms", low=1
    )
    acl: bool = key(
        "aclEnable", False, "Requests need an account of `conf/plain_acl.yml` below rocketmqHome, "
        "or an address of its white list.",
    )  # fmt: skip
    authentication: bool = key(
        "authenticationEnabled", False, "Requests need a user (`mqadmin createUser`) and its "
        "signature.",
    )  # fmt: skip
    authorization: bool = key(
        "authorizationEnabled", False, "Users need rules (`mqadmin createAcl`) for topics, groups "
        "and the cluster.",
    )  # fmt: skip
    open_requests: str = key(
        "authenticationWhitelist", "", "Codes of requests that need no user, with `,` between."
    )
    free_requests: str = key(
        "authorizationWhitelist", "", "Codes of requests that need no rule, with `,` between."
    )
    first_user: str = key(
        "initAuthenticationUser", "", 'A super user to begin with: `{"username":"…","password":'
        '"…"}`.', secret=True,
    )  # fmt: skip
    inner_account: str = key(
        "innerClientAuthenticationCredentials", "", "The super user that requests to other brokers "
        'are signed for: `{"accessKey":"…","secretKey":"…"}`.', secret=True,
    )  # fmt: skip
    home: str = key("rocketmqHome", "", "Directory of that file.")
    root: str = key(
        "storePathRootDir", "", "Directory of all files; without it, `store` in the home directory."
    )
    black_list: str = key(
        "configBlackList", "configBlackList;brokerConfigPath",
        "Keys that no request may change, separated by `;`.",
    )  # fmt: skip
    idle_s: int = key(
        "serverChannelMaxIdleTimeSeconds", 120,
        "A connection on which nothing arrives for so long is closed.",
        unit="s", low=1, high=86_400,
    )  # fmt: skip

    def check(self) -> None:
        """See `Section`."""
        ServerSettings.check(self)
        if self.acl and not self.home:
            raise ValueError("aclEnable needs rocketmqHome, where conf/plain_acl.yml is")
        if self.authorization and not self.authentication:
            raise ValueError("authorizationEnabled needs authenticationEnabled")
        if (self.role == SLAVE) != (self.id != 0):
            raise ValueError("brokerId is 0 for masters, and not 0 for slaves (brokerRole=SLAVE)")

    def refused_keys(self) -> frozenset[str]:
        """Returns the keys that no request may change."""
        own = ("brokerConfigPath", "rocketmqHome", "configBlackList")
        return frozenset((*self.black_list.split(";"), *own))


def own_address() -> str:
    """Returns the address of this machine that others reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the system only chooses the address.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
