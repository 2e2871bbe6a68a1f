"""Links on real sockets in one loop: linking, refusing, breaking, silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from convoymq.broker.node_view import NodeView
from convoymq.edges.http import metrics
from convoymq.edges.http.exposition import Text
from convoymq.kernels.link_frames import FRAME_APPEND, FRAME_CONTROL, FRAME_HEARTBEAT, frame
from convoymq.model.config import Address, ClusterConfig
from convoymq.transport import admission, credit
from convoymq.transport.identity import NodeIdentity
from convoymq.transport.links import FLAG_NEIGHBOURS, Links
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.provocation import Observed
from tests.sockets import backlog_of, full


class Node:
    """One end: links, and everything they reported."""

    def __init__(self, node: int, addresses: list[Address], **options: Any) -> None:
        identity = NodeIdentity(
            node,
            options.pop("directory", f"directory {node}"),
            options.pop("incarnation", 1),
            options.pop("cluster_id", ""),
        )
        own = options.pop("own", None) or addresses[node - 1]
        config = ClusterConfig(peers=tuple(addresses), **{"secret": "s", **options})
        self.told: list[tuple[Any, ...]] = []
        self.frames: list[tuple[int, bytes]] = []
        self.rejected = ""
        self.links = Links(config, own, identity, self, self._flush_soon, structlog.get_logger())

    def _flush_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.links.flush)

    def on_frame(self, node: int, data: bytes) -> None:
        self.frames.append((node, data))

    def on_up(self, node: int, incarnation: int) -> None:
        self.told.append(("up", node, incarnation))

    def on_down(self, node: int, definite: bool) -> None:
        self.told.append(("down", node, definite))

    def on_room(self, node: int) -> None:
        self.told.append(("room", node))

    def on_suspect(self, node: int) -> None:
        self.told.append(("suspect", node))

    def on_unsuspect(self, node: int) -> None:
        self.told.append(("unsuspect", node))

    def on_rejected(self, text: str) -> None:
        self.rejected = text


def addresses(count: int) -> list[Address]:
    return [Address("127.0.0.1", single_port(), i + 1) for i in range(count)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_three_nodes_link_and_frames_arrive_whole_and_in_order() -> None:
    where = addresses(3)
    nodes = [Node(i, where) for i in (1, 2, 3)]
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node.links)
        await until(lambda: all(len(node.links.connected()) == 2 for node in nodes))
        sent = []
        for i in range(200):
            body = [bytes([i]) * 5000, bytes([i]) * (i * 97)]
            head = frame(FRAME_APPEND, 0, 7, i, 0, 0, 0, b"", sum(map(len, body)))
            nodes[0].links.send(2, head, body)
            sent.append((1, head + b"".join(body)))
        await until(lambda: len(nodes[1].frames) == 200)
        assert nodes[1].frames == sent
        assert nodes[0].links.backlog_bytes(2) == 0
        assert nodes[2].frames == []
        nodes[0].links.send(9, b"nobody")


async def test_addresses_without_ids_spread_from_one_seed() -> None:
    where = [Address("127.0.0.1", single_port()) for _ in range(3)]
    nodes = []
    for i in (1, 2, 3):
        node = Node(i, where)
        config = ClusterConfig(peers=(where[0],), secret="s")
        node.links = Links(
            config,
            where[i - 1],
            NodeIdentity(i, f"directory {i}", 1),
            node,
            node._flush_soon,
            structlog.get_logger(),
        )
        nodes.append(node)
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node.links)
        await until(lambda: all(len(node.links.connected()) == 2 for node in nodes))


async def test_the_backlog_is_the_configured_one() -> None:
    where = addresses(1)
    identity = NodeIdentity(1, "directory", 1)
    node = Node(1, where)
    config = ClusterConfig(peers=tuple(where), secret="s")
    made = Links(
        config, where[0], identity, node, node._flush_soon, structlog.get_logger(), backlog=9
    )
    async with made:
        assert made._listener is not None
        assert backlog_of(made._listener) == 9


@pytest.mark.parametrize("option", [{"secret": "other"}, {"name": "other"}])
@pytest.mark.provokes("link.refused", "link.dial_failed")
async def test_unknown_nodes_are_refused(option: dict[str, str]) -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where, **option)
    async with one.links, two.links:
        await until(lambda: one.links.admission.refusals and two.links.admission.refusals)
        assert one.told == two.told == []
        words = "secret" if "secret" in option else "cluster"
        assert any(words in text for text in one.links.admission.refusals.values())


@pytest.mark.provokes("link.handshake_broken", "link.lost", "link.up", "link.down")
async def test_garbage_and_silence_before_hello_do_no_harm() -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    async with one.links:
        for garbage in (b"\xff" * 100, frame(FRAME_CONTROL, 0, 0, 0, 0, 0, 0, b"x" * 99), b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", where[0].port)
            writer.write(garbage)
            if garbage:
                async with asyncio.timeout(PATIENCE_S):
                    await reader.read()
            writer.close()
        assert one.frames == []
        async with two.links:
            await until(lambda: one.links.is_connected(2))


async def test_a_closed_peer_is_down_at_once_and_nothing_more_is_known() -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    async with one.links:
        async with two.links:
            await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        await until(lambda: one.links.dialler.dials[f"127.0.0.1:{where[1].port}"].last_error)
        # A refused connection alone proves nothing.
        assert one.told == [("up", 2, 1), ("down", 2, False)]
        again = Node(2, where, incarnation=2)
        async with again.links:
            await until(lambda: one.links.is_connected(2) and again.links.is_connected(1))
            assert one.told[-1] == ("up", 2, 2)
            again.links.send(1, frame(FRAME_CONTROL, 0, 0, 1, 0, 0, 0))
            await until(lambda: one.frames)


async def test_a_node_whose_address_fails_is_linked_by_another_one() -> None:
    """No address is dialled while a connection stands, and every one when it is lost."""
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    async with one.links, two.links:
        await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        dialler = one.links.dialler
        dialler.add(Address("localhost", where[1].port, 2))
        first = dialler.dials[f"127.0.0.1:{where[1].port}"]
        first.address = Address("127.0.0.1", single_port(), 2)
        outward = one.links.peers[2].outward
        assert outward is not None
        two.links.drop(two.links.peers[1], "for a test")
        await until(lambda: first.last_error)
        await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        assert one.links.peers[2].outward is not outward


@pytest.mark.provokes("link.dropped")
async def test_a_node_that_says_goodbye_is_gone() -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    async with one.links:
        async with two.links:
            await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
            two.links.send(1, frame(FRAME_APPEND, 0, 0, 7, 0, 0, 0))
            await two.links.goodbye()
        await until(lambda: ("down", 2, True) in one.told)
        assert one.told == [("up", 2, 1), ("down", 2, True)]
        # What was sent before came before.
        assert len(one.frames) == 1
        assert two.told == [("up", 1, 1)]


@pytest.mark.provokes("link.process_gone")
async def test_a_process_of_this_machine_that_does_not_run_any_more_is_gone() -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    runs = True
    known = two.links.process
    one.links.read_start = lambda pid: known.started if runs and pid == known.pid else 0
    async with one.links:
        async with two.links:
            await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        await until(lambda: ("down", 2, False) in one.told)
        runs = False
        await until(lambda: ("down", 2, True) in one.told)
        assert one.told == [("up", 2, 1), ("down", 2, False), ("down", 2, True)]


async def test_the_second_process_with_a_number_is_refused_while_the_first_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "REJECTED_S", 0.2)
    where = addresses(2)
    # Suspected no sooner than a busy machine may hold a whole process up.
    quick = {"heartbeat_ms": 20, "suspect_min_ms": 1500, "suspect_max_ms": 1500}
    one, two = Node(1, where, **quick), Node(2, where, **quick)
    other = Node(2, where[:1], own=addresses(1)[0], directory="another", incarnation=9, **quick)
    async with one.links:
        async with two.links:
            await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
            async with other.links:
                await until(lambda: other.rejected)
                assert f"number 2 is in use: the node at {where[1].host}:{where[1].port}" in (
                    other.rejected
                )
                assert other.told == []
            assert one.told == [("up", 2, 1)]
            assert two.told == [("up", 1, 1)]
        await until(lambda: not one.links.is_connected(2))
        # The first is gone: its number is free.
        later = Node(2, where[:1], own=addresses(1)[0], directory="another", **quick)
        async with later.links:
            await until(lambda: one.links.is_connected(2) and later.links.is_connected(1))


async def test_an_older_incarnation_of_the_same_directory_is_refused() -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where, incarnation=5)
    async with one.links:
        async with two.links:
            await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        for incarnation in (4, 5):
            copy = Node(2, where, incarnation=incarnation)
            async with copy.links:
                words = f"node 2 shows incarnation {incarnation} of its data directory"
                await until(
                    lambda w=words: any(w in t for t in one.links.admission.refusals.values())
                )
                assert copy.told == []
        emptied = Node(2, where, incarnation=1, directory="new")
        async with emptied.links:
            await until(lambda: one.links.is_connected(2) and emptied.links.is_connected(1))
            assert one.told[-1] == ("up", 2, 1)


async def test_a_new_identity_is_told_on_new_links() -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    async with one.links, two.links:
        await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        hello = one.links.hello_of(2)
        assert hello is not None
        assert (hello.directory, hello.cluster_id, hello.incarnation) == ("directory 2", "", 1)
        two.links.set_identity(NodeIdentity(2, "directory 2", 7, "cc"))
        await until(lambda: one.told[-1:] == [("up", 2, 7)])
        hello = one.links.hello_of(2)
        assert hello is not None
        assert (hello.cluster_id, hello.incarnation) == ("cc", 7)
        await until(lambda: two.links.is_connected(1))
        # Another cluster from now on.
        one.links.set_identity(NodeIdentity(1, "directory 1", 1, "dd"))
        await until(
            lambda: any("is of cluster" in t for t in one.links.admission.refusals.values())
        )
        assert not one.links.is_connected(2)


@pytest.mark.provokes("link.suspected", "link.recovered")
async def test_a_silent_peer_is_suspected_and_taken_back() -> None:
    where = addresses(2)
    quick = {"heartbeat_ms": 20, "suspect_min_ms": 100, "suspect_max_ms": 200}
    one, two = Node(1, where, **quick), Node(2, where, **quick)
    async with one.links, two.links:
        await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        assert two.links._timer is not None
        two.links._timer.cancel()
        await until(lambda: one.told[-1] == ("suspect", 2))
        assert not one.links.is_connected(2)
        two.links._tick()
        await until(lambda: one.told[-1] == ("unsuspect", 2))
        assert one.links.is_connected(2)


async def test_a_peer_that_does_not_read_is_dropped_at_the_bound() -> None:
    where = addresses(2)
    one, two = Node(1, where, link_backlog_max_bytes=1 << 20), Node(2, where)
    async with one.links, two.links:
        await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        wire = two.links.peers[1].inward
        assert wire is not None
        wire.pause()
        part = bytes(1 << 19)
        for _ in range(64):
            one.links.send(2, frame(FRAME_APPEND, 0, 0, 0, 0, 0, 0, b"", len(part)), [part])
            await asyncio.sleep(0)
            if ("down", 2, False) in one.told:
                break
        assert ("down", 2, False) in one.told
        await until(lambda: one.links.is_connected(2))


async def test_a_forgotten_node_is_refused() -> None:
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    # Only a node that comes with data of the cluster is refused; an empty one may join anew.
    two.links.formed = True
    async with one.links, two.links:
        await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        one.links.forget(2)
        await until(
            lambda: any("removed" in text for text in one.links.admission.refusals.values())
        )
        assert not one.links.is_connected(2)
        one.links.remember(2)
        await until(lambda: one.links.is_connected(2))


async def test_links_over_tls(tmp_path: Path) -> None:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    tls = {
        "tls_certfile": str(tmp_path / "cert.pem"),
        "tls_keyfile": str(tmp_path / "key.pem"),
        "tls_cacertfile": str(tmp_path / "ca.pem"),
    }
    where = addresses(2)
    one, two = Node(1, where, **tls), Node(2, where, **tls)
    async with one.links, two.links:
        await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
        body = bytes(range(256)) * 8000
        one.links.send(2, frame(FRAME_APPEND, 0, 0, 0, 0, 0, 0, b"", len(body)), [body])
        await until(lambda: two.frames)
        assert two.frames[0][1][48:] == body


def bulk(size: int) -> tuple[bytes, list[bytes]]:
    return frame(FRAME_APPEND, 0, 7, 1, 0, 0, 0, b"", size), [bytes(size)]


@pytest.mark.provokes("link.full", "link.has_room")
@pytest.mark.moves("convoy_link_full")
async def test_a_link_is_full_until_what_was_sent_is_taken(
    monkeypatch: pytest.MonkeyPatch, observed: Observed
) -> None:
    """The window is an eighth of the backlog's bound. Urgent frames pass; there is room as soon as
    the receiver says what it has taken, and nothing breaks."""
    monkeypatch.setattr(credit, "FULL_S", 0.01)
    where = addresses(2)
    one, two = (Node(i, where, link_backlog_max_bytes=8 << 20) for i in (1, 2))
    async with one.links, two.links:
        await until(lambda: one.links.connected() and two.links.connected())
        show(one)
        two.links.is_congested = lambda: True
        sent = 0
        while 2 not in one.links.full:
            one.links.send(2, *bulk(100_000))
            sent += 1
            await asyncio.sleep(0)
        assert 10 <= sent <= 12
        one.links.send(2, frame(FRAME_CONTROL, 0, 0, 0, 9, 0, 0, b"x"))
        # All of it arrives; no credit comes, as the receiver is congested, over many heartbeats.
        await until(lambda: len(two.frames) == sent + 1)
        ticks = two.links.peers[1].told_clock
        await until(lambda: two.links.peers[1].told_clock > ticks)
        assert one.links.full == {2}
        assert ("room", 2) not in one.told
        await until(lambda: "link.full" in observed.events)
        show(one)
        two.links.is_congested = lambda: False
        two.links.flush()
        await until(lambda: ("room", 2) in one.told)
        assert one.links.full == set()
        assert [entry[0] for entry in one.told] == ["up", "room"]
        await until(lambda: "link.has_room" in observed.events)


@pytest.mark.provokes("link.full", "link.down")
async def test_a_full_link_that_breaks_has_no_room(
    monkeypatch: pytest.MonkeyPatch, observed: Observed
) -> None:
    monkeypatch.setattr(credit, "FULL_S", 0.01)
    where = addresses(2)
    one, two = Node(1, where), Node(2, where)
    async with one.links:
        async with two.links:
            await until(lambda: one.links.is_connected(2) and two.links.is_connected(1))
            two.links.is_congested = lambda: True
            one.links.full.add(2)
            peer = one.links.peers[2]
            await until(lambda: peer.told_full)
        await until(lambda: not peer.told_full)
    assert not peer.up
    assert "link.has_room" not in observed.events


def show(node: Node) -> None:
    """Renders the metrics of links, as a node does."""
    text = Text({}, open_metrics=False)
    broker = SimpleNamespace(node=NodeView(links=node.links.info), node_name_of=str)
    metrics._linked(text, broker)
    text.render()


async def test_much_more_than_the_bound_gets_through_when_the_sender_waits_for_room() -> None:
    where = addresses(2)
    one, two = (Node(i, where, link_backlog_max_bytes=1 << 20) for i in (1, 2))
    async with one.links, two.links:
        await until(lambda: one.links.connected() and two.links.connected())
        highest = 0
        for _ in range(300):
            await until(lambda: 2 not in one.links.full)
            one.links.send(2, *bulk(100_000))
            highest = max(highest, one.links.backlog_bytes(2))
        await until(lambda: len(two.frames) == 300)
        assert highest < 400_000
        assert [entry[0] for entry in one.told if entry[0] != "room"] == ["up"]


async def test_a_frame_larger_than_the_backlogs_bound_does_not_break_the_link() -> None:
    where = addresses(2)
    one, two = (Node(i, where, link_backlog_max_bytes=1 << 20) for i in (1, 2))
    async with one.links, two.links:
        await until(lambda: one.links.connected() and two.links.connected())
        one.links.send(2, *bulk(3 << 20))
        await until(lambda: two.frames and ("room", 2) in one.told)
        assert [entry[0] for entry in one.told] == ["up", "room"]


async def test_credit_of_a_former_connection_is_void() -> None:
    where = addresses(2)
    one, two = (Node(i, where, link_backlog_max_bytes=1 << 20) for i in (1, 2))
    async with one.links, two.links:
        await until(lambda: one.links.connected() and two.links.connected())
        two.links.is_congested = lambda: True
        for _ in range(4):
            one.links.send(2, *bulk(100_000))
        assert one.links.full == {2}
        peer = one.links.peers[2]
        one.links.credit.on_credit(peer, 1 << 40, peer.out_id ^ 1)
        assert one.links.full == {2}
        with pytest.raises(ValueError, match="credit"):
            one.links.credit.on_credit(peer, 1 << 40, peer.out_id)
        # A link that is made anew owes nothing.
        one.links.drop(peer, "for the test")
        assert one.links.full == set()
        await until(lambda: one.told[-1][0] == "up" and len(one.told) > 2)
        assert one.links.credit.under_way(peer) < 10_000


async def test_a_frame_larger_than_the_bound_does_not_break_the_link_for_what_follows() -> None:
    where = addresses(2)
    one, two = (Node(i, where, link_backlog_max_bytes=1 << 20) for i in (1, 2))
    async with one.links, two.links:
        await until(lambda: one.links.connected() and two.links.connected())
        one.links.send(2, *bulk(30 << 20))
        for _ in range(10):
            one.links.send(2, *bulk(10))
        await until(lambda: len(two.frames) == 11)
        assert [entry[0] for entry in one.told if entry[0] != "room"] == ["up"]
        # What is not a single frame is bounded.
        for _ in range(100):
            one.links.send(2, *bulk(100_000))
        await until(lambda: ("down", 2, False) in one.told)


@pytest.mark.provokes("link.accept_failed", "link.bad_frame", "link.resolve_failed")
async def test_a_node_goes_on_without_descriptors_names_and_sense(observed: Observed) -> None:
    where = addresses(2)
    one = Node(1, where, dns_name="nobody.invalid")
    two = Node(2, where)
    async with one.links, two.links:
        await until(lambda: one.links.connected() and two.links.connected())
        full(one.links._server)
        head = frame(FRAME_HEARTBEAT, FLAG_NEIGHBOURS, 0, 0, 0, 0, 0, b"\xc1")
        two.links.send(1, head)
        await until(lambda: {"link.bad_frame", "link.resolve_failed"} <= observed.events.keys())


class BrokenConnection:
    """A connection that cannot be flushed."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def flush(self) -> None:
        raise KeyError("a fault of our own")


@pytest.mark.provokes("link.dropped")
async def test_a_link_that_fails_when_it_is_flushed_is_made_anew() -> None:
    """The others are flushed in the same round."""
    at = addresses(3)
    nodes = [Node(number, at) for number in (1, 2, 3)]
    async with nodes[0].links, nodes[1].links, nodes[2].links:
        links = nodes[0].links
        await until(lambda: links.connected() == [2, 3])
        links.peers[2].outward = BrokenConnection(links.peers[2].outward)
        for node in (2, 3):
            links.send(node, frame(FRAME_APPEND, 0, 5, 0, 0, 0, 0))
        links.flush()
        await until(lambda: nodes[2].frames)
        await until(lambda: nodes[0].told.count(("up", 2, 1)) > 1)
