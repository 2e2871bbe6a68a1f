"""Users and rules of a broker: requests 3001 to 3010, replicas, and RocketMQ's mqadmin."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.signing import Signer
from tests.rocketmq import upstream
from tests.rocketmq.broker_client import Running
from tests.rocketmq.groups import Groups
from tests.rocketmq.processes import BrokerProcess, Server
from tests.running import until

ROOT = {
    "authenticationEnabled": True, "authorizationEnabled": True,
    "initAuthenticationUser": '{"username":"root","password":"top"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"inner","secretKey":"word"}',
}  # fmt: skip


class Operator:
    """Requests to a broker, signed for a user."""

    def __init__(self, address: str, name: str, secret: str) -> None:
        self.address = address
        self.remoting = RemotingClient(sign=Signer(name, secret))

    async def ask(self, code: int, body: object = None, **fields: str) -> Command:
        content = b"" if body is None else json.dumps(body)
        return await self.remoting.ask(self.address, request(code, dict(fields), content), 10.0)

    async def do(self, code: int, body: object = None, **fields: str) -> Command:
        answer = await self.ask(code, body, **fields)
        assert answer.code == Answer.SUCCESS, answer.remark
        return answer

    async def send(self, topic: str) -> Command:
        known = {"a": "p", "b": topic, "c": "TBW102", "d": "1", "e": "0", "f": "0", "g": "1",
                 "h": "0", "i": "", "j": "0", "k": "false", "m": "false"}  # fmt: skip
        return await self.ask(Request.SEND_MESSAGE_V2, **known)


def acl(resource: str, *actions: str, **more: object) -> dict[str, object]:
    entry = {"resource": resource, "actions": list(actions), "decision": "allow"} | more
    return {"policies": [{"policyType": None, "entries": [entry]}]}


@pytest.mark.provokes("rocketmq.user_changed")
async def test_users_and_rules_are_made_changed_and_removed(tmp_path: Path) -> None:
    made = await Running.begin(tmp_path, **ROOT)
    address = f"127.0.0.1:{made.port}"
    root, alice = Operator(address, "root", "top"), Operator(address, "alice", "word")
    alice_user = {"username": "alice"}
    await root.do(Request.AUTH_CREATE_USER, {"password": "word"}, **alice_user)
    # A second replica of `mqadmin -c` may have copied it already.
    await root.do(Request.AUTH_CREATE_USER, {"password": "word"}, **alice_user)
    again = await root.ask(Request.AUTH_CREATE_USER, {"password": "other"}, **alice_user)
    assert (again.code, again.remark) == (Answer.NO_PERMISSION, "The user is existed")

    refused = await alice.send("orders")
    assert (refused.code, refused.remark) == (
        Answer.NO_PERMISSION, "User:alice has no permission to access Topic:orders from "
        "127.0.0.1, no matched policies.",
    )  # fmt: skip
    subject = {"subject": "User:alice"}
    await root.do(Request.AUTH_CREATE_ACL, acl("topic:ord*", "pub"), **subject)
    assert (await alice.send("orders")).code == Answer.SUCCESS
    elsewhere = acl("Topic:ord*", "Pub", sourceIps=["10.0.0.0/8"])
    await root.do(Request.AUTH_UPDATE_ACL, elsewhere, **subject)
    assert (await alice.send("orders")).code == Answer.NO_PERMISSION
    found = json.loads((await root.do(Request.AUTH_GET_ACL, **subject)).body, dict)
    assert found == {"subject": "User:alice", "policies": [{"policyType": "Custom", "entries": [
        {"resource": "Topic:ord*", "actions": ["Pub"], "sourceIps": ["10.0.0.0/8"],
         "decision": "Allow"}]}]}  # fmt: skip

    await root.do(Request.AUTH_CREATE_ACL, acl("Cluster:c", "Update"), **subject)
    self_made = {"userType": "Super"}
    answer = await alice.ask(Request.AUTH_UPDATE_USER, self_made, **alice_user)
    assert answer.remark == "The super user can only be update by super user"
    assert (await alice.ask(Request.AUTH_DELETE_USER, username="root")).code != Answer.SUCCESS
    await root.do(Request.AUTH_UPDATE_USER, {"userStatus": "disable"}, **alice_user)
    assert (await alice.send("orders")).remark == "User:alice is disabled."
    listed = json.loads((await root.do(Request.AUTH_LIST_USER, filter="ali")).body, list)
    assert listed == [{"username": "alice", "password": "word", "userType": "Normal",
                       "userStatus": "disable"}]  # fmt: skip

    await root.do(Request.AUTH_DELETE_ACL, **subject, resource="Topic:ord*")
    rest = json.loads((await root.do(Request.AUTH_LIST_ACL)).body, list)
    assert [e["resource"] for p in rest[0]["policies"] for e in p["entries"]] == ["Cluster:c"]
    await root.do(Request.AUTH_DELETE_ACL, **subject)
    assert not (await root.do(Request.AUTH_GET_ACL, **subject)).body
    gone = await root.ask(Request.AUTH_DELETE_ACL, **subject)
    assert gone.remark == "The acl is not exist."
    await root.do(Request.AUTH_DELETE_USER, **alice_user)
    assert not (await root.do(Request.AUTH_GET_USER, **alice_user)).body
    unknown = await root.ask(Request.AUTH_CREATE_ACL, acl("Topic:a", "Pub"), **subject)
    assert unknown.remark == "The subject of User:alice is not exist."

    shown = bytes((await root.do(Request.GET_BROKER_CONFIG)).body)
    assert b"authenticationEnabled=true" in shown
    assert b"word" not in shown
    for each in (root, alice):
        await each.remoting.stop()
    await made.stop()


@pytest.mark.parametrize(
    ("body", "remark"),
    [
        (None, "The body of acl is null"),
        ({"policies": [{"entries": []}]}, "The policy entries is empty."),
        (acl("Topic", "Pub"), "The resource is null."),
        (acl("Nothing:a", "Pub"), "The resource type is null or illegal."),
        (acl("Topic:a"), "The actions is empty."),
        (acl("Topic:a", "Any"), "The action is null or illegal."),
        (acl("Topic:a", "Pub", sourceIps=["here"]), "The source ip is invalid."),
        (acl("Topic:a", "Pub", decision=None), "The decision is null or illegal."),
    ],
)  # fmt: skip
async def test_a_rule_that_is_none_is_refused(running: Running, body: object, remark: str) -> None:
    content = b"" if body is None else json.dumps(body)
    fields = {"subject": "User:u"}
    answer = await running.client.ask(Request.AUTH_CREATE_ACL, content, **fields)
    assert (answer.code, answer.remark) == (Answer.NO_PERMISSION, remark)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    made = await Running.begin(tmp_path)
    user = json.dumps({"password": "p"})
    await made.client.ask(Request.AUTH_CREATE_USER, user, username="u")
    yield made
    await made.stop()


async def test_users_outlive_a_crash_and_reach_replicas(tmp_path: Path) -> None:
    """A slave copies them; a master that returns takes over what was made meanwhile."""
    groups = Groups(tmp_path)
    await groups.start()
    master = await groups.online("n", 0, **ROOT)
    slave = await groups.online("n", 1, **ROOT)
    root = Operator(master.role.address, "root", "top")
    await root.do(Request.AUTH_CREATE_USER, {"password": "word"}, username="alice")
    # The answer came when the file was written: it is there though the broker did not stop.
    assert b'"alice"' in (tmp_path / "n-0" / "config" / "users.json").read_bytes()
    await root.do(Request.AUTH_CREATE_ACL, acl("Topic:*", "All"), subject="User:alice")
    await until(lambda: slave.users.policies.get("alice") == master.users.policies["alice"])
    await groups.stop_broker(master)
    await until(lambda: slave.role.is_acting)
    acting = Operator(slave.role.address, "root", "top")
    await acting.do(Request.AUTH_CREATE_USER, {"password": "late"}, username="bob")
    back = await groups.online("n", 0, **ROOT)
    await until(lambda: {"alice", "bob", "root", "inner"} <= back.users.table.keys())
    for each in (root, acting):
        await each.remoting.stop()
    await groups.stop()


COMMANDS = (
    ("createUser", "-u", "alice", "-p", "word"),
    ("createUser", "-u", "alice", "-p", "other"),
    ("createUser", "-u", "carol", "-p", "word", "-t", "Super"),
    ("updateUser", "-u", "alice", "-s", "disable"),
    ("getUser", "-u", "alice"),
    ("getUser", "-u", "nobody"),
    ("listUser",),
    ("createAcl", "-s", "User:alice", "-r", "Topic:a*,Group:g", "-a", "Pub,Sub", "-d", "Allow",
     "-i", "10.0.0.0/8"),
    ("updateAcl", "-s", "User:alice", "-r", "Topic:b", "-a", "Pub", "-d", "Deny"),
    ("getAcl", "-s", "User:alice"),
    ("listAcl",),
    ("deleteAcl", "-s", "User:alice", "-r", "Group:g"),
    ("getAcl", "-s", "User:alice"),
    ("deleteAcl", "-s", "User:alice"),
    ("deleteUser", "-u", "alice"),
    ("listUser",),
)  # fmt: skip


PROGRAM = """
public class Commands {
    public static void main(String[] lines) {
        System.setErr(System.out);
        for (String line : lines) {
            org.apache.rocketmq.tools.command.MQAdminStartup.main0(line.split(" "), null);
            System.out.println("---");
        }
    }
}
"""
"""All commands in one process: to start mqadmin takes seconds. Refusals are printed as errors."""


def printed(directory: Path, names: str, address: str) -> list[list[str]]:
    """Returns the words that mqadmin prints for each of the commands."""
    source = directory / "Commands.java"
    source.write_text(PROGRAM)
    lines = [" ".join((words[0], "-n", names, "-b", address, *words[1:])) for words in COMMANDS]
    done = subprocess.run(
        ["java", *upstream.JAVA, f"-Duser.home={directory}", "-cp", f"{upstream.JARS}/*",
         str(source), *lines],
        env=upstream.environment(directory), capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    *parts, _ = done.stdout.replace(address, "ADDRESS").split("---\n")
    # Log lines of the client begin with a time, lines of a Java stack with a tab.
    noise = re.compile(r"\d\d:\d\d|\t|\s*$")
    return [[line for line in part.splitlines() if not noise.match(line)] for part in parts]


@upstream.needs_rocketmq
@pytest.mark.optional
def test_mqadmin_prints_the_same_of_both_brokers(tmp_path: Path) -> None:
    """Each of RocketMQ's commands about users and rules, sent to its broker and to ours."""
    names = Server(tmp_path)
    ours = BrokerProcess(tmp_path, names.address, brokerName="ours")
    home = tmp_path / "theirs"
    ports = upstream.ports()
    provider = "org.apache.rocketmq.auth.{0}.provider.Local{1}MetadataProvider"
    settings = ports | {
        "namesrvAddr": names.address, "brokerName": "theirs", "authConfigPath": home / "auth",
        "authenticationMetadataProvider": provider.format("authentication", "Authentication"),
        "authorizationMetadataProvider": provider.format("authorization", "Authorization"),
    }  # fmt: skip
    with upstream.broker(home, **settings):
        theirs = f"127.0.0.1:{ports['listenPort']}"
        asyncio.run(_reachable(theirs))
        ours_say, theirs_say = (
            printed(tmp_path, names.address, address) for address in (ours.address, theirs)
        )
        for words, one, other in zip(COMMANDS, ours_say, theirs_say, strict=True):
            assert one == other, words
            assert one or words[:3] == ("getUser", "-u", "nobody"), words
        assert any("CODE: 16  DESC: The user is existed" in line for line in ours_say[1])
    ours.stop()
    names.stop()


async def _reachable(address: str) -> None:
    remoting = RemotingClient()

    async def answers() -> bool:
        try:
            asked = request(Request.AUTH_LIST_USER, {})
            return (await remoting.ask(address, asked, 5.0)).code == Answer.SUCCESS
        except Exception:
            await asyncio.sleep(0.1)
            return False

    while not await answers():
        pass
    await remoting.stop()
