"""Settings of a quorum queue that change while it runs: CONFIG, from machine version 2 on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.model.errors import UnknownCommand
from convoymq.queues.quorum import settings
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_DELIVER, EFFECT_TIMER
from tests.unit.queues.quorum.support import Log, apply, session_id

A = session_id(1)


def configure(log: Log, **changed: Any) -> None:
    body = msgspec.msgpack.encode(changed)
    log.builder.add(batch.CMD_CONFIG, 0, 0, 0, len(body), 0, body)


def test_config_changes_what_it_names_and_nothing_else() -> None:
    machine, log = QuorumMachine({"single_active": 1}), Log()
    machine.set_version(2)
    before = dict(machine.settings)
    configure(log, delivery_limit=3)
    apply(machine, log.seal())
    assert machine.settings == {**before, "delivery_limit": 3}
    assert machine.backlog.delivery_limit == 3


def test_version_1_does_not_know_config() -> None:
    machine, log = QuorumMachine(), Log()
    configure(log, delivery_limit=3)
    with pytest.raises(UnknownCommand):
        apply(machine, log.seal())
    assert not machine.configurable


def test_a_setting_that_cannot_change_is_refused() -> None:
    machine, log = QuorumMachine(), Log()
    machine.set_version(2)
    for changed in ({"colour": 3}, {"single_active": 1}, {"delivery_limit": "3"}):
        configure(log, **changed)
        with pytest.raises(ValueError, match=next(iter(changed))):
            apply(machine, log.seal())


def test_a_lower_limit_counts_with_the_next_failure() -> None:
    """What failed before counts, and what is ready already stays."""
    machine, log = QuorumMachine({"delivery_limit": 10}), Log()
    machine.set_version(2)
    log.publish(A, [1, 1])
    log.checkout(A, 1, 1)
    apply(machine, log.seal())
    for number in range(2):
        log.return_(A, 1, number, number, failed=True)
        apply(machine, log.seal())
    configure(log, delivery_limit=2)
    apply(machine, log.seal())
    assert machine.backlog.dropped["delivery_limit"] == 0
    log.return_(A, 1, 2, 2, failed=True)
    apply(machine, log.seal())
    assert machine.backlog.dropped["delivery_limit"] == 1


def test_settings_survive_a_snapshot() -> None:
    machine, log = QuorumMachine(), Log()
    machine.set_version(2)
    configure(log, delivery_limit=7)
    apply(machine, log.seal())
    copy = QuorumMachine()
    copy.restore(machine.snapshot())
    assert copy.snapshot() == machine.snapshot()
    assert copy.backlog.delivery_limit == 7


def test_effective_settings_become_settings_of_the_machine() -> None:
    """What they do not mention, or no more, is the default."""

    def changed(**wanted: object) -> dict[str, int]:
        found = settings.machine_settings(
            {name.replace("_", "-"): value for name, value in wanted.items()}
        )
        default = settings.machine_settings({})
        assert set(found) == settings.CHANGEABLE == set(default)
        return {name: value for name, value in found.items() if value != default[name]}

    assert changed(delivery_limit=5) == {"delivery_limit": 5}
    assert changed(delivery_limit=-7) == {"delivery_limit": -1}
    assert changed(delivery_limit=1 << 70) == {"delivery_limit": 0xFFFFFFFF}
    assert changed(max_length=5, max_length_bytes=6) == {"max_length": 5, "max_length_bytes": 6}
    assert changed(message_ttl=0, expires=9) == {"message_ttl_ms": 0, "expires_ms": 9}
    assert changed(overflow="reject-publish") == {"reject_publish": 1}
    assert changed(overflow="reject-publish-dlx") == {} == changed(overflow="drop-head")
    assert changed(consumer_disconnected_timeout=9) == {settings.DISCONNECTED_TIMEOUT: 9}
    assert changed(colour=1) == {}


def test_a_version_brings_its_settings_as_if_they_were_not_there() -> None:
    machine = QuorumMachine()
    assert not set(settings.SINCE_VERSION_2) & set(machine.settings)
    machine.set_version(2)
    assert settings.SINCE_VERSION_2.items() <= machine.settings.items()


def suspected_queue(settings: dict[str, int]) -> tuple[QuorumMachine, Log]:
    """A queue whose consumer holds a message on a node that is suspected."""
    machine, log = QuorumMachine(settings), Log()
    machine.set_version(2)
    log.publish(A, [1])
    log.checkout(A, 1, 1)
    apply(machine, log.seal())
    log.node_down(1)
    apply(machine, log.seal())
    return machine, log


def test_the_time_that_a_node_may_be_away_can_be_said_and_unsaid() -> None:
    machine, log = suspected_queue({"disconnect_timeout_ms": 60_000})
    since = machine.time_ms
    assert machine.next_due_ms() == since + 60_000
    configure(log, **{settings.DISCONNECTED_TIMEOUT: 5_000})
    assert (EFFECT_TIMER, since + 5_000) in apply(machine, log.seal())
    assert machine.next_due_ms() == since + 5_000
    configure(log, **{settings.DISCONNECTED_TIMEOUT: settings.NONE})
    apply(machine, log.seal())
    assert machine.next_due_ms() == since + 60_000


def test_messages_of_a_suspected_node_return_when_the_queue_s_own_time_is_over() -> None:
    """Returned so they count as handed out, not as failed, and once only; a late acknowledgement
    does nothing."""
    machine, log = suspected_queue({})
    configure(log, **{settings.DISCONNECTED_TIMEOUT: 5_000})
    apply(machine, log.seal())
    log.leader(batch.CMD_TICK)
    apply(machine, log.seal(4_900))
    assert (machine.backlog.ready(), machine.backlog.unacked) == (0, 1)
    log.leader(batch.CMD_TICK)
    apply(machine, log.seal(200))
    assert (machine.backlog.ready(), machine.backlog.unacked) == (1, 0)
    (run,) = machine.backlog.returned.runs()
    assert run[5:7] == (1, 0), "acquired once, failed never"
    log.settle(A, 1, 0, 0)
    apply(machine, log.seal())
    assert machine.backlog.ready() == 1
    log.node_up(1)
    effects = apply(machine, log.seal())
    assert [effect[3] for effect in effects if effect[0] == EFFECT_DELIVER] == [1]
