"""docs/replication.md: its tables and plots, from docs/replication.json, which is kept.

    python -m benchmarks.replication --page      after either was edited

A part of the page between `<!-- figures: NAME -->` and `<!-- end -->` is generated; all else is
written by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.replication.faults import FAULTS, RUN_S, Fault
from benchmarks.replication.ledger import BIN_S
from benchmarks.replication.ways import WAYS, Way
from benchmarks.report import number

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "replication.md"
KEPT = DOCS / "replication.json"
PLOTS = DOCS / "replication"
PART = re.compile(r"(?<=<!-- figures: )([a-z-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
SUMS = ("published", "confirmed", "lost", "repeats", "unflagged", "reorders")
MEDIANS = (
    "publish_hit_s",
    "publish_others_s",
    "consume_hit_s",
    "consume_others_s",
    "bytes_per_message",
    "confirm_ms",
)
BINS = ("publish_bins", "consume_bins")


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs of one way through one schedule: sums of what is counted, medians of what is measured,
    and how many of them the simulator's referee found fault with."""
    found: dict[str, Any] = {"runs": len(runs)}
    found["failed"] = sum(bool(run.get("failure")) for run in runs)
    found |= {name: sum(run[name] for run in runs) for name in SUMS}
    for name in MEDIANS:
        values = [run[name] for run in runs if run[name] is not None]
        found[name] = round(median(values), 2) if values else None
    for name in BINS:
        found[name] = [
            round(sum(each) / len(runs), 1) for each in zip(*(r[name] for r in runs), strict=True)
        ]
    return found


def brief(runs: Sequence[Mapping[str, Any]]) -> str:
    """One line for a terminal."""
    found = summary(runs)
    shown = ("runs", "failed", *SUMS, "publish_others_s", "consume_others_s")
    return ", ".join(f"{name} {found[name]}" for name in shown)


def load() -> dict[str, Any]:
    """What is kept; nothing before the first run."""
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return {"about": {}, "runs": {}} | found


def store(kept: Mapping[str, Any]) -> None:
    """Keeps it, one run a line."""
    runs = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(kept["runs"].items())
    )
    KEPT.write_text(f'{{"about": {json.dumps(kept["about"])},\n "runs": {{\n{runs}\n}}}}\n')


# --- the page ------------------------------------------------------------------------------

HEADINGS = (
    "way",
    "drive",
    "lost of confirmed",
    "repeats",
    "of them unflagged",
    "reorders",
    "publish: hit",
    "publish: others",
    "consume: hit",
    "consume: others",
    "confirm",
    "bytes between nodes",
)
DRIVES = {"simulated": "simulator", "real": "processes"}


def _shown(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:.1f} {unit}" if unit else number(value)


def _row(way: Way, drive: str, run: Mapping[str, Any]) -> str:
    lost = f"{run['lost']:,} of {run['confirmed']:,}"
    cells = (
        way.title,
        f"{DRIVES[drive]}, {run['runs']}",
        f"**{lost}**" if run["lost"] else lost,
        f"{run['repeats']:,}",
        f"{run['unflagged']:,}",
        f"{run['reorders']:,}",
        _shown(run["publish_hit_s"], "s"),
        _shown(run["publish_others_s"], "s"),
        _shown(run["consume_hit_s"], "s"),
        _shown(run["consume_others_s"], "s"),
        _shown(run["confirm_ms"], "ms"),
        _shown(run["bytes_per_message"]),
    )
    return f"| {' | '.join(cells)} |"


def of_fault(kept: Mapping[str, Any], fault: Fault) -> str:
    """The part about a schedule: what happens, its table, its plot."""
    rows = [
        _row(way, drive, kept["runs"][name])
        for way in WAYS
        for drive in DRIVES
        if (name := f"{fault.name}/{way.name}/{drive}") in kept["runs"]
    ]
    note = (
        [] if fault.is_real else ["In the simulator only: no process can lose what was synced.", ""]
    )
    return "\n".join(
        [
            f"### {fault.title}",
            "",
            fault.text,
            "",
            *note,
            f"| {' | '.join(HEADINGS)} |",
            f"|---|---|{'---:|' * (len(HEADINGS) - 2)}",
            *rows,
            "",
            f"![Confirms and deliveries over time: {fault.title}](replication/{fault.name}.svg)",
            "",
        ]
    )


def of_all(kept: Mapping[str, Any]) -> str:
    """The part with all schedules."""
    return "\n".join(of_fault(kept, fault) for fault in FAULTS)


def of_ways(kept: Mapping[str, Any]) -> str:
    """The part that says which ways there are."""
    return "\n".join(
        [
            "| way | a queue gets it by |",
            "|---|---|",
            *(f"| {way.title} | {way.text} |" for way in WAYS),
            "",
        ]
    )


