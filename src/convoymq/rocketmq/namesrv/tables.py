"""The name server's tables: brokers, replicas, topics, and live replicas.

A *broker* is a name; its *replicas* have ids, 0 is the master. Replicas register with the table of
their topics and send heartbeats. One is gone when its connection closes, when it says so, or when
its heartbeats stop for its own time-out:

    unknown ──register──▶ alive ──unregister, closed, silent──▶ unknown
                           │ ▲
                           └─┘ register, heartbeat, version query

Rules, for a broker that allows a slave to act as master (`enable_acting_master`):

- The smallest id that is alive is the *acting* replica. While no master is alive its topics cannot
  be written to, and routes name it as master if the name server supports that.
- Whenever the smallest id changes the replicas are told (`Notify`): on a departure all that are
  left, on an arrival all but the new one.

- An id belongs to the replica that has it, as long as that one is alive: another address is
  refused (docs/adr/0217).

A heartbeat never brings back a replica that is gone: it has to register again.

No I/O and no clock: `now_ms` and what identifies a connection are handed in, and what is to be
sent is returned. So nothing waits for a broker that does not answer. Source: docs/rocketmq.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from convoymq.model.errors import Refused
from convoymq.rocketmq.remoting.values import (
    MASTER_ID,
    MEMBER_TOPIC_PREFIX,
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    ClusterInfo,
    DataVersion,
    MemberGroup,
    QueueData,
    RouteData,
    TopicConfig,
    TopicTable,
)

TIMEOUT_MS = 120_000
"""Of a replica that names none: it registers every 30 s at the latest."""
SYSTEM_FLAG_UNIT = 1
SYSTEM_FLAG_UNIT_SUBSCRIPTION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica as a request names it."""

    cluster: str
    broker: str
    id: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A replica's registration."""

    replica: Replica
    ha_address: str
    topics: TopicTable
    timeout_ms: int = TIMEOUT_MS
    enable_acting_master: bool = False
    is_old: bool = False
    """The broker knows nothing of acting masters."""
    zone: str | None = None
    filter_servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Notify:
    """Replicas are to be told that the smallest id of their broker is another one."""

    broker: str
    addresses: tuple[str, ...]
    min_id: int
    min_address: str
    offline_address: str | None = None
    ha_address: str | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """Answer to a registration: where a slave finds its master; and notifications to send."""

    ha_address: str | None = None
    master_address: str | None = None
    notify: tuple[Notify, ...] = ()


@dataclass(slots=True)
class _Live:
    """A replica that is alive."""

    replica: Replica
    connection: object
    heard_ms: int
    timeout_ms: int
    version: DataVersion
    ha_address: str
    filter_servers: tuple[str, ...]


@dataclass(slots=True)
class _Broker:
    """A broker: its replicas by id."""

    cluster: str
    name: str
    addresses: dict[int, str] = field(default_factory=dict)
    zone: str | None = None
    enable_acting_master: bool = False

    def data(self) -> BrokerData:
        """Returns it as clients see it."""
        return BrokerData(
            self.cluster,
            self.name,
            dict(sorted(self.addresses.items())),
            self.zone,
            self.enable_acting_master,
        )


