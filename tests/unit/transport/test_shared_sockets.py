"""Processes of a machine accept from the same sockets, each as many clients as the others; one of
them serves HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.config import Address
from convoymq.transport.listening import Acceptor
from convoymq.transport.shared_sockets import (
    HUNG_MS,
    ClientCounts,
    SharedSockets,
    TurnSockets,
    bind,
    end,
)


def free_address() -> Address:
    """A port of the system's choice: one that was bound as 0 is given up by a shutdown."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", sock.getsockname()[1])


@contextlib.contextmanager
def machine(processes: int) -> Iterator[tuple[list[SharedSockets], ClientCounts, int]]:
    """The processes of a machine, which listen on no address yet, and the port of the address."""
    here = free_address()
    bound = bind([here])
    counts = ClientCounts(processes)
    (sock,) = bound[here.host, here.port]
    try:
        made = [SharedSockets(bound, counts, k) for k in range(1, processes + 1)]
        yield made, counts, here.port
    finally:
        sock.close()


def opened(shared: SharedSockets) -> socket.socket:
    (address,) = shared._bound
    (sock,) = shared.open(*address, 64, 0)
    return sock


def connects(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_connections_are_refused_while_no_process_accepts() -> None:
    with machine(2) as ((first, second), _, port):
        assert not connects(port)
        for _ in range(2):
            with opened(first), opened(second):
                assert connects(port)
                first.close()
                assert connects(port)
                second.close()
                assert not connects(port)


def test_a_process_that_died_is_not_waited_for() -> None:
    with machine(2) as ((first, second), counts, port), opened(first), opened(second):
        second.publish(0)
        assert not first.may_accept(1)
        end({}, counts, 2)
        assert first.may_accept(1)
        assert connects(port)


def test_sockets_that_another_process_closed_meanwhile_are_opened_again() -> None:
    with machine(2) as ((first, second), _, port), opened(first), opened(second):
        (sockets,) = first._bound.values()
        sockets[0].shutdown(socket.SHUT_RDWR)
        assert not connects(port)
        first.keep_open(0)
        assert connects(port)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 4))
def test_no_process_gets_more_than_one_client_ahead(turns: list[int], processes: int) -> None:
    """Processes are woken in any order; a client comes, and the first that may takes it."""
    with machine(processes) as (shared, _, _port):
        clients = [0] * processes
        for each in shared:
            opened(each).close()
        for turn in turns:
            order = [(turn + k) % processes for k in range(processes)]
            taker = next(k for k in order if shared[k].may_accept(clients[k]))
            clients[taker] += 1
            shared[taker].publish(clients[taker])
            assert max(clients) - min(clients) <= 1


async def test_acceptors_share_clients_and_take_those_that_nobody_else_takes() -> None:
    loop = asyncio.get_running_loop()
    taken: list[list[socket.socket]] = [[], []]
    with machine(2) as (shared, _, port), contextlib.ExitStack() as stack:
        acceptors = []

        def begin(k: int) -> None:
            def accepted(sock: socket.socket, _peer: object) -> None:
                taken[k].append(stack.enter_context(sock))
                shared[k].publish(len(taken[k]))

            sock = opened(shared[k])
            may_accept = lambda: shared[k].may_accept(len(taken[k]))  # noqa: E731
            acceptors.append(Acceptor(loop, sock, accepted, pytest.fail, may_accept))  # type: ignore[arg-type]

        async def connect(count: int, total: int) -> None:
            for _ in range(count):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            while sum(map(len, taken)) < total:
                await asyncio.sleep(0.001)

        begin(0)
        begin(1)
        await connect(20, 20)
        assert [len(each) for each in taken] == [10, 10]
        # The second stands still: it has fewer clients, and accepts none.
        acceptors[1]._loop.remove_reader(acceptors[1]._listening.fileno())
        await connect(3, 23)
        assert [len(each) for each in taken] == [13, 10]
        for acceptor in acceptors:
            acceptor.close()


class Turns:
    """Processes that look whose turn it is, on a clock that the test moves."""

    def __init__(self, processes: int) -> None:
        self.counts = ClientCounts(processes)
        self.now_ms = 1_000_000
        self.of = {k: self.start(k) for k in range(1, processes + 1)}

    def start(self, process: int) -> TurnSockets:
        made = TurnSockets({("", 0): []}, self.counts, process)
        made.open("", 0, 1, 0)
        return made

    def look(self, *processes: int) -> list[int]:
        """These processes look, one after the other; returns those that serve."""
        self.now_ms += 100
        return [k for k in processes if self.of[k].look(self.now_ms)]

    def kill(self, process: int) -> None:
        end({}, self.counts, process)
        self.of[process] = TurnSockets({}, self.counts, process)


def test_one_process_serves_until_it_dies_and_the_first_of_the_others_follows() -> None:
    turns = Turns(3)
    assert turns.look(1, 2, 3) == [1]
    assert turns.look(3, 2, 1) == [1]
    turns.kill(1)
    assert turns.look(3, 2) == [2]
    turns.of[1] = turns.start(1)
    assert turns.look(1, 2, 3) == [2]
    turns.of[2].close()
    assert turns.look(3, 1) == [1]


def test_a_process_that_hangs_is_followed_and_serves_again_alone() -> None:
    turns = Turns(2)
    turns.look(1, 2)
    assert turns.look(1, 2) == [1]
    for _ in range(HUNG_MS // 100 - 2):
        assert turns.look(2) == []
    turns.look(2)
    assert turns.look(2) == [2]
    assert turns.look(1, 2) == [1]
    assert turns.look(1, 2) == [1]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(("look", "kill", "start")))))
def test_after_two_looks_of_all_one_process_serves(steps: list[tuple[int, str]]) -> None:
    turns = Turns(4)
    alive = {1, 2, 3, 4}
    for process, what in steps:
        if what == "start":
            alive.add(process)
            turns.of[process] = turns.start(process)
        elif process in alive and what == "kill":
            alive.remove(process)
            turns.kill(process)
        elif process in alive:
            turns.look(process)
    order = sorted(alive, reverse=True)
    turns.look(*order)
    turns.look(*order)
    assert len(turns.look(*order)) == min(1, len(alive))
    assert turns.look(*order) == turns.look(*order)
