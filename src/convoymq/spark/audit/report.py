"""The report for people: tables in the terminal, and one HTML page with plots."""

from __future__ import annotations

import html
import json
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from convoymq.spark.audit.coverage import QueueFacts
from convoymq.spark.audit.findings import METRICS
from convoymq.spark.audit.invariants import PROMISES
from convoymq.spark.audit.result import AuditReport, QueueReport, Verdict
from convoymq.spark.html_report import hour_text, page, plot, row

LAST_AUDIT = "convoymq-last-audit"
"""Global parameter of a cluster with the `summary` of its last audit, which its page shows."""
QUEUES_SHOWN = 20
METRIC_TITLES = {
    "published_delivered": "published → delivered",
    "delivered_settled": "delivered → settled",
    "published_settled": "published → settled",
    "delivered_sent": "decided → sent",
}


def verdict_text(report: AuditReport) -> str:
    """Returns the result in one sentence."""
    if report.violations:
        return f"{report.violations:,} violations"
    if not report.proved:
        return "no violation; not everything could be proved"
    return "proved: no violation, nothing left out"


def summary(report: AuditReport, at_ms: int) -> dict[str, object]:
    """Returns what a cluster keeps of its last audit (`LAST_AUDIT`): JSON values, of bounded size.

    Args:
        at_ms: when it was made, ms since 1970.
    """
    names = [f"{each.facts.queue} ({each.facts.vhost})" for each in report.queues]
    return {
        "at_ms": at_ms,
        "text": verdict_text(report),
        "violations": report.violations,
        "proved": report.proved,
        "rows": report.rows,
        "queues": names[:QUEUES_SHOWN],
        "queue_count": len(names),
        "invariants": [
            {
                "number": int(verdict.invariant),
                "title": PROMISES[verdict.invariant].title,
                "violations": verdict.rows,
                "unproved": verdict.unproved,
            }
            for verdict in report.verdicts
        ],
    }


def tables(report: AuditReport) -> RenderableType:
    """Returns the tables that `convoy pipeline audit` prints."""
    invariants = Table(title="Invariants", title_justify="left")
    for name in ("#", "promise"):
        invariants.add_column(name)
    for name in ("violations", "messages", "not proved"):
        invariants.add_column(name, justify="right")
    for verdict in report.verdicts:
        style = "red" if verdict.rows else ("yellow" if verdict.unproved else "green")
        invariants.add_row(
            str(int(verdict.invariant)),
            PROMISES[verdict.invariant].title,
            Text(f"{verdict.rows:,}", style=style),
            f"{verdict.messages:,}",
            f"{verdict.unproved:,}",
        )
    parts: list[RenderableType] = [invariants]
    broken = [verdict for verdict in report.verdicts if verdict.rows]
    if broken:
        examples = Table(title="Examples", title_justify="left", show_lines=True)
        examples.add_column("#")
        examples.add_column("row")
        for verdict in broken:
            for example in verdict.examples[:2]:
                examples.add_row(str(int(verdict.invariant)), json.dumps(example))
        parts.append(examples)
    queues = Table(title="Queues", title_justify="left")
    for name in ("queue", "entries"):
        queues.add_column(name)
    for name in ("published", "confirmed"):
        queues.add_column(name, justify="right")
    queues.add_column("what became of them")
    queues.add_column("gaps", justify="right")
    for queue in report.queues:
        facts = queue.facts
        queues.add_row(
            f"{facts.queue} ({facts.vhost})",
            f"{facts.start + 1:,}–{facts.end:,}",
            f"{queue.published:,}",
            f"{queue.confirmed:,}",
            ", ".join(f"{n:,} {name}" for name, n in queue.fates.items()) or "–",
            str(len(facts.gaps) + len(facts.missing)),
        )
    parts.append(queues)
    seconds = max(report.duration_s, 1e-9)
    parts.append(
        Text(
            f"{verdict_text(report)} · {report.rows:,} rows in {report.files} files, "
            f"{report.duration_s:.1f} s, {report.rows / seconds:,.0f} rows/s",
            style="bold red" if report.violations else "bold",
        )
    )
    return Group(*parts)


def html_page(report: AuditReport) -> str:
    """Returns the whole report as one page."""
    body = [
        f"<h1>Audit</h1><p class='{'bad' if report.violations else 'good'}'>"
        f"{html.escape(verdict_text(report))}</p>"
        f"<p>{report.rows:,} rows of the trace in {report.files} files, "
        f"{report.duration_s:.1f} s.</p>",
        _invariants(report),
    ]
    body += [_queue(queue) for queue in report.queues]
    return page("Audit", body)


