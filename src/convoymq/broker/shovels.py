"""Dynamic shovels: what RabbitMQ's parameter of a shovel says, and the shovels of the tree.

A shovel is a cluster-wide setting, which holds the parameter as it was given. Refusals have
RabbitMQ's texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from convoymq.broker.shovel_uris import BadUri, uri_of
from convoymq.metadata.commands import PutSetting
from convoymq.metadata.global_parameters import NAME_BYTES_MAX, VALUE_CHARS_MAX
from convoymq.metadata.tree import Tree
from convoymq.model.errors import PreconditionFailed, ValidationFailed
from convoymq.model.json import JsonObject
from convoymq.settings.definitions import invalid, term

COMPONENT = "shovel"
SHOVELS_MAX = 1000
AMQP_091, AMQP_10 = "amqp091", "amqp10"
NO_ACK, ON_PUBLISH, ON_CONFIRM = "no-ack", "on-publish", "on-confirm"
NEVER, QUEUE_LENGTH = "never", "queue-length"
PREFETCH, PREFETCH_MAX = 1000, 0xFFFF
RECONNECT_DELAY_S, RECONNECT_DELAY_S_MAX = 5, 1_000_000
SECTION_PROPERTIES = (
    *("message_id", "user_id", "to", "subject", "reply_to", "correlation_id", "content_type"),
    *("content_encoding", "group_id", "reply_to_group_id"),
)
"""Properties of AMQP 1.0 that a shovel sets."""
_PREFIX = "shovel."

_Check = Callable[[str, object], str]
"""Returns why a value of that name is not acceptable; "" = it is."""
_Keys = dict[str, _Check]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShovelEnd:
    """One end of a shovel."""

    protocol: str
    uris: tuple[str, ...]
    queue: str | None
    exchange: str | None
    """None: as the message had it."""
    key: str | None
    """None: as the message had it."""
    address: str
    """Of AMQP 1.0."""
    queue_args: Mapping[str, object]
    consumer_args: Mapping[str, object]
    predeclared: bool
    """The queue has to be there, and is not declared."""

    def shown(self, side: str) -> JsonObject:
        """Returns what messages are taken from, or go to, under RabbitMQ's names."""
        given = {"queue": self.queue, "exchange": self.exchange, "exchange_key": self.key}
        if self.protocol == AMQP_10:
            given = {"address": self.address}
        return {f"{side}_{name}": text for name, text in given.items() if text is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shovel:
    """A shovel, as its parameter describes it."""

    vhost: str
    name: str
    definition: JsonObject
    """The parameter."""
    mark: str
    """Differs after each change: the shovel begins anew."""
    source: ShovelEnd
    destination: ShovelEnd
    ack_mode: str
    prefetch: int
    delete_after: str | int
    reconnect_delay_s: float
    """0: a failure ends it."""
    forward_headers: bool
    timestamp_header: bool
    properties: Mapping[str, object]
    """Properties that each message gets."""
    application_properties: Mapping[str, object]
    annotations: Mapping[str, object]

    @property
    def takes_settled(self) -> bool:
        """Returns whether the source forgets a message when it has sent it. A shovel that ends by
        itself settles: what it was sent too much goes back."""
        return self.ack_mode == NO_ACK and self.delete_after == NEVER


def shovel_of(vhost: str, name: str, value: JsonObject, mark: str = "") -> Shovel:
    """Returns the shovel of a parameter, which was checked."""

    def first(default: object, *names: str) -> object:
        return next((value[each] for each in names if each in value), default)

    ten = value.get("dest-protocol") == AMQP_10
    properties = ("dest-properties",) if ten else ("dest-publish-properties", "publish-properties")
    return Shovel(
        vhost=vhost,
        name=name,
        definition=value,
        mark=mark,
        source=_end(value, "src"),
        destination=_end(value, "dest"),
        ack_mode=str(first(ON_CONFIRM, "ack-mode")),
        prefetch=int(_amount(first(PREFETCH, "src-prefetch-count", "prefetch-count"))),
        delete_after=_until(first(NEVER, "src-delete-after", "delete-after")),
        reconnect_delay_s=_amount(first(RECONNECT_DELAY_S, "reconnect-delay")),
        forward_headers=first(False, "dest-add-forward-headers", "add-forward-headers") is True,
        timestamp_header=first(False, "dest-add-timestamp-header", "add-timestamp-header") is True,
        properties=_object(first(None, *properties)),
        application_properties=_object(value.get("dest-application-properties")),
        annotations=_object(value.get("dest-message-annotations")),
    )


def _end(value: Mapping[str, object], side: str) -> ShovelEnd:
    def text(name: str) -> str | None:
        found = value.get(f"{side}-{name}")
        return found if isinstance(found, str) else None

    uris = value[f"{side}-uri"]
    return ShovelEnd(
        protocol=text("protocol") or AMQP_091,
        uris=tuple(map(str, uris)) if isinstance(uris, list) else (str(uris),),
        queue=text("queue"),
        exchange=text("exchange"),
        key=text("exchange-key"),
        address=text("address") or "",
        queue_args=_object(value.get(f"{side}-queue-args")),
        consumer_args=_object(value.get(f"{side}-consumer-args")),
        predeclared=value.get(f"{side}-predeclared") is True,
    )


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _amount(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _until(value: object) -> str | int:
    assert isinstance(value, str | int)
    return value


# --- checks ------------------------------------------------------------------------------------


def checked(name: str, value: object) -> JsonObject:
    """Returns the parameter of a shovel. Raises ValidationFailed."""
    if not isinstance(value, dict):
        raise invalid(f"{name} not a list {term(value)}")
    reasons = [*_conflicts(value), *_proplist(name, _keys(value), _must(value), value)]
    if reasons:
        raise invalid("\n".join(reasons))
    return value


def _conflicts(value: Mapping[str, object]) -> Iterator[str]:
    """Yields contradictions between keys."""
    if value.get("src-protocol", AMQP_091) == AMQP_091:
        given = [name for name in ("src-exchange", "src-queue") if name in value]
        if not given:
            yield "Must specify 'src-exchange' or 'src-queue'"
        if len(given) == 2:
            yield "Cannot specify 'src-exchange' and 'src-queue'"
        until = value.get("src-delete-after", value.get("delete-after"))
        if value.get("ack-mode") == NO_ACK and type(until) is int:
            yield "Cannot specify 'no-ack' and numerical 'delete-after'"
    if value.get("dest-protocol", AMQP_091) == AMQP_091 and {"dest-exchange", "dest-queue"} <= set(
        value
    ):
        yield "Cannot specify 'dest-exchange' and 'dest-queue'"


def _proplist(
    name: str, keys: _Keys, must: Collection[str], value: Mapping[str, object]
) -> Iterator[str]:
    """Yields why an object is not acceptable, in RabbitMQ's order."""
    rest = sorted(value.keys() - keys.keys())
    if rest:
        shown = ",".join(f"{{{term(each)},{term(value[each])}}}" for each in rest)
        yield f"Unrecognised terms [{shown}] in {name}"
    for key, check in reversed(keys.items()):
        if key in value:
            reason = check(key, value[key])
            if reason:
                yield reason
        elif key in must:
            yield f'Key "{key}" not found in {name}'


def _binary(name: str, value: object) -> str:
    return "" if isinstance(value, str) else f"{name} should be binary, actually was {term(value)}"


def _boolean(name: str, value: object) -> str:
    return (
        "" if isinstance(value, bool) else f"{name} should be boolean, actually was {term(value)}"
    )


def _number(name: str, value: object, most: float = float("inf")) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} should be a number, actually was {term(value)}"
    return "" if 0 <= value <= most else f"{name} should be from 0 to {most}, actually was {value}"


def _one_of(*options: str) -> _Check:
    def check(name: str, value: object) -> str:
        if value in options:
            return ""
        return f"{name} should be one of {term(options)}, actually was {term(value)}"

    return check


def _uris(name: str, value: object) -> str:
    if isinstance(value, str):
        try:
            uri_of(value)
        except BadUri as error:
            text = json.dumps(value, ensure_ascii=False)
            return f"{text} not a valid URI: {{{error},{text}}}"
        return ""
    if not isinstance(value, list):
        return f"{name} should be list, actually was {term(value)}"
    if not value:
        return f"{name} should have a URI"
    return next((reason for each in value if (reason := _uris(name, each))), "")


def _delete_after(name: str, value: object) -> str:
    if value in (NEVER, QUEUE_LENGTH) or (type(value) is int and value >= 0):
        return ""
    return (f'{name} should be a number greater than or equal to 0, "never" or "queue-length", '
            f"actually was {term(value)}")  # fmt: skip


def _map(name: str, value: object, keys: _Keys | None = None) -> str:
    if not isinstance(value, dict):
        return f"{name} not a list {term(value)}"
    known: _Keys = dict.fromkeys(map(str, value), _binary) if keys is None else keys
    return "\n".join(_proplist(name, known, (), value))


def _arguments(name: str, value: object) -> str:
    return "" if isinstance(value, dict) else f"{name} not a list {term(value)}"


_PROTOCOL = _one_of(AMQP_10, AMQP_091)
_PREFETCH = partial(_number, most=PREFETCH_MAX)
_SHOVEL: _Keys = {
    "reconnect-delay": partial(_number, most=RECONNECT_DELAY_S_MAX),
    "ack-mode": _one_of(NO_ACK, ON_PUBLISH, ON_CONFIRM),
    "src-protocol": _PROTOCOL,
    "dest-protocol": _PROTOCOL,
}
_PROPERTIES: _Keys = {
    **dict.fromkeys(("content_type", "content_encoding"), _binary),
    "delivery_mode": partial(_number, most=2),
    "priority": partial(_number, most=255),
    **dict.fromkeys(("correlation_id", "reply_to", "expiration", "message_id"), _binary),
    "timestamp": _number,
    **dict.fromkeys(("type", "user_id", "app_id", "cluster_id"), _binary),
}
_SOURCES: dict[str, _Keys] = {
    AMQP_091: {
        "src-uri": _uris,
        **dict.fromkeys(("src-exchange", "src-exchange-key", "src-queue"), _binary),
        "src-queue-args": _arguments,
        "src-consumer-args": _arguments,
        **dict.fromkeys(("prefetch-count", "src-prefetch-count"), _PREFETCH),
        **dict.fromkeys(("delete-after", "src-delete-after"), _delete_after),
        "src-predeclared": _boolean,
    },
    AMQP_10: {
        "src-uri": _uris,
        "src-address": _binary,
        "src-prefetch-count": _PREFETCH,
        "src-delete-after": _delete_after,
    },
}
_DESTINATIONS: dict[str, _Keys] = {
    AMQP_091: {
        "dest-uri": _uris,
        **dict.fromkeys(("dest-exchange", "dest-exchange-key", "dest-queue"), _binary),
        "dest-queue-args": _arguments,
        **dict.fromkeys(("add-forward-headers", "add-timestamp-header"), _boolean),
        **dict.fromkeys(("dest-add-forward-headers", "dest-add-timestamp-header"), _boolean),
        **dict.fromkeys(
            ("publish-properties", "dest-publish-properties"), partial(_map, keys=_PROPERTIES)
        ),
        "dest-predeclared": _boolean,
    },
    AMQP_10: {
        "dest-uri": _uris,
        "dest-address": _binary,
        **dict.fromkeys(("dest-add-forward-headers", "dest-add-timestamp-header"), _boolean),
        "dest-application-properties": _map,
        "dest-message-annotations": _map,
        "dest-properties": partial(_map, keys=dict.fromkeys(SECTION_PROPERTIES, _binary)),
    },
}


def _protocols(value: Mapping[str, object]) -> tuple[str, str]:
    """Returns the protocols of both ends; of one that is refused, AMQP 0-9-1."""
    ten = [value.get(f"{side}-protocol") == AMQP_10 for side in ("src", "dest")]
    return AMQP_10 if ten[0] else AMQP_091, AMQP_10 if ten[1] else AMQP_091


def _keys(value: Mapping[str, object]) -> _Keys:
    source, destination = _protocols(value)
    return {**_SHOVEL, **_SOURCES[source], **_DESTINATIONS[destination]}


def _must(value: Mapping[str, object]) -> set[str]:
    return {"src-uri", "src-address", "dest-uri", "dest-address"} & _keys(value).keys()


def local_vhosts(shovel: Shovel) -> Iterator[str]:
    """Yields the virtual hosts of the own cluster that are read or written without a password."""
    for end in (shovel.source, shovel.destination):
        for uri in map(uri_of, end.uris):
            if uri.is_local:
                yield uri.vhost


# --- the tree ----------------------------------------------------------------------------------


class ShovelView:
    """The shovels of the cluster."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def all(self, vhosts: Collection[str] | None = None) -> list[Shovel]:
        """Returns the shovels of virtual hosts that exist, in order; `vhosts`: of these."""
        known = self._tree.vhosts if vhosts is None else vhosts
        settings = self._tree.settings.items()
        found = (_read(name, text) for name, text in settings if name.startswith(_PREFIX))
        return sorted(
            (each for each in found if each.vhost in known),
            key=lambda each: (each.vhost, each.name),
        )

    def find(self, vhost: str, name: str) -> Shovel | None:
        """Returns a shovel; None = there is none of that name."""
        key = _key(vhost, name)
        text = self._tree.settings.get(key)
        return None if text is None else _read(key, text)

    def check_number(self) -> None:
        """Raises PreconditionFailed when there are too many for one more."""
        if len(self.all()) >= SHOVELS_MAX:
            raise PreconditionFailed(f"there are {SHOVELS_MAX} shovels, which is the most")


def set_shovel(vhost: str, name: str, value: object) -> PutSetting:
    """Returns the command that makes a shovel, or changes or restarts it. Raises
    ValidationFailed."""
    if not 0 < len(name.encode("utf-8", "replace")) <= NAME_BYTES_MAX:
        raise ValidationFailed(f"the name of a shovel has 1 to {NAME_BYTES_MAX} bytes")
    kept = {"value": checked(name, value), "mark": os.urandom(8).hex()}
    text = json.dumps(kept, separators=(",", ":"))
    if len(text) > VALUE_CHARS_MAX:
        raise ValidationFailed(f"a shovel has at most {VALUE_CHARS_MAX} characters of JSON")
    return PutSetting(name=_key(vhost, name), value=text)


def clear_shovel(shovel: Shovel) -> PutSetting:
    """Returns the command that deletes a shovel."""
    return PutSetting(name=_key(shovel.vhost, shovel.name))


def _key(vhost: str, name: str) -> str:
    return _PREFIX + json.dumps([vhost, name], separators=(",", ":"))


@lru_cache(SHOVELS_MAX)
def _read(key: str, text: str) -> Shovel:
    vhost, name = json.loads(key[len(_PREFIX) :])
    kept = json.loads(text)
    return shovel_of(vhost, name, kept["value"], kept["mark"])
