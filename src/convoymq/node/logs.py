"""Logs of a node: JSON lines or plain text, to a file that can be rotated."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, TextIO, cast

import structlog

from convoymq.model.config import LogConfig
from convoymq.model.errors import InvariantViolated

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "none": 100}
_least = LEVELS["info"]
"""Level below which lines are left out now."""
EXIT_FAULT = 70
"""Exit code of a node that cannot go on: a fault of its own."""
FILE_MODE = 0o640
"""Logs name users and queues: nobody reads them whom the owner's group does not hold."""
UMASK = 0o027
"""Likewise of all files of a process: they hold messages and secrets."""


def restrict_files() -> None:
    """Adds `UMASK` to this process's own."""
    os.umask(os.umask(UMASK) | UMASK)


class LogOutput:
    """The file that log lines are appended to, or standard error.

    Args:
        path: of the file; empty for standard error.

    Raises OSError when it cannot be opened.
    """

    def __init__(self, path: str = "") -> None:
        self.path = path
        self._stream: TextIO = self._open() if path else sys.stderr

    def _open(self) -> TextIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return open(os.open(self.path, flags, FILE_MODE), "a", buffering=1)

    def write(self, text: str) -> None:
        """Appends text."""
        self._stream.write(text)

    def flush(self) -> None:
        """Hands buffered text to the system."""
        self._stream.flush()

    def isatty(self) -> bool:
        """Returns whether the output is a terminal."""
        return self._stream.isatty()

    def reopen(self) -> None:
        """Goes on in a file of the same name, made anew when it was moved away (logrotate).

        Standard error stays what it is. Raises OSError; then the old file stays in use.
        """
        if self.path:
            former, self._stream = self._stream, self._open()
            former.close()

    def close(self) -> None:
        """Closes the file; standard error stays open."""
        if self.path:
            self._stream.close()


class _Libraries(logging.Handler):
    """Logs what libraries say through Python's logging, and warnings of Python, as events."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        log.warning("log.library_message", library=record.name, text=record.getMessage())


def report_fault(log: FilteringBoundLogger, message: object, error: object) -> None:
    """Logs an error that nothing expected; ends the process for a violated invariant: what this
    node believes is wrong, and the others must not hear more of it (ADR 0080)."""
    log.error("node.fault", message=message, exc_info=error)
    if isinstance(error, InvariantViolated):
        os._exit(EXIT_FAULT)


def _take_over() -> None:
    """Makes everything that Python would write to standard error a line of the log."""
    log = structlog.get_logger()

    logging.basicConfig(handlers=[_Libraries()], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    threading.excepthook = lambda args: report_fault(log, "thread", args.exc_value)
    sys.unraisablehook = lambda args: report_fault(
        log, f"ignored in {args.object!r}", args.exc_value
    )


def set_level(level: str) -> None:
    """Leaves out lines below a level from now on."""
    global _least
    _least = LEVELS[level]


def _drop_below(_logger: object, method: str, event: EventDict) -> EventDict:
    if LEVELS["error" if method in ("exception", "critical") else method] < _least:
        raise structlog.DropEvent
    return event


def set_up(config: LogConfig) -> LogOutput:
    """Configures structlog: JSON lines, or plain text in a terminal. Raises OSError."""
    output = LogOutput(config.file)
    set_level(config.level)
    plain = config.format in ("plain", "plaintext")
    if config.format == "auto":
        plain = output.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=output.isatty())
        if plain
        else structlog.processors.JSONRenderer()
    )
    stream = cast("TextIO", output)
    structlog.configure(
        processors=[
            _drop_below,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        # Loggers are kept, and the level may change: a processor looks at it.
        wrapper_class=structlog.make_filtering_bound_logger(0),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    _take_over()
    return output
