"""Shovels: status, restart, deletion."""

from __future__ import annotations

from convoymq.cli.ctl.arguments import VHOST, Switch
from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, Command, Request, Row
from convoymq.cli.ctl.failures import UNAVAILABLE, Problem

_ABSENT = (
    "Shovel with the given name was not found on the target node '{node}' and / or virtual host "
    "'{vhost}'"
)
NOT_FOUND = {404: Problem(UNAVAILABLE, _ABSENT)}


def _text(row: Row, name: str) -> object:
    return row.get(name, "")


COMMANDS = (
    Command(
        "shovel_status",
        "Displays status of Shovel on a node",
        tools=(CTL, DIAGNOSTICS),
        banner="Shovel status on node {node}",
        request=Request("GET", "shovels"),
        columns={
            "destination": lambda row: _text(row, "dest_uri"),
            "destination_protocol": lambda row: _text(row, "dest_protocol"),
            "destination_queue": lambda row: _text(row, "dest_queue"),
            "last_changed": lambda row: _text(row, "timestamp"),
            "name": "name",
            "source": lambda row: _text(row, "src_uri"),
            "source_protocol": lambda row: _text(row, "src_protocol"),
            "source_queue": lambda row: _text(row, "src_queue"),
            "state": "state",
            "termination_reason": lambda row: _text(row, "reason"),
            "type": "type",
            "vhost": "vhost",
        },
    ),
    Command(
        "restart_shovel name",
        "Restarts a dynamic Shovel",
        tools=(CTL,),
        switches=(VHOST,),
        banner="Restarting dynamic Shovel {name} in virtual host {vhost} on node {node}",
        request=Request("DELETE", "shovels/vhost/{vhost}/{name}/restart"),
        problems=NOT_FOUND,
    ),
    Command(
        "delete_shovel name",
        "Deletes a Shovel",
        tools=(CTL,),
        switches=(VHOST, Switch("force")),
        banner="Deleting shovel {name} in vhost {vhost}",
        request=Request("DELETE", "shovels/vhost/{vhost}/{name}"),
        problems=NOT_FOUND,
    ),
)
