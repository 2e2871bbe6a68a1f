"""The checks of topics as Spark jobs.

| step       | rows                              | grouped by              | sweep              |
|------------|-----------------------------------|-------------------------|--------------------|
| routes     | control rows, which are few       | collected               | `check_topics`     |
| sessions   | published, publisher, tagged      | partition and session   | `SessionSweep`     |
| producers  | produced                          | producer and lp         | `ProducerSweep`    |
| partitions | keys, settled, parked, handed out | partition, 2^18 offsets | `PartitionSweep`   |
| keys       | a row for each message and reader | topic and key           | `KeySweep`         |

Only the last two know single messages.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from convoymq.model import trace as words
from convoymq.spark.audit.findings import FindingRow, Sweep
from convoymq.spark.audit.topics import effects, keys, partitions, rules, sessions
from convoymq.spark.audit.topics.control import (
    CONTROL_KINDS,
    ControlRow,
    TopicsFacts,
    topics_facts,
)
from convoymq.spark.audit.topics.scope import TopicScope, scope_of
from convoymq.spark.audit.topics.wide import ROW, spark_schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from convoymq.spark.audit.plan import Finding, Job

PART_BITS = 18
EXAMPLES = 3
CONTROL_COLUMNS = ("group", "order", "kind", "flags", "reason", "time_us", "session", "consumer",
                   "seq", "first_id", "count", "position_index", "position_command",
                   "position_first", "acquired", "delivered")  # fmt: skip
OF_MESSAGES = (
    words.KEYED, words.PUBLISHED, words.SETTLED, words.PASSED, words.PARKED, words.LOST
)  # fmt: skip


class TopicJob:
    """The checks of all topics in a trace."""

    def __init__(self, job: Job, others: Sequence[Path]) -> None:
        self.job = job
        self.f = job.f
        self.others = others
        self.groups = [each.group for each in job.facts if each.type == words.PARTITION_TYPE]
        self.routed = any(each.type == words.TOPICS_TYPE for each in job.facts)

    def steps(self, tell: Callable[[str], None]) -> Iterator[Sequence[Finding]]:
        """Yields findings, step by step; nothing when there are no topics."""
        if not (self.groups and self.routed):
            return
        tell("routes of topics")
        facts = self.control()
        topics = {
            (topic.name or facts.name(number)): number for number, topic in facts.topics.items()
        }
        scope = scope_of(facts, effects.sinks_of(self.others, topics))
        tell("partitions of topics")
        placed = self.sessions(scope).persist()
        found = self.partitions(scope, placed).persist()
        try:
            few = [
                cast(FindingRow, row.asDict())
                for frame in (placed, found)
                for row in frame.where(self.f.col("what") != ROW).select(*_NARROW).collect()
            ]
            yield from _told(facts, few)
            yield self.job.summed(self.producers(scope)).collect()
            tell("keys of topics")
            yield self.job.summed(self.keys(scope, found, topics)).collect()
        finally:
            placed.unpersist()
            found.unpersist()

    def control(self) -> TopicsFacts:
        """Collects the rows that are few."""
        F = self.f  # noqa: N806
        rows = (
            self.job.decided.where(F.col("kind").isin(*CONTROL_KINDS))
            .select(*[F.col(f"`{name}`").cast("bigint").alias(name) for name in CONTROL_COLUMNS])
            .collect()
        )
        hosts = [footer.get("host", "") for footer in self.job.footers]
        plain = [cast(ControlRow, row.asDict()) for row in rows]
        return topics_facts(plain, self.job.facts, hosts)

    def sessions(self, scope: TopicScope) -> DataFrame:
        """Publishers against the log."""
        F = self.f  # noqa: N806
        mine = F.col("group").isin(self.groups)
        told = [group for group, each in scope.partitions.items() if each.told]
        published = self.job.decided.where(
            mine & (F.col("kind") == words.PUBLISHED) & (F.col("reason") == 0)
            & (F.col("session") != 0)
        )  # fmt: skip
        acts = self.job.raw.where(
            mine & F.col("kind").isin(words.TAGGED, words.PUBLISHER)
        ).withColumn("first", F.col("position_first"))
        names = [name for name in sessions.SESSION_COLUMNS if name != "told"]
        # A process that was killed before it had written any of a queue's rows left no file, and
        # nothing else may say that it was there.
        wrote = [
            f"{footer['group']}-{footer['node']}-{footer['incarnation']}"
            for footer in self.job.footers
        ]
        session = F.col("session")
        incarnation = F.shiftright(session, 24).bitwiseAND(0xFFFFFFFF)
        process = F.concat_ws("-", "group", F.shiftrightunsigned(session, 56), incarnation)
        rows = (
            published.select(*names)
            .unionByName(acts.select(*names))
            .withColumn("told", (F.col("group").isin(told) & process.isin(wrote)).cast("bigint"))
        )
        return self.job.swept(
            rows,
            sessions.SESSION_COLUMNS,
            sessions.SESSION_KEYS,
            sessions.SESSION_SORT,
            sessions.SessionSweep(scope),
            spark_schema_of(partitions.COLUMNS),
        )

    def producers(self, scope: TopicScope) -> DataFrame:
        """Runs of sequences."""
        F = self.f  # noqa: N806
        known = self.job.small(
            [(group, each.topic, each.created) for group, each in scope.partitions.items()],
            "`group` bigint, topic bigint, version bigint",
        )
        rows = self.job.decided.where(F.col("kind") == words.PRODUCED).join(known, "group")
        rows = rows.withColumns({"lp": F.col("first_id"), "offset": F.col("position_first")})
        return self.job.swept(
            rows,
            sessions.PRODUCER_COLUMNS,
            sessions.PRODUCER_KEYS,
            sessions.PRODUCER_SORT,
            Sweep(sessions.PRODUCER_KEYS, sessions.follow_producers, scope),
        )

    def partitions(self, scope: TopicScope, placed: DataFrame) -> DataFrame:
        """Follows every message of every partition."""
        F = self.f  # noqa: N806
        mine = F.col("group").isin(self.groups)
        names = [name for name in partitions.COLUMNS if name != "part"]
        decided = self.job.decided.where(mine & F.col("kind").isin(*OF_MESSAGES))
        handed = self.job.raw.where(mine & (F.col("kind") == words.HANDED_OUT)).withColumn(
            "order", F.lit(0)
        )
        tagged = placed.where(F.col("what") == ROW).select(
            *[F.col(f"x_{name}").alias(name) for name in names]
        )
        wide = [
            frame.select(*[F.col(f"`{name}`").cast("bigint").alias(name) for name in names])
            for frame in (decided, handed, tagged)
        ]
        rows = wide[0].unionByName(wide[1]).unionByName(wide[2]).where(F.col("count") > 0)
        last = F.col("first_id") + F.col("count") - 1
        parts = F.sequence(F.shiftright("first_id", PART_BITS), F.shiftright(last, PART_BITS))
        low = F.greatest("first_id", F.shiftleft("part", PART_BITS))
        high = F.least(last, F.shiftleft(F.col("part") + 1, PART_BITS) - 1)
        skipped = F.when(F.col("kind") == words.TAGGED, F.col("low") - F.col("first_id"))
        cut = (
            rows.withColumn("part", F.explode(parts))
            .withColumns({"low": low, "high": high})
            .withColumns(
                {
                    "seq": F.col("seq") + F.coalesce(skipped, F.lit(0)),
                    "count": F.col("high") - F.col("low") + 1,
                }
            )
            .withColumn("first_id", F.col("low"))
        )
        return self.job.swept(
            cut,
            partitions.COLUMNS,
            partitions.KEYS,
            (*partitions.KEYS, "order"),
            partitions.PartitionSweep(scope),
            spark_schema_of(partitions.KEY_COLUMNS),
        )

    def keys(self, scope: TopicScope, found: DataFrame, topics: dict[str, int]) -> DataFrame:
        """Follows every key over its partitions."""
        F = self.f  # noqa: N806
        rows = found.where(F.col("what") == ROW).select(
            *[F.col(f"x_{name}").alias(name) for name in keys.COLUMNS]
        )
        if self.others:
            lines = self.job.spark.read.text([str(file) for file in self.others])
            sweep = effects.EffectSweep(topics)
            rows = rows.unionByName(
                lines.mapInArrow(lambda batches: sweep(batches), effects.SPARK_SCHEMA)
            )
        return self.job.swept(
            rows, keys.COLUMNS, keys.KEYS, keys.SORT, Sweep(keys.KEYS, keys.follow_keys, scope)
        )


_NARROW = ("what", "group", "k1", "k2", "k3", "v1", "v2", "n", "text")


def _told(facts: TopicsFacts, rows: Sequence[FindingRow]) -> Iterator[Sequence[Finding]]:
    """Yields what sweeps found, then what control rows and their counts say."""
    from convoymq.spark.audit.plan import Found

    seen: dict[int, rules.Seen] = defaultdict(rules.Seen)
    plain: list[Finding] = [Found(row) for row in rows if not seen[row["group"]].take(row)]
    yield plain

    yield [
        Found(
            what="violation",
            group=group,
            k1=int(invariant),
            k2=len(examples),
            n=len(examples),
            text=json.dumps(examples[:EXAMPLES]),
        )
        for (invariant, group), examples in rules.summary(
            rules.check_topics(facts, dict(seen))
        ).items()
    ]
