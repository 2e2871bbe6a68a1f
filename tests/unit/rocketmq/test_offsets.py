from __future__ import annotations

from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.offsets import Offsets
from convoymq.storage.files import MemoryDirectory


def test_an_offset_of_another_replica_is_entered_once() -> None:
    """Other brokers know it still when an operator resets the group, or a topic is made again."""
    file = ConfigFile(MemoryDirectory(), "config/o.json")
    offsets = Offsets(file, 500, lambda: 1)
    offsets.commit("g", "t", 0, 3)
    for learned, end, wanted in ((9, 20, 9), (5, 20, 9), (30, 20, 20), (40, 0, 20)):
        offsets.learn_given("g", "t", 0, learned, end)
        assert offsets.get("g", "t", 0) == wanted
    offsets.learn_given("g", "t", 1, 4, 0)
    # Where a consumer begins is its own business.
    assert offsets.get("g", "t", 1) == -1
    offsets.reset("g", "t", 0, 2)
    offsets.persist()
    again = Offsets(file, 500, lambda: 1)
    again.learn_given("g", "t", 0, 40, 50)
    assert again.get("g", "t", 0) == 2
    assert again.groups_of("t") == ["g"]
    again.delete_topic("t")
    again.learn_given("g", "t", 0, 40, 50)
    assert again.get("g", "t", 0) == -1
    slave = Offsets(ConfigFile(MemoryDirectory(), "config/o.json"), 500, lambda: 1)
    slave.replace(again.content())
    slave.learn_given("g", "t", 0, 40, 50)
    assert slave.get("g", "t", 0) == -1


def offsets_of(*, is_slave: bool = True) -> Offsets:
    file = ConfigFile(MemoryDirectory(), "config/o.json")
    return Offsets(file, 500, lambda: 1, is_slave=is_slave)


def test_a_slave_keeps_what_clients_commit_until_a_master_has_it() -> None:
    file = ConfigFile(MemoryDirectory(), "config/o.json")
    slave, master = Offsets(file, 500, lambda: 1, is_slave=True), offsets_of(is_slave=False)
    master.commit("g", "t", 0, 3)
    slave.commit("g", "t", 0, 8)
    slave.commit("CID_RMQ_SYS_TRANS", "t", 0, 8)
    slave.commit("g", "pops", 0, 8, is_logged=True)
    slave.replace(master.content())
    assert slave.get("g", "t", 0) == 8
    slave.persist()
    slave = Offsets(file, 500, lambda: 1, is_slave=True)
    found = slave.to_send()
    assert found.offset_table == {"t@g": {0: 8}}
    slave.commit("g", "t", 0, 9)
    master.merge(found)
    slave.sent(found.offset_table)
    assert master.get("g", "t", 0) == 8
    assert slave.unsent == {"t@g": {0: 9}}
    slave.sent(slave.to_send().offset_table)
    assert slave.unsent == {}
    assert not master.unsent


def test_an_offset_that_an_operator_set_counts_more_than_a_larger_one() -> None:
    slave, master = offsets_of(), offsets_of(is_slave=False)
    slave.commit("g", "t", 0, 8)
    slave.commit("cloned", "t", 0, 8)
    master.reset("g", "t", 0, 2)
    master.take_reset("g", "t", 0)
    master.commit("source", "t", 0, 1)
    master.clone("source", "cloned", "t")
    master.merge(slave.to_send())
    assert [master.get(g, "t", 0) for g in ("g", "cloned")] == [2, 1]
    slave.replace(master.content())
    slave.sent(slave.to_send().offset_table)
    slave.replace(master.content())
    assert slave.get("g", "t", 0) == 2
    # Both know of it now: the larger one counts again.
    slave.commit("g", "t", 0, 5)
    master.merge(slave.to_send())
    assert master.get("g", "t", 0) == 5
    master.delete_group("g")
    assert master.content().resets == {"t@cloned": {0: 1}}


def test_offsets_of_another_slave_end_where_the_own_log_does() -> None:
    slave, other = offsets_of(), offsets_of()
    other.commit("g", "t", 0, 8)
    other.commit("g", "t", 1, 8)
    slave.merge(other.content(), lambda _, queue: 20 if queue else 6)
    assert slave.of("g", "t") == {0: 6, 1: 8}
    assert slave.unsent == {"t@g": {0: 6, 1: 8}}


def test_what_is_unsent_ends_where_the_log_was_cut() -> None:
    slave = offsets_of()
    slave.commit("g", "t", 0, 8)
    slave.commit("g", "t", 1, 3)
    slave.limit_unsent(lambda *_: 5)
    assert slave.to_send().offset_table == {"t@g": {0: 5, 1: 3}}
