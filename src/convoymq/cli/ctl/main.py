"""Runs one command line of a tool: finds the command, checks it, prints what comes of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence

from convoymq.cli import refusal_of
from convoymq.cli.ctl import arguments as words
from convoymq.cli.ctl import transport
from convoymq.cli.ctl.arguments import COMMON, VHOST, Parsed, Switch
from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, QUEUES, UPGRADE, Command, Invocation, execute
from convoymq.cli.ctl.failures import TIMED_OUT, UNAVAILABLE, USAGE, Failure, Misused
from convoymq.cli.ctl.formatting import rows_as, to_json
from convoymq.cli.ctl.outputs import Note, Output, Raw, Rows, Text
from convoymq.cli.ctl.tools import commands_of
from convoymq.model.near_names import hint, near_names

VHOST_DEFAULT = "/"
NOT_READ = 128 + signal.SIGPIPE
"""Code that a shell shows of a program that the signal ended."""
NAMES = {
    CTL: "rabbitmqctl",
    QUEUES: "rabbitmq-queues",
    DIAGNOSTICS: "rabbitmq-diagnostics",
    UPGRADE: "rabbitmq-upgrade",
}
"""Names of RabbitMQ's tools."""


def main(tool: str, arguments: Sequence[str]) -> int:
    """Runs a command line; returns the exit code. Ends in silence when nobody reads the output to
    its end, as `head` does."""
    try:
        code = _main(tool, arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer would be written at the interpreter's end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_READ
    return code


def _main(tool: str, arguments: Sequence[str]) -> int:
    if tool == CTL and list(arguments[:1]) == ["--install-names"]:
        return _install(arguments[1:])
    known = commands_of(tool)
    # The command's name may stand behind switches: which take values must be known to find it.
    every = [*COMMON, VHOST, *(switch for each in known.values() for switch in each.switches)]
    first = words.parse(arguments, every)
    program = str(first.values.get("script_name") or f"convoy {tool}")
    # `--version` of `convoy topics route` has a value.
    if first.values.get("version") is True or list(arguments) == ["--version"]:
        import convoymq

        print(convoymq.__version__)
        return 0
    if not first.words or first.words == ["help"]:
        asked = bool(first.words or first.values.get("help"))
        print(_overview(program, known), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else USAGE
    helping = first.words[0] == "help" or bool(first.values.get("help"))
    name = first.words[1] if first.words[0] == "help" else first.words[0]
    command = known.get(name)
    if command is None:
        print(_unknown(program, name, known), file=sys.stderr)
        return USAGE
    if helping:
        print(_help(program, command))
        return 0
    return _run(program, command, arguments)


def _install(arguments: Sequence[str]) -> int:
    from convoymq.cli.ctl.install import install_names

    if len(arguments) != 1:
        print("convoy ctl --install-names DIRECTORY", file=sys.stderr)
        return USAGE
    return install_names(arguments[0])


def _switches(command: Command) -> list[Switch]:
    """Returns a command's switches and the common ones; its own replace common ones of the same
    name."""
    own = {switch.name for switch in command.switches}
    return [*command.switches, *(each for each in COMMON if each.name not in own)]


def _run(program: str, command: Command, arguments: Sequence[str]) -> int:
    parsed = words.parse(arguments, _switches(command))
    own = {switch.name for switch in command.switches}
    if "format" in parsed.values and "format" not in own:
        parsed.values.setdefault("formatter", parsed.values["format"])
    printing = _Printing(parsed, command.formatter)
    try:
        if parsed.unknown:
            known = [f"--{each.name}" for each in _switches(command)]
            shown = "\n".join(
                f"{name} : {given}{hint(name, known) if name not in known else ''}"
                for name, given in parsed.unknown
            )
            raise Misused(f"Invalid options for this command:\n{shown}")
        bound, rest = words.bind(command.arguments, parsed.words[1:])
        if command.vhost:
            bound["vhost"] = str(parsed.values.get("vhost", VHOST_DEFAULT))
        if command.columns:
            command.chosen(rest)
        node = str(parsed.values.get("node") or os.environ.get("RABBITMQ_NODENAME", ""))
        timeout = parsed.values.get("timeout")
        if timeout == 0:
            raise Failure(TIMED_OUT, _timed_out(command, node), heading="")
        invocation = Invocation(
            command,
            bound,
            rest,
            parsed.values,
            transport.LazyApi(
                node=node,
                data=str(parsed.values.get("data", "")),
                url=str(parsed.values.get("url", "")),
                user="" if "user" in own else str(parsed.values.get("user", "")),
                timeout_s=float(timeout or 0),
            ),
            printing.banner,
        )
        printing.output(execute(invocation))
    except Misused as error:
        print(_misused(program, command, error, words.shown(arguments)), file=sys.stderr)
        return error.code
    except Failure as error:
        printing.failure(error)
        return error.code
    except BrokenPipeError:
        raise
    except OSError as error:
        printing.failure(Failure(UNAVAILABLE, refusal_of(error)))
        return UNAVAILABLE
    return 0


def _timed_out(command: Command, node: str) -> str:
    where = node or "(local)"
    return f"Error: operation {command.name} on node {where} timed out. Timeout value used: 0"


class _Printing:
    """Prints what the switches ask for."""

    def __init__(self, parsed: Parsed, formatter: str) -> None:
        values = parsed.values
        self._formatter = str(values.get("formatter", formatter))
        self._silent = bool(values.get("silent"))
        self._quiet = self._silent or bool(values.get("quiet"))
        self._headers = not (self._silent or bool(values.get("no_table_headers")))

    @property
    def _for_people(self) -> bool:
        return self._formatter in ("table", "pretty_table")

    def banner(self, text: str) -> None:
        """Says what is being done."""
        if self._for_people and not self._quiet:
            print(text, flush=True)

    def output(self, output: Output) -> None:
        """Prints a result."""
        match output:
            case Rows(document=dict(document)) if self._formatter == "json":
                print(to_json(document))
            case Rows():
                lines = rows_as(
                    self._formatter,
                    output.columns,
                    output.rows,
                    headers=self._headers,
                    nulls=output.nulls,
                )
                for line in lines:
                    print(line)
            case Text(text, document):
                if self._formatter != "json":
                    print(text)
                elif document is None:
                    print(to_json({"message": text}))
                else:
                    print(to_json(document))
            case Raw(text):
                print(text)
            case Note(text) if self._for_people and not self._quiet:
                print(text)

    def failure(self, failure: Failure) -> None:
        """Says on standard error why it did not succeed."""
        if failure.rows is not None:
            self.output(failure.rows)
            return
        if self._formatter == "json":
            document = failure.document or {"result": "error", "message": failure.text}
            print(to_json(document), file=sys.stderr)
            return
        heading = f"{failure.heading}\n" if failure.heading else ""
        print(f"{heading}{failure.text}", file=sys.stderr)


def _usage(program: str, command: Command) -> str:
    switches = [switch.usage for switch in command.switches]
    if command.columns:
        switches.append("[--no-table-headers]")
    parts = [*switches, *words.usage_of(command.arguments), "[--timeout <timeout>]"]
    return f"{program} [--node <node>] [--quiet] {' '.join((command.name, *parts))}"


def _misused(program: str, command: Command, error: Misused, given: str) -> str:
    return (
        f"Error (argument validation): {error.text}\nArguments given:\n\t{given}\n\n"
        f"{_bold('Usage')}\n\n{_usage(program, command)}"
    )


def _help(program: str, command: Command) -> str:
    lines = ["", _bold("Usage"), "", _usage(program, command), "", command.summary]
    if command.columns and command.arguments:
        lines += ["", "<column>", f"\tmust be one of {', '.join(sorted(command.columns))}"]
    lines += ["", _bold("General Options"), "", *GENERAL_OPTIONS]
    return "\n".join(lines)


GENERAL_OPTIONS = (
    "-n, --node NODE       the node that carries it out, by name or number",
    "-t, --timeout S       seconds to wait for an answer",
    "-q, --quiet           no banners",
    "-s, --silent          no banners, no headers of tables",
    "--no-table-headers    no headers of tables",
    "--formatter F         table, pretty_table, json or csv",
    "--data DIR            data directory of a node of this machine, or of `convoy up`",
    "--url URL             HTTP API of any node, instead of a node of this machine",
    "--user NAME:PASSWORD  an administrator, with --url",
)


def _overview(program: str, known: dict[str, Command]) -> str:
    width = max(map(len, known)) + 2
    lines = ["", _bold("Usage"), "", f"{program} [--node <node>] [--timeout <timeout>] [--quiet] "
             "<command> [<command options>]", "", "Available commands:", ""]  # fmt: skip
    lines += [f"   {name:{width}}{command.summary}" for name, command in sorted(known.items())]
    lines += ["", f"Use '{program} help <command>' to learn more about a specific command"]
    return "\n".join(lines)


def _unknown(program: str, name: str, known: dict[str, Command]) -> str:
    text = f"\nCommand '{name}' not found. \n"
    like = near_names(name, known)
    if like:
        return f"{text}Did you mean {' or '.join(map(repr, like))}? \n"
    return f"{text}Use '{program} help' for a list of the commands."


def _bold(text: str, codes: Iterable[str] = ("\x1b[1m", "\x1b[0m")) -> str:
    """For terminals only; RabbitMQ's tools write the codes into files too."""
    before, after = codes
    return f"{before}{text}{after}" if sys.stdout.isatty() and sys.stderr.isatty() else text
