"""RabbitMQ's own script `rabbitmqadmin`, as Debian packages it, against three nodes: every
subcommand that it has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pika
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import BASE_PORT

pytestmark = pytest.mark.optional

SCRIPT = shutil.which("rabbitmqadmin") or ""
COMMAND = re.compile(
    r"^  (list|show|declare|delete|close|purge|publish|get|export|import)\b ?(\w*)"
)
OF_OBJECTS = frozenset(("list", "show", "declare", "delete", "close", "purge"))
VERBS = OF_OBJECTS | {"publish", "get", "export", "import", "help"}


class Ended(NamedTuple):
    """What a run of the script left."""

    code: int
    out: str
    err: str


class Admin:
    """Runs the script against one node after another."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.ports = [node.http_port for node in cluster.nodes]
        self.used: set[str] = set()

    def run(self, *words: str, at: int = 0) -> Ended:
        options = ("-P", str(self.ports[at % len(self.ports)]))
        ended = subprocess.run(
            [sys.executable, SCRIPT, *options, *words], capture_output=True, text=True, check=False
        )
        verb, kind, *_ = [*words[next(i for i, w in enumerate(words) if w in VERBS) :], ""]
        self.used.add(f"{verb} {kind}" if verb in OF_OBJECTS else verb)
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def ok(self, *words: str, at: int = 0) -> str:
        ended = self.run(*words, at=at)
        assert ended.code == 0, (words, ended)
        return ended.out

    def rows(self, *words: str, at: int = 0) -> list[dict[str, object]]:
        ended = self.ok("list", *words, "-f", "raw_json", at=at)
        found = json.loads(ended)
        assert isinstance(found, list)
        return found


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    if not SCRIPT:
        pytest.skip("rabbitmqadmin is not installed: tools/install_rabbitmq.sh")
    with LocalCluster(tmp_path_factory.mktemp("admin"), 3, BASE_PORT) as cluster:
        cluster.wait_ready()
        made = Admin(cluster)
        yield made


def commands_of_the_script(admin: Admin) -> set[str]:
    listed = admin.ok("help", "subcommands")
    admin.used.discard("help")
    found = [each for each in map(COMMAND.match, listed.splitlines()) if each is not None]
    return {f"{each[1]} {each[2]}" if each[1] in OF_OBJECTS else each[1] for each in found}


