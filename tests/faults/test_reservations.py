"""Reservations on real nodes, used as a batch engine would: take, read, settle, with kill -9
between."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig, errors
from convoymq.kernels.columns import DELIVERY_COUNT, OFFSET, REDELIVERED, VALUE
from convoymq.model.errors import Unavailable
from tests.clusters import cut_power, start_nodes
from tests.faults.traffic import connect, declare, drain, fill, padded, until
from tests.patience import PATIENCE_S

QUEUE = "orders"
SIZE = 100
TTL = 600_000
SOON = 2_000


def client(cluster: LocalCluster, *nodes: int, timeout: float = PATIENCE_S) -> Client:
    """A client of some nodes; of all of them when none is named."""
    ports = [cluster.nodes[n - 1].amqp_port for n in nodes or (1, 2, 3)]
    servers = tuple(f"127.0.0.1:{port}" for port in ports)
    return Client(ClientConfig(servers=servers, timeout=timeout))


class Owner:
    """Who reads a queue through a reservation."""

    def __init__(self, client: Client, name: str = "me", queue: str = QUEUE, **more: Any) -> None:
        self.client = client
        self.queue = queue
        answer = client.reservation(
            queue, "open", reservation="s", owner=name, ttl_ms=more.get("ttl_ms", TTL)
        )
        self.mine = {
            "reservation": "s",
            "epoch": answer["epoch"],
            "fencing_token": answer["fencing_token"],
        }
        self.first, self.next = answer["first"], answer["next"]

    def take(self, count: int) -> int:
        """Returns the end of what is reserved after taking `count` more."""
        answer = self.client.reservation(
            self.queue, "take", **self.mine, max=count, after=self.next
        )
        self.next = answer["next"]
        return self.next

    def settle(self, upto: int) -> None:
        self.first = self.client.reservation(self.queue, "settle", **self.mine, upto=upto)["first"]

    def read(self, first: int, end: int, by: Client | None = None) -> list[tuple[int, int]]:
        return rows(by or self.client, self.queue, self.mine["epoch"], first, end)


def rows(
    client: Client, queue: str, epoch: int, first: int, end: int, **more: Any
) -> list[tuple[int, int]]:
    """(offset, number in the body) of a reservation's rows; every body must be whole."""
    found: list[tuple[int, int]] = []
    at = first
    while at < end:
        result = client.reservation_fetch(
            queue,
            more.get("reservation", "s"),
            epoch,
            at,
            end=end,
            max_rows=37,
            columns=OFFSET | VALUE,
        )
        found += zip(result.frame.offsets(), numbers(result.frame), strict=True)
        assert result.next > at
        at = result.next
    return found


def numbers(frame: Any) -> list[int]:
    _, offsets, blob = frame.buffers(VALUE)
    ends = offsets.cast("i")
    bodies = [bytes(blob[ends[i] : ends[i + 1]]) for i in range(frame.rows)]
    assert all(body == padded(int(body), SIZE) for body in bodies)
    return [int(body) for body in bodies]


def counts(frame: Any, column: int) -> list[int]:
    return list(frame.buffers(column)[0].cast("i"))


def refusal(call: Any, *arguments: Any, **fields: Any) -> str:
    with pytest.raises(errors.ReservationGone) as refused:
        call(*arguments, **fields)
    return refused.value.reason


def is_forgotten(owner: Owner) -> bool:
    """Whether the queue's node, once the others see it again, knows nothing of the reservation."""
    try:
        owner.settle(30)
    except errors.ReservationGone as refused:
        return refused.reason == "no_reservation"
    except errors.NotFound:
        # Its process runs, and another node does not know it yet.
        return False
    return False


def is_refused(owner: Owner, by: Client) -> bool:
    """Whether the owner's epoch cannot be read any more; until then its rows are what they were."""
    try:
        assert owner.read(0, 10, by) == [(i, i) for i in range(10)]
    except errors.ReservationGone as refused:
        return refused.reason == "reservation_epoch"
    return False


