"""`convoy pipeline`: ready jobs, most of them on Spark, which is imported when a job begins."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from convoymq.cli.api import base_of, put_json
from convoymq.cli.capture import capture
from convoymq.cli.output import HELP, Format, FormatOption, fail
from convoymq.model.errors import BrokerError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from convoymq.spark import LagListener
    from convoymq.spark.pipelines.apply import TableSpec

Result = TypeVar("Result")

LAST_EVENTS_MS = 10_000

JOBS = "Ready jobs: capture (needs `pip install convoymq[capture]`); on Spark (`convoymq[spark]`)."
pipeline_app = typer.Typer(
    help=JOBS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # It swallows `[spark]`.
    context_settings=HELP,
)

MasterOption = Annotated[
    str,
    typer.Option("--master", help="Spark master, such as local[4] or spark://host:7077."),
]


def need_spark(*modules: str) -> None:
    """Says what to install when Spark, or another module that a job needs, is missing."""
    for module in ("pyspark", "pyarrow", *modules):
        if find_spec(module) is None:
            extra = {"numpy": "audit", "deltalake": "delta"}.get(module, "spark")
            raise fail(f"{module} is not installed: pip install 'convoymq[{extra}]'")


@pipeline_app.callback(help=JOBS)
def pipelines() -> None:
    """Has `convoy pipeline` take the name of a job."""


pipeline_app.command()(capture)


@pipeline_app.command()
def audit(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Trace or data directories of all nodes of one cluster."),
    ],
    queue: Annotated[
        list[str] | None, typer.Option("--queue", help="Only this queue (may be repeated).")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Writes the report as a page with plots.")
    ] = None,
    report: Annotated[
        str,
        typer.Option(
            help="HTTP API of a node, http://USER:PASSWORD@HOST:PORT: its page shows the result."
        ),
    ] = "",
    master: MasterOption = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """Proves from the nodes' traces that the broker kept its promises.

    Queues are traced when they were declared with x-trace, or by trace.vhosts. Exit code 1 when a
    promise was broken, 2 when the trace can't be read or the result can't be reported.
    """
    need_spark("numpy")
    from rich.console import Console

    from convoymq.spark import session
    from convoymq.spark.audit import audit as run
    from convoymq.spark.audit.report import LAST_AUDIT, html_page, summary, tables

    console = Console(stderr=True)
    try:
        place = base_of(report) if report else None
        with console.status("starting") as status:
            found = run(
                paths,
                queues=queue or (),
                spark=lambda: _quiet(session("convoymq audit", master=master or None)),
                progress=lambda step: status.update(f"audit: {step}"),
            )
    except BrokerError as error:
        raise fail(error.text, 2) from None
    if html is not None:
        html.write_text(html_page(found), "utf-8")
    if format is Format.JSON:
        print(found.to_json())
    else:
        Console().print(tables(found))
    if place is not None:
        value = {"value": summary(found, int(time.time() * 1000))}
        _report(*place, f"global-parameters/{LAST_AUDIT}", value)
    raise typer.Exit(found.exit_code)


def _report(base: str, user: str, path: str, value: object) -> None:
    url = f"{base}/api/{path}"
    try:
        put_json(url, value, user=user)
    except BrokerError as error:
        raise fail(f"the result is not reported: {error.text}", 2) from None


ServersOption = Annotated[
    str, typer.Option("--servers", help="host:port of nodes, comma between.", show_default=True)
]
UserOption = Annotated[str, typer.Option("--user", help="User, or env:NAME, or file:PATH.")]
PasswordOption = Annotated[
    str, typer.Option("--password", help="Password, or env:NAME, or file:PATH.")
]
VhostOption = Annotated[str, typer.Option("--vhost", help="Virtual host.")]
EveryOption = Annotated[
    str | None,
    typer.Option(help="Go on for ever, in batches this often ('10 seconds'); else until the end."),
]
MoreOption = Annotated[
    list[str] | None,
    typer.Option("--option", help="NAME=VALUE of the data source (may be repeated)."),
]
MergeOption = Annotated[
    str,
    typer.Option(
        help="Where the rows of a MERGE go: driver (through it, up to 1,000,000 at a time),"
        " executors (by Delta Lake's extension of the session), or auto: there if it can."
    ),
]
SchemasOption = Annotated[
    bool,
    typer.Option("--connect-schemas", help="Reads values as the schema in each message says."),
]
ParallelOption = Annotated[int, typer.Option(min=1, help="How many tables are merged at a time.")]
ConfOption = Annotated[
    list[str] | None,
    typer.Option("--conf", help="NAME=VALUE of the Spark session (may be repeated)."),
]


@pipeline_app.command()
def archive(
    target: Annotated[Path, typer.Option(help="Directory of the archive.")],
    servers: ServersOption = "127.0.0.1:5672",
    stream: Annotated[
        list[str] | None, typer.Option("--stream", help="A stream (may be repeated).")
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", help="A queue: what is archived leaves it (may be repeated)."),
    ] = None,
    kind: Annotated[str, typer.Option("--as", help="parquet or delta.")] = "parquet",
    partition_by: Annotated[
        str, typer.Option(help="Directories below each source: columns, date and hour.")
    ] = "date",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: _checkpoint in the target.")
    ] = None,
    every: EveryOption = None,
    compact_files: Annotated[
        int, typer.Option(min=0, help="Join small files when a directory has so many; 0 = never.")
    ] = 64,
    option: MoreOption = None,
    user: UserOption = "guest",
    password: PasswordOption = "guest",
    vhost: VhostOption = "/",
    master: MasterOption = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """Archives streams and queues to Parquet or Delta, exactly once; goes on where it stopped."""
    need_spark(*(["deltalake"] if kind == "delta" else []))
    from convoymq.spark.pipelines import archive as pipeline

    options = _options(option, user, password, vhost)
    report = _run(
        "archive",
        master,
        lambda spark: pipeline.archive(
            spark,
            servers=servers,
            target=target,
            streams=stream or (),
            queues=queue or (),
            format=kind,
            checkpoint=checkpoint,
            partition_by=tuple(name for name in partition_by.split(",") if name),
            options=options,
            every=every,
            compact_files=compact_files,
        ),
    )
    _show("archive", asdict(report), format)


@pipeline_app.command()
def apply(
    table: Annotated[
        list[str],
        typer.Option(
            "--table",
            help="NAME=PATH (the name that events use) or PATH (all events); may be repeated.",
        ),
    ],
    schema: Annotated[
        list[str],
        typer.Option("--schema", help="The row as DDL: 'id bigint, name string'; one per table."),
    ],
    key: Annotated[
        list[str], typer.Option("--key", help="Columns that name a row, comma between; one each.")
    ],
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")],
    stream: Annotated[str, typer.Option(help="The stream of change events.")] = "",
    topic: Annotated[
        str, typer.Option(help="The ordered topic of change events, instead of a stream.")
    ] = "",
    servers: ServersOption = "127.0.0.1:5672",
    envelope: Annotated[str, typer.Option(help="debezium, flat or upsert.")] = "debezium",
    position: Annotated[
        str, typer.Option(help="Fields that order events: source.file,source.pos; default: offset.")
    ] = "",
    connect_schemas: SchemasOption = False,
    bad_path: Annotated[
        str | None, typer.Option(help="Where events go that can't be applied; default: stop there.")
    ] = None,
    every: EveryOption = None,
    merge: MergeOption = "auto",
    parallel: ParallelOption = 4,
    conf: ConfOption = None,
    option: MoreOption = None,
    user: UserOption = "guest",
    password: PasswordOption = "guest",
    vhost: VhostOption = "/",
    master: MasterOption = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """Applies ordered change events to Delta tables, so that they equal their source."""
    need_spark("deltalake")
    if bool(stream) == bool(topic):
        raise fail("give one of --stream and --topic", 2)
    from convoymq.spark.pipelines import apply as pipeline

    tables = _specs(table, schema, key)
    options = _options(option, user, password, vhost)
    report = _run(
        "apply",
        master,
        lambda spark: pipeline.apply(
            spark,
            servers=servers,
            stream=stream,
            topic=topic,
            tables=tables,
            checkpoint=checkpoint,
            events=pipeline.Events(
                envelope=envelope, position_field=position, connect_schemas=connect_schemas
            ),
            bad_path=bad_path,
            options=options,
            every=every,
            merge=merge,
            parallel=parallel,
        ),
        conf=_pairs("--conf", conf),
    )
    _show("apply", asdict(report), format)


@pipeline_app.command()
def triage(
    queue: Annotated[str, typer.Option(help="The queue that dead letters go to.")],
    rules: Annotated[Path, typer.Option(help="Rule file (docs/triage.md).")],
    target: Annotated[Path, typer.Option(help="Directory of the Delta table.")],
    servers: ServersOption = "127.0.0.1:5672",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Decide and report; change nothing in the broker.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: _checkpoint in the target.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Writes the report as a page with plots.")
    ] = None,
    option: MoreOption = None,
    user: UserOption = "guest",
    password: PasswordOption = "guest",
    vhost: VhostOption = "/",
    master: MasterOption = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """Republishes, drops or parks dead letters by rules, exactly once, and keeps a Delta table.

    Decisions are recorded before they are carried out; started again after a crash, it carries
    out what is recorded. Exit code 2 when the rule file can't be used.
    """
    need_spark("deltalake")
    from rich.console import Console

    from convoymq.spark.pipelines import triage as pipeline
    from convoymq.spark.pipelines.triage.report import html_page, tables

    try:
        known = pipeline.Rules.load(rules)
    except pipeline.RuleError as error:
        raise fail(str(error), 2) from None
    options = _options(option, user, password, vhost)
    report = _run(
        "triage",
        master,
        lambda spark: pipeline.triage(
            spark,
            servers=servers,
            queue=queue,
            rules=known,
            target=target,
            checkpoint=checkpoint,
            options=options,
            dry_run=dry_run,
        ),
    )
    if html is not None:
        html.write_text(html_page(report), "utf-8")
    if format is Format.JSON:
        print(json.dumps(asdict(report), indent=2, default=str))
    else:
        Console().print(tables(report))


def _specs(tables: list[str], schemas: list[str], keys: list[str]) -> list[TableSpec]:
    """Returns the tables that the command line names."""
    if not len(tables) == len(schemas) == len(keys):
        raise fail("each --table needs one --schema and one --key", 2)
    from convoymq.spark.pipelines.apply import TableSpec

    specs = []
    for place, row, names in zip(tables, schemas, keys, strict=True):
        name, _, path = place.rpartition("=")
        specs.append(TableSpec(name=name, path=path, schema=row, keys=tuple(names.split(","))))
    return specs


def _options(more: list[str] | None, user: str, password: str, vhost: str) -> dict[str, str]:
    return {"user": user, "password": password, "vhost": vhost, **_pairs("--option", more)}


def _pairs(flag: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for each in given or ():
        name, found, value = each.partition("=")
        if not found:
            raise fail(f"{flag} {each}: NAME=VALUE is needed", 2)
        pairs[name] = value
    return pairs


def _run(
    name: str,
    master: str,
    work: Callable[[SparkSession], Result],
    *,
    conf: Mapping[str, str] | None = None,
) -> Result:
    """Runs a pipeline with a live display of its queries."""
    from pyspark.errors import PySparkException
    from rich.console import Console

    from convoymq.spark import LagListener, session
    from convoymq.spark.errors import SourceError
    from convoymq.spark.pipelines.triage.rules import RuleError

    console = Console(stderr=True)
    with console.status("starting"):
        spark = _quiet(session(f"convoymq {name}", master=master or None, conf=conf))
    listener = LagListener()
    spark.streams.addListener(listener)
    try:
        with listener.live(console):
            return work(spark)
    except SourceError as error:
        raise fail(str(error), 2 if isinstance(error, RuleError) else 1) from None
    except PySparkException as error:
        raise fail(_reason(error), 1) from None
    finally:
        _end(spark, listener)


def _end(spark: SparkSession, listener: LagListener) -> None:
    """Ends Java while Python still listens: else Spark's bus calls a listener that is gone, and
    says so with a stack trace."""
    with suppress(Exception):
        # The last event may be on its way. Not in PySpark's interface, so it may go one day.
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(LAST_EVENTS_MS)
    spark.streams.removeListener(listener)
    spark.stop()


def _reason(error: Exception) -> str:
    """Returns the line that matters: what our own code said, if it did, else what Spark says
    first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("convoymq.")]
    return own[-1] if own else lines[0] if lines else type(error).__name__


def _show(name: str, values: Mapping[str, object], format: Format) -> None:
    if format is Format.JSON:
        print(json.dumps(values, indent=2, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=name)
    shown.add_column("what")
    shown.add_column("value", justify="right")
    for key, value in values.items():
        if isinstance(value, dict):
            for inner, each in value.items():
                shown.add_row(f"{key}: {inner}", str(each))
        elif isinstance(value, float):
            shown.add_row(key.replace("_", " "), f"{value:,.1f}")
        elif isinstance(value, int):
            shown.add_row(key.replace("_", " "), f"{value:,}")
        else:
            shown.add_row(key.replace("_", " "), str(value))
    Console().print(shown)


def _quiet(spark: SparkSession) -> SparkSession:
    """Spark's own warnings would break the table."""
    spark.sparkContext.setLogLevel("ERROR")
    return spark
