"""Locks of ordered queues: one holder, growing epochs, majorities."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.rocketmq.acting.locks import LOCK_LIFE_MS, Ballot, LockTable, Queue, Vote

Q = Queue("t", "b", 0)
OTHER = Queue("t", "b", 1)


def lock(table: LockTable, client: str, now_ms: int, queue: Queue = Q) -> bool:
    return table.lock("g", client, queue, table.propose("g", now_ms), now_ms)


def test_a_lock_is_one_clients_until_it_is_not_renewed() -> None:
    table = LockTable()
    assert lock(table, "a", 0)
    assert not lock(table, "b", LOCK_LIFE_MS - 1)
    assert lock(table, "a", LOCK_LIFE_MS - 1)
    assert not lock(table, "b", LOCK_LIFE_MS)
    assert lock(table, "b", 2 * LOCK_LIFE_MS)
    assert table.holder("g", Q, 2 * LOCK_LIFE_MS) == "b"


def test_groups_and_queues_do_not_know_each_other() -> None:
    table = LockTable()
    assert lock(table, "a", 0)
    assert lock(table, "b", 0, OTHER)
    assert table.lock("h", "b", Q, 1, 0)


def test_a_client_without_the_lock_is_not_served() -> None:
    """RocketMQ's broker serves whoever asks: the former holder goes on for up to 30 s, and a
    group's order is broken."""
    table = LockTable()
    assert table.may_consume("g", "a", Q, 0)
    lock(table, "a", 0)
    first = table.epoch("g", Q)
    assert table.may_consume("g", "a", Q, 1, first)
    assert not table.may_consume("g", "b", Q, 1)
    table.unlock("g", "a", Q)
    assert table.may_consume("g", "b", Q, 2)
    lock(table, "b", 2)
    assert table.epoch("g", Q) > first
    assert not table.may_consume("g", "a", Q, 3)
    # Nor does an old epoch serve, whatever the client says it is.
    assert not table.may_consume("g", "b", Q, 3, first)
    assert table.may_consume("g", "b", Q, 3, table.epoch("g", Q))


def test_a_group_is_ordered_as_long_as_it_has_a_lock() -> None:
    table = LockTable()
    assert not table.is_ordered("g", 0)
    lock(table, "a", 0)
    assert table.is_ordered("g", 1)
    assert not table.is_ordered("g", LOCK_LIFE_MS)


def test_unlocking_by_somebody_else_changes_nothing() -> None:
    table = LockTable()
    lock(table, "a", 0)
    table.unlock("g", "b", Q)
    assert table.holder("g", Q, 1) == "a"


def test_a_delayed_unlock_does_not_free_a_newer_lease() -> None:
    table = LockTable()
    lock(table, "a", 10)
    freed = table.propose("g", 10)
    table.unlock("g", "a", Q, freed)
    assert table.holder("g", Q, 11) is None
    lock(table, "a", 10)
    assert table.epoch("g", Q) > freed
    table.unlock("g", "a", Q, freed)
    assert table.holder("g", Q, 12) == "a"
    # RocketMQ's replicas name none.
    table.unlock("g", "a", Q)
    assert table.holder("g", Q, 12) is None


def test_a_lock_that_an_unlock_overtook_is_refused() -> None:
    table = LockTable()
    lock(table, "a", 10)
    delayed = table.propose("g", 10)
    table.unlock("g", "a", Q, table.propose("g", 10))
    assert not table.lock("g", "a", Q, delayed, 11)


def test_a_renewal_has_a_later_epoch() -> None:
    """A slave that has just begun to act knows of no lease. Found by the simulator: a majority
    renewed a lock by an epoch below that of the lease."""
    tables = [LockTable(), LockTable()]
    tables[1].lock("g", "a", Q, 1_000, 0)
    assert not tables[1].lock("g", "a", Q, 999, 1)
    assert ask(tables, 0, "a", 500)
    assert tables[0].epoch("g", Q) == tables[1].epoch("g", Q) > 1_000


