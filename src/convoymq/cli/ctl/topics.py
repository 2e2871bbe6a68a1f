"""`convoy topics`: ordered topics, their partitions and groups (docs/topics.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from convoymq.cli.ctl.arguments import Switch
from convoymq.cli.ctl.command import Command, Invocation, in_vhost, object_of, rows_of
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Misused
from convoymq.cli.ctl.outputs import Output, Rows, Text
from convoymq.cli.ctl.topic_scaling import explained
from convoymq.model.json import Json, JsonObject

if TYPE_CHECKING:
    from convoymq.cli.ctl.topic_page import Sample

POLL_S = 0.05
WAIT_S = 60
SAMPLE_S = 2
"""Time over which the rates of a page are means."""
SAMPLE_S_MAX = 3600
TOPIC = "topics/{vhost}/{name}"
GROUP = TOPIC + "/groups/{group}"
LISTED = ("name", "mode", "logical", "partitions", "version", "groups", "change")
TOPIC_DETAILS = ("partition_rows", "latest_change")
"""Of a topic; `route` and `changes` show them."""
ROUTE = ("pid", "lo", "hi", "node", "state")
LINEAGE = (
    *ROUTE, "created_version", "sealed_version", "open_offset", "close_offset", "parents",
    "children",
)  # fmt: skip
CHANGE = (
    "change_id", "kind", "phase", "base_version", "next_version", "attempt", "sources", "targets"
)  # fmt: skip
DURATIONS = ("change_id", "kind", "phase", "phases_ms")
GROUPS = ("group", "cv", "latest", "mode", "state", "members", "waits_for")
LOSSES = (
    "group", "pid", "lo", "hi", "first", "end", "parked_keys", "reason", "time_ms"
)  # fmt: skip
GAPS = ("pid", "first", "end")
LAG = (
    "pid", "state", "owner", "watermark", "end_offset", "close_offset", "lag", "parked_keys",
    "data_expired",
)  # fmt: skip
AUTOSCALE = (
    "autoscale", "autoscale-target-messages", "autoscale-target-bytes", "autoscale-partitions-min",
    "autoscale-partitions-max", "autoscale-changes-per-hour", "autoscale-unit",
)  # fmt: skip
SETTINGS = (
    "max-age", "max-length-bytes", "stream-max-segment-size-bytes", "group-ttl", "seal-after",
    "null-key", "weak-wait", "lost-after", "retry-exchange", *AUTOSCALE,
)  # fmt: skip
SCALE_ACTIONS = ("set", "explain")
UNSET = "default"
"""In place of a value: the setting is taken away."""
PARKED = ("key", "encoding", "lp", "pid", "messages", "messages_bytes", "resuming", "order_token")
PARK_ACTIONS = ("list", "resume", "retry", "skip", "replace")
DRAINS = ("node", "state", "open", "sealed", "bytes", "slowest_group")
DRAINED = ("vhost", "topic", "pid", "to_pid", "node", "error")
REFUSED = frozenset((400, 404, 410))
"""Status of answers to what cannot be done as it was asked for."""


def _ask(
    invocation: Invocation, method: str, template: str, body: JsonObject | None = None
) -> Json:
    """Carries out a request. Raises Failure with the reason that the node gives."""
    sent: Json = body  # type: ignore[assignment]
    answer = invocation.api.request(method, invocation.path(template), sent)
    if answer.status < 300:
        return answer.content
    found = object_of(answer.content)
    document: JsonObject = {"result": "error", "message": answer.reason}
    if "code" in found:
        document["code"] = found["code"]
    code = DATA if answer.status in REFUSED else UNAVAILABLE
    raise Failure(code, answer.reason, document=document)


def _listed(template: str, columns: tuple[str, ...]) -> Callable[[Invocation], Output]:
    """Returns a command that shows the rows of a path."""
    return lambda invocation: Rows(columns, rows_of(_ask(invocation, "GET", template)), nulls=True)


def _deleted(template: str) -> Callable[[Invocation], Output]:
    """Returns a command that deletes what a path names."""

    def run(invocation: Invocation) -> Output:
        _ask(invocation, "DELETE", template)
        return None

    return run


def _number(what: str, text: str) -> int:
    """Returns an argument that is a number. Raises Misused."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise Misused(f"Bad argument: {what} is a number, not '{text}'", DATA)
    return int(text)


def _pids(invocation: Invocation) -> list[Json]:
    return [_number("a partition", word) for word in invocation.rest]


