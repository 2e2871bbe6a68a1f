"""Stages and leases: messages checked out of a queue under a name that no connection owns.

A stage is what a batch engine reads a queue through: it takes messages, reads them as often as it
likes from any node, and settles them later (ADR 0008). The rules are here, once for all queue
types; what holding a message means is the queue's (`Holder`).

States of a stage's offset:   beyond next --take--> staged --settle--> below first
                                    ^---- release (epoch rises) ---+

| op      | needs                    | refused with                     | a repeat          |
|---------|--------------------------|----------------------------------|-------------------|
| open    | owner, ttl_ms            | limit, kind, queue's own         | the same answer   |
| take    | epoch, fence, max, after | gone, epoch, fenced, range, kind | takes nothing     |
| settle  | epoch, fence, upto       | gone, epoch, fenced, range       | settles nothing   |
| release | epoch, fence, from       | gone, epoch, fenced, range       | the same answer   |
| close   | epoch, fence             | epoch, fenced                    | nothing is there  |
| lease   | ttl_ms, max              | limit, kind, queue's own         | the same answer   |
| touch   | epoch                    | gone, epoch, fenced              | hears of it again |

Every answer but that of close is a map of epoch, fence, first (the oldest unsettled offset) and
next. A lease is a stage that is filled once: nobody fights over it, so its fence need not be named.
One that is settled to its end is over; the latest of these are remembered, so that a repeat of the
last settle is no error. An empty lease is answered (next = 0) and not kept.

Invariants (`check`): a stage holds exactly the offsets first … next - 1; epochs rise; with a queue
that serves one consumer at a time there is at most one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from convoymq.model.errors import StageRefused, Subject

NO_STAGE = "no_stage"
STAGE_EPOCH = "stage_epoch"
STAGE_FENCED = "stage_fenced"
STAGE_LIMIT = "stage_limit"
STAGE_KIND = "stage_kind"
STAGE_RANGE = "stage_range"
STAGE_SETTLED = "stage_settled"
SINGLE_ACTIVE = "single_active"
EXCLUSIVE = "exclusive"
MALFORMED = "malformed"

#: Reason of a refusal -> what a person reads.
REASONS = {
    NO_STAGE: "the stage does not exist: it was never opened, was closed, or was not heard of for"
    " its time to live, and its messages are back in the queue",
    STAGE_EPOCH: "the stage was released or opened anew since: the offsets of this epoch are gone",
    STAGE_FENCED: "another owner has taken the stage over",
    STAGE_LIMIT: "the queue has too many stages",
    STAGE_KIND: "a lease cannot be used as a stage, nor a stage as a lease",
    STAGE_RANGE: "the offset lies beyond what was taken",
    STAGE_SETTLED: "the offset was settled: these messages are gone",
    SINGLE_ACTIVE: "another consumer of the queue is active, and it serves one at a time",
    EXCLUSIVE: "a consumer has the queue for itself",
    MALFORMED: "the operation lacks a field or has one of a wrong type or size",
}

#: Stages and leases of one queue; settled leases that are remembered.
STAGES_MAX = 1024
FINISHED_KEPT_MAX = 256
NAME_BYTES_MAX = 255
TTL_MS_MIN = 1_000
TTL_MS_MAX = 7 * 24 * 3600 * 1000
TTL_MS_DEFAULT = 3600 * 1000
#: Runs that one take moves: what is applied at once must stay short. More takes get more.
TAKE_RUNS_MAX = 16_384
_U63 = (1 << 63) - 1


class Stage:
    """One stage or lease."""

    __slots__ = (
        "epoch",
        "fence",
        "first",
        "heard_ms",
        "held",
        "is_lease",
        "name",
        "next",
        "owner",
        "released",
        "ttl_ms",
    )

    def __init__(self, name: str, *, is_lease: bool, held: Any) -> None:
        self.name = name
        self.is_lease = is_lease
        self.held = held
        """What is staged, in the queue's own form."""
        self.epoch = 0
        self.fence = 1
        self.owner = ""
        self.ttl_ms = TTL_MS_DEFAULT
        self.heard_ms = 0
        self.first = 0
        """Oldest offset that is not settled."""
        self.next = 0
        """Offset that the next message gets."""
        self.released: tuple[int, int] | None = None
        """(epoch before, from) of the latest release: its repeat is answered, not refused."""

    @property
    def due_ms(self) -> int:
        """When it expires, unless it is heard of."""
        return self.heard_ms + self.ttl_ms

    def answer(self) -> dict[str, int]:
        """What every op tells."""
        return {"epoch": self.epoch, "fence": self.fence, "first": self.first, "next": self.next}


