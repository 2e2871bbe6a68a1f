"""Tables of the name server: who is alive, where topics are, who is told what."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from convoymq.model.errors import Refused
from convoymq.rocketmq.namesrv.tables import Notify, Registered, Registration, Replica, RouteTables
from convoymq.rocketmq.remoting.values import (
    MEMBER_TOPIC_PREFIX,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicTable,
)

FIRST = DataVersion()
TOPICS = ("a", "b", MEMBER_TOPIC_PREFIX + "n")


def replica(number: int, broker: str = "n", cluster: str = "c") -> Replica:
    return Replica(cluster=cluster, broker=broker, id=number, address=f"{broker}-{number}:1")


def registration(
    number: int = 0,
    *,
    broker: str = "n",
    topics: tuple[str, ...] = TOPICS,
    version: DataVersion = FIRST,
    acting: bool = True,
    address: str = "",
    **more: object,
) -> Registration:
    table = {name: TopicConfig(name, 4, 4, 6) for name in topics}
    who = replica(number, broker)
    if address:
        who = Replica(cluster=who.cluster, broker=broker, id=number, address=address)
    return Registration(
        replica=who,
        ha_address=f"ha-{number}",
        topics=TopicTable(table, version),
        enable_acting_master=acting,
        **more,  # type: ignore[arg-type]
    )


def tables(*numbers: int, acting: bool = True, **options: bool) -> RouteTables:
    """With replicas of one broker, each on a connection of its own."""
    made = RouteTables(support_acting_master=True, **options)
    for number in numbers:
        made.register(registration(number, acting=acting), f"connection {number}", 0)
    return made


def addresses(made: RouteTables, topic: str = "a") -> dict[int, str]:
    route = made.route(topic)
    assert route is not None
    return route.broker_datas[0].broker_addrs


def perm(made: RouteTables, topic: str = "a") -> int:
    route = made.route(topic)
    assert route is not None
    return route.queue_datas[0].perm


# --- routes ---------------------------------------------------------------------------------


def test_a_route_names_brokers_and_queues() -> None:
    made = tables(0, 1)
    route = made.route("a")
    assert route is not None
    assert route.queue_datas == [QueueData("n", 4, 4, 6, 0)]
    assert route.broker_datas[0].broker_addrs == {0: "n-0:1", 1: "n-1:1"}
    assert made.route("unknown") is None


def test_the_smallest_slave_acts_when_the_master_is_gone() -> None:
    made = tables(0, 2, 1)
    made.on_closed("connection 0")
    assert addresses(made) == {0: "n-1:1", 2: "n-2:1"}
    assert perm(made) == 4
    assert made.member_group("c", "n").broker_addrs == {1: "n-1:1", 2: "n-2:1"}
    assert made.cluster_info().broker_addr_table["n"].broker_addrs == {1: "n-1:1", 2: "n-2:1"}


def test_the_member_topic_shows_true_ids() -> None:
    made = tables(0, 1)
    made.on_closed("connection 0")
    assert addresses(made, MEMBER_TOPIC_PREFIX + "n") == {1: "n-1:1"}


def test_nobody_acts_where_it_is_not_supported() -> None:
    made = tables(0, 1)
    made.support_acting_master = False
    made.on_closed("connection 0")
    assert addresses(made) == {1: "n-1:1"}
    assert perm(made) == 4


def test_nobody_acts_for_a_broker_that_does_not_allow_it() -> None:
    made = tables(0, 1, acting=False)
    made.on_closed("connection 0")
    assert addresses(made) == {1: "n-1:1"}
    assert perm(made) == 6


def test_a_master_that_returns_is_written_to_again() -> None:
    made = tables(0, 1)
    made.on_closed("connection 0")
    assert perm(made) == 4
    made.register(registration(0), "again", 5)
    assert addresses(made) == {0: "n-0:1", 1: "n-1:1"}
    assert perm(made) == 6


def test_slaves_bring_topics_only_while_they_are_the_smallest() -> None:
    made = tables(0)
    made.register(registration(1, topics=(*TOPICS, "own")), "connection 1", 0)
    assert made.route("own") is None
    made.on_closed("connection 0")
    newer = DataVersion(0, 0, 1)
    made.register(registration(1, topics=(*TOPICS, "own"), version=newer), "connection 1", 1)
    assert perm(made, "own") == 4


def test_an_old_slave_brings_no_topics() -> None:
    made = RouteTables()
    made.register(registration(1, is_old=True, acting=False), "x", 0)
    assert made.topics() == []


def test_topics_are_taken_again_when_their_version_is_another() -> None:
    made = tables(0)
    made.wipe_write_perm("n")
    made.register(registration(0), "connection 0", 1)
    assert perm(made) == 4
    made.register(registration(0, version=DataVersion(0, 0, 1)), "connection 0", 1)
    assert perm(made) == 6


def test_a_topic_that_is_missing_goes_if_that_is_wanted() -> None:
    made = tables(0)
    made.register(registration(0, topics=("b", "c")), "connection 0", 1)
    assert sorted(made.topics()) == sorted((*TOPICS, "c"))
    made.delete_unregistered_topics = True
    made.register(registration(0, topics=("b", "c")), "connection 0", 1)
    assert sorted(made.topics()) == ["b", "c"]


def test_filter_servers_are_in_the_route() -> None:
    made = RouteTables()
    made.register(registration(0, filter_servers=("f:1",)), "x", 0)
    route = made.route("a")
    assert route is not None
    assert route.filter_server_table == {"n-0:1": ["f:1"]}


# --- registrations --------------------------------------------------------------------------


def test_a_slave_is_told_where_its_master_is() -> None:
    made = tables(0)
    done = made.register(registration(1), "x", 0)
    assert (done.ha_address, done.master_address) == ("ha-0", "n-0:1")
    assert made.register(registration(0), "connection 0", 0) == Registered()


def test_one_topic_of_a_stranger_is_no_registration() -> None:
    made = tables(0)
    for stranger in (registration(1, topics=("a",)), registration(0, broker="m", topics=("a",))):
        with pytest.raises(Refused, match="register broker failed"):
            made.register(stranger, "x", 0)
    assert made.member_group("c", "n").broker_addrs == {0: "n-0:1"}
    assert "m" not in made.cluster_info().broker_addr_table
    made.register(registration(0, topics=("a",)), "connection 0", 0)


def test_a_refused_registration_changes_nothing() -> None:
    made = tables(1, 2)
    with pytest.raises(Refused):
        made.register(registration(0, topics=("a",), address="n-1:1", zone="z"), "x", 0)
    assert made.member_group("c", "n").broker_addrs == {1: "n-1:1", 2: "n-2:1"}
    made.check_invariants()


def test_a_slave_that_becomes_master_gives_its_old_id_up() -> None:
    made = tables(1, 2)
    made.register(registration(0, address="n-1:1"), "connection 1", 0)
    assert made.member_group("c", "n").broker_addrs == {0: "n-1:1", 2: "n-2:1"}
    assert perm(made) == 6


def test_an_older_state_does_not_take_an_id_over() -> None:
    made = RouteTables()
    made.register(registration(0, version=DataVersion(5, 0, 0)), "x", 0)
    other = registration(0, address="other:1", version=DataVersion(4, 9, 9), acting=False)
    assert made.register(other, "y", 0) == Registered()
    assert made.member_group("c", "n").broker_addrs == {0: "n-0:1"}
    assert not made.heartbeat("c", "other:1", 0)
    made.register(registration(0, address="other:1", version=DataVersion(6, 0, 0)), "y", 0)
    assert made.member_group("c", "n").broker_addrs == {0: "other:1"}


def test_an_id_belongs_to_the_replica_that_is_alive() -> None:
    """RocketMQ's name server gives it to the last one that registers."""
    made = tables(0, 1)
    other = registration(0, address="other:1", zone="z")
    with pytest.raises(Refused, match="a live replica 0 at n-0:1"):
        made.register(other, "y", 0)
    assert made.member_group("c", "n").broker_addrs == {0: "n-0:1", 1: "n-1:1"}
    made.on_closed("connection 0")
    made.register(other, "y", 0)
    assert made.member_group("c", "n").broker_addrs == {0: "other:1", 1: "n-1:1"}
    made.register(registration(0, acting=False), "z", 0)
    assert made.member_group("c", "n").broker_addrs == {0: "n-0:1", 1: "n-1:1"}
    made.check_invariants()


