"""HELLO, sans-IO: who gets in, and who does not."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.cluster.links import Handshake, LinkRefused, refusal
from convoymq.kernels.batch import FRAME_CONTROL, FRAME_HELLO, frame


def side(dialler: bool, **changes: Any) -> Handshake:
    values: dict[str, Any] = {
        "secret": b"s",
        "cluster": "c",
        "node": 1 if dialler else 2,
        "incarnation": 5,
        "address": "127.0.0.1:1",
        "formed": False,
        **changes,
    }
    return Handshake(dialler, **values)


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
    assert (one.node, two.node, one.incarnation) == (2, 1, 5)
    assert one.peer["known"] == ["a:1"]


@pytest.mark.parametrize("change", [{"secret": b"t"}, {"cluster": "d"}])
@pytest.mark.parametrize("who", [0, 1])
def test_another_secret_or_cluster_is_refused(change: dict[str, Any], who: int) -> None:
    one = side(True, **(change if who == 0 else {}))
    two = side(False, **(change if who == 1 else {}))
    with pytest.raises(LinkRefused, match=r"secret|cluster"):
        converse(one, two)
    assert not one.done
    assert not two.done


def test_a_dialler_without_the_secret_is_refused_by_the_acceptor() -> None:
    one, two = side(True, secret=b"t"), side(False)
    one._check = lambda role, body: None  # type: ignore[method-assign]
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
    with pytest.raises(LinkRefused, match="because"):
        side(True).receive(refusal("because"))
