"""The convoy command. Commands are imported when they are used, so that a node starts fast."""

from __future__ import annotations

import sys

TOOLS = frozenset(("ctl", "queues", "diagnostics", "upgrade", "topics"))
"""RabbitMQ's tools, and `topics`, which is used as they are."""
OTHERS = (["queues", "list"], ["queues", "info"])
"""Commands under the name of a tool that it does not have."""


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


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["node"]:
        from convoymq.cli.serve import main as serve

        sys.exit(serve(arguments[1:]))
    if arguments[:1] == ["namesrv"]:
        from convoymq.cli.roles import namesrv

        sys.exit(namesrv(arguments[1:]))
    if arguments[:1] == ["broker"]:
        from convoymq.cli.roles import broker

        sys.exit(broker(arguments[1:]))
    if arguments[:1] == ["broker-container"]:
        from convoymq.cli.roles import broker_container

        sys.exit(broker_container(arguments[1:]))
    if arguments[:1] == ["bridge"]:
        from convoymq.cli.roles import bridge

        sys.exit(bridge(arguments[1:]))
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
    from convoymq.cli.app import app

    app()
