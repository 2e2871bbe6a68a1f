"""The commands of each tool, joined from the modules of the subjects."""

from __future__ import annotations

from dataclasses import replace

from convoymq.cli.ctl import (
    broker_groups,
    cluster,
    diagnostics,
    lists,
    permissions,
    policies,
    queues,
    reports,
    selections,
    shovels,
    topics,
    upgrade,
    users,
    vhosts,
)
from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, QUEUES, TOPICS, UPGRADE, Command

COMMANDS = tuple(
    replace(command, tools=command.tools or (own,))
    for commands, own in (
        (cluster.COMMANDS, CTL),
        (users.COMMANDS, CTL),
        (vhosts.COMMANDS, CTL),
        (permissions.COMMANDS, CTL),
        (policies.COMMANDS, CTL),
        (shovels.COMMANDS, CTL),
        (lists.COMMANDS, CTL),
        (broker_groups.COMMANDS, CTL),
        (diagnostics.COMMANDS, DIAGNOSTICS),
        (queues.COMMANDS, QUEUES),
        (reports.COMMANDS, CTL),
        (selections.COMMANDS, QUEUES),
        (topics.COMMANDS, TOPICS),
        (upgrade.COMMANDS, UPGRADE),
    )
    for command in commands
)
"""Commands of all modules. A command that names no tool belongs to the tool of its module."""


def commands_of(tool: str) -> dict[str, Command]:
    """Returns the commands of a tool by name."""
    return {command.name: command for command in COMMANDS if tool in command.tools}
