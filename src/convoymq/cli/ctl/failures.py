"""Failures of commands: RabbitMQ's exit codes and texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from convoymq.cli.ctl.outputs import Rows
from convoymq.model.json import JsonObject

USAGE: Final = 64
DATA: Final = 65
NO_USER: Final = 67
UNAVAILABLE: Final = 69
SOFTWARE: Final = 70
TIMED_OUT: Final = 75
NO_PERMISSION: Final = 77


class Failure(Exception):
    """Ends the command.

    Args:
        heading: what stands on a line of its own above the text; "" for nothing.
        document: what is printed instead with `--formatter json`.
        rows: what is printed before, whatever the formatter.
    """

    def __init__(
        self,
        code: int,
        text: str,
        *,
        heading: str = "Error:",
        document: JsonObject | None = None,
        rows: Rows | None = None,
    ) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.heading = heading
        self.document = document
        self.rows = rows


class Misused(Exception):
    """The command line is not acceptable; printed with the usage."""

    def __init__(self, text: str, code: int = USAGE) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


@dataclass(frozen=True, slots=True)
class Problem:
    """Meaning of an answer of the HTTP API for one command. `text` is a template."""

    code: int
    text: str
    heading: str = "Error:"