class Holder(Protocol):
    """The queue's side: where messages are, and who may have them."""

    def stage_refusal(self) -> str | None:
        """Why a new stage cannot be; None when it can."""

    def stage_opened(self, stage: Stage) -> None:
        """A stage is new: its `held` has to be made."""

    def stage_closed(self, stage: Stage) -> None:
        """A stage is no more; it holds nothing."""

    def stage_take(self, stage: Stage, limit: int) -> int:
        """Moves ready messages to the stage, from offset `stage.next` on; returns how many, at most
        `limit` and what lies in TAKE_RUNS_MAX runs."""

    def stage_settle(self, stage: Stage, first: int, last: int) -> None:
        """Acknowledges offsets first … last, all of which are staged."""

    def stage_return(self, stage: Stage, first: int, last: int, failed: bool) -> None:
        """Gives offsets first … last, up to the youngest, back to the queue in their order."""


def stage_refused(reason: str, subject: Subject | None = None) -> StageRefused:
    """The refusal as those outside a machine see it."""
    return StageRefused(reason, REASONS.get(reason, reason), subject=subject)


def checked_op(op: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an op that the rules know, with values that they take: what goes into a log.
    Raises StageRefused."""
    made: dict[str, Any] = {}
    try:
        for key, read in _FIELDS.items():
            if op.get(key) is not None:
                made[key] = read(op, key)
    except Refusal as refusal:
        raise stage_refused(refusal.reason) from None
    return made


class Refusal(Exception):
    """An op is refused; `reason` is one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Stages:
    """All stages of one queue."""

    def __init__(self, holder: Holder) -> None:
        self.by_name: dict[str, Stage] = {}
        #: Leases that were settled to their end, oldest first: name -> (epoch, next).
        self.finished: dict[str, tuple[int, int]] = {}
        self._holder = holder

    def __len__(self) -> int:
        return len(self.by_name)

    # ---------------------------------------------------------------- ops

    def apply(self, op: Mapping[str, Any], epoch: int, time_ms: int) -> tuple[str | None, Any]:
        """Carries out one op.

        Args:
            op: its fields, from outside: nothing about them is taken for granted.
            epoch: the epoch of a stage that begins or is released now; higher than any before.
            time_ms: now.
        Returns: (None, answer), or (reason, None) when it is refused and nothing has changed.
        """
        try:
            return None, self._apply(op, epoch, time_ms)
        except Refusal as refusal:
            return refusal.reason, None

    def _apply(self, op: Mapping[str, Any], epoch: int, time_ms: int) -> Any:
        name = _text(op, "stage")
        kind = op.get("op")
        if not name:
            raise Refusal(MALFORMED)
        if kind == "open":
            return self._open(name, op, epoch, time_ms)
        if kind == "lease":
            return self._lease(name, op, epoch, time_ms)
        if kind == "close" and name not in self.by_name:
            return {}
        if kind == "settle" and name in self.finished and name not in self.by_name:
            return self._settle_finished(name, op)
        # What an op needs is read before anything changes.
        if kind == "take":
            limit = _number(op, "max")
            after = -1 if op.get("after") is None else _number(op, "after")
            stage = self._known(name, op, epoch)
            answer = self._take(stage, limit, stage.next if after < 0 else after)
            stage.heard_ms = time_ms
            return answer
        if kind == "settle":
            upto = _number(op, "upto")
            stage = self._known(name, op, epoch)
            answer = self._settle(stage, upto)
            stage.heard_ms = time_ms
            return answer
        if kind == "release":
            start, failed = _number(op, "from"), _truth(op, "failed")
            return self._release(name, op, start, failed, epoch, time_ms)
        if kind == "close":
            failed = _truth(op, "failed")
            self._end(self._known(name, op, epoch), failed)
            return {}
        if kind == "touch":
            stage = self._known(name, op, epoch, fence=False)
            stage.heard_ms = time_ms
            return stage.answer()
        raise Refusal(MALFORMED)

    def _open(self, name: str, op: Mapping[str, Any], epoch: int, time_ms: int) -> Any:
        owner, ttl_ms = _text(op, "owner"), _ttl(op)
        stage = self.by_name.get(name)
        if stage is None:
            stage = self._begin(name, False)
            stage.epoch = epoch
        elif stage.is_lease:
            raise Refusal(STAGE_KIND)
        elif stage.owner != owner:
            stage.fence += 1
        stage.owner = owner
        stage.ttl_ms = ttl_ms
        stage.heard_ms = time_ms
        return stage.answer()

    def _lease(self, name: str, op: Mapping[str, Any], epoch: int, time_ms: int) -> Any:
        owner, ttl_ms, limit = _text(op, "owner", ""), _ttl(op), _number(op, "max")
        stage = self.by_name.get(name)
        if stage is not None:
            if not stage.is_lease:
                raise Refusal(STAGE_KIND)
            stage.heard_ms = time_ms
            return stage.answer()
        if name in self.finished:
            return self._finished_answer(name)
        stage = self._begin(name, True)
        stage.epoch = epoch
        stage.owner = owner
        stage.ttl_ms = ttl_ms
        stage.heard_ms = time_ms
        if limit:
            stage.next += self._holder.stage_take(stage, limit)
        if not stage.next:
            self._forget(stage)
        return stage.answer()

    def _begin(self, name: str, is_lease: bool) -> Stage:
        reason = self._holder.stage_refusal()
        if reason is None and len(self.by_name) >= STAGES_MAX:
            reason = STAGE_LIMIT
        if reason is not None:
            raise Refusal(reason)
        stage = Stage(name, is_lease=is_lease, held=None)
        self.by_name[name] = stage
        self._holder.stage_opened(stage)
        return stage

    def _known(self, name: str, op: Mapping[str, Any], epoch: int, *, fence: bool = True) -> Stage:
        """The stage that an op names with its epoch and fence. Nothing has changed yet: the op may
        still be refused, and then it does not count as a sign of life."""
        given = _number(op, "epoch")
        stage = self.by_name.get(name)
        if stage is None:
            raise Refusal(NO_STAGE)
        # An epoch that begins in this very entry was told to nobody yet: it was guessed.
        if given != stage.epoch or given >= epoch:
            raise Refusal(STAGE_EPOCH)
        self._check_fence(stage, op, fence)
        return stage

    @staticmethod
    def _check_fence(stage: Stage, op: Mapping[str, Any], needed: bool) -> None:
        given = op.get("fence")
        if given is None and (stage.is_lease or not needed):
            return
        if _number(op, "fence") != stage.fence:
            raise Refusal(STAGE_FENCED)

    def _take(self, stage: Stage, limit: int, after: int) -> Any:
        if stage.is_lease:
            raise Refusal(STAGE_KIND)
        if after > stage.next:
            raise Refusal(STAGE_RANGE)
        if after == stage.next and limit:
            stage.next += self._holder.stage_take(stage, limit)
        return stage.answer()

    def _settle(self, stage: Stage, upto: int) -> Any:
        if upto > stage.next:
            raise Refusal(STAGE_RANGE)
        if upto > stage.first:
            self._holder.stage_settle(stage, stage.first, upto - 1)
            stage.first = upto
        if stage.is_lease and stage.first == stage.next:
            self._forget(stage)
            self.finished[stage.name] = (stage.epoch, stage.next)
            if len(self.finished) > FINISHED_KEPT_MAX:
                del self.finished[next(iter(self.finished))]
        return stage.answer()

    def _settle_finished(self, name: str, op: Mapping[str, Any]) -> Any:
        epoch, end = self.finished[name]
        if _number(op, "epoch") != epoch:
            raise Refusal(STAGE_EPOCH)
        if _number(op, "upto") > end:
            raise Refusal(STAGE_RANGE)
        return self._finished_answer(name)

    def _finished_answer(self, name: str) -> dict[str, int]:
        epoch, end = self.finished[name]
        return {"epoch": epoch, "fence": 1, "first": end, "next": end}

    def _release(
        self, name: str, op: Mapping[str, Any], start: int, failed: bool, epoch: int, time_ms: int
    ) -> Any:
        stage = self.by_name.get(name)
        if stage is not None and stage.released == (_number(op, "epoch"), start):
            # Its owner did not hear the answer: nobody else can have used the new epoch.
            self._check_fence(stage, op, True)
            stage.heard_ms = time_ms
            return stage.answer()
        stage = self._known(name, op, epoch)
        if start > stage.next:
            raise Refusal(STAGE_RANGE)
        stage.heard_ms = time_ms
        released = (stage.epoch, start)
        start = max(start, stage.first)
        self._return(stage, start, failed)
        stage.epoch = epoch
        stage.released = released
        if stage.is_lease and stage.first == stage.next:
            self._forget(stage)
        return stage.answer()

    def _return(self, stage: Stage, start: int, failed: bool) -> None:
        if start < stage.next:
            self._holder.stage_return(stage, start, stage.next - 1, failed)
            stage.next = start

    def _end(self, stage: Stage, failed: bool) -> None:
        self._return(stage, stage.first, failed)
        self._forget(stage)

    def _forget(self, stage: Stage) -> None:
        del self.by_name[stage.name]
        self._holder.stage_closed(stage)

    # ---------------------------------------------------------------- time

    def next_due_ms(self) -> int | None:
        """When the next stage expires; None without stages. Cost: O(stages)."""
        return min((stage.due_ms for stage in self.by_name.values()), default=None)

    def expire(self, time_ms: int) -> list[Stage]:
        """Ends the stages that were not heard of for their time to live: failed deliveries."""
        expired = [stage for stage in self.by_name.values() if stage.due_ms <= time_ms]
        for stage in expired:
            self._end(stage, True)
        return expired

    def clear(self) -> None:
        """The queue is deleted."""
        self.by_name.clear()
        self.finished.clear()

    # ---------------------------------------------------------------- looking

    def reading(self, name: str, epoch: int, offset: int) -> Stage:
        """The stage for a read from `offset` on. Raises Refusal when that cannot be read."""
        stage = self.by_name.get(name)
        if stage is None:
            known = self.finished.get(name)
            raise Refusal(STAGE_SETTLED if known is not None and known[0] == epoch else NO_STAGE)
        if epoch != stage.epoch:
            raise Refusal(STAGE_EPOCH)
        if offset < stage.first:
            raise Refusal(STAGE_SETTLED)
        return stage

    def infos(self) -> list[dict[str, Any]]:
        """What the management API shows of each stage."""
        return [
            {
                "stage": stage.name,
                "kind": "lease" if stage.is_lease else "stage",
                "epoch": stage.epoch,
                "fence": stage.fence,
                "owner": stage.owner,
                "first": stage.first,
                "next": stage.next,
                "unacked": stage.next - stage.first,
                "ttl_ms": stage.ttl_ms,
                "heard_ms": stage.heard_ms,
            }
            for stage in self.by_name.values()
        ]

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> list[Any]:
        """Plain values: [stages, finished]; `held` must have `pack`."""
        return [
            [
                [
                    stage.name,
                    stage.is_lease,
                    stage.epoch,
                    stage.fence,
                    stage.owner,
                    stage.ttl_ms,
                    stage.heard_ms,
                    stage.first,
                    stage.next,
                    stage.released,
                    stage.held.pack(),
                ]
                for stage in self.by_name.values()
            ],
            [[name, *known] for name, known in self.finished.items()],
        ]

    def unpack(self, packed: Iterable[Any]) -> None:
        """Replaces all by what `pack` gave. The holder hears of every stage as of a new one, and
        `held.unpack` fills it."""
        stages, finished = packed
        self.clear()
        for (
            name,
            is_lease,
            epoch,
            fence,
            owner,
            ttl_ms,
            heard_ms,
            first,
            end,
            released,
            held,
        ) in stages:
            stage = Stage(name, is_lease=is_lease, held=None)
            stage.epoch = epoch
            stage.fence = fence
            stage.owner = owner
            stage.ttl_ms = ttl_ms
            stage.heard_ms = heard_ms
            stage.first = first
            stage.next = end
            stage.released = (released[0], released[1]) if released is not None else None
            self.by_name[name] = stage
            self._holder.stage_opened(stage)
            stage.held.unpack(held)
        self.finished = {name: (epoch, end) for name, epoch, end in finished}

    def check(self) -> None:
        """Asserts what the module text promises of the table itself."""
        assert len(self.by_name) <= STAGES_MAX
        assert len(self.finished) <= FINISHED_KEPT_MAX
        for name, stage in self.by_name.items():
            assert stage.name == name
            assert 0 <= stage.first <= stage.next
            assert stage.fence >= 1
            assert stage.released is None or stage.released[0] < stage.epoch
            assert not stage.is_lease or stage.first < stage.next


def _number(op: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = op.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value <= _U63:
        raise Refusal(MALFORMED)
    return value


def _text(op: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = op.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not str or len(value.encode("utf-8", "replace")) > NAME_BYTES_MAX:
        raise Refusal(MALFORMED)
    return value


def _truth(op: Mapping[str, Any], key: str) -> bool:
    value = op.get(key, False)
    if type(value) is not bool:
        raise Refusal(MALFORMED)
    return value


def _ttl(op: Mapping[str, Any]) -> int:
    value = _number(op, "ttl_ms", TTL_MS_DEFAULT)
    if not TTL_MS_MIN <= value <= TTL_MS_MAX:
        raise Refusal(MALFORMED)
    return value


_FIELDS: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "op": _text,
    "stage": _text,
    "owner": _text,
    "ttl_ms": _number,
    "epoch": _number,
    "fence": _number,
    "max": _number,
    "after": _number,
    "upto": _number,
    "from": _number,
    "failed": _truth,
}
