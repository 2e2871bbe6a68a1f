"""Filters, order, pages and columns of lists."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request

from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.fields import number
from convoymq.model.errors import BrokerError
from convoymq.model.json import JsonObject
from convoymq.model.patterns import Pattern, compile_pattern

FILTER_TIMEOUT_S = 5.0
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 500


class Page(dict[str, object]):
    """A page of a list, whose rows have the columns that were asked for."""


def only_columns(row: JsonObject, request: Request) -> JsonObject:
    """Returns what `columns` asks for of one object."""
    return _columns([row], _columns_in(request))[0]


def _columns_in(request: Request) -> list[str]:
    return [name for name in request.query_params.get("columns", "").split(",") if name]


async def paged(rows: list[JsonObject], request: Request) -> list[JsonObject] | Page:
    """Applies `name`, `use_regex`, `sort`, `columns` and the page parameters to a list."""
    query = request.query_params
    total = len(rows)
    name = query.get("name", "")
    if name and query.get("use_regex", "") == "true":
        rows = await matching(rows, name)
    elif name:
        rows = [row for row in rows if name.lower() in _name(row).lower()]
    sort = query.get("sort")
    if sort:
        rows = sorted(rows, key=lambda row: _sort_key(_dig(row, sort)))
    if query.get("sort_reverse", "") == "true":
        rows = list(reversed(rows))
    columns = _columns_in(request)
    if "page" not in query and query.get("pagination", "") != "true":
        return _columns(rows, columns)
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
    pages = max(1, -(-len(rows) // size))
    if page > pages:
        raise ApiError(
            400,
            "page_out_of_range",
            f"Page out of range, page: {page} page size: {size}, len: {len(rows)}",
        )
    items = rows[(page - 1) * size : page * size]
    return Page(
        items=_columns(items, columns),
        page=page,
        page_count=pages,
        page_size=size,
        item_count=len(items),
        filtered_count=len(rows),
        total_count=total,
    )


async def matching(
    rows: list[JsonObject], expression: str, *, ignore_case: bool = True
) -> list[JsonObject]:
    """Returns the rows whose name an expression of the user's matches. Off the loop: each match is
    short, but there may be many. Raises ApiError."""
    try:
        pattern = compile_pattern(expression, ignore_case=ignore_case)
    except BrokerError as error:
        raise bad_request(f"not a regular expression that is served: {error.text}") from None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, _matching, rows, pattern)


def _matching(rows: list[JsonObject], pattern: Pattern) -> list[JsonObject]:
    end = time.monotonic() + FILTER_TIMEOUT_S
    found = []
    for row in rows:
        if time.monotonic() > end:
            raise bad_request("the regular expression takes too long for so many rows")
        if pattern.search(_name(row)):
            found.append(row)
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