def test_the_leader_is_killed_between_take_and_settle(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 200, SIZE)
    victim = cluster.leader_of(QUEUE)
    others = [n for n in (1, 2, 3) if n != victim]
    with client(cluster) as every, client(cluster, others[1]) as other:
        owner = Owner(every)
        assert owner.take(150) == 150
        before = owner.read(0, 150)
        assert before == [(i, i) for i in range(150)]
        cluster.kill(victim)
        assert owner.read(0, 150, by=other) == before
        owner.settle(100)
        assert owner.read(100, 150) == before[100:]
        assert refusal(owner.read, 99, 150) == "reservation_settled"
        assert owner.take(1000) == 200
        # A new driver comes: it goes on where the other was, and fences it.
        heir = Owner(other, "heir")
        assert (heir.first, heir.next) == (100, 200)
        assert heir.mine["epoch"] == owner.mine["epoch"]
        assert refusal(owner.settle, 150) == "reservation_fenced"
        assert refusal(owner.take, 1) == "reservation_fenced"
        assert heir.read(100, 200) == [(i, i) for i in range(100, 200)]
        cluster.start_node(victim)
        cluster.wait_ready()
        with client(cluster, victim) as back:
            assert heir.read(100, 200, by=back) == [(i, i) for i in range(100, 200)]
        heir.settle(200)
        until(lambda: cluster.messages_in(QUEUE) == 0, "messages are left")
        assert heir.client.reservation(QUEUE, "close", **heir.mine) == {}


def test_all_nodes_are_killed_and_the_reservation_is_as_it_was(cluster: LocalCluster) -> None:
    declare(cluster, 2, QUEUE)
    fill(cluster, 1, QUEUE, 60, SIZE)
    with client(cluster) as every:
        owner = Owner(every)
        owner.take(50)
        owner.settle(20)
        cut_power(cluster)
        start_nodes(cluster, 3, 2, 1)
        again = Owner(every)
        assert again.mine == owner.mine
        assert (again.first, again.next) == (20, 50)
        for number in (1, 2, 3):
            with client(cluster, number) as one:
                assert again.read(20, 50, by=one) == [(i, i) for i in range(20, 50)]
        again.settle(50)
        assert again.take(100) == 60
        again.settle(60)


def test_a_reservation_that_nobody_is_heard_of_expires(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 30, SIZE)
    with client(cluster) as every:
        owner = Owner(every, ttl_ms=SOON)
        owner.take(20)
        owner.settle(5)
        # Consumers get what comes back, before the rest, and it says that it was out before.
        found = []
        connection = connect(cluster, 2)
        channel = connection.channel()
        for method, _, body in channel.consume(QUEUE, inactivity_timeout=PATIENCE_S):
            assert method is not None, "nothing came back"
            found.append((int(body), method.redelivered))
            channel.basic_ack(method.delivery_tag)
            if len(found) == 25:
                break
        connection.close()
        back = [(i, True) for i in range(5, 20)]
        fresh = [(i, False) for i in range(20, 30)]
        assert sorted(found) == back + fresh
        assert [row for row in found if row[1]] == back
        assert refusal(owner.settle, 20) == "no_reservation"
        assert refusal(owner.read, 5, 20) == "no_reservation"
        again = Owner(every)
        assert again.mine["epoch"] > owner.mine["epoch"]
        assert refusal(owner.settle, 20) == "reservation_epoch"
        assert again.take(10) == 0


