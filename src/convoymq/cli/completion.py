"""Completion of `convoy` in shells: scripts that ask `convoy completion words` for what may follow.

The candidates are the commands and options themselves, so a new one needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from typer import Context
from typer.core import TyperCommand, TyperGroup, TyperOption

from convoymq.cli import OTHERS, ROLES, TOOLS

SCRIPTS = {
    "bash": """\
_convoy() {
    local IFS=$'\\n'
    COMPREPLY=($(convoy completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _convoy convoy
""",
    "zsh": """\
#compdef convoy
_convoy() {
    local -a found
    found=("${(@f)$(convoy completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found[1]" ]]; then compadd -a found; else _default; fi
}
compdef _convoy convoy
""",
    "fish": """\
function __convoy_words
    set -l words (commandline -opc)
    set -l last (commandline -ct)
    convoy completion words -- $words[2..-1] "$last" 2>/dev/null
end
complete -c convoy -a '(__convoy_words)'
""",
}
"""Shell -> what it reads at its start."""


@dataclass(slots=True)
class Place:
    """Holds what may follow a command: further commands, options with their values. An option
    without values is a flag; (): it takes a value that nobody knows."""

    commands: Mapping[str, Callable[[], Place]] = field(default_factory=dict)
    options: Mapping[str, Sequence[str] | None] = field(default_factory=dict)


def candidates(words: Sequence[str]) -> list[str]:
    """Returns what the last word may become, after those before it."""
    *before, last = words or [""]
    place, wanted = _top(), None
    for word in before:
        if wanted is not None:
            wanted = None
        elif word in place.options:
            wanted = place.options[word]
        elif word in place.commands:
            place = place.commands[word]()
    if wanted is not None:
        found: Iterable[str] = wanted
    elif last.startswith("-"):
        found = place.options
    else:
        found = place.commands
    return sorted(each for each in found if each.startswith(last))


def _top() -> Place:
    from typer.main import get_command

    from convoymq.cli.app import app

    top = _typer(get_command(app))
    others: dict[str, Callable[[], Place]] = dict.fromkeys(ROLES, Place)
    others |= {name: lambda name=name: _tool(name, top) for name in TOOLS}  # type: ignore[misc]
    return Place({**top.commands, **others, "perf": _perf, "pipeline": _pipeline}, top.options)


def _typer(command: object) -> Place:
    """Returns the place of a command of Typer."""
    assert isinstance(command, TyperCommand | TyperGroup)
    commands = {
        name: lambda each=each: _typer(each)
        for name, each in (command.commands if isinstance(command, TyperGroup) else {}).items()
        if not each.hidden
    }
    options: dict[str, Sequence[str] | None] = {"--help": None}
    for each in command.params:
        if isinstance(each, TyperOption):
            known = each.shell_complete(Context(command), "")
            values = tuple(item.value for item in known if item.type == "plain")
            names = (*each.opts, *each.secondary_opts)
            options |= dict.fromkeys(names, None if each.is_flag else values)
    return Place(commands, options)


def _perf() -> Place:
    import typer
    from typer.main import get_command

    from convoymq.cli.perf.command import perf

    app = typer.Typer(add_completion=False)
    app.command()(perf)
    return _typer(get_command(app))


def _pipeline() -> Place:
    from typer.main import get_command

    from convoymq.cli.pipeline import pipeline_app

    return _typer(get_command(pipeline_app))


def _tool(tool: str, top: Place) -> Place:
    """Returns the place of one of RabbitMQ's tools, with our own commands under its name."""
    from convoymq.cli.ctl.arguments import COMMON, VHOST, Switch
    from convoymq.cli.ctl.tools import commands_of

    def options_of(switches: Iterable[Switch]) -> dict[str, Sequence[str] | None]:
        return {
            f"--{each.name}": None if each.parse is None else each.choices
            for each in switches
            if each.name != "script-name"
        }

    common = options_of((*COMMON, VHOST))
    commands: dict[str, Callable[[], Place]] = {
        name: lambda each=each: Place({}, {**common, **options_of(each.switches)})  # type: ignore[misc]
        for name, each in commands_of(tool).items()
    }
    own = top.commands[tool]().commands if tool in top.commands else {}
    commands |= {name: own[name] for first, name in OTHERS if first == tool}
    return Place(commands, common)
