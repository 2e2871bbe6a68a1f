"""Commands: a command is a row of a table, carried out here.

    words ─▶ banner printed ─▶ request ─▶ rows or text
                                  └─ refused ─▶ `missing` (what may be absent), `problems`, or the
                                                API's reason

What no request alone can do has `run`, a function that returns an `Output`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TypeAlias, TypeVar

from convoymq.cli.ctl import transport
from convoymq.cli.ctl.arguments import VHOST, Switch, Values
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Misused, Problem
from convoymq.cli.ctl.outputs import Note, Output, Rows
from convoymq.model.json import Json, JsonObject
from convoymq.model.near_names import did_you_mean, hint

CTL, QUEUES, DIAGNOSTICS, UPGRADE = "ctl", "queues", "diagnostics", "upgrade"
TOPICS = "topics"

Row: TypeAlias = JsonObject
_Value = TypeVar("_Value", str, int, float)


@dataclass(slots=True)
class Invocation:
    """A command with what was given to it."""

    command: Command
    words: dict[str, str]
    """Arguments by name, and `vhost`."""
    rest: list[str]
    """Arguments of a last name that takes any number."""
    values: Values
    """Switches by name."""
    api: transport.Api
    print_banner: Callable[[str], None]
    _node: str = ""

    @property
    def node(self) -> str:
        """Returns the name of the node that carries it out."""
        if not self._node:
            self._node = self.api.state().name
        return self._node

    @property
    def vhost(self) -> str:
        """Returns the virtual host that was given, or the default one."""
        return self.words["vhost"]

    def word(self, name: str) -> str:
        """Returns an argument; "" when it was left out."""
        return self.words.get(name, "")

    def value(self, name: str, default: _Value) -> _Value:
        """Returns a switch of the default's type."""
        found = self.values.get(name, default)
        assert not isinstance(found, bool)
        return type(default)(found)

    def flag(self, name: str) -> bool:
        """Returns whether a flag was given."""
        return bool(self.values.get(name, False))

    def text(self, template: str) -> str:
        """Returns a template filled with arguments and `{node}`."""
        words = dict.fromkeys(_names_of(self.command), "") | self.words
        if "{node}" in template and "node" not in words:
            words["node"] = self.node
        for name, given in words.items():
            template = template.replace("{" + name + "}", given)
        return template

    def path(self, template: str) -> str:
        """Returns a path filled with quoted arguments."""
        for name, given in self.words.items():
            template = template.replace("{" + name + "}", transport.segment(given))
        return template

    def call(
        self,
        method: str,
        template: str,
        body: Json = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """Carries out a request. Raises Failure when it is refused."""
        answer = self.api.request(method, self.path(template), body, headers)
        if answer.status == 404 and self.command.absent_ok:
            self.need_present()
            return None
        if answer.status >= 300:
            refused = self._refused(answer)
            raise self.named(refused, template) if answer.status == 404 else refused
        return answer.content

    def get(self, template: str) -> list[JsonObject]:
        """Returns the rows of a list. Raises Failure."""
        return rows_of(self.call("GET", template))

    def one(self, template: str) -> JsonObject | None:
        """Returns an object; None when there is none. Raises Failure."""
        answer = self.api.request("GET", self.path(template))
        if answer.status == 404:
            return None
        if answer.status >= 300:
            raise self._refused(answer)
        return object_of(answer.content)

    def need_present(self) -> None:
        """Looks for everything in `missing`. Raises Failure."""
        for path, problem in _missing(self.command):
            if self.api.request("GET", self.path(path)).status == 404:
                raise self.named(self.failure(problem), path)

    def failure(self, problem: Problem) -> Failure:
        """Returns the failure that a row of the table describes."""
        return Failure(problem.code, self.text(problem.text), heading=problem.heading)

    def named(self, failure: Failure, template: str) -> Failure:
        """Returns a failure about something absent with the names that were probably meant.

        Args:
            template: path that was not found: what is missing of it is looked for in lists.
        """
        parts = template.split("?")[0].split("/")
        for at, part in enumerate(parts):
            name = self.words.get(part.strip("{}"), "") if part.startswith("{") else ""
            if not name:
                continue
            listed = "vhosts" if part == "{vhost}" else "/".join(parts[:at])
            known = self._names_in(listed)
            if name not in known:
                asked = did_you_mean(name, known)
                if asked and asked not in failure.text:
                    failure.text += f"\n{asked[0].upper()}{asked[1:]}"
                break
        return failure

    def _names_in(self, template: str) -> list[str]:
        """Returns the names of a list; without an answer none."""
        try:
            answer = self.api.request("GET", f"{self.path(template)}?columns=name")
        except Failure:
            return []
        rows = answer.content if answer.status == 200 and isinstance(answer.content, list) else []
        return [str(row["name"]) for row in rows if isinstance(row, dict) and "name" in row]

    def _refused(self, answer: transport.Answer) -> Failure:
        if answer.status in (400, 404):
            self.need_present()
        problem = self.command.problems.get(answer.status)
        if problem is not None:
            return self.failure(problem)
        return Failure(UNAVAILABLE, "not_found" if answer.status == 404 else answer.reason)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the HTTP API. `path` is a template."""

    method: str
    path: str
    body: Callable[[Invocation], Json] | None = None

    def send(self, invocation: Invocation) -> Json:
        """Carries it out. Raises Failure."""
        body = self.body(invocation) if self.body is not None else None
        return invocation.call(self.method, self.path, body)


Columns: TypeAlias = Mapping[str, "str | Callable[[Row], object]"]
"""Name of a column -> key of the API's rows (`a.b` digs), or what computes it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of one or several tools."""

    usage: str
    """Name, and names of arguments: `x?` may be left out, `x*` takes all that follow."""
    summary: str
    _: KW_ONLY
    tools: tuple[str, ...] = ()
    """Tools that have it; empty: the one that its module is for."""
    switches: tuple[Switch, ...] = ()
    formatter: str = "table"
    """Formatter of a list when no other is asked for."""
    banner: str = ""
    request: Request | None = None
    columns: Columns = field(default_factory=dict)
    """Of a list; what can be asked for by name, if the last argument is `column*`."""
    shown: tuple[str, ...] = ()
    """Columns that are shown when none is asked for; empty = all."""
    keep: Callable[[Invocation, Row], bool] | None = None
    """Filter of the answer's rows."""
    complete: Callable[[Invocation, Sequence[str], list[Row]], None] | None = None
    """Adds to the rows, for the columns that are asked for, what takes another request."""
    done: str = ""
    """A remark after success."""
    missing: tuple[tuple[str, Problem], ...] = ()
    """Paths that answer 404 when something is absent, and what that means."""
    problems: Mapping[int, Problem] = field(default_factory=dict)
    """Problems by status of the API."""
    absent_ok: bool = False
    """404 means that there is nothing to do."""
    check: Callable[[Invocation], None] | None = None
    """Refuses arguments before anything is asked. Raises Misused."""
    run: Callable[[Invocation], Output] | None = None

    @property
    def name(self) -> str:
        """Returns the word that calls it."""
        return self.usage.split()[0]

    @property
    def arguments(self) -> list[str]:
        """Returns the names of its arguments, with their marks."""
        return self.usage.split()[1:]

    @property
    def vhost(self) -> bool:
        """Returns whether it takes `--vhost`."""
        return VHOST in self.switches

    def chosen(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Returns the columns to show. Raises Misused."""
        names = [name for word in asked for name in word.split(",") if name]
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            near = "".join(hint(name, self.columns) for name in unknown)
            raise Misused(f"Info key(s) {','.join(unknown)} are not supported{near}")
        return tuple(names) or self.shown or tuple(self.columns)


def in_vhost(*commands: Command) -> tuple[Command, ...]:
    """Returns commands about one virtual host: they take `--vhost` before their own switches."""
    return tuple(replace(each, switches=(VHOST, *each.switches)) for each in commands)


VHOST_MISSING = Problem(DATA, "Virtual host '{vhost}' does not exist", heading="")
VHOST_PRESENT = ("vhosts/{vhost}", VHOST_MISSING)


def _missing(command: Command) -> tuple[tuple[str, Problem], ...]:
    if not command.vhost or any(path == "vhosts/{vhost}" for path, _ in command.missing):
        return command.missing
    return (*command.missing, VHOST_PRESENT)


def _names_of(command: Command) -> list[str]:
    return [name.rstrip("?*") for name in command.arguments]


def execute(invocation: Invocation) -> Output:
    """Carries a command out. Raises Failure, Misused."""
    command = invocation.command
    if command.check is not None:
        command.check(invocation)
    columns = command.chosen(invocation.rest) if command.columns else ()
    if command.banner:
        invocation.print_banner(invocation.text(command.banner))
    if command.run is not None:
        return command.run(invocation)
    assert command.request is not None
    content = command.request.send(invocation)
    if command.columns:
        keep = command.keep or (lambda _invocation, _row: True)
        rows = [row for row in rows_of(content) if keep(invocation, row)]
        if not rows:
            invocation.need_present()
        if command.complete is not None:
            command.complete(invocation, columns, rows)
        return Rows(columns, [pick(command.columns, columns, row) for row in rows])
    return Note(invocation.text(command.done)) if command.done else None


def pick(columns: Columns, names: Sequence[str], row: Row) -> Row:
    """Returns the cells of a row."""
    made: Row = {}
    for name in names:
        source = columns[name]
        made[name] = source(row) if callable(source) else dig(row, source)
    return made


def dig(row: object, path: str) -> object:
    """Returns the value of a row under `a.b`; None without."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def plain(*names: str) -> dict[str, str | Callable[[Row], object]]:
    """Columns that are named as the API names them."""
    return {name: name for name in names}


def rows_of(content: Json) -> list[JsonObject]:
    """Returns the objects of a list."""
    return (
        [dict(row) for row in content if isinstance(row, dict)] if isinstance(content, list) else []
    )


def object_of(content: Json) -> JsonObject:
    """Returns an object; empty when it is something else."""
    return dict(content) if isinstance(content, dict) else {}


def json_word(text: str, code: int = UNAVAILABLE) -> Json:
    """Returns an argument that is JSON. Raises Failure, with the exit code, when it is not."""
    try:
        value: Json = json.loads(text)
    except ValueError as error:
        raise Failure(code, f"JSON decoding error. Reason: {error}") from None
    return value
