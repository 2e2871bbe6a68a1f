"""Runs the load tool on its own: `python -m convoymq.cli.perf`."""

import typer

from convoymq.cli.perf.command import perf

typer.run(perf)
