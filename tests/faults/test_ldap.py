"""Users of a real directory (Debian's slapd) on a cluster of three nodes."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ldap3
import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import answered, serving_cluster
from tests.faults.test_administration import listen
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from tests.provocation import Observed

SLAPD = shutil.which("slapd", path="/usr/sbin:/usr/bin:/sbin")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(SLAPD is None, reason="slapd is not there: apt-get install slapd"),
]

BASE_PORT = cluster_ports(__name__)
BASE = "dc=example,dc=org"
ADMIN = f"cn=admin,{BASE}"
PEOPLE = ("ann", "bob", "we(ird*")
CONFIG = """
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/inetorgperson.schema
modulepath /usr/lib/ldap
moduleload back_mdb
pidfile {directory}/slapd.pid
database mdb
directory {directory}/data
suffix "{base}"
rootdn "{admin}"
rootpw secret
access to attrs=userPassword by anonymous auth by * none
access to * by anonymous auth by users read
"""


@dataclass
class Directory:
    """The directory, which can go away and come back."""

    path: Path
    port: int
    urls: str = "ldap://127.0.0.1:{port}"
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert SLAPD is not None
        self.process = subprocess.Popen(
            [SLAPD, "-h", self.urls.format(port=self.port), "-f",
             str(self.path / "slapd.conf"), "-d", "0"],
        )  # fmt: skip
        until(self.answers, "slapd does not answer")

    def stop(self, sign: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(sign)
            self.process.wait(PATIENCE_S)
            self.process = None

    def answers(self) -> bool:
        # ldap3 leaves a socket open that could not connect.
        socket.create_connection(("127.0.0.1", self.port), PATIENCE_S).close()
        return True

    @contextmanager
    def bound(self) -> Iterator[Any]:
        server = ldap3.Server("127.0.0.1", self.port, get_info=ldap3.NONE)
        connection = ldap3.Connection(server, ADMIN, "secret", auto_bind=True)
        yield connection
        connection.unbind()

    def fill(self) -> None:
        with self.bound() as connection:
            connection.add(BASE, ["dcObject", "organization"], {"o": "example"})
            for unit in ("people", "groups"):
                connection.add(f"ou={unit},{BASE}", "organizationalUnit")
            for name in PEOPLE:
                fields = {"cn": name, "sn": name, "uid": name, "userPassword": f"{name}-secret"}
                connection.add(person(name), "inetOrgPerson", fields)
            members = {
                "admins": [person("ann")],
                "outer": [group("admins")],
                "writers": [person("ann"), person("bob")],
            }
            for name, found in members.items():
                connection.add(group(name), "groupOfNames", {"member": found})
                assert connection.result["description"] == "success", connection.result

    def change(self, name: str, **members: Any) -> None:
        with self.bound() as connection:
            connection.modify(group(name), {"member": [(ldap3.MODIFY_REPLACE, members["to"])]})
            assert connection.result["description"] == "success"


def write_config(path: Path, more: str = "") -> None:
    """Writes the configuration of a directory with its files in `path`."""
    (path / "data").mkdir()
    text = CONFIG.format(directory=path, base=BASE, admin=ADMIN)
    # Certificates are of the whole server, so before the first database.
    (path / "slapd.conf").write_text(text.replace("database mdb", f"{more}database mdb"))


def person(name: str) -> str:
    return f"uid={name},ou=people,{BASE}"


def group(name: str) -> str:
    return f"cn={name},ou=groups,{BASE}"


@dataclass
class Setup:
    cluster: LocalCluster
    directory: Directory
    logs: Path


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    path = tmp_path_factory.mktemp("ldap")
    write_config(path)
    directory = Directory(path, BASE_PORT + 40)
    settings = {
        "auth_backends.1": "internal",
        "auth_backends.2": "cache",
        "auth_cache.cached_backend": "ldap",
        "auth_cache.cache_ttl": "1000",
        "auth_ldap.servers.1": "127.0.0.2",
        "auth_ldap.servers.2": "127.0.0.1",
        "auth_ldap.port": str(directory.port),
        "auth_ldap.timeout": "2000",
        "auth_ldap.dn_lookup_attribute": "uid",
        "auth_ldap.dn_lookup_base": f"ou=people,{BASE}",
        "auth_ldap.dn_lookup_bind.user_dn": ADMIN,
        "auth_ldap.dn_lookup_bind.password": "secret",
        "auth_ldap.other_bind.user_dn": ADMIN,
        "auth_ldap.other_bind.password": "secret",
        "auth_ldap.group_lookup_base": f"ou=groups,{BASE}",
        "auth_ldap.queries.resource_access": (
            '{for, [{permission, configure, {match, "${name}", "^(ann|bob)-"}}, '
            f'{{permission, write, {{in_group, "{group("writers")}"}}}}, '
            "{permission, read, {constant, true}}]}"
        ),
        "auth_ldap.queries.tags": (
            f'[{{administrator, {{in_group, "{group("admins")}"}}}}, '
            f'{{monitoring, {{in_group_nested, "{group("outer")}"}}}}]'
        ),
    }
    directory.start()
    try:
        directory.fill()
        with serving_cluster(path / "cluster", BASE_PORT, settings) as cluster:
            yield Setup(cluster, directory, path / "cluster")
    finally:
        directory.stop()


@pytest.fixture(autouse=True)
def answering(setup: Setup) -> Iterator[None]:
    yield
    if setup.directory.process is None:
        setup.directory.start()


def dial(setup: Setup, name: str, password: str = "", node: int = 1) -> Any:
    return pika.BlockingConnection(
        pika.ConnectionParameters(
            "127.0.0.1",
            setup.cluster.nodes[node - 1].amqp_port,
            credentials=pika.PlainCredentials(name, password or f"{name}-secret"),
            heartbeat=0,
            socket_timeout=PATIENCE_S,
        )
    )


def whoami(setup: Setup, name: str, password: str, node: int = 1) -> tuple[int, Any]:
    port = setup.cluster.nodes[node - 1].http_port
    basic = b64encode(f"{name}:{password}".encode()).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/whoami", headers={"authorization": f"Basic {basic}"}
    )
    try:
        with answered(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_groups_decide_about_rights(setup: Setup) -> None:
    connection = dial(setup, "bob")
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("bob-orders", durable=True)
    channel.basic_publish("", "bob-orders", b"1")
    assert channel.basic_get("bob-orders", auto_ack=True)[2] == b"1"
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="configure access to queue"):
        channel.queue_declare("orders", durable=True)
    connection.close()


def test_tags_come_from_groups_and_groups_of_groups(setup: Setup) -> None:
    found = whoami(setup, "ann", "ann-secret")
    assert found == (200, {"name": "ann", "tags": ["administrator", "monitoring"]})
    assert whoami(setup, "bob", "bob-secret")[1]["reason"] == "Not management user"
    assert whoami(setup, "guest", "guest")[0] == 200


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("ann", "wrong"),
        ("ann", ""),
        ("nobody", "x"),
        ("*", "ann-secret"),
        ("ann)(uid=*", "ann-secret"),
        ("we(ird*", "wrong"),
        ("ann\x00", "ann-secret"),
    ],
)
def test_wrong_passwords_and_names_of_patterns_are_refused(
    setup: Setup, name: str, password: str
) -> None:
    assert whoami(setup, name, password)[1]["reason"] == "Login failed"


def test_a_name_with_special_characters_logs_in(setup: Setup) -> None:
    dial(setup, "we(ird*").close()


def test_rights_follow_the_groups_of_open_connections(setup: Setup) -> None:
    connection = dial(setup, "bob", node=2)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("bob-left", durable=True)
    channel.basic_publish("", "bob-left", b"1")
    setup.directory.change("writers", to=[person("ann")])

    def is_refused() -> bool:
        try:
            channel.basic_publish("", "bob-left", b"2")
        except pika.exceptions.ChannelClosedByBroker as error:
            return "write access" in str(error.reply_text)
        return False

    until(is_refused, "the group that bob left still lets it write")
    connection.close()
    setup.directory.change("writers", to=[person("ann"), person("bob")])


@pytest.mark.provokes("identity.not_refreshed", "identity.refused")
def test_a_directory_that_is_gone_admits_nobody_and_keeps_who_is_there(
    setup: Setup, observed: Observed
) -> None:
    connection = dial(setup, "bob", node=3)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("bob-kept", durable=True)
    setup.directory.stop()

    def is_noticed() -> bool:
        observed.log_files(setup.logs)
        return "identity.not_refreshed" in observed.events

    until(is_noticed, "nobody asked the directory again")
    channel.basic_publish("", "bob-kept", b"1")
    assert whoami(setup, "ann", "ann-wrong")[1]["reason"] == "Login failed"
    assert whoami(setup, "guest", "guest", node=3)[0] == 200
    observed.log_files(setup.logs)
    setup.directory.start()
    until(lambda: whoami(setup, "ann", "ann-secret")[0] == 200, "nobody is admitted again")
    with setup.directory.bound() as admin:
        admin.delete(person("bob"))
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="user 'bob' is deleted"):
        listen(connection)
