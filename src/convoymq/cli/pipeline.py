"""`convoy pipeline`: ready jobs on Spark. Spark is imported when a job begins."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from convoymq.cli.app import Format, FormatOption, fail

pipeline_app = typer.Typer(
    help="Ready jobs on Spark (needs `pip install convoymq[spark]`).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MasterOption = Annotated[
    str,
    typer.Option("--master", help="Spark master, such as local[4] or spark://host:7077."),
]


def need_spark(*modules: str) -> None:
    """Says what to install when Spark, or another module that a job needs, is missing."""
    for module in ("pyspark", "pyarrow", *modules):
        if find_spec(module) is None:
            extra = "audit" if module == "numpy" else "spark"
            raise fail(f"{module} is not installed: pip install 'convoymq[{extra}]'")


@pipeline_app.callback()
def pipelines() -> None:
    """Ready jobs on Spark (needs `pip install convoymq[spark]`)."""


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
    master: MasterOption = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """Proves from the nodes' traces that the broker kept its promises.

    Queues are traced when they were declared with x-trace, or by trace.vhosts. Exit code 1 when a
    promise was broken, 2 when the trace can't be read.
    """
    need_spark("numpy")
    from rich.console import Console

    from convoymq.model.errors import BrokerError
    from convoymq.spark import session
    from convoymq.spark.audit import audit as run
    from convoymq.spark.audit.report import html_page, tables

    console = Console(stderr=True)
    try:
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
    raise typer.Exit(found.exit_code)


def _quiet(spark: Any) -> Any:
    """Spark's own warnings would break the table."""
    spark.sparkContext.setLogLevel("ERROR")
    return spark
