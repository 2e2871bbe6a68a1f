"""Copies of mirrored queues whose files are damaged: another member that has all takes their place.

| found by                              | where there is another synchronised member    |
| a node that starts, as all do         | its copy leaves the ring; another founds one  |
| a mirror that is to be the master     | it does not open, and leaves the ring         |
| a master, in a part that is passed by | it gives way as on a drained node             |
| a master that cannot go on            | it ends, and clients wait for the next master |

Where there is none, what is intact is served, as by a plain queue.
"""

from __future__ import annotations

from abc import abstractmethod

from convoymq.metadata.records import QueueRecord
from convoymq.model.errors import StorageFault
from convoymq.queues.classic.queue import ClassicQueue
from convoymq.queues.driver import HostParts
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.queues.mirrored.proposals import ProposingHost
from convoymq.replication.ring.views import Member
from convoymq.shells.ring.shell import RingShell
from convoymq.storage.types import Worker


class DamagedCopies(ProposingHost):
    """Part of `MirroredHost`; see the module text."""

    _shell: RingShell
    _void: dict[int, int]
    _watched: dict[int, None]

    def __init__(self, parts: HostParts, worker: Worker | None = None) -> None:
        self._looked_at: dict[int, bool] = {}
        """Group of a ring that is over -> whether the files here are damaged."""
        super().__init__(parts, worker)

    @abstractmethod
    def _depose(self, record: QueueRecord, *, keeps: bool = False) -> None:
        """Ends a master of this node; its clients wait for another one."""

    def _is_damaged(self, record: QueueRecord, own: Member, number: int | None) -> bool:
        """See `ProposingHost`."""
        known = self._looked_at.get(record.group)
        if known is None:
            reason = self._damage_of(record, own, number)
            known = self._looked_at[record.group] = bool(reason)
            if reason:
                self._name(record, reason)
        return known

    def _damage_of(self, record: QueueRecord, own: Member, number: int | None) -> str:
        assert record.view is not None
        if number is None and own.number == record.view.master:
            # A disk that is new was never written to.
            is_new = record.group <= self._parts.lost_groups()
            return "" if is_new else "the file `member` is missing or damaged"
        if number != own.number:
            return ""
        log = self.make_log(record, self._directory, sync=True)
        try:
            for _ in log.recover():
                pass
        except (StorageFault, OSError) as error:
            return str(error)
        finally:
            log.close()
        return ", ".join(sorted({name for name, _, _ in log.damages}))

    def _name(self, record: QueueRecord, reason: str) -> None:
        place = {"vhost": record.vhost, "queue": record.name, "group": record.group}
        self.note("queue.mirror_failed", **place, reason=reason)

    def _give_up(self, group: int, number: int, error: Exception) -> None:
        """A member of this node leaves its ring, and begins anew later."""
        record = self._records[group][0]
        self._name(record, str(error))
        self._shell.close(group)
        self._rings.pop(group, None)
        self._void[group] = number
        self._watched[group] = None
        own = record.view.live_at(self.node_id) if record.view is not None else None
        if own is not None:
            self._withdraw(record, own)

    def _stop_failed(self, queue: ClassicQueue, error: Exception) -> None:
        """See `ClassicHost`."""
        is_fault = isinstance(error, (StorageFault, OSError)) and queue.ended is None
        if not (is_fault and isinstance(queue, MasterQueue) and queue.has_equals):
            super()._stop_failed(queue, error)
            return
        assert queue.member is not None
        number = queue.member.member
        self._depose(queue.record)
        self._give_up(queue.group, number, error)