def _check_numbers(invocation: Invocation) -> None:
    if "pid" in invocation.words:
        _number("a partition", invocation.word("pid"))
    _pids(invocation)


# --- topics ------------------------------------------------------------------------------------


def _check_create(invocation: Invocation) -> None:
    if "partitions" not in invocation.values:
        raise Misused("Say how many partitions it begins with: --partitions N", DATA)


def create(invocation: Invocation) -> Output:
    """Creates a topic and its exchange."""
    values = invocation.values
    names = ("partitions", "logical", "mode", *SETTINGS)
    keys = {name: name.replace("-", "_") for name in names}
    body: JsonObject = {name: values[key] for name, key in keys.items() if key in values}
    _ask(invocation, "PUT", TOPIC, body)
    return None


def _describe(invocation: Invocation) -> Output:
    found = object_of(_ask(invocation, "GET", TOPIC))
    shown = {name: value for name, value in found.items() if name not in TOPIC_DETAILS}
    width = max(map(len, shown), default=0) + 2
    lines = [f"{name:{width}}{_shown(value)}" for name, value in sorted(shown.items())]
    return Text("\n".join(lines), found)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def route(invocation: Invocation) -> Output:
    """The partitions of a route version; with `--lineage` all that there ever were."""
    version = invocation.value("version", -1)
    query = [f"version={version}"] if version >= 0 else []
    lineage = invocation.flag("lineage")
    query += ["lineage=true"] if lineage else []
    rows = rows_of(_ask(invocation, "GET", f"{TOPIC}/route?{'&'.join(query)}"))
    return Rows(LINEAGE if lineage else ROUTE, rows, nulls=True)


def _check_route(invocation: Invocation) -> None:
    if invocation.flag("lineage") and "version" in invocation.values:
        raise Misused("--lineage shows all versions: leave --version out", DATA)
    if invocation.value("version", 0) < 0:
        raise Misused("Bad argument: a version is a number from 0 on", DATA)


# --- autoscaling -------------------------------------------------------------------------------


def _autoscale(invocation: Invocation) -> Output:
    if invocation.word("action") == "set":
        _ask(invocation, "PUT", TOPIC + "/autoscale", _scaling(invocation))
        return None
    found = object_of(_ask(invocation, "GET", TOPIC + "/autoscale"))
    return Text(explained(found), found)


def _scaling(invocation: Invocation) -> JsonObject:
    """Returns the settings that the switches name. Raises Misused."""
    made: JsonObject = {}
    for name in AUTOSCALE:
        key = name.replace("-", "_")
        if key not in invocation.values:
            continue
        text = invocation.value(key, "")
        if text == UNSET:
            made[name] = None
        else:
            made[name] = text if name == "autoscale" else _number(f"--{name}", text)
    return made


def _check_autoscale(invocation: Invocation) -> None:
    action = invocation.word("action")
    if action not in SCALE_ACTIONS:
        raise Misused(f"Bad argument: action is one of {', '.join(SCALE_ACTIONS)}", DATA)
    if (action == "set") != bool(_scaling(invocation)):
        switches = ", ".join(f"--{name}" for name in AUTOSCALE)
        raise Misused(f"`set`, and no other action, needs some of {switches}", DATA)


# --- changes -----------------------------------------------------------------------------------


def _change(invocation: Invocation, verb: str, body: JsonObject) -> Output:
    """Begins a change, or finds it by its id, and waits for its end."""
    if "change_id" in invocation.values:
        body["change_id"] = invocation.value("change_id", "")
    found = object_of(_ask(invocation, "POST", f"{TOPIC}/{verb}", body))
    invocation.words["change"] = str(found["change_id"])
    until = time.monotonic() + invocation.value("wait", WAIT_S)
    while found["phase"] not in ("done", "aborted") and time.monotonic() < until:
        time.sleep(POLL_S)
        found = object_of(_ask(invocation, "GET", TOPIC + "/changes/{change}"))
    shown = Rows(CHANGE, [found], nulls=True)
    if found["phase"] != "done":
        raise Failure(UNAVAILABLE, f"Change {found['change_id']} is not done", rows=shown)
    return shown


def split(invocation: Invocation) -> Output:
    """Replaces a partition by two or more of parts of its range."""
    body: JsonObject = {"pid": int(invocation.word("pid")), "at": _cuts(invocation)}
    return _change(invocation, "split", body)


