"""Triage of dead letters: rules, what messages tell, decisions, and each message carried out once
whatever stops the driver."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pika
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from convoymq.cli.pipeline import pipeline_app
from convoymq.edges.amqp091._spec import Properties
from convoymq.edges.amqp091.codec import ContentHeader, decode_header, encode_header
from convoymq.model.tables import Field, Table
from convoymq.spark import clients
from convoymq.spark.errors import ReservationLost
from convoymq.spark.option_table import Use, parse_options
from convoymq.spark.options import Connection, QueueReadOptions
from convoymq.spark.pipelines import triage as pipeline
from convoymq.spark.pipelines.checkpoint import CheckpointError
from convoymq.spark.pipelines.triage import deaths, decisions, publishing, report
from convoymq.spark.pipelines.triage.pipeline import _Batches
from convoymq.spark.pipelines.triage.rules import RuleError, Rules
from convoymq.spark.pipelines.triage.table import TriageTable
from tests.patience import PATIENCE_S
from tests.spark.cluster import Broker
from tests.spark.fakes import FakeBroker, FakeClient

RULES = """
default = "park"
park = "parked"

[[rule]]
name = "again"
when = "reason = 'rejected' AND deaths < 3"
action = "republish"

[[rule]]
name = "old"
when = "reason = 'expired' OR group_messages > 2"
action = "drop"
"""


# --- the rule file ---------------------------------------------------------------------------


def test_rules_are_read_in_their_order_with_the_default_behind_them() -> None:
    rules = Rules.parse(RULES)
    assert [(rule.name, rule.action) for rule in rules.rules] == [
        ("again", "republish"),
        ("old", "drop"),
        ("default", "park"),
    ]
    assert (rules.rules[-1].exchange, rules.rules[-1].routing_key) == ("", "parked")
    assert rules.keep_deaths
    assert rules.hash == Rules.parse(RULES).hash != Rules.parse(RULES + "\n").hash


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default = ", "not TOML"),
        ("", "there is no default"),
        ("default = 'delete'", "default: action 'delete'; there are republish, drop, park"),
        ("default = 'park'", "default parks messages: name a queue"),
        ("defalt = 'drop'", "the file has no defalt; did you mean default"),
        ("default = 'drop'\nrule = 1", "rules are written [[rule]]"),
        ("default = 'drop'\nx_death = 'hide'", "x_death is"),
        ("default = 'drop'\ngroup_by = []", "group_by is a list"),
        ("default = 'drop'\n[[rule]]\naction = 'drop'", "rule 1 needs when"),
        ("default = 'drop'\n[[rule]]\nname='a'\nwhen = 'true'", "rule 1 (a) needs action"),
        ("default = 'drop'\n[[rule]]\nwhen = 'true'\naction = 'drop'\nqueue = 'q'", "goes nowhere"),
        (
            "default = 'drop'\n[[rule]]\nwhen = 'true'\naction = 'park'\nexchange = 'x'",
            "not by exchange",
        ),
        (
            "default='drop'\n[[rule]]\nwhen='true'\naction='republish'\nqueue='q'\nexchange='x'",
            "does not go together",
        ),
        (
            "default = 'drop'\n[[rule]]\nwhen = 'true'\naction = 'republish'\nto = 'moon'",
            'to is "exchange" or "queue"',
        ),
        (
            "default='drop'\n[[rule]]\nname='a'\nwhen='true'\naction='drop'\n"
            "[[rule]]\nname='a'\nwhen='true'\naction='drop'",
            "two rules have the name 'a'",
        ),
    ],
)
def test_what_a_rule_file_lacks_is_named(text: str, said: str) -> None:
    with pytest.raises(RuleError) as refused:
        Rules.parse(text)
    assert said in str(refused.value)


def test_a_broken_rule_file_ends_the_command_before_spark_starts(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("default = ")
    words = ["triage", "--queue", "q", "--target", str(tmp_path / "t"), "--rules"]
    for rules in (path, tmp_path / "none.toml"):
        done = CliRunner().invoke(pipeline_app, [*words, str(rules)])
        assert done.exit_code == 2
        assert str(rules) in done.output.replace("\n", "")


# --- what a message tells --------------------------------------------------------------------


def death(queue: str, reason: str, count: int = 1, time: int = 1_700_000_000) -> Table:
    return Table.of(
        {
            "count": count,
            "reason": reason,
            "queue": queue,
            "time": Field("T", time),
            "exchange": f"{queue}-exchange",
            "routing-keys": [f"{queue}-key", "copy"],
        }
    )


def header(
    history: Sequence[Table] = (), more: dict[str, Any] | None = None, **known: Any
) -> bytes:
    fields: dict[str, Any] = dict(more or {})
    if history:
        fields["x-death"] = list(history)
        for name in ("reason", "queue", "exchange"):
            fields[f"x-first-death-{name}"] = history[-1].get(name)
            fields[f"x-last-death-{name}"] = history[0].get(name)
    properties = Properties(**known, headers=Table.of(fields) if fields else None)
    return encode_header(ContentHeader(body_size=3, properties=properties))


def test_deaths_are_read_newest_first_and_the_origin_is_the_oldest() -> None:
    found = deaths.facts(
        header(
            [death("b", "expired", 2, 1_700_000_500), death("a", "rejected", 3)],
            {"tenant": "x", "n": 7, "x-republish-count": 2, "x-republish-deaths": 4},
            message_id="m",
            priority=3,
        )
    )
    assert (found["reason"], found["queue"], found["exchange"]) == ("expired", "b", "b-exchange")
    assert (found["origin_queue"], found["origin_exchange"]) == ("a", "a-exchange")
    assert (found["routing_key"], found["origin_routing_key"]) == ("b-key", "a-key")
    assert (found["first_reason"], found["first_queue"]) == ("rejected", "a")
    assert (found["deaths"], found["republish_count"]) == (9, 2)
    assert (found["died_at"], found["first_died_at"]) == (1_700_000_500 * 10**6, 17 * 10**14)
    assert found["headers"] == {"tenant": "x", "n": "7"}
    assert (found["message_id"], found["priority"]) == ("m", 3)


@pytest.mark.parametrize(
    "content_header",
    [
        b"",
        header(),
        header(message_id="m")[:-1],
        header(more={"x-death": "no list", "x-republish-count": -1}),
        header(more={"x-death": [1, {"time": Field("T", 1 << 63), "routing-keys": 1}]}),
    ],
)
def test_headers_that_tell_nothing_are_rows_all_the_same(content_header: bytes) -> None:
    schema = pa.schema([("offset", pa.int64()), ("died_at", pa.timestamp("us", "UTC"))])
    found = deaths.facts(content_header)
    assert (found["reason"], found["republish_count"]) == (None, 0)
    assert pa.array([found["died_at"]], schema.field("died_at").type).to_pylist() == [None]
    made = deaths.outgoing(content_header, republish=True, deaths=0, count=0, keep_deaths=True)
    assert content_header[:2] == made[:2]


def test_a_republished_message_keeps_its_properties_and_counts() -> None:
    known = {"content_type": "a/b", "delivery_mode": 2, "message_id": "m", "timestamp": 5}
    given = header(
        [death("a", "rejected", 2)],
        {"tenant": "x", "x-republish-count": 1},
        **known,
        user_id="guest",
        expiration="100",
        reply_to="amq.rabbitmq.reply-to.abc",
    )
    for keep in (True, False):
        made = deaths.outgoing(given, republish=True, deaths=4, count=1, keep_deaths=keep)
        found = decode_header(made).properties
        assert {name: getattr(found, name) for name in known} == known
        assert (found.user_id, found.expiration, found.reply_to) == (None, None, None)
        assert found.headers is not None
        plain = found.headers.to_plain()
        assert (plain["x-republish-count"], plain["x-republish-deaths"]) == (2, 4)
        assert ("x-death" in plain, "x-first-death-queue" in plain) == (keep, keep)
        assert plain["tenant"] == "x"
    parked = deaths.outgoing(given, republish=False, deaths=4, count=1, keep_deaths=False)
    headers = decode_header(parked).properties.headers
    assert headers is not None
    assert headers == decode_header(given).properties.headers


def test_deaths_that_do_not_fit_any_more_are_left_out() -> None:
    large = {"pad": "x" * (deaths.HEADER_BYTES_MAX - 500)}
    given = header([death(f"q{i}", "rejected") for i in range(2)], large)
    made = deaths.outgoing(given, republish=True, deaths=2, count=0, keep_deaths=True)
    headers = decode_header(made).properties.headers
    assert headers is not None
    assert set(headers.keys()) == {"pad", "x-republish-count", "x-republish-deaths"}


# --- publishing ------------------------------------------------------------------------------


def going(keys: Sequence[str]) -> pa.RecordBatch:
    """Decided messages, one for each routing key, that number themselves."""
    return pa.RecordBatch.from_pylist(
        [
            {
                "offset": i,
                "value": b"%d" % i,
                "content_header": header([death("a", "rejected")]),
                "action": "park" if key == "parked" else "republish",
                "deaths": 1,
                "republish_count": 0,
                "keep_deaths": True,
                "target_exchange": "",
                "target_routing_key": key,
            }
            for i, key in enumerate(keys)
        ],
        schema=pa.schema(
            [
                ("offset", pa.int64()),
                ("value", pa.binary()),
                ("content_header", pa.binary()),
                ("action", pa.string()),
                ("deaths", pa.int64()),
                ("republish_count", pa.int64()),
                ("keep_deaths", pa.bool_()),
                ("target_exchange", pa.string()),
                ("target_routing_key", pa.string()),
            ]
        ),
    )


def connection() -> Connection:
    return Connection.of(parse_options("convoymq_queue", {"servers": "fake:1", "queue": "dead"}))


def cut(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


@settings(max_examples=60)
@given(
    batches=st.lists(
        st.lists(st.sampled_from(["a", "b", "parked"]), min_size=1, max_size=12),
        min_size=1,
        max_size=3,
    ),
    attempts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=3),
)
def test_messages_go_on_once_whatever_attempts_end_early(
    batches: list[list[str]], attempts: list[tuple[int, int]]
) -> None:
    """Attempts of a batch cut it into frames of other sizes, and end after some of them; also an
    attempt of a driver that was replaced, at a batch that is long done."""
    broker = FakeBroker()
    for name in ("a", "b", "parked"):
        broker.queue(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "connect", lambda _connection: FakeClient(broker))
        publishers = [
            publishing.Publisher(connection=connection(), producer="p", batch=number)
            for number in range(len(batches))
        ]
        for publisher, keys in zip(publishers, batches, strict=True):
            for rows, frames in attempts:
                results = publishing._published(publisher, cut(going(keys), rows))
                for _ in range(frames):
                    next(results, None)
            list(publishing._published(publisher, cut(going(keys), 7)))
            list(publishing._published(publishers[0], cut(going(batches[0]), 3)))
    for name in ("a", "b", "parked"):
        wanted = [b"%d" % i for keys in batches for i, key in enumerate(keys) if key == name]
        assert [message.value for message in broker.queues[name].ready] == wanted


def test_the_broker_is_asked_before_anything_is_decided_for_good(broker: FakeBroker) -> None:
    publisher = publishing.Publisher(connection=connection(), producer="p")
    broker.queue("a")
    with pytest.raises(publishing.PublishError, match=r"nothing was done.*no queue for .* 'b'"):
        list(publishing._checked(publisher, iter([going(["a", "b"])])))
    assert broker.queues["a"].ready == []
    list(publishing._checked(publisher, iter([going(["a", "a"])])))
    assert set(broker.calls) == {"check_produce"}


def test_frames_are_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "FRAME_ROWS_MAX", 3)
    monkeypatch.setattr(publishing, "FRAME_BYTES_MAX", 10)
    assert list(publishing._cuts([1] * 7)) == [(0, 3), (3, 6), (6, 7)]
    assert list(publishing._cuts([11, 5, 5, 1])) == [(0, 1), (1, 3), (3, 4)]
    assert list(publishing._cuts([])) == []


# --- what a new driver finds -------------------------------------------------------------------


class Recorded:
    """A triage's table that has batch 3, of the messages of plan `p`."""

    root = Path("t")

    def applied(self) -> int:
        return 3

    def last_plan(self) -> str:
        return "p"


