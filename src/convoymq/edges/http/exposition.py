"""Metrics in the text formats of Prometheus and OpenMetrics. By hand, because `prometheus_client`
writes all in one call (ADR 0194)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OWN = ("convoy_", "rocketmq_")
"""Prefixes of names that are complete; others are RabbitMQ's."""


def wants_open_metrics(accept: str) -> bool:
    """Returns whether a client prefers the OpenMetrics form, as Prometheus does."""
    return "application/openmetrics-text" in accept


class Text:
    """Families with their samples, in the order of their first sample. Those of a histogram end in
    `_bucket`, `_count` and `_sum`.

    Args:
        help_texts: by family.
        prefix: of all names, behind RabbitMQ's or our own.
        labels: of all samples.
    """

    def __init__(
        self,
        help_texts: Mapping[str, str],
        *,
        open_metrics: bool,
        prefix: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._labels = dict(labels or {})
        self._help_texts = help_texts
        self.prefix = prefix
        self._open_metrics = open_metrics
        self._families: dict[str, list[str]] = {}

    def add(self, kind: str, name: str, value: float, labels: dict[str, str] | None = None) -> None:
        known = name if name.startswith(OWN) else f"rabbitmq_{name}"
        full = known
        if self.prefix:
            origin, _, rest = known.partition("_")
            full = f"{origin}_{self.prefix}{rest}"
        family = full
        if kind == "histogram":
            family, _, part = full.rpartition("_")
            known = known.removesuffix(f"_{part}")
        lines = self._families.get(family)
        if lines is None:
            # The family of a counter has no _total in OpenMetrics; its samples have.
            named = family
            if kind == "counter" and self._open_metrics:
                named = family.removesuffix("_total")
            help_text = self._help_texts.get(known, "docs/metrics.md says what this is")
            lines = [f"# TYPE {named} {kind}", f"# HELP {named} {help_text}"]
            self._families[family] = lines
        shown = ""
        if self._labels:
            labels = {**self._labels, **(labels or {})}
        if labels:
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            shown = f"{{{pairs}}}"
        lines.append(f"{full}{shown} {value:g}" if value < 1e6 else f"{full}{shown} {value}")

    def gauge(self, name: str, value: float, labels: dict[str, str] | None = None) -> None:
        self.add("gauge", name, value, labels)

    def counter(self, name: str, value: float, labels: dict[str, str] | None = None) -> None:
        self.add("counter", name, value, labels)

    def families(self) -> list[tuple[str, list[str]]]:
        """Returns name and lines of each family; the first two lines say what it is."""
        return list(self._families.items())

    def extend(self, families: Iterable[tuple[str, list[str]]]) -> None:
        """Adds samples of another text of the same form."""
        for family, lines in families:
            known = self._families.setdefault(family, lines[:2])
            known += lines[2:]

    def render(self) -> str:
        lines = [line for family in self._families.values() for line in family]
        if self._open_metrics:
            lines.append("# EOF")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