def _cuts(invocation: Invocation) -> list[int]:
    words = invocation.value("at", "")
    return [_number("a cut point", word.strip()) for word in words.split(",")] if words else []


def _check_split(invocation: Invocation) -> None:
    _check_numbers(invocation)
    _cuts(invocation)


def merge(invocation: Invocation) -> Output:
    """Replaces neighbouring partitions by one."""
    return _change(invocation, "merge", {"pids": _pids(invocation)})


def _check_merge(invocation: Invocation) -> None:
    if len(_pids(invocation)) < 2:
        raise Misused("A merge takes two or more partitions", DATA)


def move(invocation: Invocation) -> Output:
    """Replaces a partition by one on another node."""
    body: JsonObject = {"pid": int(invocation.word("pid")), "node": invocation.value("to", "")}
    return _change(invocation, "move", body)


def _check_move(invocation: Invocation) -> None:
    _check_numbers(invocation)
    if not invocation.value("to", ""):
        raise Misused("Say where it goes: --to NODE", DATA)


def _drain(invocation: Invocation) -> Output:
    body: JsonObject = {"node": invocation.word("target")}
    rows = rows_of(_ask(invocation, "POST", "topics/drain", body))
    shown = Rows(DRAINED, rows, nulls=True)
    if any(row.get("error") for row in rows):
        raise Failure(UNAVAILABLE, "", rows=shown)
    return shown


def _seal(invocation: Invocation) -> Output:
    return _change(invocation, "seal", {"pid": int(invocation.word("pid"))})


def _declare_lost(invocation: Invocation) -> Output:
    body: JsonObject = {"pid": int(invocation.word("pid"))}
    _ask(invocation, "POST", TOPIC + "/declare-lost", body)
    return None


# --- groups ------------------------------------------------------------------------------------


def create_group(invocation: Invocation) -> Output:
    """Creates a consumer group, before its first consumer comes."""
    body: JsonObject = {}
    if _named_positions(invocation):
        body.update(_position(invocation))
    if "advance" in invocation.values:
        body["advance"] = invocation.value("advance", "")
    _ask(invocation, "PUT", GROUP, body)
    return None


def _check_create_group(invocation: Invocation) -> None:
    if _named_positions(invocation):
        _position(invocation)


def _named_positions(invocation: Invocation) -> list[str]:
    return [name for name in ("earliest", "latest", "time", "vector") if name in invocation.values]


def _position(invocation: Invocation) -> JsonObject:
    """Returns the position that the switches name. Raises Misused."""
    named = _named_positions(invocation)
    if len(named) != 1:
        raise Misused("Say one of --earliest, --latest, --time MS and --vector PID=OFFSET,…", DATA)
    match named[0]:
        case "time":
            return {"time": invocation.value("time", 0)}
        case "vector":
            return {"vector": _vector(invocation.value("vector", ""))}
        case name:
            return {"position": name}


def _vector(text: str) -> JsonObject:
    made: JsonObject = {}
    for word in text.split(","):
        pid, _, offset = word.partition("=")
        place = str(_number("a partition", pid.strip()))
        if place in made:
            raise Misused(f"Bad argument: the vector names partition {place} twice", DATA)
        made[place] = _number("an offset", offset.strip())
    return made


def _seek(invocation: Invocation) -> Output:
    _ask(invocation, "POST", GROUP + "/seek", _position(invocation))
    return None


def _check_seek(invocation: Invocation) -> None:
    _position(invocation)


def _accept_loss(invocation: Invocation) -> Output:
    rows = rows_of(_ask(invocation, "POST", GROUP + "/accept-loss"))
    return Rows(GAPS, rows)


def _park(invocation: Invocation) -> Output:
    if invocation.word("action") == "list":
        return Rows(PARKED, rows_of(_ask(invocation, "GET", GROUP + "/park")), nulls=True)
    encoding = "base64" if invocation.flag("base64") else "string"
    body: JsonObject = {"keys": list(invocation.rest), "encoding": encoding}
    if invocation.word("action") == "replace":
        body.update(payload=invocation.value("body", ""), payload_encoding=encoding)
    _ask(invocation, "POST", GROUP + "/park/{action}", body)
    return None


