"""Brokers that may hold keys: listed ones, and those that were listed not long ago."""

from __future__ import annotations

import pytest

from convoymq.model.errors import StorageFault
from convoymq.rocketmq.acting.key_log import HOLDER_MS, KeyLog
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.sim.disk import SimDisk
from tests.unit.rocketmq.store.stores import Opened

OTHER = {0: "10.0.0.2:10911"}


def key_log(opened: Opened) -> KeyLog:
    return KeyLog("a", opened.store, ConfigFile(opened.disk, "config/escapeKeys.json"))


def test_a_broker_that_restarts_is_asked_although_it_is_not_listed() -> None:
    keys = key_log(Opened())
    keys.on_listed({"a": {0: "10.0.0.1:10911"}, "b": OTHER}, 1_000)
    keys.on_listed({}, HOLDER_MS)
    assert keys.holders() == {"b": OTHER}
    keys.on_listed({}, 1_000 + HOLDER_MS)
    assert keys.holders() == {}


def test_a_replica_that_restarts_remembers_the_brokers() -> None:
    opened = Opened()
    keys = key_log(opened)
    keys.on_listed({"b": OTHER}, 1_000)
    keys.persist()
    assert key_log(opened).holders() == {"b": OTHER}


def test_a_clock_that_jumps_back_forgets_no_broker_that_is_listed() -> None:
    keys = key_log(Opened())
    keys.on_listed({"b": OTHER}, 1_000_000)
    keys.on_listed({"b": OTHER}, 1_000)
    keys.on_listed({}, 2_000)
    assert keys.holders() == {"b": OTHER}


def test_a_broker_is_noted_before_the_first_message_leaves_for_it() -> None:
    opened = Opened()
    keys = key_log(opened)
    assert keys.begin("b", 0)
    again = key_log(opened)
    assert (list(again.targets), again.is_complete) == (["b"], False)
    again.complete(["c"])
    again = key_log(opened)
    assert (list(again.targets), again.is_complete) == (["b", "c"], True)


def test_a_broker_that_cannot_be_noted_is_sent_nothing() -> None:
    disk = SimDisk()
    keys = key_log(Opened(disk))
    disk.failing = True
    with pytest.raises(StorageFault):
        keys.begin("b", 0)
    assert not keys.targets


def test_a_replica_that_named_its_targets_begins_with_no_other() -> None:
    keys = key_log(Opened())
    keys.begin("b", 5)
    keys.generations.raise_to("a", 7)
    assert keys.begin("b", 5)
    assert not keys.begin("c", 5)
    assert keys.begin("c", 7)
