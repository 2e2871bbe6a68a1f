"""Output of results: tables, JSON and CSV, byte by byte as RabbitMQ's tools write them, which no
library does (ADR 0194)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from convoymq.model.json import JsonObject

INT32_MAX = (1 << 31) - 1
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0xD800, 0xE000))
} | {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}
"""Characters that would begin another line, or that terminals act on."""


class Table(dict[str, object]):
    """Arguments or properties: `[{"key",value}]` in tables, with types in JSON."""


class Erlang(str):
    """Text that RabbitMQ prints as it is inside of tuples and lists: an atom."""

    __slots__ = ()


class Tuple(tuple[object, ...]):
    """`{a,b}` in tables, a list in JSON."""

    __slots__ = ()


def cell(value: object) -> str:
    """Returns a value in a table, on one line, whatever a sender has put into it."""
    return _cell(value).translate(_CONTROLS)


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case Table():
            return _term(value)
        case Tuple():
            return "{" + ",".join(map(_cell, value)) + "}"
        case dict():
            return "[" + ", ".join(f"{{{key}, {_cell(each)}}}" for key, each in value.items()) + "]"
        case list() | tuple():
            return "[" + ", ".join(map(_cell, value)) + "]"
        case _:
            return str(value)


def _term(value: object) -> str:
    """Returns a value inside of arguments, as an Erlang term."""
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "undefined"
        case Mapping():
            pairs = ",".join(f'{{"{key}",{_term(each)}}}' for key, each in value.items())
            return f"[{pairs}]"
        case list() | tuple():
            return "[" + ",".join(map(_term, value)) + "]"
        case str():
            return f'"{value}"'
        case _:
            return str(value)


def _plain(value: object) -> object:
    """Returns a value for JSON."""
    match value:
        case Table():
            return [[key, *_typed(each)] for key, each in value.items()]
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value


def _typed(value: object) -> tuple[str, object]:
    """Type and value of an argument. The HTTP API has no types: the usual one of such a value."""
    match value:
        case bool():
            return "bool", value
        case int():
            return ("signedint" if abs(value) <= INT32_MAX else "long"), value
        case float():
            return "double", value
        case None:
            return "void", None
        case Mapping():
            return "table", [[key, *_typed(each)] for key, each in value.items()]
        case list() | tuple():
            return "array", [list(_typed(each)) for each in value]
        case _:
            return "longstr", str(value)


def to_json(value: object) -> str:
    """JSON on one line, as RabbitMQ's tools print it."""
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), default=str)


def rows_as(
    formatter: str,
    columns: Sequence[str],
    rows: Sequence[JsonObject],
    *,
    headers: bool,
    nulls: bool = False,
) -> Iterator[str]:
    """Yields the lines of a list."""
    match formatter:
        case "json":
            yield from _json_lines(columns, rows, None if nulls else "")
        case "csv":
            if headers:
                yield ",".join(map(_quoted, columns))
            for row in rows:
                yield ",".join(_quoted(cell(row.get(name))) for name in columns)
        case "pretty_table":
            if rows:
                yield from _pretty(columns, rows)
        case _:
            if headers and rows:
                yield "\t".join(columns)
            for row in rows:
                yield "\t".join(cell(row.get(name)) for name in columns)


def _json_lines(
    columns: Sequence[str], rows: Sequence[JsonObject], absent: object
) -> Iterator[str]:
    yield "["
    for number, row in enumerate(rows):
        chosen = {name: absent if row.get(name) is None else row[name] for name in columns}
        yield ("," if number else "") + to_json(chosen)
    yield "]"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _pretty(columns: Sequence[str], rows: Sequence[JsonObject]) -> Iterator[str]:
    lines = [list(columns)]
    for row in rows:
        lines.append([_pretty_cell(row.get(name)) for name in columns])
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]

    def border(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + right

    yield border("┌", "┬", "┐")
    for number, line in enumerate(lines):
        if number:
            yield border("├", "┼", "┤")
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        yield "│ " + " │ ".join(padded) + " │"
    yield border("└", "┴", "┘")


def _pretty_cell(value: object) -> str:
    if type(value) is list:
        return ", ".join(map(cell, value))
    return cell(value)
