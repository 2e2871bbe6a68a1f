"""`convoy pipeline capture`: a database's changes into an ordered topic."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoymq.cli.output import Format, FormatOption, fail
from convoymq.model.json import Json

if TYPE_CHECKING:
    from convoymq.capture.database import Address
    from convoymq.capture.reader import Options
    from convoymq.client import ClientConfig


class Truncate(StrEnum):
    """Effect of a TRUNCATE."""

    STOP = "stop"
    EVENT = "event"


SERVER_ID_FIRST = 1_000_000_000
SERVER_IDS = (1 << 32) - SERVER_ID_FIRST
MISSING = "pymysql is not installed: pip install 'convoymq[capture]'"

TEXTS = {
    "snapshot": "takes snapshot {attempt}, behind {gtid}",
    "table": "{table}: {rows:,} rows",
    "follow": "follows the binary log behind {after}",
    "lost": "lost the database: {reason}; tries again in {retry_s:g} s",
    "altered": "{table} was altered by {gtid}: {statement}",
    "passed": "passes over {gtid}, which changes {table}: {statement}",
}
"""For people; `stored` is for programs, which read it as JSON."""


def server_id_of(name: str, topic: str) -> int:
    """Returns a number that no usual server has, the same for a capture each time."""
    digest = hashlib.blake2b(f"{topic} {name}".encode(), digest_size=8).digest()
    return SERVER_ID_FIRST + int.from_bytes(digest, "big") % SERVER_IDS


def keys_of(given: list[str] | None, tables: list[str]) -> dict[str, list[str]]:
    """Returns the columns that name a row by table. Raises typer.Exit."""
    keys = {}
    for each in given or ():
        table, _, columns = each.partition("=")
        names = [name for name in columns.split(",") if name]
        if not names:
            raise fail(f"--key {each}: TABLE=COLUMN,COLUMN is needed", 2)
        if table not in tables:
            raise fail(f"--key {each}: no --table {table}", 2)
        keys[table] = names
    return keys


def reporter(format: Format) -> Callable[[str, Mapping[str, Json]], None]:
    """Returns what prints the events of a capture: JSON lines, or text on standard error."""

    def report(event: str, values: Mapping[str, Json]) -> None:
        if format is Format.JSON:
            line = {"event": event, "time_s": round(time.time(), 3), **values}
            print(json.dumps(line), flush=True)
        elif event in TEXTS:
            shown = {name: value or "its beginning" for name, value in values.items()}
            print(f"capture: {TEXTS[event].format(**shown)}", file=sys.stderr, flush=True)

    return report


DatabaseOption = Annotated[
    str, typer.Option(help="The database: mariadb://USER@HOST:PORT/DATABASE.")
]
TablesOption = Annotated[list[str], typer.Option("--table", help="A table (may be repeated).")]
TopicOption = Annotated[str, typer.Option(help="The ordered topic that gets the changes.")]
StateOption = Annotated[Path, typer.Option(help="Directory that remembers what is stored.")]
ServersOption = Annotated[str, typer.Option(help="host:port of nodes, comma between.")]
PasswordOfDatabaseOption = Annotated[
    str, typer.Option(help="Password of the database's user, or env:NAME, or file:PATH.")
]
AuthorityOption = Annotated[
    str, typer.Option(help="Authority of the database's certificate (PEM): encrypts.")
]
KeysOption = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        help="TABLE=COLUMN,COLUMN: a unique key that names a row, instead of the primary key.",
    ),
]
NameOption = Annotated[
    str, typer.Option(help="A newer capture of one name and topic ends the one before.")
]
ServerIdOption = Annotated[
    int, typer.Option(min=0, help="Among the database's replicas; 0: made from name and topic.")
]
TruncateOption = Annotated[
    Truncate,
    typer.Option(help="A TRUNCATE ends the capture, or is an event (op t), as --resnapshot then."),
]
PassOption = Annotated[
    list[str] | None,
    typer.Option("--pass", help="Goes on behind this transaction, a GTID (may be repeated)."),
]
TombstonesOption = Annotated[
    bool, typer.Option("--tombstones", help="Sends a tombstone behind every delete.")
]
CascadesOption = Annotated[
    bool, typer.Option("--allow-cascades", help="Takes tables whose foreign keys change rows.")
]
ResnapshotOption = Annotated[
    bool, typer.Option("--resnapshot", help="Begins with a new snapshot of all tables.")
]
UntilEndOption = Annotated[
    bool, typer.Option("--until-end", help="Ends with what is there now, else never.")
]
UserOption = Annotated[str, typer.Option(help="User of the broker, or env:NAME, or file:PATH.")]
PasswordOption = Annotated[str, typer.Option(help="Its password, or env:NAME, or file:PATH.")]
VhostOption = Annotated[str, typer.Option(help="Virtual host.")]


def capture(
    database: DatabaseOption,
    table: TablesOption,
    topic: TopicOption,
    state: StateOption,
    servers: ServersOption = "127.0.0.1:5672",
    database_password: PasswordOfDatabaseOption = "",
    database_ca: AuthorityOption = "",
    key: KeysOption = None,
    name: NameOption = "capture",
    server_id: ServerIdOption = 0,
    truncate: TruncateOption = Truncate.STOP,
    tombstones: TombstonesOption = False,
    pass_: PassOption = None,
    allow_cascades: CascadesOption = False,
    resnapshot: ResnapshotOption = False,
    until_end: UntilEndOption = False,
    user: UserOption = "guest",
    password: PasswordOption = "guest",
    vhost: VhostOption = "/",
    format: FormatOption = Format.TABLE,
) -> None:
    """Captures tables of a MariaDB database into an ordered topic, each change once.

    Begins with a snapshot and follows the binary log; goes on where it stopped. SIGTERM stores what
    was read and ends it. Exit code 1 when an operator has to act, 2 when the options are wrong.
    """
    if find_spec("pymysql") is None:
        raise fail(MISSING)
    if repeated := [each for each in set(table) if table.count(each) > 1]:
        raise fail(f"--table {repeated[0]} is given twice", 2)
    keys = keys_of(key, table)
    from convoymq.capture.database import Address
    from convoymq.capture.errors import CaptureError
    from convoymq.capture.reader import Options
    from convoymq.client import ClientConfig
    from convoymq.client.errors import ClientError
    from convoymq.spark.errors import OptionError
    from convoymq.spark.option_values import secret

    options = Options(
        server_id=server_id or server_id_of(name, topic),
        keys=keys,
        passed=frozenset(pass_ or ()),
        truncate_events=truncate is Truncate.EVENT,
        tombstones=tombstones,
        allow_cascades=allow_cascades,
        resnapshot=resnapshot,
        until_end=until_end,
    )
    try:
        address = Address.of(database, secret(database_password), database_ca)
        nodes, broker_user = tuple(servers.split(",")), secret(user)
        config = ClientConfig(nodes, broker_user, secret(password), vhost, name=f"capture {name}")
    except (CaptureError, OptionError, ValueError) as error:
        raise fail(str(error), 2) from None
    try:
        _run(address, config, table, topic, state, name, options, format)
    except (CaptureError, ClientError) as error:
        raise fail(str(error)) from None


def _run(
    address: Address,
    config: ClientConfig,
    tables: list[str],
    topic: str,
    state: Path,
    name: str,
    options: Options,
    format: Format,
) -> None:
    from convoymq.capture.errors import CaptureError
    from convoymq.capture.reader import Capture
    from convoymq.capture.state import StateFile
    from convoymq.client import Client
    from convoymq.client.topic_producer import TopicProducer

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with StateFile(state) as file, Client(config) as client:
        route = client.topic_route(topic, lineage=False)
        if route.mode != "strict":
            raise CaptureError(f"topic {topic} is weak: it does not keep the order of a row")
        with TopicProducer(client, topic, producer_id=name) as producer:
            made = Capture(
                address, tables, producer, file, topic=topic, topic_created_ms=route.created_ms,
                options=options, report=reporter(format), stop=stop,
            )  # fmt: skip
            made.run()
    if format is Format.TABLE:
        stored = made.progress.gtid or "nothing"
        print(f"capture: {made.sent:,} messages; all is stored up to {stored}")
