"""What every version of a queue's machine keeps to: it skips nothing, and old logs mean what they
meant."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.kernels.entries import HEADER_SIZE
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import UnknownCommand
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.stream.machine import StreamMachine
from convoymq.replication import versions
from convoymq.replication.machine import EFFECT_DELIVER
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from tests.unit.queues.quorum.support import Log, apply, session_id

S = session_id(1)
PRIORITY = 2
EXPIRATION = 4


@pytest.mark.parametrize("machine", [QuorumMachine, StreamMachine])
@pytest.mark.parametrize("session", [0, S])
def test_an_unknown_command_is_never_skipped(machine: type[Any], session: int) -> None:
    log = Log()
    log.publish(S, [1])
    if session:
        log.command(S, 99)
    else:
        log.builder.add(99, 0, 0, 0, 0, 0)
    with pytest.raises(UnknownCommand, match="type 99 is not known"):
        apply(machine(), log.seal())


@pytest.mark.parametrize("machine", [QuorumMachine, StreamMachine])
def test_the_table_of_types_is_what_the_machine_knows(machine: type[Any]) -> None:
    """Every type from a session, once behind its own SESSION start."""
    table = machine().command_types(1)
    for kind in range(256):
        if kind == batch.CMD_ENQUEUE or kind == getattr(batch, "CMD_SESSION_OPEN", 20):
            continue
        known = False
        for session in (0, S):
            log = Log()
            log.publish(S, [1])
            if session:
                log.command(S, kind, body=bytes(8))
            else:
                log.builder.add(kind, 0, 0, 0, 0, 0, bytes(8))
            try:
                apply(machine(), log.seal())
                known = True
            except UnknownCommand:
                pass
            except (ValueError, KeyError):
                known = True
        assert known == bool(table[kind >> 3] & 1 << (kind & 7)), f"type {kind}"


def test_priority_and_expiration_mean_nothing_in_the_first_version() -> None:
    """A log of version 1 whose messages carry them replays as plain first in, first out."""
    plain, marked = Log(), Log()
    for log, flags in ((plain, (0, 0, 0)), (marked, (0, PRIORITY, PRIORITY | EXPIRATION))):
        log.checkout(S, 1, prefetch=10)
        log.seal()
        for each in flags:
            log._target(S).publish([b"\0\1q", b"h", bytes(1)], 1, 0, each)
            log.seal()
        log.time_ms += 10**9
        log.publish(S, [1])
        log.seal()
    found = []
    for log in (plain, marked):
        machine = QuorumMachine()
        effects: list[tuple[Any, ...]] = []
        for entry in log.entries:
            effects += apply(machine, entry)
        found.append((
            [effect for effect in effects if effect[0] == EFFECT_DELIVER],
            machine.snapshot(),
        ))  # fmt: skip
    assert len(found[0][0]) == 4
    assert found[0] == found[1]
    marks = [entry.data[HEADER_SIZE + 5] for entry in marked.entries]
    assert [mark & (PRIORITY | EXPIRATION) for mark in marks] == [0, 0, 2, 6, 0]


def test_a_stream_gives_priority_and_expiration_no_meaning_either() -> None:
    log = Log()
    for flags in (0, PRIORITY, EXPIRATION):
        log._target(S).publish([b"\0\1q", b"h", bytes(1)], 1, 0, flags)
        log.seal()
    machine = StreamMachine()
    for entry in log.entries:
        apply(machine, entry)
    assert (machine.first, machine.next) == (0, 3)


def test_the_docstring_of_a_machine_explains_each_of_its_versions() -> None:
    classes: list[type[Any]] = [
        MetadataMachine,
        QuorumMachine,
        StreamMachine,
        PartitionGroupMachine,
    ]
    assert {each.KIND for each in classes} == versions.announced().keys() - {"link"}
    for each in classes:
        text = sys.modules[each.__module__].__doc__ or ""
        section = text[text.index("\nVersions (ADR 0016)") :]
        explained = [int(number) for number in re.findall(r"^    (\d+): \w", section, re.M)]
        assert explained == list(range(1, each.VERSION + 1)), each
