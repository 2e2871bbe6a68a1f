"""Medians, verdicts and tables of a comparison."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.cases import Case, Figure
from convoymq.compiled_modules import build_text

Samples = dict[str, dict[str, dict[str, list[float]]]]
"""system → case → figure → one value per run"""

INTRODUCTION = """\
{setting} of each system on one machine, one system at a time, runs alternating, {runs} of each;
medians, ± half the range. {queues}, fdatasync before confirm, publisher confirms,
acknowledgement in fifties, 1,000 unconfirmed messages, prefetch 1,000. The same load tool
(`convoy perf`) drives both, on the same cores as the brokers, and checks loss, order and duplicates
in every run."""

NOTHING = "–"
TITLES = {"convoy": "ConvoyMQ", "rabbitmq": "RabbitMQ"}


@dataclass(frozen=True, slots=True)
class Subject:
    """Cases that have a page of their own. `setting` and `queues` describe them."""

    name: str
    cases: tuple[Case, ...]
    page: Path
    setting: str
    queues: str

    def chosen(self, names: list[str] | None) -> tuple[Case, ...]:
        """Returns the named cases; without names all but the extra ones."""
        return tuple(c for c in self.cases if (c.name in names if names else not c.extra))


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the comparison, ready to print."""

    title: str
    convoy: str
    rabbitmq: str
    ratio: str
    target: str
    verdict: str


def machine(versions: dict[str, str]) -> dict[str, Any]:
    """What the numbers depend on: the class of machine and the versions, nothing that names it."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "build": build_text(),
        "processor": _processor(),
        "versions": versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def number(value: float) -> str:
    """A number in as many digits as it deserves: 381000 → 381,000, 0.2931 → 0.293."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(values: list[float] | None, unit: str) -> str:
    if not values:
        return NOTHING
    middle = median(values)
    spread = (max(values) - min(values)) / middle * 100 if middle and len(values) > 1 else 0
    return f"{number(middle)} {unit}" + (f" ±{spread / 2:.0f} %" if len(values) > 1 else "")


def _target(figure: Figure) -> str:
    if figure.kind == "shown":
        return ""

    def one(value: float) -> str:
        match figure.kind:
            case "share":
                return f"≥ {value:g} {figure.unit}"
            case "faster":
                return f"≥ {value:g}×"
            case "less":
                return f"≤ 1/{1 / value:g}" if value < 0.2 else f"≤ {value:.2g}×"
            case _:
                return f"≤ {value:g} {figure.unit}"

    return one(figure.must) + (f", aim {one(figure.aim)}" if figure.aim is not None else "")


def verdict(figure: Figure, convoy: list[float] | None, rabbitmq: list[float] | None) -> str:
    """`aim`, `reached`, `missed`, or nothing when there is nothing to judge."""
    if not convoy or figure.kind == "shown":
        return ""
    value = median(convoy)
    if figure.kind in ("faster", "less"):
        if not rabbitmq:
            return ""
        value /= median(rabbitmq) or float("nan")
    sign = -1 if figure.kind in ("faster", "share") else 1
    if figure.aim is not None and sign * value <= sign * figure.aim:
        return "aim"
    return "reached" if sign * value <= sign * figure.must else "missed"


def rows(cases: tuple[Case, ...], samples: Samples) -> list[Row]:
    """One row per figure, in the order of the cases."""
    result = []
    for case in cases:
        for figure in case.figures:
            convoy, rabbitmq = (
                samples.get(system, {}).get(case.name, {}).get(figure.name)
                for system in ("convoy", "rabbitmq")
            )
            both = bool(convoy and rabbitmq and median(rabbitmq))
            ratio = median(convoy) / median(rabbitmq) if both else None  # type: ignore[arg-type]
            result.append(
                Row(
                    title=f"{case.title}: {figure.title}",
                    convoy=_cell(convoy, figure.unit),
                    rabbitmq=_cell(rabbitmq, figure.unit),
                    ratio=f"{ratio:.3g}×" if ratio is not None else "–",
                    target=_target(figure),
                    verdict=verdict(figure, convoy, rabbitmq),
                )
            )
    return result


def table(subject: Subject, cases: tuple[Case, ...], samples: Samples) -> Table:
    """The comparison for a terminal."""
    shown = Table(title=f"ConvoyMQ and RabbitMQ: {subject.queues}, medians")
    for heading in ("case", "ConvoyMQ", "RabbitMQ", "ratio", "to reach", ""):
        shown.add_column(heading, justify="left" if heading == "case" else "right")
    colours = {"aim": "bold green", "reached": "green", "missed": "bold red"}
    for row in rows(cases, samples):
        style = colours.get(row.verdict, "dim")
        shown.add_row(
            row.title,
            row.convoy,
            row.rabbitmq,
            row.ratio,
            row.target,
            f"[{style}]{row.verdict}[/]" if row.verdict else "",
        )
    return shown


def markdown(
    subject: Subject, samples: Samples, about: dict[str, Any], runs: int, broken: list[str]
) -> str:
    """Returns the section of the subject's page about the current release."""
    versions = " · ".join(f"{TITLES[name]} {text}" for name, text in about["versions"].items())
    lines = [
        f"{about['date']} · {about['cores']} cores ({about['processor']}), "
        f"{about['memory_gib']} GiB, Linux {about['kernel']}, Python {about['python']} · "
        f"{versions}",
        "",
        f"Build: {about['build']}. "
        + INTRODUCTION.format(runs=runs, setting=subject.setting, queues=subject.queues),
        "",
        "| case | ConvoyMQ | RabbitMQ | ratio | to reach | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {row.title} | {row.convoy} | {row.rabbitmq} | {row.ratio} | {row.target} "
        f"| {row.verdict} |"
        for row in rows(subject.cases, samples)
        if row.convoy != NOTHING
    ]
    lines += ["", "Promises broken in these runs: " + ("; ".join(broken) or "none") + ".", ""]
    return "\n".join(lines)
