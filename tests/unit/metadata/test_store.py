"""The session into the tree: window, resends, deadlines, watchers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from convoymq.kernels.batch import CommandBuilder, commands
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.commands import DeleteVhost, PutPermission, PutUser, PutVhost
from convoymq.metadata.machine import Change, MetadataMachine
from convoymq.metadata.store import RESEND_AFTER_MS, WINDOW, MetadataStore
from convoymq.model.errors import NotFound, PreconditionFailed, Unavailable
from convoymq.replication.machine import EFFECT_GAP

SESSION = 1 << 56 | 7 << 24 | 1


class Clock:
    def __init__(self) -> None:
        self.ms = 0
        self.calls: list[tuple[int, Any]] = []

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> int:
        return self.ms

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Any:
        self.calls.append((self.ms + delay_ms, lambda: callback(*arguments)))
        return None

    def random(self) -> float:
        return 0.5

    def pass_by(self, ms: int) -> None:
        self.ms += ms
        calls, self.calls = self.calls, []
        for due, callback in calls:
            if due <= self.ms:
                callback()
            else:
                self.calls.append((due, callback))


class Lone:
    """A store, and a leader that takes a batch only when told."""

    def __init__(self, kind: Any = AsyncMetadataStore) -> None:
        self.machine = MetadataMachine()
        self.builder = CommandBuilder()
        self.clock = Clock()
        self.store = kind(self.machine, self.builder, SESSION, self.clock)
        self.store.on_leader(0, 1, 1)
        self.index = 0

    def take(self) -> bytes:
        """Seals what the node would send."""
        return self.builder.take_entry(0, self.index + 1, 1, 1000).data

    def commit(self, data: bytes) -> None:
        self.index += 1
        self.machine.apply(self.index, 1000, data)
        effects, self.machine.effects = self.machine.effects, []
        self.store.on_effects(effects, None)

    def ask(self, name: str, timeout: float = 30.0) -> asyncio.Task[Any]:
        return asyncio.create_task(self.store.execute(PutVhost(name=name), timeout))


async def turn() -> None:
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_answer_comes_after_the_own_tree_has_changed() -> None:
    lone = Lone()
    heard: list[Change] = []
    lone.store.watch(heard.append)
    task = lone.ask("v")
    await turn()
    lone.commit(lone.take())
    assert await task is True
    assert "v" in lone.machine.vhosts
    assert [change.vhost for change in heard] == ["v"]


async def test_a_refusal_of_the_tree_is_raised_as_what_it_was() -> None:
    lone = Lone()
    command = PutPermission(user="u", vhost="/", configure="", write="", read="")
    task = asyncio.create_task(lone.store.execute(command))
    await turn()
    lone.commit(lone.take())
    with pytest.raises(NotFound, match="user 'u' not found"):
        await task


async def test_what_this_release_refuses_is_never_logged() -> None:
    lone = Lone()
    with pytest.raises(PreconditionFailed, match="invalid vhost name"):
        await lone.store.execute(PutVhost(name=""))
    with pytest.raises(PreconditionFailed, match="not text"):
        await lone.store.execute(PutVhost(name="v", description="\ud800"))
    heard: list[Any] = []
    lone.store.submit(PutUser(name=""), lambda reply, error: heard.append(error))
    assert [error.text for error in heard] == ["invalid user name"]
    assert lone.builder.used == 0


async def test_no_more_commands_are_open_than_the_machine_remembers_answers_of() -> None:
    lone = Lone()
    tasks = [lone.ask(f"v{i}") for i in range(WINDOW + 3)]
    await turn()
    first = lone.take()
    assert len(commands(first)) == WINDOW
    lone.commit(first)
    second = lone.take()
    assert len(commands(second)) == 3
    lone.commit(second)
    assert await asyncio.gather(*tasks) == [True] * (WINDOW + 3)


async def test_a_new_leader_gets_what_is_pending_and_applies_it_once() -> None:
    lone = Lone()
    task = lone.ask("v")
    await turn()
    lost = lone.take()
    lone.store.on_leader(0, None, 1)
    lone.store.on_leader(0, 2, 2)
    again = lone.take()
    assert [command[3] for command in commands(again)] == [1]
    lone.commit(again)
    assert await task is True
    count = lone.machine.change_count
    lone.commit(lost)
    assert lone.machine.change_count == count


async def test_a_batch_that_vanished_is_sent_again_after_a_while() -> None:
    lone = Lone()
    task = lone.ask("v")
    await turn()
    lone.take()
    lone.clock.pass_by(RESEND_AFTER_MS - 1)
    assert lone.builder.used == 0
    lone.clock.pass_by(1)
    lone.commit(lone.take())
    assert await task is True


async def test_a_gap_makes_the_rest_follow() -> None:
    lone = Lone()
    tasks = [lone.ask("a")]
    await turn()
    lone.take()
    tasks.append(lone.ask("b"))
    await turn()
    lone.take()
    lone.store.on_effects([(EFFECT_GAP, SESSION, 0)], None)
    lone.commit(lone.take())
    assert await asyncio.gather(*tasks) == [True, True]


async def test_no_answer_in_time_is_unavailable_and_the_next_command_still_works() -> None:
    lone = Lone()
    with pytest.raises(Unavailable):
        await lone.store.execute(PutVhost(name="v"), 0)
    task = asyncio.create_task(lone.store.execute(DeleteVhost(name="v")))
    await turn()
    lone.commit(lone.take())
    # The first was given up by its caller, not by the session: both were applied.
    assert await task is True


async def test_waiting_for_a_leader_has_a_deadline() -> None:
    lone = Lone()
    await lone.store.wait_for_leader(0)
    lone.store.on_leader(0, None, 1)
    with pytest.raises(Unavailable):
        await lone.store.wait_for_leader(0)


def test_an_answer_is_called_back_without_a_loop() -> None:
    lone = Lone(MetadataStore)
    heard: list[Any] = []
    lone.store.submit(PutVhost(name="v"), lambda reply, error: heard.append((reply, error)))
    assert heard == []
    lone.commit(lone.take())
    assert heard == [(True, None)]


def test_a_callback_hears_of_a_deadline_once() -> None:
    lone = Lone(MetadataStore)
    heard: list[Any] = []
    lone.store.submit(PutVhost(name="v"), lambda *answer: heard.append(answer), 50)
    taken = lone.take()
    lone.clock.pass_by(50)
    ((reply, error),) = heard
    assert reply is None
    assert isinstance(error, Unavailable)
    lone.commit(taken)
    assert len(heard) == 1
    assert "v" in lone.machine.vhosts
