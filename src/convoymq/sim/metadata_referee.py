"""The referee of the metadata group: a naive model of the tree, fed with the committed log.

It keeps queues by name, the numbers that were given out, and incarnations, by its own rules.
What it asserts:

- a command is carried out once, whatever was resent, and answered the same every time;
- numbers of groups rise and are never given out twice;
- the record of a queue follows committed configurations of its group, and never goes back;
- incarnations never fall, and nobody who was forgotten counts before it has joined again;
- the cluster has one id for ever;
- what a node was told when it joined is in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from convoymq.kernels import batch
from convoymq.metadata.commands import (
    Bootstrap,
    Command,
    DeclareQueue,
    DeleteQueue,
    ForgetNode,
    Join,
    PutNode,
    RecordRecovery,
    SetMembers,
    decode_command,
)
from convoymq.metadata.machine import STATUS_OK, MetadataMachine
from convoymq.metadata.nodes import STARTS_UNSEEN
from convoymq.model.tables import Table, decode_body
from convoymq.replication.machine import EFFECT_APPLIED, Effect, Machine
from convoymq.sim.delivery_model import InvariantBroken


@dataclass(slots=True)
class KnownQueue:
    """A queue that the log says was declared."""

    name: str
    group: int
    members: tuple[int, ...]
    arguments: Table
    compatibility: str
    config: tuple[int, int] = (0, 0)
    deleted: bool = False
    out_ever: set[int] = field(default_factory=set)
    """Nodes that were members once, and of a later record were not."""


class MetadataReferee:
    """The model of the tree.

    Args:
        on_created, on_deleted: hear of queues when their command is committed.
        members_at: the nodes that an entry of a group made its members; None = there is no such
            entry, or it is not committed.
    """

    def __init__(
        self,
        on_created: Callable[[KnownQueue], None],
        on_deleted: Callable[[KnownQueue], None],
        members_at: Callable[[int, tuple[int, int]], frozenset[int] | None] | None,
    ) -> None:
        self.index = 0
        self.cluster_id = ""
        self.queues: dict[str, KnownQueue] = {}
        self.by_group: dict[int, KnownQueue] = {}
        """Every queue that ever was."""
        self.nodes: set[int] = set()
        self.forgotten: set[int] = set()
        self.incarnations: dict[int, int] = {}
        self.joins: set[tuple[int, str, int]] = set()
        """(node, directory, incarnation) of everybody who was let in."""
        self.replies: dict[tuple[int, int], tuple[int, object]] = {}
        self.seqs: dict[int, int] = {}
        self.commands = 0
        self._on_created = on_created
        self._on_deleted = on_deleted
        self._members_at = members_at

    def go_on(
        self,
        on_created: Callable[[KnownQueue], None],
        on_deleted: Callable[[KnownQueue], None],
        members_at: Callable[[int, tuple[int, int]], frozenset[int] | None],
    ) -> None:
        """From now on others hear of queues again: what was, they know."""
        self._on_created = on_created
        self._on_deleted = on_deleted
        self._members_at = members_at

    def fail(self, text: str) -> None:
        """Stops the run."""
        raise InvariantBroken(f"metadata, entry {self.index}: {text}")

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        """A committed entry of commands, in order of the log."""
        self.index = index
        answers: dict[tuple[int, int], list[tuple[int, object]]] = {}
        for effect in effects:
            if effect[0] == EFFECT_APPLIED:
                answers.setdefault((effect[1], effect[2]), []).append((effect[3], effect[4]))
        for kind, _flags, session, seq, _count, arg, offset, _length in batch.commands(data):
            if kind != batch.CMD_METADATA:
                continue
            node, incarnation = session >> 56, session >> 24 & 0xFFFFFFFF
            found = answers.get((session, seq), [])
            if incarnation < self.incarnations.get(node, 0) or node in self.forgotten:
                known = self.replies.get((session, seq))
                if any(status == STATUS_OK and (status, reply) != known for status, reply in found):
                    self.fail(
                        f"command {seq} of node {node} is carried out, of incarnation {incarnation}"
                    )
                continue
            known = self.replies.get((session, seq))
            if known is not None:
                if any(each != known for each in found):
                    self.fail(f"command {seq} of {session:x} is answered {found}, was {known}")
                continue
            if seq != self.seqs.get(session, 0) + 1:
                if found:
                    self.fail(f"command {seq} of {session:x} follows {self.seqs.get(session, 0)}")
                continue
            if not found:
                self.fail(f"command {seq} of {session:x} is not carried out")
            self.seqs[session] = seq
            self.replies[session, seq] = found[0]
            self.commands += 1
            body = batch.command_body(data, offset)[:arg]
            self._command(decode_command(body), *found[0])

    def _command(self, command: Command, status: int, reply: object) -> None:
        if isinstance(command, Bootstrap):
            if status == STATUS_OK and reply:
                if self.cluster_id not in ("", command.cluster_id):
                    self.fail(f"the cluster {self.cluster_id} becomes {command.cluster_id}")
                self.cluster_id = command.cluster_id
        elif isinstance(command, DeclareQueue):
            self._declare(command, status, reply)
        elif isinstance(command, DeleteQueue):
            queue = self.queues.get(command.name)
            here = queue is not None and command.group in (0, queue.group)
            if status == STATUS_OK and bool(reply) != here:
                self.fail(f"{command} is answered {reply}, but there is {queue}")
            if queue is not None and here:
                self._delete(queue)
        elif isinstance(command, SetMembers):
            self._set_members(command, status, reply)
        elif isinstance(command, ForgetNode):
            if reply:
                self._forget(command.id)
        elif isinstance(command, RecordRecovery):
            if status == STATUS_OK and reply:
                if self.cluster_id not in (command.former_id, command.cluster_id):
                    self.fail(f"{command} follows {self.cluster_id}")
                self.cluster_id = command.cluster_id
                for node in command.lost_nodes:
                    if node in self.nodes:
                        self._forget(node)
                    self.incarnations[node] = self.incarnations.get(node, 0) + STARTS_UNSEEN
        elif isinstance(command, Join):
            if status == STATUS_OK:
                assert isinstance(reply, dict)
                self._start(command.id, reply["incarnation"])
                self.forgotten.discard(command.id)
                self.joins.add((command.id, command.directory, reply["incarnation"]))
        elif isinstance(command, PutNode) and status == STATUS_OK and reply:
            if command.id in self.forgotten:
                self.fail(f"node {command.id} is forgotten, and counts")
            self.nodes.add(command.id)
            if command.incarnation > self.incarnations.get(command.id, 0):
                self._start(command.id, command.incarnation)

    def _forget(self, node: int) -> None:
        self.forgotten.add(node)
        self.nodes.discard(node)
        for queue in list(self.queues.values()):
            if queue.members == (node,):
                self._delete(queue)

    def _start(self, node: int, incarnation: int) -> None:
        if incarnation < self.incarnations.get(node, 0):
            self.fail(
                f"node {node} is back in incarnation {incarnation}: {self.incarnations[node]} was"
            )
        self.incarnations[node] = incarnation

    def _declare(self, command: DeclareQueue, status: int, reply: object) -> None:
        queue = self.queues.get(command.name)
        if status != STATUS_OK:
            if queue is None:
                self.fail(f"{command.name} is refused, and there is none: {reply}")
            return
        assert isinstance(reply, dict)
        if queue is not None:
            if reply["created"] or reply["group"] != queue.group:
                self.fail(f"{command.name} is declared as {reply}, but is {queue.group}")
            return
        group = reply["group"]
        if not reply["created"] or group <= max(self.by_group, default=0):
            self.fail(f"{command.name} is declared as {reply}, {max(self.by_group)} was the last")
        arguments = decode_body(command.arguments)
        queue = KnownQueue(command.name, group, command.members, arguments, command.compatibility)
        self.queues[command.name] = self.by_group[group] = queue
        self._on_created(queue)

    def _delete(self, queue: KnownQueue) -> None:
        del self.queues[queue.name]
        queue.deleted = True
        self._on_deleted(queue)

    def _set_members(self, command: SetMembers, status: int, reply: object) -> None:
        queue = self.queues.get(command.name)
        if status != STATUS_OK or not reply:
            return
        if queue is None or queue.group != command.group:
            self.fail(f"{command} changes {queue}")
            return
        if command.config <= queue.config:
            self.fail(f"{command} is older than what {command.name} has, {queue.config}")
        if self._members_at is not None:
            nodes = self._members_at(command.group, command.config)
            if nodes is None:
                self.fail(f"{command} follows no committed configuration")
            elif nodes != frozenset(command.members):
                self.fail(f"{command} is not the configuration {sorted(nodes)}")
        queue.config = command.config
        queue.out_ever.update(set(queue.members) - set(command.members))
        queue.members = command.members

    def check_machine(self, machine: Machine) -> None:
        """Compares with a machine that applied the same index."""
        assert isinstance(machine, MetadataMachine)
        machine.check_invariants()
        queues = {r.name: (r.group, r.members, r.compatibility) for r in machine.records()}
        known = {q.name: (q.group, q.members, q.compatibility) for q in self.queues.values()}
        if queues != known:
            self.fail(f"the tree has {queues}, the log says {self.queues}")
        if machine.forgotten != self.forgotten:
            self.fail(f"forgotten are {machine.forgotten}, the log says {self.forgotten}")
        if machine.next_group <= max(self.by_group, default=0):
            self.fail(f"number {machine.next_group} is given out again")
        if self.cluster_id and machine.cluster_id != self.cluster_id:
            self.fail(f"the cluster is {machine.cluster_id}, the log says {self.cluster_id}")
        if any(machine.incarnations.get(n, 0) < i for n, i in self.incarnations.items()):
            self.fail(f"incarnations are {machine.incarnations}, the log says {self.incarnations}")

    def waits_for(self) -> str:
        """Returns what has to happen before the end: nothing."""
        return ""