def of_losses(kept: Mapping[str, Any]) -> str:
    """The part with one line a schedule: what every way lost, in both drives together."""
    lines = [
        f"| schedule | {' | '.join(way.title for way in WAYS)} |",
        f"|---|{'---:|' * len(WAYS)}",
    ]
    for fault in FAULTS:
        cells = []
        for way in WAYS:
            runs = [
                kept["runs"][name]
                for drive in DRIVES
                if (name := f"{fault.name}/{way.name}/{drive}") in kept["runs"]
            ]
            lost, confirmed = (sum(run[name] for run in runs) for name in ("lost", "confirmed"))
            share = f"{100 * lost / confirmed:.0f} %" if lost else "0"
            cells.append(f"**{share}**" if lost else share)
        lines.append(f"| {fault.title} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def of_costs(kept: Mapping[str, Any]) -> str:
    """The part about what a way costs when nothing happens."""
    lines = [
        "| way | confirm, simulator | confirm, processes | bytes between nodes |",
        "|---|---:|---:|---:|",
    ]
    for way in WAYS:
        simulated, real = (kept["runs"].get(f"none/{way.name}/{drive}") for drive in DRIVES)
        cells = [_shown(run and run["confirm_ms"], "ms") for run in (simulated, real)]
        bytes_ = _shown(real and real["bytes_per_message"])
        lines.append(f"| {way.title} | {' | '.join(cells)} | {bytes_} |")
    return "\n".join([*lines, ""])


def of_machine(kept: Mapping[str, Any]) -> str:
    """The part that says where it was measured."""
    about = kept["about"]
    return (
        f"{about['date']} · {about['cores']} cores ({about['processor']}), "
        f"{about['memory_gib']} GiB, Linux {about['kernel']}, Python {about['python']} · "
        f"ConvoyMQ {about['versions']['convoy']}\n"
    )


PARTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "ways": of_ways,
    "losses": of_losses,
    "costs": of_costs,
    "machine": of_machine,
    "faults": of_all,
}


def filled(page: str, kept: Mapping[str, Any]) -> str:
    """The page with its generated parts as they are now."""
    return PART.sub(lambda part: f"{part[1]}{part[2]}{PARTS[part[1]](kept)}", page)


def write(kept: Mapping[str, Any]) -> None:
    """Brings page and plots in step with what is kept."""
    PAGE.write_text(filled(PAGE.read_text(), kept))
    PLOTS.mkdir(exist_ok=True)
    for fault in FAULTS:
        plot(kept, fault)


# --- plots ---------------------------------------------------------------------------------


def plotted(kept: Mapping[str, Any], fault: Fault) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Drive -> title of a way -> the run that its line shows."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for drive in DRIVES:
        for way in WAYS:
            run = kept["runs"].get(f"{fault.name}/{way.name}/{drive}")
            if run is not None:
                found.setdefault(drive, {})[way.title] = run
    return found


def digest(kept: Mapping[str, Any], fault: Fault) -> str:
    """What a plot was drawn from, in short; it stands in the file."""
    lines = [
        [drive, title, *(run[name] for name in BINS)]
        for drive, runs in plotted(kept, fault).items()
        for title, run in runs.items()
    ]
    return hashlib.sha256(json.dumps([lines, fault.windows()]).encode()).hexdigest()


def plot(kept: Mapping[str, Any], fault: Fault) -> None:
    """Draws confirms and deliveries a second of a schedule, over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = fault.name
    drives = plotted(kept, fault)
    figure, panels = plt.subplots(
        2, len(drives), figsize=(10, 4.4), sharex=True, squeeze=False, layout="constrained"
    )
    for column, (drive, runs) in enumerate(drives.items()):
        panels[0][column].set_title(DRIVES[drive], fontsize="medium")
        panels[1][column].set_xlabel("seconds; grey: the fault")
        for panel, bins, what in zip(
            panels[:, column], BINS, ("confirms/s", "deliveries/s"), strict=True
        ):
            for title, run in runs.items():
                times = [(i + 0.5) * BIN_S for i in range(len(run[bins]))]
                panel.plot(times, [each / BIN_S for each in run[bins]], label=title, linewidth=1.2)
            for begin, end in fault.windows():
                panel.axvspan(begin, end, color="#94a3b8", alpha=0.25, linewidth=0)
            panel.set(ylabel=what, xlim=(0, RUN_S))
            panel.set_ylim(bottom=0)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), ncols=len(WAYS), loc="outside upper center"
    )
    figure.savefig(
        PLOTS / f"{fault.name}.svg", metadata={"Date": None, "Description": digest(kept, fault)}
    )
    plt.close(figure)
