"""Output of commands: tables for people, JSON for programs, errors with an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

HELP = {"help_option_names": ["-h", "--help"]}
"""Settings of every command line: what asks for help."""


class Format(StrEnum):
    """Format of results."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Table for people, or JSON.")]


def fail(text: str, code: int = 1) -> typer.Exit:
    """Says why on standard error and returns the exit to raise."""
    print(f"convoy: {text}", file=sys.stderr)
    return typer.Exit(code)


def print_json(content: object) -> None:
    """Prints a value as indented JSON."""
    print(json.dumps(content, indent=1, default=str), flush=True)


def table(
    columns: list[str],
    rows: Sequence[Sequence[object]],
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """Makes a table; columns of integers are right-aligned, None prints as a dash. `caption`: lines
    below it."""
    from rich.table import Table
    from rich.text import Text

    # Names may look like markup: `[spark]` would be swallowed.
    made = Table(
        title=None if title is None else Text(title, "italic"),
        title_justify="left",
        caption=None if caption is None else Text(caption, "dim"),
        caption_justify="left",
    )
    for column in columns:
        number = bool(rows) and all(isinstance(row[columns.index(column)], int) for row in rows)
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(
            *(
                cell if isinstance(cell, Text) else Text("–" if cell is None else str(cell))
                for cell in row
            )
        )
    return made


def show(made: RenderableType) -> None:
    """Prints a table made by `table`."""
    from rich.console import Console

    # Into a file or a pipe: as wide as the content is, rather than cut to 80 columns.
    Console(width=None if sys.stdout.isatty() else 200).print(made)
