"""Chosen messages of a queue as JSON: filters, cursors and names of messages, and back.

A message is named by its place in the queue's log: `ENTRY.OFFSET.RECORD`. The name holds for as
long as the message is in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoymq.broker.browse import (
    ROWS_MAX,
    SPEC_BYTES_MAX,
    Cursor,
    Filter,
    Page,
    Place,
    Question,
    Row,
    Summary,
)
from convoymq.broker.records import User
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.fields import number_in, object_in, text_in
from convoymq.edges.http.messages import content_in, payload_in, row_of
from convoymq.messages.record import names_of, read_record, with_body
from convoymq.model.errors import PeerError
from convoymq.model.json import JsonObject
from convoymq.model.refusals import message_too_big
from convoymq.queues.message_checks import check_message

COUNT_DEFAULT = 100
TRUNCATE_DEFAULT = 50_000
SELECTED_MAX = 1_000_000
"""Messages of one operation."""
RECORD_BYTES_MAX = SPEC_BYTES_MAX - 4096
"""Of a message that takes another one's place."""
_FILTER_KEYS = frozenset(
    ("position", "time", "headers", "header_exists", "first_death", "last_death")
)


def filter_in(body: JsonObject) -> Filter:
    """Returns the filter of a request. Raises ApiError."""
    given = object_in(body, "filter")
    unknown = sorted(given.keys() - _FILTER_KEYS)
    if unknown:
        raise bad_request(f"filter: {', '.join(unknown)} is not known")
    position, time = object_in(given, "position"), object_in(given, "time")
    exists = given.get("header_exists", [])
    if isinstance(exists, str):
        exists = [exists]
    if not isinstance(exists, list) or not all(isinstance(name, str) for name in exists):
        raise bad_request("filter: header_exists is not a list of names")
    first, last = object_in(given, "first_death"), object_in(given, "last_death")
    return Filter(
        position_from=max(1, number_in(position, "from", 1) or 1),
        position_to=number_in(position, "to", None),
        time_from=number_in(time, "from", None),
        time_to=number_in(time, "to", None),
        headers=object_in(given, "headers"),
        header_exists=tuple(str(name) for name in exists),
        first_queue=_word(first, "queue"),
        first_reason=_word(first, "reason"),
        last_queue=_word(last, "queue"),
        last_reason=_word(last, "reason"),
    )


def _word(given: JsonObject, key: str) -> str | None:
    return None if given.get(key) is None else text_in(given, key)


def question_in(body: JsonObject) -> Question:
    """Returns what is asked for. Raises ApiError."""
    count = number_in(body, "count", COUNT_DEFAULT)
    truncate = number_in(body, "truncate", TRUNCATE_DEFAULT)
    cursor = body.get("cursor")
    return Question(
        filter=filter_in(body),
        cursor=None if cursor is None else cursor_of(text_in(body, "cursor")),
        rows=min(COUNT_DEFAULT if count is None else count, ROWS_MAX),
        body_bytes=TRUNCATE_DEFAULT if truncate is None else truncate,
    )


def cursor_of(text: str) -> Cursor:
    """Returns the cursor of `page_json`. Raises ApiError."""
    numbers = _numbers(text, 6)
    if numbers is None or numbers[0] < 1:
        raise bad_request("the cursor is not one of a page")
    return Cursor(*numbers)


def place_of(text: object) -> Place:
    """Returns the place that a message's name says. Raises ApiError."""
    numbers = _numbers(text, 3) if isinstance(text, str) else None
    if numbers is None or min(numbers) < 0:
        raise bad_request(f"{text!r} is not the id of a message")
    return numbers[0], numbers[1], numbers[2]


def _numbers(text: str, count: int) -> list[int] | None:
    words = text.split(".")
    if len(words) != count or any(len(word) > 19 for word in words):
        return None
    try:
        return [int(word) for word in words]
    except ValueError:
        return None


def places_in(body: JsonObject) -> list[Place] | None:
    """Returns the messages that a request names; None: it has a filter. Raises ApiError."""
    ids = body.get("ids")
    if (ids is None) == (body.get("filter") is None):
        raise bad_request("messages are chosen by either ids or filter")
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) > SELECTED_MAX:
        raise bad_request(f"ids is not a list of at most {SELECTED_MAX} names")
    return list(dict.fromkeys(place_of(each) for each in ids))


def page_json(page: Page, encoding: str) -> JsonObject:
    """Returns a page as JSON."""
    return {
        "messages": [_row_json(row, encoding) for row in page.rows],
        "cursor": None if page.cursor is None else ".".join(map(str, page.cursor)),
        "examined": page.examined,
        "messages_ready": page.ready,
    }


def _row_json(row: Row, encoding: str) -> JsonObject:
    index, offset, number, position, time_ms, acquired_count, failed, record, deaths = row
    made: JsonObject = {
        "id": f"{index}.{offset}.{number}",
        "position": position,
        "enqueued_at": time_ms,
    }
    if record is None:
        return made
    try:
        size = read_record(record).header.body_size
    except PeerError:
        return {**made, "unreadable": True}
    shown = row_of(record, acquired_count, 0, encoding, None)
    del shown["message_count"]
    origins = [
        {**origin._asdict(), "routing_keys": list(origin.routing_keys)} for origin in deaths or ()
    ]
    first, last = origins if origins else (None, None)
    return {
        **made,
        **shown,
        "truncated": size != shown["payload_bytes"],
        "payload_bytes": size,
        "acquired_count": acquired_count,
        "delivery_count": failed,
        "first_death": first,
        "last_death": last,
    }


def edited_record(record: bytes, body: JsonObject, user: User, size_max: int) -> bytes:
    """Returns a message with other properties, or another payload, or both; what is not given
    stays. It passes the checks of a publish by this user. Raises ApiError, PreconditionFailed,
    PeerError."""
    message = read_record(record)
    content, payload = message.content, message.body
    if body.get("payload") is not None:
        payload = payload_in(text_in(body, "payload"), text_in(body, "payload_encoding", "string"))
        content = with_body(content, payload)
    if len(payload) > size_max:
        raise message_too_big(len(payload), size_max)
    if body.get("properties") is not None:
        content = content_in(object_in(body, "properties"), payload)
    checked = check_message(content, message.routing_key, user=user)
    made = names_of(message.exchange, message.routing_key) + checked.content
    if len(made) > RECORD_BYTES_MAX:
        raise bad_request(f"an edited message has at most {RECORD_BYTES_MAX} bytes")
    return made


def operation_json(id: str, summary: Summary, waits_for: str = "") -> JsonObject:
    """Returns an operation as JSON."""
    ended: Sequence[str] = ("gone", "deleted", "moved", "returned")
    waiting = summary["selected"] - sum(summary[name] for name in ended)
    done = bool(summary["sealed"]) and not waiting
    return {
        "operation": id,
        "state": "done" if done else "running",
        "selected": summary["selected"],
        **{name: summary[name] for name in ended},
        "waiting": waiting,
        "waits_for": waits_for,
    }
