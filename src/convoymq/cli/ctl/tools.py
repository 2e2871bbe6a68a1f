"""The commands of each tool, joined from the modules of the subjects."""

from __future__ import annotations

from convoymq.cli.ctl import (
    cluster,
    diagnostics,
    lists,
    permissions,
    policies,
    queues,
    reports,
    selections,
    topics,
    upgrade,
    users,
    vhosts,
)
from convoymq.cli.ctl.command import Command

COMMANDS: tuple[Command, ...] = (
    *cluster.COMMANDS,
    *users.COMMANDS,
    *vhosts.COMMANDS,
    *permissions.COMMANDS,
    *policies.COMMANDS,
    *lists.COMMANDS,
    *diagnostics.COMMANDS,
    *queues.COMMANDS,
    *reports.COMMANDS,
    *selections.COMMANDS,
    *topics.COMMANDS,
    *upgrade.COMMANDS,
)


def commands_of(tool: str) -> dict[str, Command]:
    """Returns the commands of a tool by name."""
    return {command.name: command for command in COMMANDS if tool in command.tools}
