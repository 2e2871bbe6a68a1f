"""Random schedules of all special services on one log: crashes and restarts anywhere.

What must hold is seen in the log alone: each message comes out once, not before its time, in the
order of its level; acknowledged pops never come back, others always do.
"""

from __future__ import annotations

import random

import pytest

from convoymq.rocketmq.special.levels import DelayLevels, Done
from convoymq.rocketmq.special.names import IS_PREPARED
from convoymq.rocketmq.special.outbox import Batch, Outbox
from convoymq.rocketmq.special.pop import Pops
from convoymq.rocketmq.special.pop_records import Ack, CheckPoint, PopKey, retry_topic
from convoymq.rocketmq.special.state import Saved, SpecialState
from convoymq.rocketmq.special.transactions import End, Transactions
from convoymq.rocketmq.special.wheel import ROLL_MS, TimerWheel
from convoymq.rocketmq.store.types import Draft, Message
from tests.unit.rocketmq.special.machine import DELAYS_MS, NAME, Machine, seeded

GROUP = "g"
SEEDS = 12
STEPS = 100
DAY_MS = 24 * 3600 * 1000


class Model:
    """What was asked for, beside the machine that does it."""

    def __init__(self, machine: Machine, rng: random.Random) -> None:
        self.machine = machine
        self.rng = rng
        self.count = 0
        self.due_ms: dict[bytes, int] = {}
        """Not to be delivered before."""
        self.levels: dict[bytes, int] = {}
        self.halves: dict[bytes, tuple[Message, End]] = {}
        self.popped: dict[bytes, int] = {}
        self.acked: set[bytes] = set()
        self.receipts: list[tuple[CheckPoint, int, bytes]] = []

    def body(self) -> bytes:
        self.count += 1
        return b"%d" % self.count

    # --- what clients do -------------------------------------------------------------------------

    def delay(self) -> None:
        level, body = self.rng.randint(1, len(DELAYS_MS)), self.body()
        self.machine.send(body, self.rng.choice(("t", "u")), DELAY=level)
        self.due_ms[body] = self.machine.now_ms + DELAYS_MS[level - 1]
        self.levels[body] = level

    def time(self) -> None:
        ahead_ms = self.rng.choice((1, 400, 1500, 4000, 30_000, ROLL_MS + 5000, ROLL_MS + DAY_MS))
        body = self.body()
        self.machine.send(body, self.rng.choice(("t", "u")), TIMER_DELAY_MS=ahead_ms)
        self.due_ms[body] = self.machine.now_ms + ahead_ms

    def half(self) -> None:
        body = self.body()
        placed = self.machine.send(body, **{IS_PREPARED: "true", "PGROUP": "p"})
        found = self.machine.opened.store.message_at(placed.physical)
        assert found is not None
        self.halves[body] = (found, End.UNKNOWN)

    def end(self) -> None:
        waiting = list(self.halves)
        if not waiting:
            return
        body = self.rng.choice(waiting)
        half, end = self.halves[body]
        if end is End.UNKNOWN:
            end = self.rng.choice((End.COMMIT, End.ROLLBACK))
        self.halves[body] = (half, end)
        for _ in range(self.rng.choice((1, 1, 2))):
            drafts = self.machine.state.transactions.end(
                half, end=end, group="p", offset=half.queue_offset, is_checked=True,
                now_ms=self.machine.now_ms,
            )  # fmt: skip
            if drafts:
                self.machine.opened.put(*drafts)
            if self.rng.random() < 0.3:
                # Its answer may be lost: the producer says it again.
                self.machine.kill()

    def pop(self) -> None:
        machine, pops = self.machine, self.machine.state.pops
        topic = self.rng.choice(("p", retry_topic("p", GROUP)))
        start = machine.position(topic, GROUP)
        messages, _ = machine.log.read(topic, 0, start, self.rng.randint(1, 5))
        if not messages:
            return
        checkpoint = CheckPoint(
            start=start, pop_ms=machine.now_ms, invisible_ms=self.rng.choice((2000, 10_000)),
            queue=0, topic=topic, group=GROUP, count=len(messages), broker=NAME,
            differences=[message.queue_offset - start for message in messages],
        )  # fmt: skip
        machine.put(pops.checkpoint(checkpoint, 0, machine.now_ms))
        for message in messages:
            body = bytes(message.body)
            assert body not in self.acked, "an acknowledged message was given out again"
            self.popped[body] = self.popped.get(body, 0) + 1
            self.receipts.append((checkpoint, message.queue_offset, body))
        # Time passes: a pop at the same time from the same place has the same name.
        machine.now_ms += 1

    def ack(self) -> None:
        if not self.receipts:
            return
        checkpoint, offset, body = self.receipts.pop(self.rng.randrange(len(self.receipts)))
        machine = self.machine
        if checkpoint.revive_ms <= machine.now_ms:
            return
        ack = Ack(
            start=checkpoint.start, group=GROUP, topic=checkpoint.topic, queue=0,
            pop_ms=checkpoint.pop_ms, offset=offset, broker=NAME,
        )  # fmt: skip
        draft = machine.state.pops.ack(ack, 0, checkpoint.revive_ms, machine.now_ms)
        if draft is not None:
            machine.put(draft)
        self.acked.add(body)

    def produce(self) -> None:
        self.machine.send(self.body(), "p")

    # --- what happens to the broker --------------------------------------------------------------

    def fail(self) -> None:
        topic = self.rng.choice(("t", "u", "none"))
        self.machine.fails = lambda draft: draft.topic == topic

    def step(self) -> None:
        act = self.rng.choice((
            self.delay, self.time, self.half, self.end, self.pop, self.pop, self.ack, self.ack,
            self.produce, self.produce, self.fail,
        ))  # fmt: skip
        act()
        machine = self.machine
        chance = self.rng.random()
        if chance < 0.05:
            machine.kill()
        elif chance < 0.15:
            machine.save()
        for _ in range(self.rng.randint(0, 12)):
            machine.now_ms += 100
            machine.tick(self.rng.choice((None, None, None, 0, 1, 2)))

    # --- what must hold --------------------------------------------------------------------------

    def finish(self) -> None:
        machine = self.machine
        machine.fails = lambda _draft: False
        machine.advance(60_000, 1000)
        machine.advance(4 * DAY_MS, 3_600_000)
        machine.advance(60_000, 1000)

    def check(self) -> None:
        machine = self.machine
        out = [message for topic in ("t", "u") for message in machine.messages(topic)]
        bodies = sorted(bytes(message.body) for message in out)
        committed = [body for body, (_, end) in self.halves.items() if end is End.COMMIT]
        assert bodies == sorted([*self.due_ms, *committed])
        for message in out:
            assert message.stored_ms >= self.due_ms.get(bytes(message.body), 0)
        for topic in ("t", "u"):
            for level in range(1, len(DELAYS_MS) + 1):
                order = [int(b) for b in machine.bodies(topic) if self.levels.get(b) == level]
                assert order == sorted(order)
        asked = {check.physical for check in machine.checks}
        for half, end in self.halves.values():
            assert end is not End.UNKNOWN or half.physical in asked
        self.check_pops()

    def check_pops(self) -> None:
        machine = self.machine
        retry = retry_topic("p", GROUP)
        back = machine.bodies(retry)
        for body, count in self.popped.items():
            # The last pop was acknowledged, or it came back once for each.
            assert back.count(body) == count - (body in self.acked)


