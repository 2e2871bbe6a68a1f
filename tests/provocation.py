"""Holds claims of tests against what happens: which events are logged, which metrics move.

`@pytest.mark.provokes("link.up")` claims that the test makes a node log that event;
`@pytest.mark.moves("convoy_groups_led")` that it shows two values of one sample of that metric.
The test fails when it does not, and when an event has another level than docs/operations.md says.
tests/docs/test_reference.py asks that every event and metric has such a test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog

from convoymq.edges.http.exposition import Text

OPERATIONS = Path(__file__).resolve().parents[1] / "docs" / "operations.md"
EVENT = re.compile(r"`([a-z]+\.[a-z_]+)`")
NODE = re.compile(r'rabbitmq_node="([^"]*)"')
HISTOGRAM = re.compile(r"^# TYPE (\S+) histogram$", re.MULTILINE)
SAMPLE = re.compile(r"([a-z][a-z_0-9]*)(\{.*\})? (\S+)")


def documented_events() -> dict[str, frozenset[str]]:
    """Event -> its levels, by the table of docs/operations.md."""
    page = OPERATIONS.read_text()
    rows = page[page.index("| event | level |") :].splitlines()[2:]
    found: dict[str, frozenset[str]] = {}
    for row in rows:
        if not row.startswith("| `"):
            break
        names, levels, _ = (part.strip() for part in row.strip("|").split("|", 2))
        for name in EVENT.findall(names):
            found[name] = frozenset(level.strip() for level in levels.split(","))
    return found


class Observed:
    """What happened during one test."""

    def __init__(self) -> None:
        self.events: dict[str, set[str]] = {}
        """Event -> the levels at which it was logged."""
        self.moved: set[str] = set()
        """Metrics of which two values were seen."""
        self._samples: dict[str, dict[tuple[str, str], str]] = {}
        """Node -> (metric, labels) -> first value."""

    def event(self, name: str, level: str) -> None:
        """An event was logged."""
        self.events.setdefault(name, set()).add("error" if level == "exception" else level)

    def log_files(self, directory: Path) -> None:
        """Takes what processes logged in files below a directory."""
        for path in directory.rglob("*.log*"):
            if not path.is_file():
                continue
            for line in path.read_bytes().splitlines():
                if line.startswith(b'{"'):
                    try:
                        said = json.loads(line)
                    except ValueError:
                        continue
                    self.event(str(said.get("event")), str(said.get("level")))

    def exposition(self, text: str) -> None:
        """Takes metrics as Prometheus gets them.

        A sample that was not there in an earlier text of this node in the same test was 0.
        """
        node = NODE.search(text)
        samples = self._samples.setdefault(node[1] if node else "", {})
        earlier = bool(samples)
        for line in text.splitlines():
            found = SAMPLE.fullmatch(line)
            if found is None:
                continue
            name, labels, value = found.groups()
            before = samples.setdefault((name, labels or ""), "0" if earlier else value)
            if before != value:
                self.moved.add(name)
        self.moved |= {name for name in HISTOGRAM.findall(text) if f"{name}_count" in self.moved}


@contextmanager
def observing() -> Iterator[Observed]:
    """Observes what this process logs and which metrics it gives out."""
    observed = Observed()
    log, render = structlog.BoundLoggerBase._proxy_to_logger, Text.render

    def logged(self: Any, method: str, event: str | None = None, /, **fields: Any) -> Any:
        observed.event(str(event), method)
        return log(self, method, event, **fields)

    def rendered(self: Any) -> str:
        text = render(self)
        observed.exposition(text)
        return text

    with (
        patch.object(structlog.BoundLoggerBase, "_proxy_to_logger", logged),
        patch.object(Text, "render", rendered),
    ):
        yield observed


def check(observed: Observed, events: set[str], names: set[str]) -> None:
    """Fails when something that was claimed did not happen."""
    levels = documented_events()
    silent = sorted(events - observed.events.keys())
    assert not silent, f"not logged, though this test claims to provoke it: {', '.join(silent)}"
    for event in sorted(events):
        assert event in levels, f"docs/operations.md has no row for {event}"
        others = observed.events[event] - levels[event]
        assert not others, f"{event} is documented as {set(levels[event])}, logged as {others}"
    still = sorted(names - observed.moved)
    assert not still, f"not moved, though this test claims it: {', '.join(still)}"
