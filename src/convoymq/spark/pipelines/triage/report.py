"""Report of a triage: counted by group, in the terminal and as one HTML page with plots."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convoymq.spark.html_report import bars, page, plot, row
from convoymq.spark.pipelines.triage.rules import ACTIONS, Rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from rich.console import RenderableType

GROUPS_MAX = 1000
"""Groups of a report, the largest ones."""
BARS_MAX = 20
REASONS_MAX = 4
"""Lines of a plot."""
NO_REASON = "unknown"
_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Messages that agree in the columns of `group_by`, and what was decided about them."""

    key: dict[str, str | None]
    action: str
    rule: str
    target: str
    """`exchange → routing key`, or empty; "several" where they differ."""
    messages: int
    first_died_at: str
    last_died_at: str


@dataclass(slots=True, kw_only=True)
class TriageReport:
    """Result of one call of `triage`."""

    queue: str
    target: str
    rules_hash: str
    dry_run: bool = False
    messages: int = 0
    actions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACTIONS, 0))
    rules: dict[str, int] = field(default_factory=dict)
    """Messages by the rule that decided; 0 for one that decided about none."""
    groups: list[Group] = field(default_factory=list)
    groups_total: int = 0
    """Above GROUPS_MAX the smallest groups are not listed."""
    batches: int = 0
    recorded_before: int = 0
    """Batches whose decisions an earlier call had recorded: they stood, whatever the rules are
    now."""
    given_up: int = 0
    """Batches whose messages went back to the queue before their decisions were carried out."""
    published: int = 0
    """Messages that this call sent on."""
    duplicates: int = 0
    """Of these, those that an earlier attempt had sent on already; the broker dropped them."""
    hours: dict[str, dict[int, int]] = field(default_factory=dict)
    """Messages by reason and hour of their newest death (hours since the epoch)."""
    deaths: dict[int, int] = field(default_factory=dict)
    """Messages by how often they have died."""
    seconds: float = 0.0


def summarise(report: TriageReport, rows: DataFrame, rules: Rules) -> None:
    """Counts the rows of a triage's table into its report."""
    from pyspark.sql import functions as f

    counted = rows.persist()
    try:
        target = f.concat_ws(" → ", "target_exchange", "target_routing_key")
        grouped = counted.groupBy(*rules.group_by, "action", "rule").agg(
            f.count(f.lit(1)).alias("_messages"),
            f.min(target).alias("_target"),
            f.max(target).alias("_other"),
            f.min("died_at").cast("string").alias("_first"),
            f.max("died_at").cast("string").alias("_last"),
        )
        by_size = f.col("_messages").desc()
        found = grouped.orderBy(by_size, *rules.group_by, "rule").limit(GROUPS_MAX).collect()
        report.groups = [
            Group(
                key={
                    name: None if each[name] is None else str(each[name]) for name in rules.group_by
                },
                action=each["action"],
                rule=each["rule"],
                target=each["_target"] if each["_target"] == each["_other"] else "several",
                messages=each["_messages"],
                first_died_at=each["_first"] or "",
                last_died_at=each["_last"] or "",
            )
            for each in found
        ]
        report.groups_total = len(found) if len(found) < GROUPS_MAX else grouped.count()
        report.rules = dict.fromkeys((rule.name for rule in rules.rules), 0)
        for each in counted.groupBy("action", "rule").count().collect():
            report.messages += each["count"]
            report.actions[each["action"]] += each["count"]
            report.rules[each["rule"]] = report.rules.get(each["rule"], 0) + each["count"]
        hour = f.floor(f.unix_timestamp("died_at") / 3600).cast("long").alias("hour")
        reason = f.coalesce("reason", f.lit(NO_REASON)).alias("reason")
        dated = counted.where("died_at IS NOT NULL")
        for each in dated.groupBy(reason, hour).count().orderBy("reason", "hour").collect():
            report.hours.setdefault(each["reason"], {})[each["hour"]] = each["count"]
        for each in counted.groupBy("deaths").count().orderBy("deaths").collect():
            report.deaths[each["deaths"]] = each["count"]
    finally:
        counted.unpersist()


def headline(report: TriageReport) -> str:
    """Returns the result in one sentence."""
    if not report.messages:
        return f"nothing to decide in {report.queue}"
    done = "would be" if report.dry_run else "were"
    parts = [f"{report.actions[action]:,} {done} {_PAST[action]}" for action in ACTIONS]
    return f"{report.messages:,} dead letters in {report.queue}: {', '.join(parts)}"