def test_a_reader_keeps_a_reservation_alive_and_a_lease_counts_deliveries(
    cluster: LocalCluster,
) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 10, SIZE)
    with client(cluster) as every:
        leased = every.reservation(QUEUE, "lease", reservation="l", ttl_ms=SOON, max=4)
        assert leased == every.reservation(QUEUE, "lease", reservation="l", ttl_ms=SOON, max=9)
        done = threading.Event()
        timer = threading.Timer(2 * SOON / 1000, done.set)
        timer.start()
        reads = 0
        while not done.wait(0.1):
            found = rows(every, QUEUE, leased["epoch"], 0, 4, reservation="l")
            assert found == [(i, i) for i in range(4)]
            reads += 1
        assert reads > 5
        # Nobody reads any more: it expires, and the next lease tells how often it went wrong.
        until(lambda: not reservations(cluster), "the lease does not expire")
        leased = every.reservation(QUEUE, "lease", reservation="m", ttl_ms=TTL, max=4)
        result = every.reservation_fetch(
            QUEUE, "m", leased["epoch"], 0, end=4, columns=VALUE | DELIVERY_COUNT | REDELIVERED
        )
        assert numbers(result.frame) == [0, 1, 2, 3]
        assert counts(result.frame, DELIVERY_COUNT) == [1] * 4
        assert counts(result.frame, REDELIVERED) == [1] * 4
        every.reservation(QUEUE, "settle", reservation="m", epoch=leased["epoch"], upto=4)
        every.reservation(QUEUE, "settle", reservation="m", epoch=leased["epoch"], upto=4)
        assert cluster.messages_in(QUEUE) == 6


def reservations(cluster: LocalCluster) -> list[Any]:
    found: list[Any] = [row for row in cluster.api("consumers") if row.get("kind")]
    return found


def test_released_rows_go_to_consumers_and_the_old_epoch_is_refused(
    cluster: LocalCluster,
) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 40, SIZE)
    with client(cluster) as every:
        owner = Owner(every)
        owner.take(40)
        assert [(row["kind"], row["unacked"]) for row in reservations(cluster)] == [
            ("reservation", 40)
        ]
        answer = every.reservation(QUEUE, "release", **owner.mine, **{"from": 10})
        assert (answer["first"], answer["next"]) == (0, 10)
        for number in (1, 2, 3):
            with client(cluster, number) as one:
                # A follower may be a moment behind; then it still shows what the epoch meant.
                until(lambda one=one: is_refused(owner, one), "the old epoch can be read")
                found = rows(one, QUEUE, answer["epoch"], 0, 10)
                assert found == [(i, i) for i in range(10)]
        owner.mine["epoch"] = answer["epoch"]
        owner.settle(10)
    assert drain(cluster, 3, QUEUE, 30, SIZE) == list(range(10, 40))


@pytest.mark.parametrize("victims", [(1, 2, 3), (2, 3, 1)])
def test_a_driver_that_is_fenced_now_and_then_archives_every_message_once(
    cluster: LocalCluster, victims: tuple[int, ...]
) -> None:
    """The archive is written per batch, as a checkpointed sink does: a batch that is read again
    replaces itself. Nodes die in turn, and drivers too, between any two steps."""
    count = 3000
    declare(cluster, 1, QUEUE)
    filler = threading.Thread(target=fill, args=(cluster, 1, QUEUE, count, SIZE))
    filler.start()
    filler.join()
    archive: dict[int, list[tuple[int, int]]] = {}
    with client(cluster) as every:
        owner = Owner(every, "driver 0")
        epoch = owner.mine["epoch"]
        done, step = 0, 0
        deaths = iter(victims)
        down = 0
        while done < count:
            step += 1
            if step % 12 == 4:
                down = next(deaths, 0)
                if down:
                    cluster.kill(down)
            if step % 12 == 10 and down:
                cluster.start_node(down)
                cluster.wait_ready()
                down = 0
            if step % 7 == 3:
                # The driver dies after it read; the next one finds the batch still reserved.
                owner = Owner(every, f"driver {step}")
                assert owner.mine["epoch"] == epoch
                assert owner.first == done
            end = owner.next if owner.next > done else owner.take(100)
            archive[done] = owner.read(done, end)
            if step % 5 == 2:
                continue
            owner.settle(end)
            done = end
    archived = [row for batch in sorted(archive) for row in archive[batch]]
    assert archived == [(i, i) for i in range(count)]
    until(lambda: cluster.messages_in(QUEUE) == 0, "messages are left")


