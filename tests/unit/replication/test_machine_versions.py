"""What a build supports, and the tables of command types."""

from __future__ import annotations

import pytest

from convoymq.model.errors import BrokerError, InvariantViolated, UnsupportedVersion
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.stream.machine import StreamMachine
from convoymq.replication import versions as supported


@pytest.mark.parametrize("machine", [QuorumMachine, StreamMachine])
def test_every_machine_is_announced(machine: type[QuorumMachine] | type[StreamMachine]) -> None:
    expected = (machine.OLDEST_VERSION, machine.VERSION)
    assert supported.supports()[machine.KIND] == expected
    assert machine().version == 1
    for version in range(machine.OLDEST_VERSION, machine.VERSION + 1):
        assert len(machine().command_types(version)) == 32


def test_who_says_nothing_supports_the_first_version() -> None:
    assert supported.newest_of({}, "quorum") == 1
    assert supported.is_supported({}, "quorum", 1)
    assert not supported.is_supported({}, "quorum", 2)
    assert supported.is_supported({"quorum": [1, 3]}, "quorum", 2)
    assert not supported.is_supported({"quorum": [2, 3]}, "quorum", 1)


def test_a_version_out_of_range_is_named_with_the_range() -> None:
    newest = QuorumMachine.VERSION
    text = rf"version {newest + 1} of the quorum machine .* 1 to {newest}"
    with pytest.raises(UnsupportedVersion, match=text):
        QuorumMachine().set_version(newest + 1)
    assert issubclass(UnsupportedVersion, BrokerError)
    assert not issubclass(UnsupportedVersion, InvariantViolated)


def test_a_table_holds_its_types_and_no_others() -> None:
    table = supported.command_table((1, 8, 255))
    assert [t for t in range(256) if table[t >> 3] & 1 << (t & 7)] == [1, 8, 255]
