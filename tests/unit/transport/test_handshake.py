"""HELLO, sans-IO: who gets in, and who does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from convoymq.kernels.link_frames import FRAME_CONTROL, FRAME_HELLO, HEADER_SIZE, frame
from convoymq.transport.handshake import Handshake, Hello, LinkRefused, refusal
from convoymq.transport.identity import NodeIdentity
from convoymq.transport.processes import ProcessId


def side(dialler: bool, **changes: Any) -> Handshake:
    node = 1 if dialler else 2
    identity = NodeIdentity(node, f"{node}d", 5, changes.pop("cluster_id", ""), f"{node}c")
    values: dict[str, Any] = {
        "cluster": "c",
        "identity": identity,
        "address": "127.0.0.1:1",
        "formed": False,
        "release": "0.2.0",
        "supports": {"quorum": (1, 3)},
        "process": ProcessId("m", 7, 9),
        "instance": f"{node}i",
    }
    others = {key: changes.pop(key) for key in list(changes) if key not in values}
    return Handshake(
        dialler, others.pop("secrets", [b"s"]), Hello(**{**values, **changes}), **others
    )


def converse(dialler: Handshake, acceptor: Handshake) -> list[bytes]:
    wire = [dialler.begin()]
    turn = [acceptor, dialler]
    while (answer := turn[0].receive(wire[-1])) is not None:
        wire.append(answer)
        turn.reverse()
    return wire


def test_both_learn_who_the_other_is() -> None:
    one, two = side(True), side(False, known=lambda: ["a:1"])
    converse(one, two)
    assert one.done
    assert two.done
    assert one.peer is not None
    assert two.peer is not None
    assert (one.peer.node, two.peer.node, one.peer.incarnation) == (2, 1, 5)
    assert (one.peer.directory, one.peer.candidate, one.peer.instance) == ("2d", "2c", "2i")
    assert one.peer.supports == {"quorum": (1, 3), "link": (3, 3)}
    assert (one.peer.release, one.peer.process) == ("0.2.0", ProcessId("m", 7, 9))
    assert one.known == ["a:1"]


def test_different_cluster_ids_never_link() -> None:
    with pytest.raises(LinkRefused, match="node 1 is of cluster aa, this one of bb") as refused:
        converse(side(True, cluster_id="aa"), side(False, cluster_id="bb"))
    assert refused.value.code == "cluster"


@pytest.mark.parametrize(("one", "two"), [("aa", ""), ("", "bb"), ("aa", "aa")])
def test_a_node_without_a_cluster_id_links_with_any(one: str, two: str) -> None:
    dialler, acceptor = side(True, cluster_id=one), side(False, cluster_id=two)
    converse(dialler, acceptor)
    assert dialler.peer is not None
    assert dialler.peer.cluster_id == two


def test_a_field_changed_on_the_way_is_noticed() -> None:
    one, two = side(True), side(False)
    body = msgspec.msgpack.decode(one.begin()[HEADER_SIZE:])
    answer = two.receive(hello(1, {**body, "directory": "other"}))
    assert answer is not None
    proof = one.receive(answer)
    assert proof is not None
    with pytest.raises(LinkRefused, match="secret"):
        two.receive(proof)


def test_what_the_acceptor_says_of_itself_cannot_be_changed_on_the_way() -> None:
    one, two = side(True), side(False)
    answer = two.receive(one.begin())
    assert answer is not None
    proof = one.receive(answer)
    assert proof is not None
    last = two.receive(proof)
    assert last is not None
    body = msgspec.msgpack.decode(last[HEADER_SIZE:])
    with pytest.raises(LinkRefused, match="secret"):
        one.receive(hello(4, {**body, "directory": "other"}))
    assert one.peer is None


def test_an_unknown_node_gets_nothing_before_it_has_proved_itself() -> None:
    unknown, two = side(True, secrets=[b"t"]), side(False)
    answer = two.receive(unknown.begin())
    assert answer is not None
    assert set(msgspec.msgpack.decode(answer[HEADER_SIZE:])) == {"nonce"}
    guess = unknown.receive(answer)
    assert guess is not None
    with pytest.raises(LinkRefused, match="secret") as refused:
        two.receive(guess)
    assert not refused.value.told


def test_an_acceptor_without_the_secret_is_refused_by_the_dialler() -> None:
    one, two = side(True), side(False, secrets=[b"t"])
    two._check = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(LinkRefused, match="secret"):
        converse(one, two)
    assert one.peer is None


def test_both_know_the_connection_by_the_same_number() -> None:
    one, two = side(True), side(False)
    converse(one, two)
    assert one.connection == two.connection


def hello(step: int, body: dict[str, Any]) -> bytes:
    return frame(FRAME_HELLO, 0, 0, step, 0, 0, 0, msgspec.msgpack.encode(body))


def first_step(**changes: Any) -> bytes:
    body = msgspec.msgpack.decode(side(True).begin()[HEADER_SIZE:])
    return hello(1, {k: v for k, v in {**body, **changes}.items() if v is not None})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"version": 1, "supports": None, "release": "0.1.0"},
            "node 1 runs ConvoyMQ 0.1.0 (link protocol 1), this node 0.2.0 needs 3 or later",
        ),
        (
            {"version": 1, "supports": None, "release": None},
            "node 1 runs an older ConvoyMQ (link protocol 1), this node 0.2.0 needs 3 or later",
        ),
        (
            {"version": 5, "supports": {"link": [4, 5]}, "release": "9.0.0"},
            "node 1 runs ConvoyMQ 9.0.0 (link protocol 4 to 5), this node 0.2.0 needs 3 or earlier",
        ),
    ],
)
def test_releases_that_have_no_protocol_in_common_are_named(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(LinkRefused) as refused:
        side(False).receive(first_step(**changes))
    assert (refused.value.text, refused.value.code) == (text, "version")


def test_a_newer_release_that_still_speaks_our_protocol_is_taken() -> None:
    answer = side(False).receive(first_step(version=4, supports={"link": [3, 4]}, more=[1]))
    assert answer is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"node": 0},
        {"node": 256},
        {"node": "1"},
        {"incarnation": 0},
        {"incarnation": 1 << 32},
        {"directory": None},
        {"instance": 5},
        {"cluster_id": "x" * 65},
        {"release": "x" * 201},
        {"supports": {"link": [3, 3], "quorum": [1]}},
        {"supports": []},
        {"process": ["m", 1]},
        {"process": ["m", 1, "2"]},
        {"nonce": b"short"},
        {"version": "2"},
    ],
)
def test_a_malformed_identity_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LinkRefused):
        side(False).receive(first_step(**changes))


@pytest.mark.parametrize("change", [{"secrets": [b"t"]}, {"cluster": "d"}])
@pytest.mark.parametrize("who", [0, 1])
def test_another_secret_or_cluster_is_refused(change: dict[str, Any], who: int) -> None:
    one = side(True, **(change if who == 0 else {}))
    two = side(False, **(change if who == 1 else {}))
    with pytest.raises(LinkRefused, match=r"secret|cluster"):
        converse(one, two)
    assert not one.done
    assert not two.done


def test_a_dialler_without_the_secret_is_refused_by_the_acceptor() -> None:
    one, two = side(True, secrets=[b"t"]), side(False)
    one._check = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(LinkRefused, match="secret"):
        converse(one, two)
    assert not two.done


def test_a_recorded_conversation_cannot_be_replayed() -> None:
    wire = converse(side(True), side(False))
    again = side(False)
    again.receive(wire[0])
    with pytest.raises(LinkRefused, match="secret"):
        again.receive(wire[2])


def test_our_own_proof_cannot_be_reflected() -> None:
    one, two = side(True), side(False)
    answer = two.receive(one.begin())
    assert answer is not None
    with pytest.raises(LinkRefused):
        two.receive(answer)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 47,
        frame(FRAME_CONTROL, 0, 0, 1, 0, 0, 0, b"\x80"),
        frame(FRAME_HELLO, 0, 0, 1, 0, 0, 0, b"\xc1"),
        frame(FRAME_HELLO, 0, 0, 1, 0, 0, 0, b"\x90"),
        frame(FRAME_HELLO, 0, 0, 1, 0, 0, 0, b"\x80"),
        frame(FRAME_HELLO, 0, 0, 3, 0, 0, 0, b"\x80"),
        frame(FRAME_HELLO, 0, 0, 77, 0, 0, 0, b"\x80"),
    ],
)
def test_malformed_steps_are_refused(data: bytes) -> None:
    with pytest.raises(LinkRefused):
        side(False).receive(data)


def test_a_refusal_is_told() -> None:
    with pytest.raises(LinkRefused, match="because") as refused:
        side(True).receive(refusal("because", "number_in_use"))
    assert (refused.value.told, refused.value.code) == (True, "number_in_use")


def test_a_dialler_with_either_secret_is_taken_while_it_is_replaced() -> None:
    for dials, accepts in (
        ([b"old"], [b"old", b"new"]),
        ([b"old", b"new"], [b"new", b"old"]),
        ([b"new", b"old"], [b"new"]),
    ):
        one, two = side(True, secrets=dials), side(False, secrets=accepts)
        data = one.begin()
        while data is not None:
            answer = two.receive(data)
            data = None if answer is None else one.receive(answer)
        assert (one.done, two.done) == (True, True)
    one, two = side(True, secrets=[b"new", b"old"]), side(False, secrets=[b"old"])
    answer = two.receive(one.begin())
    assert answer is not None
    proof = one.receive(answer)
    assert proof is not None
    with pytest.raises(LinkRefused, match="secret"):
        two.receive(proof)