def test_a_reservation_and_a_consumer_share_a_queue_while_its_leader_is_killed(
    cluster: LocalCluster,
) -> None:
    count = 2000
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, count, SIZE)
    assert cluster.leader_of(QUEUE) == 1
    consumed: list[int] = []
    over = threading.Event()

    def consume() -> None:
        # At a node that lives on: what it acknowledges is acknowledged.
        connection = connect(cluster, 2)
        channel = connection.channel()
        channel.basic_qos(prefetch_count=7)
        for method, _, body in channel.consume(QUEUE, inactivity_timeout=0.1):
            if method is not None:
                consumed.append(int(body))
                channel.basic_ack(method.delivery_tag)
            elif over.is_set():
                break
        connection.close()

    consumer = threading.Thread(target=consume)
    archived: list[tuple[int, int]] = []
    with client(cluster) as every:
        owner = Owner(every)
        # The reservation has the first part for sure, whatever the consumer takes.
        owner.take(200)
        consumer.start()
        killed = False
        while owner.first < owner.next or not is_over(cluster):
            if owner.first == owner.next and owner.take(20) == owner.first:
                continue
            end = min(owner.first + 30, owner.next)
            archived += owner.read(owner.first, end)
            if not killed and len(archived) >= 100:
                cluster.kill(1)
                killed = True
            owner.settle(end)
        over.set()
        consumer.join()
    assert killed
    assert [offset for offset, _ in archived] == list(range(len(archived)))
    reserved = [number for _, number in archived]
    assert len(consumed) == len(set(consumed))
    assert sorted(reserved + consumed) == list(range(count))


def is_over(cluster: LocalCluster) -> bool:
    """Whether the queue has nothing left; no while nobody can tell."""
    with contextlib.suppress(Unavailable, LookupError):
        return cluster.messages_in(QUEUE) == 0
    return False


def test_a_queue_with_one_replica_is_reserved_and_browsed_from_every_node(
    cluster: LocalCluster,
) -> None:
    declare(cluster, 2, QUEUE, {"x-quorum-initial-group-size": 1})
    fill(cluster, 1, QUEUE, 50, SIZE)
    for number in (1, 2, 3):
        with client(cluster, number) as one:
            seen: list[int] = []
            cursor = None
            while True:
                result, cursor = one.browse(QUEUE, cursor, max_rows=7, columns=VALUE)
                seen += numbers(result.frame)
                if cursor is None:
                    break
            assert seen == list(range(50))
            owner = Owner(one, f"at {number}")
            end = owner.take(10)
            for reader in (1, 2, 3):
                with client(cluster, reader) as by:
                    assert owner.read(0, end, by=by) == [(i, i) for i in range(end)]
            one.reservation(QUEUE, "close", **owner.mine)
    assert drain(cluster, 1, QUEUE, 50, SIZE) == list(range(50))


def test_a_durable_classic_queue_forgets_its_reservations_with_its_node(
    cluster: LocalCluster,
) -> None:
    declare(cluster, 2, QUEUE, {"x-queue-type": "classic"})
    fill(cluster, 1, QUEUE, 50, SIZE)
    home = cluster.leader_of(QUEUE)
    away = [n for n in (1, 2, 3) if n != home]
    with client(cluster, *away) as every:
        owner = Owner(every)
        assert owner.take(30) == 30
        owner.settle(10)
        assert owner.read(10, 30) == [(i, i) for i in range(10, 30)]
        cluster.kill(home)
        cluster.start_node(home)
        cluster.wait_ready()
        until(lambda: is_forgotten(owner), "the reservation outlives its queue's node")
        assert refusal(owner.read, 10, 30) == "no_reservation"
        again = Owner(every)
        assert again.mine["epoch"] > owner.mine["epoch"]
        assert refusal(owner.settle, 30) == "reservation_epoch"
        assert again.take(100) == 40
        assert again.read(0, 40) == [(i, i + 10) for i in range(40)]
        again.settle(40)
    until(lambda: cluster.messages_in(QUEUE) == 0, "messages are left")