# --- life and death -------------------------------------------------------------------------


def test_a_silent_replica_is_gone_after_its_own_time() -> None:
    made = RouteTables(support_acting_master=True)
    made.register(registration(0, timeout_ms=1000), "x", 0)
    made.register(registration(1, timeout_ms=9000), "y", 0)
    assert made.scan(1000) == ([], ())
    closed, told = made.scan(1001)
    assert closed == ["x"]
    assert told == (Notify("n", ("n-1:1",), 1, "n-1:1", "n-0:1"),)


def test_heartbeats_and_version_queries_keep_a_replica() -> None:
    made = RouteTables()
    version = DataVersion(0, 1, 2)
    made.register(registration(0, timeout_ms=1000, version=version), "x", 0)
    assert made.heartbeat("c", "n-0:1", 900)
    assert made.scan(1900) == ([], ())
    assert made.version_of("c", "n-0:1", 1900) == version
    assert made.scan(2900) == ([], ())
    assert made.scan(2901)[0] == ["x"]
    assert not made.heartbeat("c", "n-0:1", 2901)
    assert made.version_of("c", "n-0:1", 2901) is None
    assert made.topics() == []


def test_a_connection_that_was_replaced_ends_nobody() -> None:
    made = tables(0)
    made.register(registration(0), "again", 1)
    assert made.on_closed("connection 0") == ()
    assert made.member_group("c", "n").broker_addrs == {0: "n-0:1"}
    made.on_closed("again")
    assert made.member_group("c", "n").broker_addrs == {}
    assert made.cluster_info().cluster_addr_table == {}


