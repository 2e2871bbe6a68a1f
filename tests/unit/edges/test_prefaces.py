"""The first bytes of a connection decide, as soon as they can and not before."""

from __future__ import annotations

import pytest

from convoymq.edges.amqp091.edge import AmqpEdge
from convoymq.edges.edge import Edge
from convoymq.edges.prefaces import Prefaces
from convoymq.model.errors import Misuse


class Amqp(Edge):
    prefaces = AmqpEdge.prefaces
    takes_unknown = True


class Amqp10(Edge):
    """AMQP 1.0: without and with SASL."""

    prefaces = (b"AMQP\x00\x01\x00\x00", b"AMQP\x03\x01\x00\x00")


class Columnar(Edge):
    prefaces = (b"CNVY",)


class Http(Edge):
    """Has ports of its own."""


AMQP, AMQP_10, COLUMNAR = Amqp(), Amqp10(), Columnar()
BOTH = Prefaces([COLUMNAR, AMQP, Http()])
VERSIONS = Prefaces([COLUMNAR, AMQP, AMQP_10])


@pytest.mark.parametrize("head", [b"", b"A", b"AMQP", b"AMQP\x00\x00\x09", b"C", b"CNV"])
def test_the_beginning_of_a_preface_decides_nothing(head: bytes) -> None:
    assert BOTH.is_undecided(head)


@pytest.mark.parametrize(
    ("head", "edge"),
    [
        (b"AMQP\x00\x00\x09\x01", AMQP),
        (b"AMQP\x01\x01\x00\x09", AMQP),
        (b"AMQP\x03", AMQP),
        (b"AMQP\x00\x00\x08\x00", AMQP),
        (b"CNVY", COLUMNAR),
        (b"CNVY\x00\x00\x02", COLUMNAR),
        (b"G", AMQP),
        (b"CX", AMQP),
        (b"\x16\x03\x01", AMQP),
    ],
)
def test_a_preface_names_its_edge_and_the_unknown_are_taken(head: bytes, edge: Edge) -> None:
    assert not BOTH.is_undecided(head)
    assert BOTH.edge_of(head) is edge


@pytest.mark.parametrize(
    ("head", "edge"),
    [
        (b"AMQP\x00\x00\x09\x01", AMQP),
        (b"AMQP\x01\x01\x00\x09", AMQP),
        (b"AMQP\x00\x01\x00\x00", AMQP_10),
        (b"AMQP\x03\x01\x00\x00", AMQP_10),
        (b"AMQP\x03\x01\x00\x01", AMQP),
        (b"AMQP\x02", AMQP),
        (b"CNVY", COLUMNAR),
    ],
)
def test_two_versions_of_a_protocol_have_an_edge_each(head: bytes, edge: Edge) -> None:
    for length in range(len(head)):
        assert VERSIONS.is_undecided(head[:length])
    assert not VERSIONS.is_undecided(head)
    assert VERSIONS.edge_of(head) is edge


def test_the_unknown_are_nobody_s_without_an_edge_that_takes_them() -> None:
    assert Prefaces([COLUMNAR]).edge_of(b"AMQP") is None


@pytest.mark.parametrize("preface", [b"", b"CN", b"CNVY2", b"too long."])
def test_prefaces_that_cannot_be_told_apart_are_refused(preface: bytes) -> None:
    class Other(Edge):
        prefaces = (preface,)

    with pytest.raises(Misuse):
        Prefaces([COLUMNAR, Other()])