def batches(**options: str) -> tuple[_Batches, report.TriageReport]:
    given = {"servers": "fake:1", "queue": "dead", "reservation": "triage", **options}
    read = QueueReadOptions.of(parse_options("convoymq_queue", given), Use.STREAM_READ)
    found = report.TriageReport(queue="dead", target="t", rules_hash="")
    rules = Rules.parse("default = 'drop'")
    return _Batches(read, rules, cast(TriageTable, Recorded()), Path("state"), found, None), found


def test_decisions_about_messages_that_went_back_are_not_carried_out(broker: FakeBroker) -> None:
    queue = broker.queue("dead", b"a", b"b")
    opened = queue.apply({"op": "open", "reservation": "triage", "owner": "o", "ttl_ms": 1000})
    offsets = json.dumps({"v": 1, "queue": "dead", "epoch": opened["epoch"], "off": 2})
    held, _ = batches()
    assert held._is_held(offsets)
    queue.expire(2000)
    with pytest.raises(ReservationLost, match=r"decisions are recorded, but .* no longer reserved"):
        held._is_held(offsets)
    lenient, found = batches(failOnDataLoss="false")
    assert not lenient._is_held(offsets)
    assert found.given_up == 1


@pytest.mark.parametrize(
    ("batch", "plan", "same"), [(3, "p", True), (3, "q", False), (2, "p", False)]
)
def test_an_older_checkpoint_is_refused(batch: int, plan: str, same: bool) -> None:
    known, _ = batches()
    if same:
        known._check_repeat(batch, plan)
        return
    with pytest.raises(CheckpointError, match="recorded with other messages"):
        known._check_repeat(batch, plan)


