"""The convoy command. Commands are imported when they are used, so that a node starts fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

TOOLS = frozenset(("ctl", "queues", "diagnostics", "upgrade", "topics"))
"""RabbitMQ's tools, and `topics`, which is used as they are."""
OTHERS = (["queues", "list"], ["queues", "info"])
"""Commands under the name of a tool that it does not have."""


ROLES = {
    "node": ("convoymq.cli.serve", "main"),
    "namesrv": ("convoymq.cli.roles", "namesrv"),
    "broker": ("convoymq.cli.roles", "broker"),
    "broker-container": ("convoymq.cli.roles", "broker_container"),
    "bridge": ("convoymq.cli.roles", "bridge"),
}
"""Servers: module and function that runs one from its command line and returns the exit code."""


def main() -> None:
    """Entry point of `convoy`. What the system refuses is one line that names the file."""
    try:
        _main(sys.argv[1:])
    except OSError as error:
        print(f"convoy: {refusal_of(error)}", file=sys.stderr)
        sys.exit(1)


def refusal_of(error: OSError) -> str:
    """Returns what the system refused, and for which file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def role_of(name: str) -> Callable[[Sequence[str]], int]:
    """Returns the function that runs a server."""
    module, function = ROLES[name]
    made: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
    return made


def _main(arguments: list[str]) -> None:
    if arguments[:1] and arguments[0] in ROLES:
        sys.exit(role_of(arguments[0])(arguments[1:]))
    if arguments[:1] == ["perf"]:
        import typer

        from convoymq.cli.perf.command import perf

        sys.argv = ["convoy perf", *arguments[1:]]
        app = typer.Typer(
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        app.command()(perf)
        app()
        return
    if arguments[:1] == ["pipeline"]:
        from convoymq.cli.pipeline import pipeline_app

        pipeline_app(arguments[1:], prog_name="convoy pipeline")
        return
    if arguments[:1] and arguments[0] in TOOLS and arguments[:2] not in OTHERS:
        from convoymq.cli.ctl.main import main as operate

        sys.exit(operate(arguments[0], arguments[1:]))
    if arguments[:2] == ["config", "reload"]:
        from convoymq.cli.ctl.main import main as operate

        sys.exit(operate("ctl", ["reload_config", *arguments[2:]]))
    from convoymq.cli.app import app

    app()
