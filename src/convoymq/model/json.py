"""The types of parsed JSON values."""

from __future__ import annotations

from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""Values that `json.loads` returns."""
JsonObject: TypeAlias = dict[str, object]
"""Becomes a JSON object: values are None, booleans, numbers, text, lists and such objects."""