def test_many_replicas_that_go_at_once_are_told_of_once() -> None:
    made = tables(0, 1, 2, 3)
    told = made.unregister([replica(0), replica(1)])
    assert told == (Notify("n", ("n-2:1", "n-3:1"), 2, "n-2:1", "n-1:1"),)
    assert made.unregister([replica(2), replica(3)]) == ()


def test_a_larger_id_that_goes_is_no_news() -> None:
    made = tables(0, 1, 2)
    assert made.unregister([replica(2)]) == ()
    assert made.unregister([replica(7, broker="unknown")]) == ()


def test_all_but_the_newcomer_hear_of_a_smaller_id() -> None:
    made = tables(1, 2)
    done = made.register(registration(0), "x", 0)
    assert done.notify == (
        Notify("n", ("n-1:1", "n-2:1"), 0, "n-0:1", None, "ha-0"),
    )  # fmt: skip


def test_nobody_is_told_when_that_is_off() -> None:
    made = tables(0, 1, notify_min_id=False)
    assert made.on_closed("connection 0") == ()
    assert made.register(registration(0), "x", 0).notify == ()


# --- topics ---------------------------------------------------------------------------------


def test_permissions_of_a_broker_are_wiped_and_added() -> None:
    made = tables(0)
    assert made.wipe_write_perm("n") == len(TOPICS)
    assert perm(made) == 4
    assert made.add_write_perm("n") == len(TOPICS)
    assert perm(made) == 6
    assert made.wipe_write_perm("unknown") == 0


def test_topics_are_entered_deleted_and_listed() -> None:
    made = tables(0)
    made.register(registration(0, broker="m", topics=("b", "d")), "x", 0)
    made.register_topic("e", [QueueData("m", 1, 1, 6), QueueData("unknown", 1, 1, 6)])
    assert made.topics_of_cluster("c") == made.topics()
    assert made.topics_of_cluster("other") == []
    assert [queues.broker_name for queues in made.route("e").queue_datas] == ["m"]  # type: ignore[union-attr]
    made.delete_topic("b", "other")
    assert made.route("b") is not None
    made.delete_topic("b", "c")
    made.delete_topic("unknown")
    assert made.route("b") is None


class Tables(RuleBasedStateMachine):
    """Whatever comes in whatever order, the tables agree with a plain list of who is there."""

    def __init__(self) -> None:
        super().__init__()
        self.made = RouteTables(support_acting_master=True)
        self.now_ms = 0
        self.there: dict[tuple[str, int], tuple[int, int]] = {}
        """(broker, id) -> (connection, time of its last word)"""

    @rule(
        broker=st.sampled_from("nm"), number=st.integers(0, 3), connection=st.integers(0, 3),
        counter=st.integers(0, 2),
    )  # fmt: skip
    def register(self, broker: str, number: int, connection: int, counter: int) -> None:
        version = DataVersion(0, 0, counter)
        one = registration(number, broker=broker, version=version, timeout_ms=100)
        self.made.register(one, connection, self.now_ms)
        self.there[broker, number] = connection, self.now_ms

    @rule(connection=st.integers(0, 3))
    def close(self, connection: int) -> None:
        self.made.on_closed(connection)
        self.there = {k: v for k, v in self.there.items() if v[0] != connection}

    @rule(broker=st.sampled_from("nm"), number=st.integers(0, 3))
    def unregister(self, broker: str, number: int) -> None:
        self.made.unregister([replica(number, broker)])
        self.there.pop((broker, number), None)

    @rule(passed_ms=st.integers(0, 150))
    def scan(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.made.scan(self.now_ms)
        self.there = {k: v for k, v in self.there.items() if v[1] + 100 >= self.now_ms}

    @rule(broker=st.sampled_from("nm"), number=st.integers(0, 3))
    def heartbeat(self, broker: str, number: int) -> None:
        known = self.made.heartbeat("c", f"{broker}-{number}:1", self.now_ms)
        assert known == ((broker, number) in self.there)
        if known:
            self.there[broker, number] = self.there[broker, number][0], self.now_ms

    @invariant()
    def agrees(self) -> None:
        self.made.check_invariants()
        for broker in "nm":
            numbers = sorted(number for name, number in self.there if name == broker)
            assert list(self.made.member_group("c", broker).broker_addrs) == numbers
            route = self.made.route("a")
            datas = {} if route is None else {data.broker_name: data for data in route.broker_datas}
            assert (broker in datas) == bool(numbers)
            if numbers:
                assert 0 in datas[broker].broker_addrs
                (perm,) = [q.perm for q in route.queue_datas if q.broker_name == broker]  # type: ignore[union-attr]
                assert bool(perm & 2) == (numbers[0] == 0)


TestTables = Tables.TestCase
TestTables.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
