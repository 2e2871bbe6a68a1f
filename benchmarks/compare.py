"""Measures ConvoyMQ and RabbitMQ side by side: one machine, one run, alternating.

    python benchmarks/compare.py                        everything; writes docs and README
    python benchmarks/compare.py --quick --case spread  one case, short
    python benchmarks/compare.py --queues classic       classic and mirrored queues only

Each round starts a fresh cluster of each system in turn, runs every case once on it and removes it,
so that never more than one system uses the machine; behind a case that kills or stops a node, and
before one that needs another setup, comes another fresh cluster. A case begins when the disk has
rested from the one before (`benchmarks/disk.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks import amqp10, classic, figures, report
from benchmarks.cases import CASES, QUICK, Case, Run, Scale, Setup
from benchmarks.convoy import ConvoyCluster
from benchmarks.disk import Disk
from benchmarks.load import LoadFailed
from benchmarks.rabbitmq import RabbitCluster
from benchmarks.systems import LocalCluster, NotPossible, NotUsable, SystemMissing

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("convoy", "rabbitmq")
TABLE_WIDTH_MIN = 150
SUBJECTS = (
    report.Subject("quorum", CASES, figures.PAGE, "Three nodes", "Quorum queues"),
    report.Subject(
        "classic",
        classic.CASES,
        figures.CLASSIC_PAGE,
        "Three nodes of mirrored queues and one node of others",
        "Classic and mirrored queues",
    ),
    report.Subject("amqp10", amqp10.CASES, figures.AMQP10_PAGE, "Three nodes", "Quorum queues"),
)


def make_cluster(system: str, base_port: int, setup: Setup) -> LocalCluster:
    """A cluster of the named system, not yet started. Raises SystemMissing."""
    settings: dict[str, str] = {}
    if system == "rabbitmq":
        if setup.memory_bytes:
            # It pages out at half of the limit.
            settings["vm_memory_high_watermark.absolute"] = str(2 * setup.memory_bytes)
            settings["vm_memory_high_watermark_paging_ratio"] = "0.5"
        return RabbitCluster(
            base_port=base_port + 50,
            count=setup.nodes,
            plugins=setup.plugins,
            settings=settings,
        )
    if setup.memory_bytes:
        settings["classic_queue.memory_target"] = str(setup.memory_bytes)
    return ConvoyCluster(base_port=base_port, count=setup.nodes, settings=settings)


class Comparison:
    """Collects samples round by round."""

    def __init__(self, cases: tuple[Case, ...], scale: Scale, base_port: int) -> None:
        self.cases = cases
        self.scale = scale
        self.base_port = base_port
        self.samples: report.Samples = {}
        self.broken: list[str] = []
        self.failed: list[str] = []
        self.versions: dict[str, str] = {}
        self.console = Console(stderr=True)
        self.disk = Disk(Path(tempfile.gettempdir()))

    def round(self, system: str) -> None:
        """Every case once on a fresh cluster; a case that breaks the cluster costs only itself."""
        left = [case for case in self.cases if system == "convoy" or not case.extra]
        while left:
            setup = left[0].setup
            try:
                with make_cluster(system, self.base_port, setup) as cluster:
                    self.versions[system] = cluster.version()
                    startup_s = cluster.start()
                    while self._case(left.pop(0), cluster, startup_s):
                        if not left or left[0].setup != setup:
                            break
            except NotUsable as error:
                self._fail(f"{system}: {error}")
                return

    def _case(self, case: Case, cluster: LocalCluster, startup_s: float) -> bool:
        """Run one case. Returns: whether the cluster can be used for the next."""
        run = Run(cluster=cluster, scale=self.scale, startup_s=startup_s, broken=[])
        flush_ms = self.disk.rest()
        try:
            figures = case.measure(run)
        except NotPossible as error:
            self.console.print(f"[yellow]skipped[/] {case.name}: {error}", highlight=False)
            return True
        except (LoadFailed, NotUsable, OSError) as error:
            self._fail(f"{cluster.system}, {case.name}: {error}")
            return False
        for name, value in figures.items():
            by_case = self.samples.setdefault(cluster.system, {}).setdefault(case.name, {})
            by_case.setdefault(name, []).append(value)
        shown = "  ".join(f"{name} {report.number(value)}" for name, value in figures.items())
        self.console.print(
            f"[bold]{cluster.system:9}[/] {case.name:14} {shown}  (flush {flush_ms:.2f} ms)",
            highlight=False,
            soft_wrap=True,
        )
        for text in run.broken:
            self.broken.append(f"{cluster.system}, {case.name}: {text}")
            self.console.print(f"          [bold red]promise broken: {text}[/]")
        return not case.disturbs

    def _fail(self, text: str) -> None:
        self.failed.append(text)
        self.console.print(f"[bold red]failed[/] {text}", highlight=False, soft_wrap=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ConvoyMQ and RabbitMQ, side by side")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated")
    parser.add_argument(
        "--case",
        action="append",
        choices=[case.name for subject in SUBJECTS for case in subject.cases],
    )
    parser.add_argument("--queues", action="append", choices=[subject.name for subject in SUBJECTS])
    parser.add_argument("--runs", type=int, help="rounds of each system (3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="short runs, small backlogs")
    parser.add_argument("--base-port", type=int, default=28600)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "benchmarks.json")
    options = parser.parse_args(arguments)
    options.systems = options.systems.split(",")
    unknown = set(options.systems) - set(SYSTEMS)
    if unknown:
        parser.error(f"unknown system {', '.join(unknown)}; known: {', '.join(SYSTEMS)}")
    return options


def main() -> int:
    """Exit code: 0 done, 1 a run failed or a promise broke, 2 a system is not installed."""
    options = parse()
    codes = [
        compare(subject, options)
        for subject in SUBJECTS
        if subject.chosen(options.case) and subject.name in (options.queues or (subject.name,))
    ]
    return max(codes)


def compare(subject: report.Subject, options: argparse.Namespace) -> int:
    """Runs the chosen cases of a subject; returns the exit code."""
    cases = subject.chosen(options.case)
    runs = options.runs or (1 if options.quick else 3)
    comparison = Comparison(cases, QUICK if options.quick else Scale(), options.base_port)
    try:
        for _ in range(runs):
            for system in options.systems:
                comparison.round(system)
    except SystemMissing as error:
        comparison.console.print(f"[bold red]{error}[/]")
        return 2
    except KeyboardInterrupt:
        comparison.failed.append("interrupted")
    about = report.machine(comparison.versions)
    output = Console()
    output.width = max(output.width, TABLE_WIDTH_MIN)
    output.print(report.table(subject, cases, comparison.samples))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.with_stem(f"{options.json.stem}-{subject.name}").write_text(
        json.dumps(
            {
                "about": about,
                "quick": options.quick,
                "samples": comparison.samples,
                "broken": comparison.broken,
                "failed": comparison.failed,
            },
            indent=2,
        )
    )
    complete = not (options.quick or options.case or comparison.failed)
    if complete:
        written = report.markdown(subject, comparison.samples, about, runs, comparison.broken)
        figures.replace_section(subject.page, written)
        figures.write()
    return 1 if comparison.failed or comparison.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
