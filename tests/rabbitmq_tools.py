"""What Debian's rabbitmqctl 3.10.8 and its like print, recorded: texts to compare our tools with.

Each subject is a script. `=` before a command means that our tool prints the same;
`~` that the texts differ on purpose (docs/tools.md says how) and the exit codes are the same; `!`
that the exit code is another one too, because RabbitMQ 4.3 has another one than the recorded
release, or because a virtual host that there is not is 65 in every command of ours. To record
again, where RabbitMQ is installed:

    python -m tests.rabbitmq_tools
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

from benchmarks.rabbitmq import SCRIPTS, RabbitCluster, installed_version

from tests.patience import PATIENCE_S

RECORDED = Path(__file__).parent / "vectors" / "tools" / "rabbitmq.json"
PORT = 5700
ESCAPES = re.compile(r"\x1b\[\d*m")
WARNING = re.compile(r"^\d\d:\d\d:\d\d\.\d+ \[warning\]")

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
! rabbitmqctl set_permissions -p nosuch app a b c
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
! rabbitmqctl set_policy p1 '^c' nojson
! rabbitmqctl set_policy p1 '^c' '{"bogus":10}'
! rabbitmqctl set_policy p1 '^c' '{"max-length":"x"}'
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
! rabbitmqctl list_queues -p nosuch
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
~ rabbitmqctl delete_queue nosuch
~ rabbitmqctl delete_queue nosuch --if-empty --if-unused
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
~ rabbitmq-queues quorum_status nosuch
"""

SUBJECTS = {
    "users": USERS,
    "vhosts": VHOSTS,
    "permissions": PERMISSIONS,
    "policies": POLICIES,
    "lists": LISTS,
    "nodes": NODES,
    "checks": CHECKS,
}


def commands(subject: str) -> list[tuple[str, str, list[str]]]:
    """(mark, tool, words) of a script."""
    rows = map(shlex.split, SUBJECTS[subject].strip().splitlines())
    return [(mark, tool, words) for mark, tool, *words in rows]


def lines(text: str, node: str) -> list[str]:
    """Lines to compare: without blank ones and control codes, rows in order. RabbitMQ's have none.
    Members of JSON objects are in order for the same reason."""
    kept = [line.rstrip().replace(node, "NODE") for line in ESCAPES.sub("", text).splitlines()]
    kept = [line for line in kept if line and not WARNING.match(line)]
    kept = [_in_order(line) for line in kept]
    return sorted(kept)


def _in_order(line: str) -> str:
    try:
        found = json.loads(line.removeprefix(","))
    except ValueError:
        return line
    return json.dumps(found, sort_keys=True)


def record() -> None:
    """Runs all scripts on a RabbitMQ node of its own; they leave nothing that later ones see."""
    recorded: dict[str, list[object]] = {}
    with RabbitCluster(base_port=PORT, count=1) as cluster:
        cluster.start()
        environment = cluster.environment(0) | {"LANG": "C.UTF-8"}
        for subject in SUBJECTS:
            recorded[subject] = rows = []
            for _, tool, words in commands(subject):
                done = subprocess.run(
                    [str(SCRIPTS / tool), *words],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                    stdin=subprocess.DEVNULL,
                    check=False,
                )
                texts = (lines(text, cluster.nodes[0].name) for text in (done.stdout, done.stderr))
                rows.append([tool, words, done.returncode, *texts])
                print(subject, tool, *words, flush=True)
    RECORDED.parent.mkdir(exist_ok=True)
    content = {"version": installed_version(), "subjects": recorded}
    RECORDED.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    record()
