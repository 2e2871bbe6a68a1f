"""Filters, order, pages and columns of lists."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from starlette.requests import Request

from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.fields import number
from convoymq.model.errors import BrokerError
from convoymq.model.json import JsonObject
from convoymq.model.patterns import Pattern, compile_pattern
from convoymq.model.slices import in_slices

FILTER_TIMEOUT_S = 5.0
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 500


Item = TypeVar("Item")


class Page(dict[str, object]):
    """A page of a list, whose rows have the columns that were asked for."""


def only_columns(row: JsonObject, request: Request) -> JsonObject:
    """Returns what `columns` asks for of one object."""
    return _columns([row], _columns_in(request))[0]


def _columns_in(request: Request) -> list[str]:
    return [name for name in request.query_params.get("columns", "").split(",") if name]


NEEDS_ROW = object()
"""Value of a field that only the row tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy(Generic[Item]):
    """A list whose rows are made when they are shown."""

    items: Sequence[Item]
    name: Callable[[Item], str]
    row: Callable[[Item], JsonObject | None]
    """Makes a row; None: the item is gone."""
    value: Callable[[Item, str], object]
    """Returns a field of a row by its path, or `NEEDS_ROW`."""


Shown: TypeAlias = Callable[[int, int], Awaitable[list[JsonObject]]]
"""Makes the rows from one place of a list to another."""


async def paged(given: list[JsonObject] | Lazy[Item], request: Request) -> list[JsonObject] | Page:
    """Applies `name`, `use_regex`, `sort`, `columns` and the page parameters to a list."""
    query, columns = request.query_params, _columns_in(request)
    if isinstance(given, Lazy):
        total = len(given.items)
        count, shown = await _ordered(given, query)
    else:
        total = len(given)
        lazy = Lazy(items=given, name=_name, row=lambda row: row, value=_dig)
        count, shown = await _ordered(lazy, query)
    if "page" not in query and query.get("pagination", "") != "true":
        return _columns(await shown(0, count), columns)
    page = number(query.get("page", "1"))
    size = number(query.get("page_size", str(PAGE_SIZE_DEFAULT)))
    if page is None or size is None:
        raise bad_request("Pagination parameters are invalid")
    if page < 1 or not 1 <= size <= PAGE_SIZE_MAX:
        raise ApiError(
            400,
            "invalid_pagination_parameters",
            f"Invalid pagination parameters: page number {page}, page size {size}",
        )
    pages = max(1, -(-count // size))
    if page > pages:
        raise ApiError(
            400,
            "page_out_of_range",
            f"Page out of range, page: {page} page size: {size}, len: {count}",
        )
    items = await shown((page - 1) * size, page * size)
    return Page(
        items=_columns(items, columns),
        page=page,
        page_count=pages,
        page_size=size,
        item_count=len(items),
        filtered_count=count,
        total_count=total,
    )


async def _ordered(lazy: Lazy[Item], query: Mapping[str, str]) -> tuple[int, Shown]:
    """Returns how many items the query wants, and what makes their rows in its order."""
    items, name = list(lazy.items), query.get("name", "")
    if name and query.get("use_regex", "") == "true":
        items = await matching(items, name, lazy.name)
    elif name:
        wanted = name.lower()
        items = [item async for item in in_slices(items) if wanted in lazy.name(item).lower()]
    reverse, sort = query.get("sort_reverse", "") == "true", query.get("sort")
    if sort:
        values = [lazy.value(item, sort) async for item in in_slices(items)]
        if NEEDS_ROW in values:
            rows = await _rows(lazy, items)
            ordered = _sorted(rows, [_dig(row, sort) for row in rows])
            if reverse:
                ordered.reverse()

            async def made(first: int, end: int) -> list[JsonObject]:
                return ordered[first:end]

            return len(ordered), made
        items = _sorted(items, values)
    if reverse:
        items.reverse()
    return len(items), lambda first, end: _rows(lazy, items[first:end])


def _sorted(items: list[Item], values: list[object]) -> list[Item]:
    keys = [_sort_key(value) for value in values]
    return [items[place] for place in sorted(range(len(items)), key=keys.__getitem__)]


async def _rows(lazy: Lazy[Item], items: Sequence[Item]) -> list[JsonObject]:
    rows = [lazy.row(item) async for item in in_slices(items)]
    return [row for row in rows if row is not None]


async def matching(
    items: list[Item],
    expression: str,
    name: Callable[[Item], str],
    *,
    ignore_case: bool = True,
) -> list[Item]:
    """Returns the items whose name an expression of the user's matches. Off the loop: each match is
    short, but there may be many. Raises ApiError."""
    try:
        pattern = compile_pattern(expression, ignore_case=ignore_case)
    except BrokerError as error:
        raise bad_request(f"not a regular expression that is served: {error.text}") from None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, _matching, items, pattern, name)


def _matching(items: list[Item], pattern: Pattern, name: Callable[[Item], str]) -> list[Item]:
    end = time.monotonic() + FILTER_TIMEOUT_S
    found = []
    for item in items:
        if time.monotonic() > end:
            raise bad_request("the regular expression takes too long for so many rows")
        if pattern.search(name(item)):
            found.append(item)
    return found


def _name(row: JsonObject) -> str:
    return str(row.get("name", ""))


def _dig(row: object, path: str) -> object:
    for part in path.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(part)
    return row


def _sort_key(value: object) -> tuple[int, float | str]:
    if isinstance(value, int | float):
        return 1, value
    return (0, "") if value is None else (2, str(value))


def _columns(rows: list[JsonObject], columns: list[str]) -> list[JsonObject]:
    if not columns:
        return rows
    made: list[JsonObject] = []
    for row in rows:
        kept: JsonObject = {}
        for column in columns:
            value = _dig(row, column)
            if value is None:
                continue
            *parents, last = column.split(".")
            place = kept
            for parent in parents:
                below = place.setdefault(parent, {})
                if not isinstance(below, dict) or below is row.get(parent):
                    # All of the parent is shown already.
                    break
                place = below
            else:
                place[last] = value
        made.append(kept)
    return made
