"""Global parameters: named JSON values of operators and their tools, kept as cluster-wide settings.
The cluster's name is one of them, and has been a setting of its own name from the beginning. Those
in `SIZES` act at once on all nodes, in place of the configuration key of that name."""

from __future__ import annotations

import json
from collections.abc import Mapping

from convoymq.metadata.commands import PutSetting
from convoymq.model.config.values import parse_bytes
from convoymq.model.errors import ValidationFailed
from convoymq.model.json import Json

CLUSTER_NAME = "cluster_name"
SYNC_THROUGHPUT = "mirroring_sync_max_throughput"
SIZES = {SYNC_THROUGHPUT: 1 << 40}
"""Name -> greatest number of bytes."""
PREFIX = "parameter."
NAME_BYTES_MAX = 255
VALUE_CHARS_MAX = 64 << 10
PARAMETERS_MAX = 1000


def global_parameters(settings: Mapping[str, str], cluster_name: str) -> dict[str, Json]:
    """Returns all parameters by name, in alphabetical order."""
    found: dict[str, Json] = {CLUSTER_NAME: cluster_name}
    for key, text in settings.items():
        if key.startswith(PREFIX):
            found[key[len(PREFIX) :]] = json.loads(text)
    return dict(sorted(found.items()))


def set_global_parameter(name: str, value: Json) -> PutSetting:
    """Returns the command that sets a parameter. Raises ValidationFailed."""
    if name == CLUSTER_NAME:
        if not isinstance(value, str) or not value:
            raise ValidationFailed(f"{CLUSTER_NAME} is not text, or empty")
        return PutSetting(name=name, value=value)
    if not 0 < len(name.encode("utf-8", "replace")) <= NAME_BYTES_MAX:
        raise ValidationFailed(f"the name of a global parameter has 1 to {NAME_BYTES_MAX} bytes")
    if name in SIZES:
        value = _size(name, value)
    text = json.dumps(value, separators=(",", ":"))
    if len(text) > VALUE_CHARS_MAX:
        raise ValidationFailed(f"the value of a global parameter has at most {VALUE_CHARS_MAX} "
                               "characters of JSON")  # fmt: skip
    return PutSetting(name=PREFIX + name, value=text)


def _size(name: str, value: Json) -> int:
    try:
        is_given = isinstance(value, str | int) and not isinstance(value, bool)
        size = parse_bytes(str(value)) if is_given else -1
    except ValueError as error:
        raise ValidationFailed(f"{name}: {error}") from None
    if not 0 <= size <= SIZES[name]:
        raise ValidationFailed(f"{name} is no size from 0 to {SIZES[name]}")
    return size


def size_in(settings: Mapping[str, str], name: str, default: int) -> int:
    """Returns the size that a parameter sets; `default` where there is none."""
    text = settings.get(PREFIX + name)
    # One that was set before it had a meaning may be anything.
    return int(text) if text is not None and text.isdecimal() else default


def clear_global_parameter(name: str) -> PutSetting:
    """Returns the command that removes a parameter; the cluster then has its first name."""
    return PutSetting(name=name if name == CLUSTER_NAME else PREFIX + name)


def check_number(settings: Mapping[str, str], name: str) -> None:
    """Raises ValidationFailed when there are too many for one more of this name."""
    known = {key for key in settings if key.startswith(PREFIX)}
    if len(known | {PREFIX + name}) > PARAMETERS_MAX:
        raise ValidationFailed(f"there are {PARAMETERS_MAX} global parameters, which is the most")