def test_a_replica_votes_for_later_epochs_after_a_restart() -> None:
    """Found by the simulator: two clients won one epoch, as clocks had jumped and a replica of both
    majorities had restarted."""
    table = LockTable()
    table.floor = 1_000
    assert not table.lock("g", "a", Q, 1_000, 0)
    assert table.propose("g", 5) == table.epoch("g", Q) + 1 == 1_001
    assert table.lock("g", "a", Q, 1_001, 0)


def test_a_table_proposes_no_epoch_twice() -> None:
    table = LockTable()
    assert len({table.propose("g", 10) for _ in range(3)}) == 3


def ask(
    tables: list[LockTable], at: int, client: str, now_ms: int, wall_ms: int | None = None
) -> bool:
    """Asks for a lock at one replica, which asks the others; twice if a replica knew more."""
    above = 0
    for _ in range(2):
        own = tables[at]
        epoch = own.propose("g", now_ms if wall_ms is None else wall_ms, above)
        won = [Q] if own.lock("g", client, Q, epoch, now_ms) else []
        ballot = Ballot(len(tables), won)
        for table in tables:
            if table is not own and ballot.needs_votes:
                granted = table.lock("g", client, Q, epoch, now_ms)
                known = {} if granted else {Q: table.epoch("g", Q)}
                ballot.on_vote(Vote(frozenset({Q} if granted else ()), known))
        if Q in ballot.granted():
            return True
        if ballot.lost():
            for table in tables:
                table.unlock("g", client, Q)
        above = ballot.above
        if not above:
            return False
    return False


def test_two_configured_replicas_of_which_one_is_away_lock_nothing() -> None:
    ballot = Ballot(2, [Q])
    assert ballot.needs_votes
    assert not ballot.granted()
    assert ballot.lost() == {Q}


def test_two_of_three_are_a_majority() -> None:
    ballot = Ballot(3, [Q, OTHER])
    ballot.on_vote(Vote(frozenset({Q, Queue("t", "b", 9)}), {}))
    assert ballot.granted() == {Q}
    assert ballot.lost() == {OTHER}


def test_one_replica_decides_alone() -> None:
    assert not Ballot(1, [Q]).needs_votes
    assert Ballot(1, [Q]).granted() == {Q}


def test_a_replica_that_knows_a_higher_epoch_is_asked_again_above_it() -> None:
    tables = [LockTable(), LockTable()]
    tables[1].lock("g", "x", Q, 1_000_000, 0)
    tables[1].unlock("g", "x", Q)
    assert ask(tables, 0, "a", 5)
    assert tables[0].epoch("g", Q) == tables[1].epoch("g", Q) > 1_000_000


def test_what_was_won_without_a_majority_is_given_back() -> None:
    """RocketMQ keeps it: everybody waits for the end of its life."""
    tables = [LockTable(), LockTable(), LockTable()]
    for table in tables[1:]:
        table.lock("g", "x", Q, 1, 0)
    assert not ask(tables, 0, "a", 1)
    assert tables[0].holder("g", Q, 1) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 40_000),
            st.sampled_from(["lock", "unlock", "restart"]), st.integers(-100_000, 100_000),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_majorities_have_one_holder_and_growing_epochs(
    events: list[tuple[int, str, int, str, int]],
) -> None:
    """Replicas restart, and clocks of wall jump."""
    tables = [LockTable() for _ in range(3)]
    now_ms = 1_000_000
    held: tuple[str, int] | None = None
    highest = 0
    for at, client, passed_ms, name, skew_ms in events:
        now_ms += passed_ms
        if name == "restart":
            former, tables[at] = tables[at], LockTable()
            tables[at].floor = former.epoch("g", Q)
            held = None
        elif name == "unlock":
            for table in tables:
                table.unlock("g", client, Q)
            if held is not None and held[0] == client:
                held = None
        elif name == "lock" and ask(tables, at, client, now_ms, now_ms + skew_ms):
            if held is not None and held[0] != client:
                assert now_ms - held[1] >= LOCK_LIFE_MS
            epoch = tables[at].epoch("g", Q)
            assert epoch > highest
            highest, held = epoch, (client, now_ms)
