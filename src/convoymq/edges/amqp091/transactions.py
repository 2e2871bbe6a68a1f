"""The methods of the class tx, and acknowledgements within transactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from convoymq.edges.amqp091 import _spec as spec
from convoymq.kernels import channel_codec
from convoymq.kernels.channel_codec import ConsumerDeliveries
from convoymq.model import refusals
from convoymq.queues.interface import QueueClient

if TYPE_CHECKING:
    from convoymq.edges.amqp091.channel import Channel


class Transaction:
    """Operations that tx.commit will carry out."""

    __slots__ = ("acks", "bytes", "publishes", "refused", "settling", "tag", "waiting")

    def __init__(self) -> None:
        self.publishes: list[tuple[bytes, int, bytes, int, int]] = []
        self.acks: list[tuple[int, list[tuple[int, int, ConsumerDeliveries, int]]]] = []
        self.bytes = 0
        # of the latest publish of a commit
        self.tag = 0
        # tag -> answers that are due, while a commit is on its way
        self.waiting: dict[int, int] = {}
        # queues that have not applied their acknowledgements yet
        self.settling = 0
        # a queue did not take one of the publishes, or was lost with acknowledgements
        self.refused = False

    def is_done(self) -> bool:
        """Returns whether every queue has answered."""
        return not self.waiting and not self.settling

    def on_published(self, tags: Sequence[int], *, ok: bool) -> None:
        """A queue has answered for publishes of the commit under way."""
        waiting = self.waiting
        self.refused |= not ok
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                left = waiting.get(tag, 0) - 1
                if left > 0:
                    waiting[tag] = left
                else:
                    waiting.pop(tag, None)


def select(channel: Channel, _method: spec.TxSelect) -> None:
    """Makes the channel transactional. Raises Refused."""
    if channel.codec.mode == channel_codec.MODE_CONFIRM:
        raise refusals.mode_switch("confirm", "tx")
    if channel.transaction is None:
        channel.transaction = Transaction()
    channel.codec.mode = channel_codec.MODE_TX
    channel.send(spec.TxSelectOk())


def commit(channel: Channel, _method: spec.TxCommit) -> None:
    """Carry out what was collected, and answer when every queue has it. Raises Refused."""
    transaction = channel.transaction
    if transaction is None:
        raise refusals.not_transactional()
    publishes, transaction.publishes = transaction.publishes, []
    acks, transaction.acks = transaction.acks, []
    transaction.bytes = 0
    transaction.refused = False
    for message in publishes:
        transaction.tag += 1
        channel.publish(*message, transaction.tag)
        if channel.closed or channel.codec.state == channel_codec.CHANNEL_CLOSING:
            return
    settled: dict[QueueClient, None] = {}
    for kind, taken in acks:
        channel.codec.settle_taken(kind, taken)
        settled.update((deliveries.client, None) for _, _, deliveries, _ in taken)
    channel.codec.flush_settles()
    transaction.settling = len(settled)
    for client in settled:
        client.when_settled(partial(_on_settled, channel))

    def committed() -> None:
        if transaction.refused:
            raise refusals.partial_commit()
        channel.send(spec.TxCommitOk())

    if transaction.is_done():
        committed()
    else:
        channel.wait_for(committed)


def _on_settled(channel: Channel, ok: bool) -> None:
    """A queue has applied its acknowledgements of the commit under way, or was lost."""
    transaction = channel.transaction
    if transaction is None:
        return
    transaction.settling -= 1
    transaction.refused |= not ok
    if transaction.is_done():
        channel.answer(spec.TxCommit.METHOD_ID, class_id=spec.TX)


def rollback(channel: Channel, _method: spec.TxRollback) -> None:
    """Forgets what was collected. Raises Refused."""
    transaction = channel.transaction
    if transaction is None:
        raise refusals.not_transactional()
    transaction.publishes.clear()
    transaction.bytes = 0
    for _, taken in transaction.acks:
        channel.codec.put_back(taken)
    transaction.acks.clear()
    channel.send(spec.TxRollbackOk())


def acknowledge(
    channel: Channel, method: spec.BasicAck | spec.BasicNack | spec.BasicReject
) -> None:
    """Settle or return; the kernel does it unless the channel is transactional."""
    match method:
        case spec.BasicAck():
            kind, multiple = channel_codec.SETTLE, method.multiple
        case spec.BasicNack():
            kind = channel_codec.RETURN if method.requeue else channel_codec.DISCARD
            multiple = method.multiple
        case spec.BasicReject():
            kind = channel_codec.RETURN_FAILED if method.requeue else channel_codec.DISCARD
            multiple = False
    transaction = channel.transaction
    if transaction is None:
        if not channel.codec.acknowledge(kind, method.delivery_tag, multiple):
            raise refusals.unknown_delivery_tag(method.delivery_tag)
        channel.codec.flush_settles()
        return
    taken = channel.codec.take(method.delivery_tag, multiple)
    if taken is None:
        raise refusals.unknown_delivery_tag(method.delivery_tag)
    transaction.acks.append((kind, taken))


HANDLERS: dict[type[spec.Method], Callable[..., None]] = {
    spec.TxSelect: select,
    spec.TxCommit: commit,
    spec.TxRollback: rollback,
    spec.BasicAck: acknowledge,
    spec.BasicNack: acknowledge,
    spec.BasicReject: acknowledge,
}