def _check_park(invocation: Invocation) -> None:
    action = invocation.word("action")
    if action not in PARK_ACTIONS:
        raise Misused(f"Bad argument: action is one of {', '.join(PARK_ACTIONS)}", DATA)
    if (action == "list") == bool(invocation.rest):
        raise Misused("`list` takes no keys, the other actions take some", DATA)
    if (action == "replace") != ("body" in invocation.values):
        raise Misused("`replace`, and no other action, needs --body TEXT", DATA)
    if action == "replace" and len(invocation.rest) != 1:
        raise Misused("`replace` takes one key", DATA)


# --- pages -------------------------------------------------------------------------------------


def _sample(invocation: Invocation, groups: list[str]) -> Sample:
    from convoymq.cli.ctl.topic_page import Sample

    topic = object_of(_ask(invocation, "GET", TOPIC))
    lags = {}
    for group in groups:
        invocation.words["group"] = group
        lags[group] = rows_of(_ask(invocation, "GET", GROUP + "/lag"))
    return Sample(topic, lags)


def show(invocation: Invocation) -> Output:
    """Writes a page about a topic: route history, changes, rates of the partitions, groups."""
    from convoymq.cli.ctl.topic_page import topic_page

    rows = rows_of(_ask(invocation, "GET", TOPIC + "/groups"))
    lineage = rows_of(_ask(invocation, "GET", TOPIC + "/route?lineage=true"))
    times = rows_of(_ask(invocation, "GET", TOPIC + "/durations"))
    names = [str(each["group"]) for each in rows]
    first = _sample(invocation, names)
    begun = time.monotonic()
    time.sleep(invocation.value("seconds", SAMPLE_S))
    last = _sample(invocation, names)
    seconds = max(time.monotonic() - begun, 1e-3)
    shown = topic_page(lineage, rows, times, first, last, round(seconds, 1) or seconds)
    path = Path(invocation.value("html", ""))
    try:
        path.write_text(shown)
    except OSError as error:
        raise Failure(DATA, f"{path} cannot be written: {error.strerror}") from error
    return Text(f"Written: {path}", {"file": str(path)})


def _check_show(invocation: Invocation) -> None:
    if not invocation.value("html", ""):
        raise Misused("Say which file the page is written to: --html FILE", DATA)
    if not 0 <= invocation.value("seconds", SAMPLE_S) <= SAMPLE_S_MAX:
        raise Misused(f"Bad argument: --seconds is 0 to {SAMPLE_S_MAX}", DATA)


WAIT = Switch("wait", int)
CHANGE_ID = Switch("change-id", str)
POSITIONS = (
    Switch("earliest"), Switch("latest"), Switch("time", int), Switch("vector", str)
)  # fmt: skip

