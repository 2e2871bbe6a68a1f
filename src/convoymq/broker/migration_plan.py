"""Plans of migrations: what a queue becomes as one of another type (ADR 0128)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convoymq.metadata.machine import MetadataMachine, QueueRecord
from convoymq.model.errors import PreconditionFailed
from convoymq.model.refusals import missing, queue_subject
from convoymq.model.tables import Field, Table
from convoymq.routing.policies import Policies, effective_settings
from convoymq.routing.queue_arguments import TYPE_ARGUMENT
from convoymq.routing.queue_types import PlacementKind, TypeRules, rules_of
from convoymq.routing.types import Queue as DeclaredQueue
from convoymq.routing.types import QueueType
from convoymq.settings.values import Setting

MIRRORED = "mirrored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Declaration of a queue under another type."""

    record: QueueRecord
    to: str
    arguments: Table
    dropped: tuple[str, ...]
    """Arguments that the type does not serve."""
    notes: tuple[str, ...]
    """Texts on the rest that changes."""


def plan_of(tree: MetadataMachine, vhost: str, name: str, to: str) -> Plan:
    """Returns what a queue would become. Raises Refused."""
    place = tree.vhost(vhost)
    subject = queue_subject(vhost, name)
    record, declared = place.queues.get(name), place.topology.find_queue(name)
    if record is None or declared is None:
        raise missing(subject)
    rules = rules_of(to)
    reason = _obstacle(record, declared, rules, to)
    if rules is None or reason:
        raise PreconditionFailed(reason.format(subject=subject), subject=subject)
    found = declared.arguments.items()
    kept = {key: value for key, value in found if key != TYPE_ARGUMENT}
    dropped = tuple(sorted(k for k in kept if k.startswith("x-") and not rules.takes(k)))
    fields = {key: value for key, value in kept.items() if key not in dropped}
    without_effect = sorted(fields.keys() & rules.kept)
    fields[TYPE_ARGUMENT] = Field("S", to.encode())
    arguments = Table.from_fields(fields.items())
    other = DeclaredQueue(name=name, type=QueueType(to), durable=True, arguments=arguments)
    notes = [f"the argument {key} has no effect" for key in without_effect]
    notes += _changes(declared, other, place.policies)
    return Plan(
        record=record, to=to, arguments=arguments, dropped=dropped,
        notes=(*notes, *_notes(record, to)),
    )  # fmt: skip


def _obstacle(
    record: QueueRecord, declared: DeclaredQueue, rules: TypeRules | None, to: str
) -> str:
    """Returns why a queue cannot become one of a type, or ""."""
    if to == MIRRORED:
        return (
            "{subject} cannot be migrated to type 'mirrored': mirrored queues are classic queues "
            "with a policy that has ha-mode; migrate it to 'classic', and set one"
        )
    if rules is None or rules.is_managed:
        return f"queues cannot be migrated to type '{to}'"
    type = record.type
    if type.value == to:
        return f"{{subject}} is of type '{to}' already"
    if type.is_managed or type is QueueType.STREAM:
        return (
            f"{{subject}} is of type '{type.value}', which is not migrated: its consumers count on "
            "offsets"
        )
    if record.view is not None:
        return (
            "{subject} has mirrors, which would not stand still: take it out of its policy with "
            "ha-mode first"
        )
    if record.owner is not None:
        return "{subject} is exclusive to a connection and goes with it"
    if not record.durable:
        return "{subject} is not durable"
    if declared.auto_delete:
        return "{subject} is deleted with its last consumer (auto-delete)"
    return ""


def _changes(before: DeclaredQueue, after: DeclaredQueue, policies: Policies) -> Iterator[str]:
    """Yields what acts otherwise of the policies and arguments of a queue."""
    old, new = effective_settings(before, policies), effective_settings(after, policies)
    texts = {
        "acts no more": _missing(old, new),
        "begins to act": _missing(new, old),
        "is another one": {k: v for k, v in new.items() if k in old and old[k] != v},
    }
    for text, settings in texts.items():
        for key, value in sorted(settings.items()):
            yield f"{key} {value} {text}"


def _missing(here: Mapping[str, Setting], there: Mapping[str, Setting]) -> Mapping[str, Setting]:
    return {key: value for key, value in here.items() if key not in there}


def _notes(record: QueueRecord, to: str) -> Iterator[str]:
    """Yields what a migration does not keep, or changes, beside arguments and policies."""
    if to == QueueType.STREAM.value:
        yield "acknowledged messages stay, as all messages do; retention takes the oldest"
        yield (
            "consumers need a prefetch limit and acknowledgements, or are cancelled; they begin at "
            "the first message"
        )
        yield "expiration, priorities, dead letters and rejects mean nothing"
    yield "time limits of messages begin anew"
    if record.placement is PlacementKind.RAFT:
        yield "failed deliveries, remembered message-ids and named producers are forgotten"
        yield "delays and groups of messages mean nothing"
    if QueueType(to).placement is PlacementKind.HOME:
        yield "one node has the queue from now on"
        yield "messages that are not persistent are gone when the node stops"
    elif to == QueueType.QUORUM.value:
        yield "groups of messages act on what is published from now on"
    declared = f"clients that declare the queue as '{record.type.value}' are refused (406)"
    if to == QueueType.QUORUM.value:
        declared += (
            ", unless quorum_queue.property_equivalence.relaxed_checks_on_redeclaration says "
            "otherwise"
        )
    yield declared
