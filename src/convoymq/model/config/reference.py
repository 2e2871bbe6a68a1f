"""docs/configuration.md, made from the keys."""

from __future__ import annotations

import dataclasses

from convoymq.model.config.config import Keys
from convoymq.model.config.keys import Key, number_text
from convoymq.model.config.rabbitmq_keys import FIXED, INSTEAD


def _text(value: object) -> str:
    if value is None or value == () or value == "":
        return "none" if value is None or value == () else "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(str(one) for one in value)
    return str(value)


def reference(keys: Keys) -> str:
    """Returns docs/configuration.md: every key with its type, default, bounds and meaning."""
    lines = [
        "# Configuration",
        "",
        "A node reads `convoy.conf`, then the environment, then flags; what comes later wins.",
        "A line is `key = value`, `#` starts a comment, sizes may end in `KiB`, `MiB`, `GiB`",
        "(or `kB`, `MB`, `GB`). In the environment `raft.segment_max_entries` is",
        "`CONVOY_RAFT_SEGMENT_MAX_ENTRIES`; as a flag of `convoy node` it is",
        "`--set raft.segment_max_entries=1000`. Key names are RabbitMQ's where the meaning is the",
        "same. An unknown key is an error. This page is made by",
        "`convoy config --reference`.",
    ]
    for kind in keys.sections.values():
        lines += ["", f"## {(kind.__doc__ or '').splitlines()[0].rstrip('.')}", ""]
        defaults = kind()
        for entry in dataclasses.fields(kind):
            key: Key | None = entry.metadata.get("key")
            if key is None:
                continue
            facts = [key.type_name + (f" ({key.unit})" if key.unit else "")]
            if key.choices:
                facts[0] = "one of " + ", ".join(f"`{choice}`" for choice in key.choices)
            if key.low is not None:
                facts.append(f"{number_text(key.low)} to {number_text(key.high)}")
            facts.append(f"default `{_text(getattr(defaults, entry.name))}`")
            also = [f"`{name}`" for name in key.names[1:]]
            if key.collects:
                also.append(f"`{key.collects}NAME`")
            lines += [f"### `{key.name}`", "", f"{'; '.join(facts)}. {key.doc}"]
            if also:
                lines[-1] += f" Also: {', '.join(also)}."
            lines.append("")
        lines.pop()
    lines += [
        "",
        "## Keys of RabbitMQ without a place here",
        "",
        "Keys of its `advanced.config` may be written as `rabbit.KEY` and `ra.KEY`. These are",
        "taken with one value only, because the cluster does just that:",
        "",
        *(f"- `{name} = {value}`: {why}." for name, (value, why) in FIXED.items()),
        "",
        "These are refused, with the reason:",
        "",
        *(f"- `{name}`: {why}." for name, why in INSTEAD.items()),
    ]
    return "\n".join(lines) + "\n"