def test_every_subcommand_does_its_work(admin: Admin, tmp_path: Path) -> None:
    """In an order in which each needs what was declared before; each through another node."""
    ok = admin.ok
    ok("declare", "vhost", "name=v", "tracing=false")
    ok("declare", "user", "name=u", "password=pw", "tags=management,policymaker", at=1)
    words = ("vhost=v", "user=u", "configure=.*", "write=.*", "read=.*")
    ok("declare", "permission", *words, at=2)
    for kind in ("quorum", "classic", "stream"):
        ok("-V", "v", "declare", "queue", f"name={kind}", f"queue_type={kind}")
    ok("-V", "v", "declare", "exchange", "name=x", "type=topic", "durable=true", at=1)
    binding = ("source=x", "destination=quorum")
    ok("-V", "v", "declare", "binding", *binding, "routing_key=a.#", 'arguments={"n":1}', at=2)
    ok("-V", "v", "declare", "binding", *binding, "routing_key=plain")
    policy = ("name=p", "pattern=^quo", 'definition={"max-length":10}', "priority=3")
    ok("-V", "v", "declare", "policy", *policy, "apply-to=queues", at=1)
    ok("-V", "v", "declare", "operator_policy", *policy, at=2)
    ok("declare", "vhost_limit", "vhost=v", "name=max-queues", "value=20")

    publish = ("publish", "exchange=x", "routing_key=a.b")
    assert "Message published" in ok("-V", "v", *publish, "payload=one", at=1)
    properties = '{"delivery_mode":2,"headers":{"h":7}}'
    ok("-V", "v", *publish, f"properties={properties}", "payload=two", at=2)
    assert "NOT routed" in ok("-V", "v", "publish", "exchange=x", "routing_key=no", "payload=x")
    got = json.loads(ok("-V", "v", "-f", "raw_json", "get", "queue=quorum", "count=2", at=1))
    assert [each["payload"] for each in got] == ["one", "two"]
    assert got[1]["properties"] == {"delivery_mode": 2, "headers": {"h": 7}}
    kept = tmp_path / "payload"
    file = f"payload_file={kept}"
    ok("-V", "v", "get", "queue=quorum", "ackmode=ack_requeue_false", file, at=2)
    assert kept.read_bytes() == b"one"

    (queue,) = [each for each in admin.rows("queues", at=2) if each["name"] == "quorum"]
    assert (queue["type"], queue["policy"], queue["operator_policy"]) == ("quorum", "p", "p")
    seen = admin.rows("bindings", "source", "destination", "routing_key", at=1)
    assert {"source": "x", "destination": "quorum", "routing_key": "a.#"} in seen
    for kind in ("exchanges", "users", "vhosts", "permissions", "policies", "operator_policies"):
        assert admin.rows(kind), kind
    assert admin.rows("vhost_limits", at=1) == [{"vhost": "v", "value": {"max-queues": 20}}]
    assert len(admin.rows("nodes", at=2)) == 3
    components = {each["component"] for each in admin.rows("parameters")}
    assert components == {"operator_policy", "vhost-limits"}
    assert "cluster_name" in ok("show", "overview")
    # Its other forms of output, from the same row.
    for form in ("table", "long", "kvp", "tsv", "bash", "pretty_json"):
        assert "quorum" in ok("-V", "v", "-f", form, "list", "queues", "name", "messages"), form

    exported = tmp_path / "definitions.json"
    ok("export", str(exported))
    assert {each["name"] for each in json.loads(exported.read_text())["vhosts"]} == {"/", "v"}

    assert "queue purged" in ok("-V", "v", "purge", "queue", "name=quorum", at=1)
    ok("-V", "v", "delete", "binding", "source=x", "destination_type=queue",
       "destination=quorum", "properties_key=plain")  # fmt: skip
    ok("-V", "v", "delete", "policy", "name=p", at=1)
    ok("-V", "v", "delete", "operator_policy", "name=p", at=2)
    ok("delete", "vhost_limit", "vhost=v", "name=max-queues")
    ok("-V", "v", "delete", "exchange", "name=x", at=1)
    for kind in ("quorum", "classic", "stream"):
        ok("-V", "v", "delete", "queue", f"name={kind}", at=2)
    ok("delete", "permission", "vhost=v", "user=u")
    ok("delete", "user", "name=u", at=1)
    ok("delete", "vhost", "name=v", at=2)
    ok("import", str(exported))
    assert {each["name"] for each in admin.rows("queues")} == {"quorum", "classic", "stream"}
    ok("delete", "vhost", "name=v")
    ok("delete", "user", "name=u")


def test_connections_are_listed_and_closed(admin: Admin) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", BASE_PORT))
    channel = connection.channel()
    channel.queue_declare("mine", exclusive=True)
    channel.basic_consume("mine", lambda *_: None)
    (row,) = admin.rows("connections", "name", "user", "channels")
    assert row["user"] == "guest"
    assert [each["name"] for each in admin.rows("channels")] == [f"{row['name']} (1)"]
    assert len(admin.rows("consumers")) == 1
    admin.ok("close", "connection", f"name={row['name']}", at=1)
    with pytest.raises(pika.exceptions.ConnectionClosed):
        connection.process_data_events(600)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("declare", "queue", "name=q", "queue_type=nosuch"), "unsupported queue type"),
        (("declare", "queue", "name=q", 'arguments={"x-max-length":-1}'), "x-max-length"),
        (("delete", "queue", "name=nosuch"), "Not Found"),
        (("-V", "nosuch", "declare", "queue", "name=q"), "Not Found"),
        (("-p", "wrong", "list", "queues"), "Access refused"),
        (("declare", "parameter", "component=nosuch", "name=n", "value=1"), "not found"),
        (("delete", "parameter", "component=nosuch", "name=n"), "Not Found"),
        (("publish", "exchange=nosuch", "routing_key=k", "payload=x"), "no exchange 'nosuch'"),
        (("get", "queue=nosuch"), "Not Found"),
        (("close", "connection", "name=nosuch"), "Not Found"),
    ],
)
def test_refusals_are_told_in_one_line(admin: Admin, words: tuple[str, ...], text: str) -> None:
    ended = admin.run(*words)
    assert ended.code == 1, ended
    assert text.lower() in (ended.out + ended.err).lower(), ended
    assert "Traceback" not in ended.err


def test_no_subcommand_of_the_script_was_left_out(admin: Admin) -> None:
    """Runs last: what the tests above have called is all that the script offers."""
    assert commands_of_the_script(admin) <= admin.used