# --- decisions, by Spark ---------------------------------------------------------------------


def arrived(spark: SparkSession, headers: Sequence[bytes]) -> DataFrame:
    """Messages as the queue's reader has them."""
    columns = (
        "offset bigint, timestamp timestamp, exchange string, routing_key string, "
        "delivery_count int, value binary, content_header binary"
    )
    rows = [(i, None, "dlx", "key", 0, b"%d" % i, each) for i, each in enumerate(headers)]
    return spark.createDataFrame(rows, columns)


def test_the_first_rule_that_is_true_decides(spark: SparkSession) -> None:
    rules = Rules.parse(RULES)
    decisions.check_conditions(spark, rules)
    headers = [
        header([death("a", "rejected")]),
        header([death("a", "rejected", 3)]),
        header([death("a", "expired")]),
        header(),
        *[header([death("b", "maxlen")])] * 3,
    ]
    found = decisions.decided(
        decisions.exploded(arrived(spark, headers)), rules, queue="dead", run="r", batch=4
    ).persist()
    rows = sorted(found.collect(), key=lambda row: row.offset)
    assert [row.rule for row in rows] == ["again", "default", "old", "default", *["old"] * 3]
    assert [row.action for row in rows[:3]] == ["republish", "park", "drop"]
    assert (rows[0].target_exchange, rows[0].target_routing_key) == ("a-exchange", "a-key")
    assert (rows[1].target_exchange, rows[1].target_routing_key) == ("", "parked")
    assert (rows[2].target_exchange, rows[2].target_routing_key) == (None, None)
    assert [row.group_messages for row in rows] == [2, 2, 1, 1, 3, 3, 3]
    assert {(row.rules, row.batch, row.run) for row in rows} == {(rules.hash, 4, "r")}
    assert rows[0].history[0].routing_keys == ["a-key", "copy"]
    decisions.check_targets(found, "dead")
    with pytest.raises(decisions.DecisionError, match="back to parked, the queue under triage"):
        decisions.check_targets(found, "parked")
    counted = report.TriageReport(queue="dead", target="t", rules_hash=rules.hash)
    report.summarise(counted, found, rules)
    assert counted.actions == {"republish": 1, "drop": 4, "park": 2}
    assert counted.rules == {"again": 1, "old": 4, "default": 2}
    assert counted.groups[0].messages == 3
    assert sum(sum(hours.values()) for hours in counted.hours.values()) == 6
    page = report.html_page(counted)
    assert (page.count("class='bars'"), page.count("<div class='chart'>")) == (4, 1)
    assert "4 were dropped" in page
    found.unpersist()


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("when = 'reson = 1'", "reson"),
        ("when = 'deaths <'", "PARSE"),
        ("when = 'deaths'", "BOOLEAN"),
        ("when = 'count(*) > 3'", "WHERE"),
    ],
)
def test_a_condition_that_spark_refuses_is_named(spark: SparkSession, rule: str, said: str) -> None:
    rules = Rules.parse(f"default='drop'\n[[rule]]\nname='bad'\naction='drop'\n{rule}")
    with pytest.raises(RuleError, match=r"^bad: when") as refused:
        decisions.check_conditions(spark, rules)
    assert said in str(refused.value)