IN_VHOST = in_vhost(
    Command(
        "show name",
        "Writes a page about a topic: route history, changes, rates of partitions, groups",
        switches=(Switch("html", str), Switch("seconds", int)),
        check=_check_show,
        run=show,
    ),
    Command(
        "create name",
        "Creates an ordered topic, and an exchange of its name to publish to",
        switches=(
            Switch("partitions", int),
            Switch("logical", int),
            Switch("mode", str, choices=("strict", "weak")),
            Switch("max-age", str),
            Switch("max-length-bytes", int),
            Switch("stream-max-segment-size-bytes", int),
            Switch("group-ttl", str),
            Switch("autoscale", str, choices=("on", "off")),
            *(Switch(name, int) for name in AUTOSCALE[1:]),
            Switch("seal-after", str),
            Switch("null-key", str, choices=("refuse", "sticky", "spread")),
            Switch("weak-wait", str),
            Switch("lost-after", str),
            Switch("retry-exchange", str),
        ),
        check=_check_create,
        banner="Creating topic {name}...",
        run=create,
    ),
    Command(
        "delete name",
        "Deletes a topic with its messages, groups and exchange",
        banner="Deleting topic {name}...",
        run=_deleted(TOPIC),
    ),
    Command(
        "list",
        "Lists the topics of a virtual host",
        banner="Listing topics of vhost {vhost}...",
        run=_listed("topics/{vhost}", LISTED),
    ),
    Command(
        "describe name",
        "Shows a topic; as JSON with all of its partitions",
        run=_describe,
    ),
    Command(
        "route name",
        "Lists the partitions of the newest route version, of another one, or of all",
        # `--version` of other commands is a flag: the program's version.
        switches=(Switch("version", int, "V"), Switch("lineage")),
        check=_check_route,
        banner="Listing partitions of topic {name}...",
        run=route,
    ),
    Command(
        "autoscale name action",
        "Sets how a topic scales by itself; explains what is decided, and by which rule",
        switches=(*(Switch(name, str) for name in AUTOSCALE),),
        check=_check_autoscale,
        run=_autoscale,
    ),
    Command(
        "split name pid",
        "Splits a partition in two, or at given logical partitions, and waits for the end",
        switches=(Switch("at", str), CHANGE_ID, WAIT),
        check=_check_split,
        banner="Splitting partition {pid} of topic {name}...",
        run=split,
    ),
    Command(
        "merge name pid*",
        "Merges neighbouring partitions into one, and waits for the end",
        switches=(CHANGE_ID, WAIT),
        check=_check_merge,
        banner="Merging partitions of topic {name}...",
        run=merge,
    ),
    Command(
        "move name pid",
        "Moves a partition to another node, and waits for the end",
        switches=(Switch("to", str), CHANGE_ID, WAIT),
        check=_check_move,
        banner="Moving partition {pid} of topic {name}...",
        run=move,
    ),
    Command(
        "changes name",
        "Shows the change of a topic that runs, or ended last",
        banner="Listing changes of topic {name}...",
        run=_listed(TOPIC + "/changes", CHANGE),
    ),
    Command(
        "durations name",
        "Shows how long the phases of the last changes took, as the node has seen them",
        banner="Listing durations of changes of topic {name}...",
        run=_listed(TOPIC + "/durations", DURATIONS),
    ),
    Command(
        "abort name change",
        "Gives a change up that has not closed a partition yet",
        banner="Giving up change {change} of topic {name}...",
        run=_deleted(TOPIC + "/changes/{change}"),
    ),
    Command(
        "seal name pid",
        "Seals a partition whose majority is gone: writes go on, readers wait for it",
        switches=(WAIT,),
        check=_check_numbers,
        banner="Sealing partition {pid} of topic {name} from outside...",
        run=_seal,
    ),
    Command(
        "declare-lost name pid",
        "Gives up a partition that was sealed without its node: groups go on without it",
        check=_check_numbers,
        banner="Declaring partition {pid} of topic {name} lost...",
        run=_declare_lost,
    ),
    Command(
        "groups name",
        "Lists the consumer groups of a topic",
        banner="Listing groups of topic {name}...",
        run=_listed(TOPIC + "/groups", GROUPS),
    ),
    Command(
        "create-group name group",
        "Creates a consumer group, from the first message on unless a position is given",
        switches=(Switch("advance", str, choices=("linear", "dag")), *POSITIONS),
        check=_check_create_group,
        banner="Creating group {group} of topic {name}...",
        run=create_group,
    ),
    Command(
        "losses name",
        "Lists what groups go on without, because a partition was declared lost",
        banner="Listing losses of topic {name}...",
        run=_listed(TOPIC + "/losses", LOSSES),
    ),
    Command(
        "delete-group name group",
        "Deletes a consumer group without members; partitions are not kept for it any more",
        banner="Deleting group {group} of topic {name}...",
        run=_deleted(GROUP),
    ),
    Command(
        "lag name group",
        "Lists what a group has before it, by partition",
        banner="Listing the lag of group {group} of topic {name}...",
        run=_listed(GROUP + "/lag", LAG),
    ),
    Command(
        "seek name group",
        "Has a group without members read again from a position",
        switches=POSITIONS,
        check=_check_seek,
        banner="Seeking group {group} of topic {name}...",
        run=_seek,
    ),
    Command(
        "accept-loss name group",
        "Has a group go on behind messages that retention cut before it had read them",
        banner="Accepting the loss of group {group} of topic {name}...",
        run=_accept_loss,
    ),
    Command(
        "park action name group key*",
        "Lists and resumes parked keys of a group; retries, skips, replaces first messages",
        switches=(Switch("base64"), Switch("body", str)),
        check=_check_park,
        run=_park,
    ),
)

COMMANDS = (
    *IN_VHOST,
    Command(
        "drain target",
        "Has a node give its partitions away, and waits until it has no open one to give",
        banner="Moving partitions off node {target}...",
        run=_drain,
    ),
    Command(
        "drains",
        "Lists the nodes that give their partitions away, and what is left on them",
        banner="Listing drains...",
        run=_listed("convoy/topics/drains", DRAINS),
    ),
    Command(
        "revive target",
        "Ends a drain: the node gets partitions again",
        banner="Ending the drain of node {target}...",
        run=_deleted("convoy/topics/drains/{target}"),
    ),
)
