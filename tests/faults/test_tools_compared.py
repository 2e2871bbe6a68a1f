"""The tools against RabbitMQ's own, command by command: what is printed, and the exit code.

Each subject is a script that both run, one after the other. `=` before a command means that both
print the same; `~` that the texts differ on purpose (docs/tools.md says how) and the exit codes are
the same. The order of rows is not compared: RabbitMQ's has none.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from benchmarks.rabbitmq import SCRIPTS, RabbitCluster
from benchmarks.systems import SystemMissing

from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import BASE_PORT

TIMEOUT_S = 60
TOOLS = {"rabbitmqctl": "ctl", "rabbitmq-diagnostics": "diagnostics", "rabbitmq-queues": "queues"}
ESCAPES = re.compile(r"\x1b\[\d*m")
WARNING = re.compile(r"^\d\d:\d\d:\d\d\.\d+ \[warning\]")

Result = tuple[int, str, str]
Run = Callable[[str, list[str]], Result]


@dataclass
class Both:
    """Both systems."""

    rabbit: Run
    convoy: Run


def finished(command: list[str], environment: dict[str, str], node: str) -> Result:
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    out, err = (ESCAPES.sub("", text).replace(node, "NODE") for text in (done.stdout, done.stderr))
    return done.returncode, out, err


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    try:
        rabbit = RabbitCluster(base_port=BASE_PORT + 40, count=1)
    except SystemMissing as error:
        pytest.skip(str(error))
    ours = LocalCluster(tmp_path_factory.mktemp("compared"), 1, BASE_PORT + 70)
    with rabbit, ours:
        rabbit.start()
        ours.wait_ready()
        name = ours.api("nodes")[0]["name"]

        def run_rabbit(tool: str, words: list[str]) -> Result:
            command = [str(SCRIPTS / tool), *words]
            return finished(
                command, rabbit.environment(0) | {"LANG": "C.UTF-8"}, "rabbit1@localhost"
            )

        def run_convoy(tool: str, words: list[str]) -> Result:
            command = [sys.executable, "-m", "convoymq.cli", TOOLS[tool], "--script-name", tool]
            environment = {**os.environ, "CONVOY_DATA_DIR": str(ours.data)}
            return finished([*command, *words], environment, name)

        yield Both(run_rabbit, run_convoy)


USERS = r"""
= rabbitmqctl add_user u1 pw
= rabbitmqctl add_user u1 pw
= rabbitmqctl -q add_user u2 pw
= rabbitmqctl list_users
= rabbitmqctl list_users -s
= rabbitmqctl list_users --formatter csv
= rabbitmqctl list_users --no-table-headers
= rabbitmqctl authenticate_user u1 pw
= rabbitmqctl authenticate_user u1 wrong
= rabbitmqctl change_password u1 new
= rabbitmqctl change_password nobody new
= rabbitmqctl set_user_tags u1 administrator other
= rabbitmqctl set_user_tags nobody x
= rabbitmqctl clear_password u1
= rabbitmqctl set_user_limits u1 '{"max-connections":3}'
= rabbitmqctl list_user_limits --user u1
= rabbitmqctl list_user_limits --user u1 --formatter json
= rabbitmqctl list_user_limits --global
= rabbitmqctl clear_user_limits u1 all
~ rabbitmqctl set_user_limits nobody '{"max-connections":3}'
= rabbitmqctl delete_user u1
= rabbitmqctl delete_user u1
= rabbitmqctl delete_user u2
~ rabbitmqctl add_user
~ rabbitmqctl list_users extra
~ rabbitmqctl list_users --bogus
= rabbitmqctl list_usres
"""

VHOSTS = r"""
= rabbitmqctl add_vhost v1
= rabbitmqctl add_vhost v1
= rabbitmqctl list_vhosts
= rabbitmqctl list_vhosts name tracing default_queue_type
~ rabbitmqctl list_vhosts nosuch
= rabbitmqctl set_vhost_tags v1 a b
= rabbitmqctl set_vhost_limits -p v1 '{"max-queues":3}'
= rabbitmqctl list_vhost_limits
= rabbitmqctl list_vhost_limits -p v1
= rabbitmqctl list_vhost_limits --global
= rabbitmqctl clear_vhost_limits -p v1
= rabbitmqctl list_vhost_limits -p v1
= rabbitmqctl set_vhost_limits -p nosuch '{"max-queues":3}'
~ rabbitmqctl set_vhost_limits -p v1 nojson
~ rabbitmqctl set_vhost_limits -p v1 '{"bogus":3}'
= rabbitmqctl delete_vhost v1
= rabbitmqctl delete_vhost v1
"""

PERMISSIONS = r"""
= rabbitmqctl add_vhost v2
= rabbitmqctl add_user app pw
= rabbitmqctl set_permissions -p v2 app '^a' '.*' ''
= rabbitmqctl set_permissions -p nosuch app a b c
= rabbitmqctl set_permissions nobody a b c
~ rabbitmqctl set_permissions app '(' b c
= rabbitmqctl list_permissions -p v2
= rabbitmqctl list_permissions -p nosuch
= rabbitmqctl list_user_permissions app
~ rabbitmqctl list_user_permissions nobody
= rabbitmqctl set_topic_permissions -p v2 app amq.topic '^a' '^b'
= rabbitmqctl list_topic_permissions -p v2
~ rabbitmqctl list_user_topic_permissions app
= rabbitmqctl clear_topic_permissions -p v2 app amq.topic
= rabbitmqctl clear_topic_permissions -p v2 app
= rabbitmqctl clear_permissions -p v2 app
= rabbitmqctl clear_permissions -p v2 app
= rabbitmqctl clear_permissions nobody
= rabbitmqctl set_topic_permissions nobody a b c
"""

POLICIES = r"""
= rabbitmqctl set_policy p1 '^c' '{"max-length":10}' --priority 3 --apply-to queues
~ rabbitmqctl set_policy p1 '^c' nojson
= rabbitmqctl set_policy p1 '^c' '{"bogus":10}'
= rabbitmqctl set_policy p1 '^c' '{"max-length":"x"}'
~ rabbitmqctl set_policy p1 '^c' '{}' --priority high
= rabbitmqctl list_policies
= rabbitmqctl list_policies --formatter json
= rabbitmqctl list_policies -p nosuch
= rabbitmqctl clear_policy nosuch
= rabbitmqctl clear_policy p1
= rabbitmqctl set_operator_policy o1 '^c' '{"max-length":10}' --apply-to queues
= rabbitmqctl list_operator_policies
= rabbitmqctl clear_operator_policy o1
= rabbitmqctl clear_operator_policy o1
= rabbitmqctl set_parameter vhost-limits limits '{"max-queues":3}'
= rabbitmqctl list_parameters
= rabbitmqctl list_parameters --formatter json
= rabbitmqctl clear_parameter vhost-limits limits
= rabbitmqctl clear_parameter vhost-limits limits
= rabbitmqctl set_parameter nosuch x 1
= rabbitmqctl set_cluster_name compared
~ rabbitmqctl list_global_parameters
"""

LISTS = r"""
= rabbitmqctl list_queues
= rabbitmqctl list_queues -t 5 --online
= rabbitmqctl list_queues -p nosuch
~ rabbitmqctl list_queues nosuch
~ rabbitmqctl list_queues --bogus
~ rabbitmqctl list_queues -t 0
= rabbitmqctl list_exchanges
= rabbitmqctl list_exchanges name type durable auto_delete internal arguments policy
= rabbitmqctl list_bindings
= rabbitmqctl list_connections
= rabbitmqctl list_channels
= rabbitmqctl list_consumers
= rabbitmqctl purge_queue nosuch
= rabbitmqctl delete_queue nosuch
= rabbitmqctl delete_queue nosuch --if-empty --if-unused
= rabbitmqctl close_all_connections bye
= rabbitmqctl close_all_connections -p / --limit 5 bye
= rabbitmqctl close_all_connections --global bye
= rabbitmqctl close_all_user_connections guest bye
~ rabbitmqctl close_all_connections
"""

NODES = r"""
~ rabbitmqctl cluster_status
~ rabbitmqctl status
= rabbitmqctl await_startup
= rabbitmqctl await_online_nodes 1
~ rabbitmqctl forget_cluster_node nosuch@nowhere
~ rabbitmqctl -n nosuch@localhost list_users
= rabbitmqctl set_vm_memory_high_watermark 0.9
= rabbitmqctl set_vm_memory_high_watermark absolute 8GB
~ rabbitmqctl set_vm_memory_high_watermark x
~ rabbitmqctl set_vm_memory_high_watermark 1.5
= rabbitmqctl set_disk_free_limit 10MB
= rabbitmqctl set_disk_free_limit mem_relative 0.001
~ rabbitmqctl set_disk_free_limit x
~ rabbitmqctl import_definitions /nosuch.json
~ rabbitmqctl export_definitions
"""

CHECKS = r"""
~ rabbitmq-diagnostics ping
= rabbitmq-diagnostics ping -q
= rabbitmq-diagnostics alarms
= rabbitmq-diagnostics check_alarms
= rabbitmq-diagnostics check_alarms --formatter json
= rabbitmq-diagnostics check_local_alarms
= rabbitmq-diagnostics check_running
= rabbitmq-diagnostics check_running --formatter json
= rabbitmq-diagnostics is_booting
= rabbitmq-diagnostics is_running
~ rabbitmq-diagnostics listeners
~ rabbitmq-diagnostics check_port_connectivity
~ rabbitmq-diagnostics check_port_listener 1
= rabbitmq-diagnostics check_protocol_listener amqp
~ rabbitmq-diagnostics check_protocol_listener nosuch
= rabbitmq-diagnostics check_virtual_hosts
~ rabbitmq-diagnostics check_if_node_is_quorum_critical
= rabbitmq-queues check_if_node_is_quorum_critical --formatter json
~ rabbitmq-diagnostics server_version
= rabbitmq-queues quorum_status nosuch
"""


def lines(text: str) -> list[str]:
    """Lines to compare: without blank ones, and rows in order."""
    kept = [line.rstrip() for line in text.splitlines()]
    kept = [line for line in kept if line and not WARNING.match(line)]
    return kept[:1] + sorted(kept[1:])


@pytest.mark.parametrize(
    "script", [USERS, VHOSTS, PERMISSIONS, POLICIES, LISTS, NODES, CHECKS],
    ids=["users", "vhosts", "permissions", "policies", "lists", "nodes", "checks"],
)  # fmt: skip
def test_the_tools_say_what_rabbitmqs_say(both: Both, script: str) -> None:
    different = []
    for line in script.strip().splitlines():
        mark, tool, *words = shlex.split(line)
        theirs, ours = both.rabbit(tool, words), both.convoy(tool, words)
        same = ours[0] == theirs[0]
        if mark == "=":
            same = same and [lines(text) for text in ours[1:]] == [lines(t) for t in theirs[1:]]
        if not same:
            different.append((line, theirs, ours))
    assert not different, "\n".join(map(str, different))