def run(seed: int, steps: int = STEPS) -> Model:
    """Runs a schedule."""
    model = Model(Machine(log_file_bytes=1 << 20, queue_file_bytes=20_000), seeded(seed))
    for _ in range(steps):
        model.step()
    model.finish()
    model.check()
    return model


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_message_comes_out_once(seed: int) -> None:
    run(seed)


# --- planted bugs: each must be found ------------------------------------------------------------


def _no_keys(self: SpecialState) -> None:
    """The log is not read for what was given out behind the checkpoint."""


def _late_position(self: SpecialState, now_ms: int) -> Saved:
    """The checkpoint names the end of the log, not what it was at its time."""
    saved = _saved(self, now_ms)
    saved.checkpoint.physical = self._log.end
    return saved


def _now_as_checkpoint(self: SpecialState, now_ms: int) -> Saved:
    """The checkpoint names the present, whatever still waits."""
    saved = _saved(self, now_ms)
    saved.checkpoint.read_ms = now_ms
    return saved


def _skips_failures(self: Outbox, batch: Batch, count: int, now_ms: int) -> None:
    """A message whose putting fails is given up (as RocketMQ does after ten, or three, tries)."""
    _settle(self, batch, len(batch.keys), now_ms)


def _passes_on_after_failure(self: Outbox, batch: Batch, count: int, now_ms: int) -> None:
    """A message that fails goes behind those of its topic that follow."""
    line = self._lines[batch.topic]
    if count < len(batch.keys):
        line.keys.append(batch.keys[count])
        del line.keys[count]
    _settle(self, batch, count, now_ms)


def _slots_early(self: TimerWheel, now_ms: int) -> None:
    """A slot is due when its second begins."""
    _tick_wheel(self, now_ms + 1000)


def _levels_early(self: DelayLevels, now_ms: int) -> None:
    """Levels are due before their time."""
    _tick_levels(self, now_ms + 500)


def _ends_again(self: Transactions, half: Message, **named: object) -> list[Draft]:
    """A repeated commit is not recognised."""
    done, self._done = self._done, Done()
    try:
        return _end(self, half, **named)  # type: ignore[arg-type]
    finally:
        self._done = done


def _forgets_acks(self: Pops, message: Message, **named: object) -> None:
    """Acknowledgements are in memory only (as in RocketMQ's buffer), and a crash loses them."""
    if not named or message.properties.get("TAGS") != "ack":
        _on_pop_record(self, message, **named)  # type: ignore[arg-type]


def _no_positions(self: Pops) -> dict[tuple[str, str, int], int]:
    """How far a group is, is not read from checkpoints (a crash loses the last offsets)."""
    found = _take_positions(self)
    return {place: offset for place, offset in found.items() if place[0] != "p"}


def _revives_all(self: Pops, key: PopKey, found: object, index: int) -> None:
    """One acknowledgement is taken for all messages of its checkpoint."""
    self._close(key)


_saved = SpecialState.saved
_settle = Outbox.settle
_tick_wheel, _tick_levels = TimerWheel.tick, DelayLevels.tick
_end = Transactions.end
_on_pop_record = Pops.on_record
_take_positions = Pops.take_positions

BUGS = {
    "keys": (SpecialState, "catch_up", _no_keys),
    "position": (SpecialState, "saved", _late_position),
    "checkpoint": (SpecialState, "saved", _now_as_checkpoint),
    "failures": (Outbox, "settle", _skips_failures),
    "order": (Outbox, "settle", _passes_on_after_failure),
    "slots": (TimerWheel, "tick", _slots_early),
    "levels": (DelayLevels, "tick", _levels_early),
    "ends": (Transactions, "end", _ends_again),
    "acks": (Pops, "on_record", _forgets_acks),
    "positions": (Pops, "take_positions", _no_positions),
    "done": (Pops, "_set_done", _revives_all),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[name])
    for seed in range(5 * SEEDS):
        try:
            run(seed)
        except AssertionError:
            return
    raise AssertionError(f"{name} was not found")