def tables(report: TriageReport) -> RenderableType:
    """Returns the tables that `convoy pipeline triage` prints."""
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    groups = Table(title="Groups", title_justify="left")
    names = list(report.groups[0].key) if report.groups else []
    for name in (*names, "action", "rule", "target"):
        groups.add_column(name, overflow="fold")
    groups.add_column("messages", justify="right")
    groups.add_column("died", overflow="fold")
    for each in report.groups[:_SHOWN]:
        groups.add_row(
            *(_shown(each.key[name]) for name in names),
            each.action,
            each.rule,
            each.target,
            f"{each.messages:,}",
            _span(each),
        )
    rules = Table(title="Rules", title_justify="left")
    rules.add_column("rule")
    rules.add_column("messages", justify="right")
    for name, count in report.rules.items():
        rules.add_row(name, f"{count:,}")
    parts: list[RenderableType] = [groups, rules] if report.groups else []
    if report.groups_total > min(len(report.groups), _SHOWN):
        parts.insert(1, Text(f"… of {report.groups_total:,} groups; the table has all"))
    parts.append(Text(headline(report), style="bold"))
    parts += [Text(line) for line in _notes(report)]
    return Lines(*parts)


def html_page(report: TriageReport) -> str:
    """Returns the whole report as one page."""
    body = [
        f"<h1>Triage of {html.escape(report.queue)}{' (dry run)' if report.dry_run else ''}</h1>"
        f"<p class='good'>{html.escape(headline(report))}</p>"
        f"<p>Rules {report.rules_hash}; table {html.escape(report.target)}; "
        f"{report.seconds:.1f} s.</p>"
    ]
    body += [f"<p class='unsure'>{html.escape(line)}</p>" for line in _notes(report)]
    if report.groups:
        largest = [(_name(each), float(each.messages)) for each in report.groups[:BARS_MAX]]
        actions = [(name, float(count)) for name, count in report.actions.items()]
        by_rule = [(name, float(count)) for name, count in report.rules.items()]
        died = [(f"{times} times", float(n)) for times, n in report.deaths.items()]
        body += [
            f"<h2>What becomes of them</h2>{bars(actions)}",
            f"<h2>Largest groups</h2>{bars(largest)}",
            f"<h2>Rules</h2>{bars(by_rule)}",
            f"<h2>How often they have died</h2>{bars(died[:BARS_MAX])}",
        ]
    if report.hours:
        body.append(f"<h2>Deaths by hour</h2>{plot(*_series(report))}")
    body.append(_group_table(report.groups))
    return page(f"Triage of {report.queue}", body)


_PAST = {"republish": "republished", "drop": "dropped", "park": "parked"}


def _notes(report: TriageReport) -> list[str]:
    notes = []
    if report.recorded_before:
        notes.append(
            f"{report.recorded_before:,} batches: the decisions that an earlier run recorded stood"
        )
    if report.duplicates:
        notes.append(f"{report.duplicates:,} messages had been sent on already, and were not again")
    if report.given_up:
        notes.append(f"{report.given_up:,} batches were given up: their messages are back")
    return notes


def _series(report: TriageReport) -> tuple[Sequence[int], dict[str, list[float]]]:
    """Hours with deaths, and a line for each reason; the rarest reasons are one line."""
    by_size = sorted(report.hours, key=lambda name: -sum(report.hours[name].values()))
    lines = {name: dict(report.hours[name]) for name in by_size[: REASONS_MAX - 1]}
    for name in by_size[REASONS_MAX - 1 :]:
        rest = lines.setdefault("other", {})
        for hour, count in report.hours[name].items():
            rest[hour] = rest.get(hour, 0) + count
    hours = sorted({hour for line in lines.values() for hour in line})
    return hours, {
        name: [float(line.get(hour, 0)) for hour in hours] for name, line in lines.items()
    }


def _group_table(groups: Sequence[Group]) -> str:
    if not groups:
        return ""
    names = list(groups[0].key)
    rows = [row((*names, "action", "rule", "target", "messages", "died"), "th")]
    for each in groups:
        cells = [_shown(each.key[name]) for name in names]
        cells += [each.action, each.rule, each.target]
        rows.append(row((*map(html.escape, cells), f"{each.messages:,}", html.escape(_span(each)))))
    return f"<h2>Groups</h2><table>{''.join(rows)}</table>"


def _name(group: Group) -> str:
    text = " · ".join(_shown(value) for value in group.key.values())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _span(group: Group) -> str:
    first, last = group.first_died_at, group.last_died_at
    return first if first == last else f"{first} – {last}"


def _shown(value: str | None) -> str:
    return "–" if value is None else value or '""'