class RouteTables:
    """See the module text.

    Args:
        support_acting_master: routes name the acting replica as master.
        notify_min_id: replicas are told when the smallest id changes.
        delete_unregistered_topics: a registration without a topic takes it away.
    """

    def __init__(
        self,
        *,
        support_acting_master: bool = False,
        notify_min_id: bool = True,
        delete_unregistered_topics: bool = False,
    ) -> None:
        self.support_acting_master = support_acting_master
        self.notify_min_id = notify_min_id
        self.delete_unregistered_topics = delete_unregistered_topics
        self._brokers: dict[str, _Broker] = {}
        self._topics: dict[str, dict[str, QueueData]] = {}
        """topic -> broker -> queues"""
        self._live: dict[tuple[str, str], _Live] = {}
        """(cluster, address) -> replica"""
        self._of_connection: dict[object, set[tuple[str, str]]] = {}
        self._routes: dict[str, RouteData | None] = {}
        """Routes that were asked for since something changed."""

    # --- replicas that come and stay ---------------------------------------------------------

    def register(self, registration: Registration, connection: object, now_ms: int) -> Registered:
        """Enters a replica and its topics. Raises Refused when the table is not the whole one, and
        for an id that another live replica has."""
        replica = registration.replica
        topics = registration.topics.topic_config_table
        broker = self._brokers.get(replica.broker)
        is_first = broker is None
        if broker is None:
            broker = _Broker(replica.cluster, replica.broker)
        if replica.id not in broker.addresses and len(topics) == 1:
            # A change of one topic, sent by a replica that has to register as a whole first.
            raise Refused("register broker failed")
        holder = self.holder(replica)
        state = registration.topics.data_version.state_version
        if holder and registration.enable_acting_master and state <= holder.version.state_version:
            text = f"live replica {replica.id} at {holder.replica.address}"
            raise Refused(f"broker {replica.broker} has a {text}")
        self._brokers[broker.name] = broker
        broker.enable_acting_master = registration.enable_acting_master
        broker.zone = registration.zone
        former_min = min(broker.addresses, default=MASTER_ID)
        for number in [n for n, a in broker.addresses.items() if a == replica.address]:
            if number != replica.id:
                del broker.addresses[number]
        self._routes.clear()
        if holder is not None and state < holder.version.state_version:
            self._forget_live((replica.cluster, replica.address))
            return Registered()
        is_first |= broker.addresses.get(replica.id) is None
        broker.addresses[replica.id] = replica.address
        self._take_topics(broker, registration, is_first=is_first)
        self._enter_live(registration, connection, now_ms)
        master = broker.addresses.get(MASTER_ID) if replica.id != MASTER_ID else None
        known = self._live.get((replica.cluster, master)) if master else None
        notify: tuple[Notify, ...] = ()
        if replica.id < former_min and self.notify_min_id:
            notify = self._notify(broker, ha_address=registration.ha_address)
        if known is None:
            return Registered(notify=notify)
        return Registered(known.ha_address, master, notify)

    def holder(self, replica: Replica) -> _Live | None:
        """Returns another live replica that has the id of this one."""
        broker = self._brokers.get(replica.broker)
        address = broker.addresses.get(replica.id) if broker else None
        if address is None or address == replica.address:
            return None
        return self._live.get((replica.cluster, address))

    def _take_topics(self, broker: _Broker, registration: Registration, *, is_first: bool) -> None:
        """Takes a table of topics over, from the master or from the smallest of its slaves."""
        replica = registration.replica
        is_prime = replica.id == min(broker.addresses) and not registration.is_old
        if replica.id != MASTER_ID and not is_prime:
            return
        topics = registration.topics.topic_config_table
        if self.delete_unregistered_topics:
            for topic in [t for t, on in self._topics.items() if broker.name in on]:
                if topic not in topics:
                    self._remove_queues(topic, broker.name)
        live = self._live.get((replica.cluster, replica.address))
        changed = is_first or live is None or live.version != registration.topics.data_version
        for name, config in topics.items():
            queues = self._topics.setdefault(name, {})
            if changed or broker.name not in queues:
                perm = config.perm
                if replica.id != MASTER_ID and broker.enable_acting_master:
                    perm &= ~PERM_WRITE
                queues[broker.name] = _queues(broker.name, config, perm)

    def _enter_live(self, registration: Registration, connection: object, now_ms: int) -> None:
        replica = registration.replica
        key = (replica.cluster, replica.address)
        self._forget_live(key)
        self._live[key] = _Live(
            replica,
            connection,
            now_ms,
            registration.timeout_ms,
            registration.topics.data_version,
            registration.ha_address,
            registration.filter_servers,
        )
        self._of_connection.setdefault(connection, set()).add(key)

    def _forget_live(self, key: tuple[str, str]) -> _Live | None:
        live = self._live.pop(key, None)
        if live is not None:
            keys = self._of_connection[live.connection]
            keys.discard(key)
            if not keys:
                del self._of_connection[live.connection]
        return live

    def heartbeat(self, cluster: str, address: str, now_ms: int) -> bool:
        """A replica is alive; returns whether it is registered."""
        live = self._live.get((cluster, address))
        if live is not None:
            live.heard_ms = max(live.heard_ms, now_ms)
        return live is not None

    def version_of(self, cluster: str, address: str, now_ms: int) -> DataVersion | None:
        """Returns the version of the topics that a replica registered. It is a heartbeat too."""
        self.heartbeat(cluster, address, now_ms)
        live = self._live.get((cluster, address))
        return None if live is None else live.version

    # --- replicas that go --------------------------------------------------------------------

    def on_closed(self, connection: object) -> tuple[Notify, ...]:
        """A connection is closed: the replicas that registered on it are gone."""
        keys = self._of_connection.get(connection, ())
        return self.unregister([self._live[key].replica for key in list(keys)])

    def first_end_ms(self) -> int | None:
        """Returns when `scan` ends the first replica, if none is heard of; None: there is none."""
        return min((x.heard_ms + x.timeout_ms + 1 for x in self._live.values()), default=None)

    def scan(self, now_ms: int) -> tuple[list[object], tuple[Notify, ...]]:
        """Ends replicas that were silent for their time-out. Returns their connections, which are
        of no use any more, and notifications to send."""
        silent = [x for x in self._live.values() if x.heard_ms + x.timeout_ms < now_ms]
        notify = self.unregister([live.replica for live in silent])
        return [live.connection for live in silent], notify

    def unregister(self, replicas: Iterable[Replica]) -> tuple[Notify, ...]:
        """Ends replicas; returns the notifications to send, once for each broker."""
        offline: dict[str, str] = {}
        for replica in replicas:
            self._forget_live((replica.cluster, replica.address))
            broker = self._brokers.get(replica.broker)
            if broker is None:
                continue
            self._routes.clear()
            was_min = replica.id == min(broker.addresses, default=-1)
            for number in [n for n, a in broker.addresses.items() if a == replica.address]:
                del broker.addresses[number]
            if not broker.addresses:
                self._remove_broker(broker)
                offline.pop(broker.name, None)
                continue
            if was_min:
                offline[broker.name] = replica.address
            if broker.enable_acting_master and MASTER_ID not in broker.addresses:
                self._set_perm(broker.name, lambda perm: perm & ~PERM_WRITE)
        if not self.notify_min_id:
            return ()
        return tuple(
            told
            for name, address in offline.items()
            if self._brokers[name].enable_acting_master
            for told in self._notify(self._brokers[name], offline_address=address)
        )

    def _remove_broker(self, broker: _Broker) -> None:
        del self._brokers[broker.name]
        for topic in [t for t, on in self._topics.items() if broker.name in on]:
            self._remove_queues(topic, broker.name)

    def _remove_queues(self, topic: str, broker: str) -> None:
        queues = self._topics[topic]
        del queues[broker]
        if not queues:
            del self._topics[topic]

    def _notify(
        self,
        broker: _Broker,
        *,
        offline_address: str | None = None,
        ha_address: str | None = None,
    ) -> tuple[Notify, ...]:
        number = min(broker.addresses)
        is_arrival = offline_address is None
        told = [a for n, a in broker.addresses.items() if n != number or not is_arrival]
        if not told:
            return ()
        smallest = broker.addresses[number]
        return (Notify(broker.name, tuple(told), number, smallest, offline_address, ha_address),)

    # --- topics ------------------------------------------------------------------------------

    def _set_perm(self, broker: str, change: Callable[[int], int]) -> int:
        """Changes the permission of a broker's topics; returns their number."""
        self._routes.clear()
        found = [queues[broker] for queues in self._topics.values() if broker in queues]
        for data in found:
            data.perm = change(data.perm)
        return len(found)

    def wipe_write_perm(self, broker: str) -> int:
        """Forbids writing to a broker; returns the number of its topics."""
        return self._set_perm(broker, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, broker: str) -> int:
        """Allows reading and writing on a broker; returns the number of its topics."""
        return self._set_perm(broker, lambda _perm: PERM_READ | PERM_WRITE)

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Enters queues of a topic on brokers that are known."""
        self._routes.clear()
        for data in queues:
            if data.broker_name in self._brokers:
                self._topics.setdefault(topic, {})[data.broker_name] = data

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forgets a topic, of one cluster or of all."""
        self._routes.clear()
        for broker in list(self._topics.get(topic, ())):
            if cluster is None or self._brokers[broker].cluster == cluster:
                self._remove_queues(topic, broker)

    def topics(self) -> list[str]:
        """Returns the names of all topics."""
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Returns the names of topics that have queues in a cluster."""
        names = {b.name for b in self._brokers.values() if b.cluster == cluster}
        return [topic for topic, queues in self._topics.items() if not names.isdisjoint(queues)]

    def unit_topics(self, is_wanted: Callable[[int], bool]) -> list[str]:
        """Returns topics by their system flag."""
        return [
            topic
            for topic, queues in self._topics.items()
            if is_wanted(next(iter(queues.values())).topic_sys_flag)
        ]

    def forget_routes(self) -> None:
        """Rules have changed: routes are made anew."""
        self._routes.clear()

    # --- requests of clients ----------------------------------------------------------------

    def route(self, topic: str) -> RouteData | None:
        """Returns where a topic is, None if nobody has it. The answer is not to be changed."""
        if topic in self._routes:
            return self._routes[topic]
        found = self._topics.get(topic)
        if found is None:
            # Not kept: anybody may ask for any name.
            return None
        made = self._routes[topic] = self._make_route(topic, found)
        return made

    def _make_route(self, topic: str, found: dict[str, QueueData]) -> RouteData:
        brokers = [self._brokers[name] for name in found]
        servers = {
            address: list(live.filter_servers)
            for broker in brokers
            for address in broker.addresses.values()
            if (live := self._live.get((broker.cluster, address))) and live.filter_servers
        }
        datas = [broker.data() for broker in brokers]
        if self.support_acting_master and not topic.startswith(MEMBER_TOPIC_PREFIX):
            for data in datas:
                _name_acting(data, found[data.broker_name])
        return RouteData(list(found.values()), datas, servers)

    def counts(self) -> tuple[int, int, int, int]:
        """Returns the numbers of brokers, of those without a master, of replicas and of topics."""
        brokers = self._brokers.values()
        headless = sum(MASTER_ID not in broker.addresses for broker in brokers)
        return len(brokers), headless, len(self._live), len(self._topics)

    def cluster_info(self) -> ClusterInfo:
        """Returns all brokers with their true ids, and their clusters."""
        clusters: dict[str, list[str]] = {}
        for broker in self._brokers.values():
            clusters.setdefault(broker.cluster, []).append(broker.name)
        return ClusterInfo({n: b.data() for n, b in self._brokers.items()}, clusters)

    def member_group(self, cluster: str, name: str) -> MemberGroup:
        """Returns the replicas of a broker; none if it is not known."""
        broker = self._brokers.get(name)
        addresses = {} if broker is None or broker.cluster != cluster else broker.addresses
        return MemberGroup(cluster, name, dict(sorted(addresses.items())))

    def check_invariants(self) -> None:
        """Raises AssertionError when the tables contradict each other."""
        for name, broker in self._brokers.items():
            assert broker.name == name, name
            assert broker.addresses, name
            assert len(set(broker.addresses.values())) == len(broker.addresses), name
        for topic, queues in self._topics.items():
            assert queues, topic
            assert queues.keys() <= self._brokers.keys(), topic
        for connection, keys in self._of_connection.items():
            assert keys, connection
            assert all(self._live[key].connection is connection for key in keys)
        assert sum(map(len, self._of_connection.values())) == len(self._live)


def _queues(broker: str, topic: TopicConfig, perm: int) -> QueueData:
    return QueueData(
        broker, topic.read_queue_nums, topic.write_queue_nums, perm, topic.topic_sys_flag
    )


def _name_acting(data: BrokerData, queues: QueueData) -> None:
    """Names the smallest id as master, where a slave acts."""
    addresses = data.broker_addrs
    acts = data.enable_acting_master and not queues.perm & PERM_WRITE
    if acts and addresses and MASTER_ID not in addresses:
        addresses[MASTER_ID] = addresses.pop(min(addresses))
        data.broker_addrs = dict(sorted(addresses.items()))