def test_groups_have_known_columns(spark: SparkSession) -> None:
    with pytest.raises(RuleError, match=r"group_by has no column queu; did you mean queue"):
        decisions.check_conditions(spark, Rules.parse("default='drop'\ngroup_by=['queu']"))


def test_a_message_without_an_origin_needs_a_target(spark: SparkSession) -> None:
    found = decisions.exploded(arrived(spark, [header()]))
    for text, fails in (
        ("default = 'republish'", True),
        ("default='drop'\n[[rule]]\nwhen='true'\naction='republish'\nto='queue'", True),
        ("default='drop'\n[[rule]]\nwhen='true'\naction='republish'\nqueue='q'", False),
    ):
        rows = decisions.decided(found, Rules.parse(text), queue="dead", run="r", batch=0)
        if fails:
            with pytest.raises(decisions.DecisionError, match="1 messages that do not tell where"):
                decisions.check_targets(rows, "dead")
        else:
            decisions.check_targets(rows, "dead")


# --- on real nodes ---------------------------------------------------------------------------


class Cut(Exception):
    """Where a test stops the driver."""


class Place:
    """A queue with dead letters, and where they can go."""

    def __init__(self, nodes: Broker, root: Path) -> None:
        self.nodes = nodes
        self.target = root / "triage"
        self.dead = nodes.declare("quorum")
        self.parked = nodes.declare("quorum")
        self.work = nodes.declare(
            "quorum", dead_letter_exchange="", dead_letter_routing_key=self.dead
        )
        self.rules = self.rules_but("false")

    def rules_but(self, dropped: str) -> Rules:
        """A third of the messages each way, but for those that a condition drops."""
        third = "int(cast(value as string)) % 3"
        return Rules.parse(
            f"default = 'park'\npark = '{self.parked}'\n"
            f'[[rule]]\nwhen = "{dropped}"\naction = "drop"\n'
            f'[[rule]]\nwhen = "{third} = 0"\naction = "republish"\n'
            f'[[rule]]\nwhen = "{third} = 1"\naction = "drop"\n'
        )

    def die(self, first: int, last: int) -> None:
        """Messages of these numbers become dead letters."""
        properties = pika.BasicProperties(delivery_mode=2, content_type="a/b", headers={"t": 1})
        with self.nodes.channel() as channel:
            channel.confirm_delivery()
            for number in range(first, last):
                channel.basic_publish("", self.work, b"%d" % number, properties)
            tag = 0
            for number, (method, _, _) in enumerate(channel.consume(self.work), first + 1):
                tag = method.delivery_tag
                if number == last:
                    break
            channel.basic_nack(tag, multiple=True, requeue=False)
            channel.cancel()
        deadline = time.monotonic() + PATIENCE_S
        while self.nodes.cluster.messages_in(self.dead) < last - first:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def run(self, spark: SparkSession, **more: Any) -> pipeline.TriageReport:
        known = {"servers": self.nodes.servers, "queue": self.dead, "rules": self.rules}
        options = {"maxOffsetsPerTrigger": "15"}
        return pipeline.triage(
            spark, **{**known, "target": self.target, "options": options, **more}
        )

    def held(self, queue: str) -> list[tuple[int, dict[str, Any]]]:
        """(number, headers) of the messages in a queue, which are taken out."""
        found = []
        with self.nodes.channel() as channel:
            while True:
                method, properties, body = channel.basic_get(queue, auto_ack=True)
                if method is None:
                    return found
                assert properties.content_type == "a/b"
                found.append((int(body), properties.headers))