def _invariants(report: AuditReport) -> str:
    rows = [row(("#", "promise", "violations", "messages", "not proved"), "th")]
    for verdict in report.verdicts:
        promise = PROMISES[verdict.invariant]
        text = f"<b>{html.escape(promise.title)}</b><br>{html.escape(promise.meaning)}"
        if verdict.examples:
            shown = "\n".join(json.dumps(example) for example in verdict.examples)
            text += f"<details open><summary>examples</summary><pre>{html.escape(shown)}</pre>"
            text += "</details>"
        style = "bad" if verdict.rows else ("unsure" if verdict.unproved else "good")
        unproved = f"{verdict.unproved:,}"
        if verdict.unproved:
            unproved += f"<br>{html.escape('; '.join(_why(report, verdict)))}"
        numbers = (f"{verdict.rows:,}", f"{verdict.messages:,}")
        cells = (int(verdict.invariant), text, *numbers, unproved)
        rows.append(row(cells, style=style))
    return f"<table>{''.join(rows)}</table>"


def _why(report: AuditReport, verdict: Verdict) -> list[str]:
    """Returns why the trace cannot tell, by queue."""
    name = verdict.invariant.name.lower()
    return [
        f"{queue.facts.queue}: {'; '.join(_left_out(queue.facts)) or 'the trace is too short'}"
        for queue in report.queues
        if queue.unproved.get(name)
    ] or ["the trace begins later, or has a gap there"]


def _left_out(facts: QueueFacts) -> list[str]:
    """Returns what the trace of a queue lacks."""
    told = [
        f"entries {gap.start + 1:,} to {gap.end:,}"
        if gap.end and not gap.node
        else gap.why
        if not gap.node
        else f"acts of node {gap.node} between {_time(gap.start)} and {_time(gap.end)} ({gap.why})"
        for gap in facts.gaps
    ]
    told += [f"{n:,} {name} are missing in the files" for name, n in facts.missing.items()]
    if facts.lost:
        told.append(f"{facts.lost:,} rows were dropped by overloaded nodes")
    if facts.start:
        told.append(f"the trace begins at entry {facts.start + 1:,}")
    return told


def _queue(queue: QueueReport) -> str:
    facts = queue.facts
    name = html.escape(f"{facts.queue} in {facts.vhost}")
    lines = [
        f"<h2>{name}</h2><p>Entries {facts.start + 1:,} to {facts.end:,} of group {facts.group}; "
        f"{queue.published:,} published, {queue.confirmed:,} confirmed."
    ]
    if facts.start:
        lines.append(" What was published before is older than the trace.")
    if facts.state_snapshot is None:
        lines.append(
            " No state snapshot of the queue: what is still queued is known from the log alone."
        )
    lines.append("</p>")
    fates = [row(("what became of them", "messages"), "th")]
    fates += [row((html.escape(name), f"{n:,}")) for name, n in queue.fates.items()]
    lines.append(f"<table>{''.join(fates)}</table>")
    told = _left_out(facts)
    if told:
        lines.append(f"<p class='unsure'>Not proved: {html.escape('; '.join(told))}.</p>")
    for metric in METRICS:
        found = [each for each in queue.latencies if each.metric == metric]
        if found:
            hours = [each.hour for each in found]
            series = {
                key: [each.percentiles[key] for each in found] for key in found[0].percentiles
            }
            series["max"] = [each.largest for each in found]
            lines.append(f"<h3>{METRIC_TITLES[metric]}, ms</h3>{plot(hours, series)}")
    if queue.shares:
        hours = [each.hour for each in queue.shares]
        fair = {"fairness (1 = equal)": [each.fairness for each in queue.shares]}
        lines.append(f"<h3>Consumers</h3>{plot(hours, fair, logarithmic=False)}")
        rows = [row(("hour", "consumers", "messages", "least", "most", "fairness"), "th")]
        rows += [
            row(
                (
                    hour_text(each.hour),
                    each.consumers,
                    f"{each.messages:,}",
                    f"{each.smallest:,}",
                    f"{each.largest:,}",
                    each.fairness,
                )
            )
            for each in queue.shares
        ]
        lines.append(f"<table>{''.join(rows)}</table>")
    return "".join(lines)


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="milliseconds")
