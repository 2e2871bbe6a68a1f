"""Every command of the tools, each a process of its own, against one cluster that has something to
show.

A process that has just started knows less than a node: a command that works in the process of a
test may be wrong in a shell. The processes are forked off one that has imported what every command
imports first, because that takes ten times as long as a command; a command imports the rest.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, QUEUES, TOPICS, UPGRADE
from convoymq.cli.ctl.tools import commands_of
from tests.clusters import wait_http
from tests.forked_nodes import ForkedCluster
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)
COMMANDS = r"""
import json, os, sys
import convoymq.cli.ctl.main
from convoymq import cli
for line in sys.stdin:
    words, output = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.argv[1:] = words
        sys.exit(cli.main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs commands, one after the other: a line of JSON with words and a file for what they print is
answered by the exit code."""
POLICY = """'{"max-length": 50}'"""
ENDS = '"src-uri": "amqp://", "src-queue": "a", "dest-uri": "amqp://", "dest-queue": "b"'
SHOVEL = f"'{{{ENDS}}}'"

#: In this order. `rc TOOL WORDS => TEXT`: an exit code other than 0, and text that is printed.
MAKING = f"""
ctl await_startup
ctl await_online_nodes 3
ctl add_vhost v --description made
ctl set_vhost_tags v one two
ctl update_vhost_metadata v --description changed
ctl add_user u secret
ctl change_password u other
ctl authenticate_user u other
65 ctl authenticate_user u secret
ctl set_user_tags u monitoring
ctl set_permissions -p v u .* .* .*
ctl set_permissions_globally u .* .* .*
ctl set_topic_permissions -p v u amq.topic .* .*
ctl set_user_limits u '{{"max-connections": 5}}'
ctl set_vhost_limits -p v '{{"max-queues": 50}}'
ctl set_policy p ^q {POLICY} --priority 3
ctl set_policy behind ^q '{{"delivery-limit": 7}}'
ctl set_operator_policy op ^q '{{"expires": 9000000}}'
ctl set_parameter -p v vhost-limits limits '{{"max-queues": 60}}'
ctl set_global_parameter cluster_name '"first"'
ctl set_cluster_name second
ctl set_global_parameter mine '{{"a": [1]}}'
ctl trace_on -p v
ctl enable_vhost_deletion_protection v
ctl set_log_level info
ctl rotate_logs
ctl reload_config
queues set_prefetch q tag 7
queues transfer_leadership q 2
queues delete_member q 3
queues add_member q 3
queues grow_to_count 3 all
queues grow 3 all
queues rebalance all --dry-run
queues force_checkpoint
queues reclaim_quorum_memory q
topics create t --partitions 2
topics create-group t g --earliest
topics split t 0
topics merge t 2 3
topics move t 1 --to 2
topics autoscale t explain
topics autoscale t set --autoscale off
topics seek t g --earliest
topics accept-loss t g
topics drain 3
topics revive 3
ctl set_parameter shovel s {SHOVEL}
"""

#: In any order: they change nothing.
LOOKING = """
ctl list_users => monitoring
ctl list_vhosts name description => changed
ctl list_vhosts name tracing => true
ctl list_permissions -p v => u
ctl list_user_permissions u => v
ctl hash_password secret
ctl list_topic_permissions -p v => amq.topic
ctl list_user_topic_permissions u => amq.topic
ctl list_user_limits --user u => max-connections
ctl list_vhost_limits -p v => 60
ctl list_policies => behind
ctl list_operator_policies => op
ctl list_parameters => operator_policy
ctl list_global_parameters => second
ctl list_global_parameters => mine
ctl list_queues name policy operator_policy effective_policy_definition => max-length
ctl list_exchanges -p v => amq.topic
ctl list_bindings => q
ctl list_connections user state => running
ctl list_channels user => guest
ctl list_consumers => tag
69 ctl list_broker_groups
69 ctl list_group_topics n
ctl list_unresponsive_queues
ctl shovel_status
ctl force_boot
ctl list_feature_flags => metadata_version_2
ctl enable_feature_flag metadata_version_2
ctl list_deprecated_features => global_qos
ctl list_node_auth_attempt_stats => amqp
ctl cluster_status => second
ctl status => RabbitMQ
ctl report => list_queues
ctl ping
ctl has_reached_target_cluster_size
ctl check_if_any_deprecated_features_are_used
ctl version => 4.
ctl export_definitions -
diagnostics alarms
diagnostics check_alarms
diagnostics check_local_alarms
diagnostics check_certificate_expiration
diagnostics check_for_quorum_queues_without_an_elected_leader .*
diagnostics check_if_metadata_store_is_initialized
diagnostics check_if_metadata_store_is_initialized_with_data
diagnostics check_if_cluster_has_classic_queue_mirroring_policy
diagnostics check_if_new_quorum_queue_replicas_have_finished_initial_sync
diagnostics check_if_node_is_mirror_sync_critical
diagnostics check_if_node_is_quorum_critical
diagnostics check_port_connectivity
diagnostics check_port_listener {amqp}
diagnostics check_protocol_listener amqp
diagnostics check_running
diagnostics check_virtual_hosts
diagnostics is_booting
diagnostics is_running
diagnostics list_policies_that_match q => p
diagnostics list_policies_that_match q => behind
diagnostics listeners => {amqp}
diagnostics log_location => stderr
diagnostics stream_status s => leader
diagnostics memory_breakdown
diagnostics metadata_store_status => leader
diagnostics quorum_status q => leader
diagnostics reclaim_quorum_memory q
diagnostics server_version => 4.
diagnostics status => RabbitMQ
diagnostics list_queues => q
queues check_for_quorum_queues_without_an_elected_leader .*
queues check_if_cluster_has_classic_queue_mirroring_policy
queues check_if_new_quorum_queue_replicas_have_finished_initial_sync
queues check_if_node_is_mirror_sync_critical
queues check_if_node_is_quorum_critical
queues quorum_status q => leader
queues stream_status s => leader
queues peek q 1 => body
queues browse q => one
queues list_operations q
queues list_scheduled q
queues list => quorum
queues info q => operator_policy
topics list => t
topics describe t => partitions
topics route t => pid
topics changes t => move
topics durations t => phases_ms
topics groups t => g
topics lag t g => pid
topics losses t
topics park list t g
topics drains
topics show t --html {tmp}/t.html --seconds 1
upgrade await_online_quorum_plus_one
upgrade await_online_synchronized_mirror
upgrade has_reached_target_cluster_size
"""

#: In this order again.
ENDING = """
queues move_messages q --all --to-queue r --wait 60
queues retry_messages r --all --wait 60
69 queues republish_message r 77777 --to-queue q
65 queues cancel_operation q none
69 queues cancel_scheduled q 77777
queues delete_messages q --all --wait 60
queues migrate q --to classic --dry-run
queues shrink 3
65 topics abort t none
65 topics declare-lost t 77
65 topics seal t 77
65 topics park skip t g nokey
topics delete-group t g
topics delete t
upgrade drain 3
upgrade revive 3
upgrade post_upgrade
69 ctl sync_queue q
69 ctl cancel_sync_queue q
ctl purge_queue q
ctl delete_queue q
ctl close_all_user_connections u bye
ctl close_connection none bye
ctl close_all_connections bye
ctl import_definitions {tmp}/d.json
ctl reset_node_auth_attempt_metrics
ctl set_vm_memory_high_watermark 0.5
ctl set_disk_free_limit 1000000
ctl trace_off -p v
ctl restart_shovel s
ctl delete_shovel s
69 ctl delete_shovel s
ctl clear_global_parameter mine
69 ctl clear_global_parameter mine
ctl clear_policy p
ctl clear_operator_policy op
ctl clear_parameter -p v vhost-limits limits
ctl clear_vhost_limits -p v
ctl clear_user_limits u all
ctl clear_topic_permissions -p v u
ctl clear_permissions -p v u
ctl clear_password u
ctl delete_user u
ctl disable_vhost_deletion_protection v
ctl delete_vhost v
69 ctl forget_cluster_node none --offline
69 ctl forget_cluster_node none
"""


@dataclass(frozen=True)
class Step:
    """A command line, and what it does."""

    code: int
    words: list[str]
    text: str

    @classmethod
    def of(cls, line: str, names: dict[str, object]) -> Step:
        """Reads a line of the tables above."""
        given, _, text = line.partition(" => ")
        for name, value in names.items():
            given, text = (part.replace(f"{{{name}}}", str(value)) for part in (given, text))
        words = shlex.split(given)
        code = int(words.pop(0)) if words[0].isdecimal() else 0
        return cls(code, words, text)


class Shell:
    """Runs command lines on the machine of the cluster."""

    def __init__(self, cluster: LocalCluster, commands: subprocess.Popen[str]) -> None:
        self.cluster = cluster
        self.names = {"amqp": cluster.nodes[0].amqp_port, "tmp": cluster.data}
        self._commands = commands

    def run(self, *words: str) -> tuple[int, str]:
        """Returns exit code and output of a process."""
        assert self._commands.stdin is not None
        assert self._commands.stdout is not None
        output = self.cluster.data / "output"
        print(json.dumps((words, str(output))), file=self._commands.stdin, flush=True)
        return int(self._commands.stdout.readline()), output.read_text()

    def wrong(self, line: str) -> str:
        """Carries a step out; returns how it differs from what its line says."""
        step = Step.of(line, self.names)
        data = ("--data", str(self.cluster.data)) if step.words[:2] in OTHERS else ()
        code, said = self.run(*step.words, *data)
        if code == step.code and step.text in said and "Traceback" not in said:
            return ""
        return f"{line}: {code}\n{said}"


OTHERS = [["queues", "list"], ["queues", "info"]]


def lines_of(*tables: str) -> list[str]:
    return [line for table in tables for line in table.splitlines() if line]


def names_of(tool: str, *tables: str) -> set[str]:
    names: dict[str, object] = dict.fromkeys(("amqp", "tmp"), "")
    steps = [Step.of(line, names).words for line in lines_of(*tables)]
    return {words[1] for words in steps if words[0] == tool}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with ForkedCluster(tmp_path_factory.mktemp("tools"), 3, BASE_PORT) as cluster:
        cluster.wait_ready()
        wait_http(cluster)
        with subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            env={**os.environ, "CONVOY_DATA_DIR": str(cluster.data)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as commands:
            yield Shell(cluster, commands)


def connect(shell: Shell) -> Any:
    address = pika.ConnectionParameters("127.0.0.1", shell.cluster.nodes[0].amqp_port, heartbeat=0)
    return pika.BlockingConnection(address)


def test_the_tables_have_every_command() -> None:
    for tool in (CTL, QUEUES, UPGRADE, TOPICS):
        missing = set(commands_of(tool)) - names_of(tool, MAKING, LOOKING, ENDING)
        assert not missing, f"no process runs {tool} {missing}"
    missing = set(commands_of(DIAGNOSTICS)) - set(commands_of(CTL))
    assert not missing - names_of(DIAGNOSTICS, MAKING, LOOKING, ENDING)


def test_every_command_works_in_a_process_of_its_own(shell: Shell) -> None:
    connection = connect(shell)
    channel = connection.channel()
    channel.confirm_delivery()
    for name in ("q", "r"):
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    (shell.cluster.data / "d.json").write_text('{"vhosts": [{"name": "w"}]}')
    # Some are held, the others are ready.
    channel.basic_qos(prefetch_count=3)
    channel.basic_consume("q", lambda *_: None, consumer_tag="tag")
    for number in range(12):
        channel.basic_publish("", "q", f"body one {number}")
    wrong = [shell.wrong(line) for line in lines_of(MAKING)]
    channel.queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
    wrong += [shell.wrong(line) for line in lines_of(LOOKING)]
    channel.basic_cancel("tag")
    connection.close()
    wrong += [shell.wrong(line) for line in lines_of(ENDING)]
    assert not any(wrong), "\n".join(filter(None, wrong))
