"""Definitions of policies: keys and values that one may have together. Texts are RabbitMQ's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from convoymq.model.errors import ValidationFailed
from convoymq.model.near_names import did_you_mean
from convoymq.settings.table import KEYS
from convoymq.settings.values import COUNT_MAX, Setting

KEYS_MAX = 64
"""Of one definition."""
NAMES_MAX = 255
"""Of nodes in one value."""
MIRRORING_KEYS = tuple(name for name in KEYS if name.startswith("ha-") and name != "ha-mode")
"""Keys that mean nothing without `ha-mode`."""


def checked_definition(
    definition: Mapping[str, object], *, operator: bool = False
) -> dict[str, Setting]:
    """Returns a definition whose keys and values are those of a policy, or an operator policy.

    Raises:
        ValidationFailed: they are not.
    """
    if not definition:
        raise invalid("no policy provided")
    if len(definition) > KEYS_MAX:
        raise invalid(f"a definition has at most {KEYS_MAX} keys")
    found: dict[str, Setting] = {}
    unknown: dict[str, object] = {}
    for name in sorted(definition):
        value = definition[name]
        key = KEYS.get(name)
        if key is None or (operator and key.operator is None):
            unknown[name] = value
        elif name == "ha-params" and isinstance(value, list | tuple):
            found[name] = _names_of_nodes(value)
        elif not key.values.accepts(value) or not isinstance(value, bool | int | str):
            raise invalid(f"{term(value)} is not a valid {key.noun}{key.values.range_text}")
        else:
            found[name] = value
    if unknown:
        listed = ",".join(f"{{{term(name)},{term(value)}}}" for name, value in unknown.items())
        raise invalid(f"[{listed}] are not recognised policy settings{_meant(unknown)}")
    _check_retry(found)
    _check_mirrors(found)
    if reason := contradiction(found):
        raise invalid(reason)
    return found


def _meant(unknown: Iterable[str]) -> str:
    """Returns the end of a message that names settings which are like those."""
    hints = {name: did_you_mean(name, KEYS, 0.75) for name in unknown}
    return "".join(f"; {name}: {text}" for name, text in hints.items() if text)


def _names_of_nodes(value: Sequence[object]) -> tuple[str, ...]:
    """Returns a list of names. Raises ValidationFailed."""
    if not value or len(value) > NAMES_MAX:
        raise invalid('ha-mode="nodes" list must be non-empty')
    wrong = [each for each in value if not isinstance(each, str)]
    if wrong:
        raise invalid(f'ha-mode="nodes" takes a list of strings, {term(wrong)} was not a string')
    return tuple(str(each) for each in value)


def _check_mirrors(found: Mapping[str, Setting]) -> None:
    """Raises ValidationFailed for settings of mirroring that are wrong, or do not go together."""
    mode, params = found.get("ha-mode"), found.get("ha-params")
    if mode is None:
        if any(key in found for key in MIRRORING_KEYS):
            raise invalid(
                "ha-mode must be specified to specify ha-params, ha-sync-mode or "
                "ha-promote-on-shutdown"
            )
        return
    given = "none" if params is None else term(params)
    if mode == "all" and params is not None:
        raise invalid('ha-mode="all" does not take parameters')
    if mode == "exactly" and not (type(params) is int and 0 < params <= COUNT_MAX):
        raise invalid(f'ha-mode="exactly" takes an integer, {given} given')
    if mode == "nodes" and not isinstance(params, tuple):
        raise invalid(f'ha-mode="nodes" takes a list, {given} given')
    size = found.get("ha-sync-batch-size", 1)
    if not (type(size) is int and 0 < size <= COUNT_MAX):
        raise invalid(f"ha-sync-batch-size takes an integer greater than 0, {term(size)} given")
    for key, allowed in _MIRRORING_VALUES.items():
        value = found.get(key, allowed[0])
        if value not in allowed:
            first, second = allowed
            raise invalid(f'{key} must be "{first}" or "{second}", got {term(value)}')


_MIRRORING_VALUES = {
    "ha-sync-mode": ("manual", "automatic"),
    "ha-promote-on-shutdown": ("always", "when-synced"),
    "ha-promote-on-failure": ("always", "when-synced"),
}


def contradiction(found: Mapping[str, Setting]) -> str:
    """Returns what is wrong with bounds of an autoscaler that do not go together, or nothing."""
    least, most = found.get("autoscale-partitions-min"), found.get("autoscale-partitions-max")
    if isinstance(least, int) and isinstance(most, int) and most < least:
        return "autoscale-partitions-max is less than autoscale-partitions-min"
    return ""


def _check_retry(found: Mapping[str, Setting]) -> None:
    """Raises ValidationFailed for times of a delayed retry that do not go together."""
    least, most = found.get("delayed-retry-min"), found.get("delayed-retry-max")
    if found.get("delayed-retry-type", "disabled") != "disabled" and least is None:
        raise invalid("delayed-retry-type needs delayed-retry-min")
    if isinstance(least, int) and isinstance(most, int) and most < least:
        raise invalid("delayed-retry-max is less than delayed-retry-min")


def invalid(reason: str) -> ValidationFailed:
    """Returns a policy, a parameter or a limit that is not acceptable."""
    return ValidationFailed(f"Validation failed\n\n{reason}")


def term(value: object) -> str:
    """Returns a JSON value as RabbitMQ prints it inside these texts: as an Erlang term."""
    match value:
        case str():
            return f"<<{json.dumps(value, ensure_ascii=False)}>>"
        case list() | tuple():
            return f"[{','.join(term(each) for each in value)}]"
        case dict():
            inside = ",".join(f"{term(name)} => {term(each)}" for name, each in value.items())
            return f"#{{{inside}}}"
        case _:
            return json.dumps(value)