def test_dead_letters_are_carried_out_once_wherever_the_driver_stops(
    spark: SparkSession, nodes: Broker, tmp_path: Path
) -> None:
    """One stop at every step, the broker asked with half of a batch published among them; and the
    rules change after the decisions of a batch are recorded, which stand."""
    place = Place(nodes, tmp_path)
    place.die(0, 60)
    seen: list[tuple[str, int]] = []

    def stop(point: str, number: int) -> Callable[[str, int], None]:
        def probe(reached: str, batch_id: int) -> None:
            if (reached, batch_id) != (point, number):
                return
            seen.append((reached, batch_id))
            if point == "recorded":
                (table,) = {row.run for row in rows(batch_id).select("run").collect()}
                publisher = publishing.Publisher(
                    connection=Connection.of(
                        parse_options(
                            "convoymq_queue", {"servers": nodes.servers, "queue": place.dead}
                        )
                    ),
                    producer=f"triage/{table}",
                    batch=batch_id,
                )
                assert publisher.publish(rows(batch_id).where("offset % 15 < 8"))[1] == 0
            raise Cut

        return probe

    def rows(batch_id: int) -> DataFrame:
        return pipeline.messages(spark, place.target).where(f"batch = {batch_id}")

    for point, number in (
        ("staged", 0),
        ("checked", 0),
        ("recorded", 1),
        ("published", 2),
        ("executed", 3),
    ):
        with pytest.raises(StreamingQueryException, match="Cut"):
            place.run(spark, probe=stop(point, number))
        assert seen[-1] == (point, number)
        if point in ("recorded", "published"):
            # What is recorded stands.
            place.rules = place.rules_but(f"offset BETWEEN {15 * number} AND {15 * number + 14}")
    assert place.run(spark).recorded_before == 1
    assert nodes.cluster.messages_in(place.dead) == 0
    wanted = [number for number in range(60) if number % 3 == 0]
    found = place.held(place.work)
    assert [number for number, _ in found] == wanted
    assert all(headers["x-republish-count"] == 1 for _, headers in found)
    assert all(headers["x-death"][0]["reason"] == "rejected" for _, headers in found)
    parked = place.held(place.parked)
    assert [number for number, _ in parked] == [n for n in range(60) if n % 3 == 2]
    assert all("x-republish-count" not in headers for _, headers in parked)
    table = pipeline.messages(spark, place.target)
    assert Counter(row.action for row in table.collect()) == dict.fromkeys(
        ("republish", "drop", "park"), 20
    )
    assert table.select("offset", "value").distinct().count() == 60
    kept = {path.stem for path in (place.target / "_rules").iterdir()}
    assert kept == {row.rules for row in table.select("rules").distinct().collect()}


def test_a_dry_run_takes_nothing_and_a_missing_target_stops_before_anything_is_recorded(
    spark: SparkSession, nodes: Broker, tmp_path: Path
) -> None:
    place = Place(nodes, tmp_path)
    place.die(0, 6)
    looked = place.run(spark, dry_run=True)
    assert looked.actions == {"republish": 2, "drop": 2, "park": 2}
    assert (looked.published, looked.batches) == (0, 0)
    assert pipeline.messages(spark, place.target / "dry-run").count() == 6
    assert nodes.cluster.messages_in(place.dead) == 6
    rules, place.rules = place.rules, Rules.parse("default = 'park'\npark = 'nowhere'")
    with pytest.raises(StreamingQueryException, match="no queue for routing key 'nowhere'"):
        place.run(spark)
    # The rules are mended, and the same checkpoint goes on.
    place.rules = rules
    assert place.run(spark).actions == {"republish": 2, "drop": 2, "park": 2}
    assert (nodes.cluster.messages_in(place.dead), len(place.held(place.work))) == (0, 2)
    assert len(place.held(place.parked)) == 2
