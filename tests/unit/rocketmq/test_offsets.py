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
