"""Decisions about dead letters, as a Spark plan: what rules say of each message and its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import TYPE_CHECKING

from convoymq.spark.errors import SourceError
from convoymq.spark.pipelines.triage import deaths
from convoymq.spark.pipelines.triage.rules import Rule, RuleError, Rules, near

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

GROUP_COLUMNS: Mapping[str, str] = {
    "group_messages": "bigint",
    "group_first_died_at": "timestamp",
    "group_last_died_at": "timestamp",
}
"""Of the messages of this batch that agree in the columns of `group_by`."""
_NESTED = ("history", "headers", "value", "content_header")


class DecisionError(SourceError):
    """Rules decide what can't be carried out; nothing is recorded and nothing is done."""


def check_conditions(spark: SparkSession, rules: Rules) -> None:
    """Raises RuleError: a condition that Spark does not take, or a column that is not there."""
    from pyspark.errors import PySparkException

    columns = {**deaths.COLUMNS, **GROUP_COLUMNS}
    empty = spark.createDataFrame([], deaths.ddl(columns))
    for rule in rules.rules:
        if not rule.when:
            continue
        try:
            # Spark analyses what it is given at once.
            empty.where(rule.when)
        except PySparkException as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
            raise RuleError(f"{rule.name}: when {rule.when!r}: {reason.strip()}") from None
    known = tuple(name for name in deaths.COLUMNS if name not in _NESTED)
    for name in rules.group_by:
        if name not in known:
            raise RuleError(f"group_by has no column {name}; {near(name, known)}")


def exploded(messages: DataFrame) -> DataFrame:
    """Returns the rows of a queue's reader with `content_header` as rows of `deaths.COLUMNS`."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(deaths.ddl(deaths.COLUMNS))
    assert isinstance(schema, StructType)
    renamed = {
        "received_at": "timestamp",
        "via_exchange": "exchange",
        "via_routing_key": "routing_key",
    }
    chosen = [f.col(renamed.get(name, name)).alias(name) for name in deaths.MESSAGE_COLUMNS]
    explode = partial(deaths.explode, schema=deaths.arrow_schema(schema))
    return messages.select(*chosen).mapInArrow(explode, schema)


def decided(found: DataFrame, rules: Rules, *, queue: str, run: str, batch: int) -> DataFrame:
    """Adds to exploded messages GROUP_COLUMNS and what the rules decide; `rules` is the hash of
    the rule file, `run` and `batch` name the batch of the pipeline."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    group = Window.partitionBy(*rules.group_by)
    grouped = (
        found.withColumn("group_messages", f.count(f.lit(1)).over(group))
        .withColumn("group_first_died_at", f.min("died_at").over(group))
        .withColumn("group_last_died_at", f.max("died_at").over(group))
        .withColumn("_rule", _first_match(rules))
    )

    def chosen(value: Callable[[Rule], Column]) -> Column:
        """Returns the value of the rule that decides."""
        return reduce(
            lambda found, each: found.when(f.col("_rule") == each[0], value(each[1])),
            list(enumerate(rules.rules))[1:],
            f.when(f.col("_rule") == 0, value(rules.rules[0])),
        )

    return (
        grouped.withColumn("action", chosen(lambda rule: f.lit(rule.action)))
        .withColumn("rule", chosen(lambda rule: f.lit(rule.name)))
        .withColumn("rules", f.lit(rules.hash))
        .withColumn("target_exchange", chosen(_exchange))
        .withColumn("target_routing_key", chosen(_routing_key))
        .withColumn("keep_deaths", f.lit(rules.keep_deaths))
        .withColumn("dead_letter_queue", f.lit(queue))
        .withColumn("run", f.lit(run))
        .withColumn("batch", f.lit(batch).cast("bigint"))
        .drop("_rule")
    )


def check_targets(rows: DataFrame, queue: str) -> None:
    """Raises DecisionError for messages without a target, or with the queue itself as it."""
    from pyspark.sql import functions as f

    going = rows.where(f.col("action") != "drop")
    missing = f.col("target_exchange").isNull() | f.col("target_routing_key").isNull()
    loop = (f.col("target_exchange") == "") & (f.col("target_routing_key") == queue)
    bad = (
        going.withColumn("_why", f.when(missing, "origin").when(loop, "loop"))
        .where("_why IS NOT NULL")
        .groupBy("rule", "_why")
        .count()
        .orderBy("rule", "_why")
        .limit(1)
        .collect()
    )
    for row in bad:
        if row["_why"] == "origin":
            raise DecisionError(
                f"rule {row['rule']!r} republishes {row['count']} messages that do not tell where "
                "they died (no x-death, or one without exchange or routing key): give it exchange "
                "and routing_key, or put a rule for 'deaths = 0' before it"
            )
        raise DecisionError(
            f"rule {row['rule']!r} would send {row['count']} messages back to {queue}, the queue "
            "under triage"
        )


def _first_match(rules: Rules) -> Column:
    """Returns the number of the first rule whose condition is true; the default is the last one."""
    from pyspark.sql import functions as f

    conditions = [
        f.when(f.coalesce(f.expr(rule.when), f.lit(False)), f.lit(i))
        for i, rule in enumerate(rules.rules)
        if rule.when
    ]
    return f.coalesce(*conditions, f.lit(len(rules.rules) - 1))


def _exchange(rule: Rule) -> Column:
    from pyspark.sql import functions as f

    if rule.action == "drop":
        return f.lit(None).cast("string")
    if rule.to_queue:
        return f.lit("")
    return f.col("origin_exchange") if rule.exchange is None else f.lit(rule.exchange)


def _routing_key(rule: Rule) -> Column:
    from pyspark.sql import functions as f

    if rule.action == "drop":
        return f.lit(None).cast("string")
    if rule.to_queue:
        return f.col("origin_queue")
    return f.col("origin_routing_key") if rule.routing_key is None else f.lit(rule.routing_key)
