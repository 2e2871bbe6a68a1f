"""Maintenance of nodes, as `rabbitmq-upgrade` has it."""

from __future__ import annotations

import time

from convoymq.cli.ctl.arguments import Switch
from convoymq.cli.ctl.command import Command, Invocation
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Problem
from convoymq.cli.ctl.listeners import nodes_of
from convoymq.cli.ctl.outputs import Output, Text
from convoymq.cli.ctl.queues import rebalance

WAIT_S = 120
MACHINE = Switch("machine")
"""All processes of the target's machine."""
POLL_S = 0.5
NOT_FOUND = {404: Problem(DATA, "not_found")}


def _target(invocation: Invocation) -> None:
    """The node that was named, or the one that is asked."""
    invocation.words.setdefault("target", invocation.node)


def _drain(invocation: Invocation) -> Output:
    return _post(invocation, "drain")


def _revive(invocation: Invocation) -> Output:
    return _post(invocation, "revive")


def _post(invocation: Invocation, what: str) -> Output:
    whole = "?machine=true" if invocation.flag("machine") else ""
    invocation.call("POST", f"convoy/nodes/{{target}}/{what}{whole}")
    return None


def _announce(invocation: Invocation) -> None:
    invocation.words["timeout"] = str(invocation.value("timeout", WAIT_S))


def _said_of_single_node(invocation: Invocation) -> Text | None:
    if len(nodes_of(invocation)) != 1:
        return None
    return Text(
        "Target node seems to be the only one in a single node cluster, the command does not apply"
    )


def _await_quorum(invocation: Invocation) -> Output:
    return _await_check(
        invocation,
        "node-is-quorum-critical",
        "queues still have only the minimum of members online: ",
    )


def _await_mirrors(invocation: Invocation) -> Output:
    return _await_check(
        invocation,
        "node-is-mirror-sync-critical",
        "queues still have no synchronised mirror online: ",
    )


def _await_check(invocation: Invocation, check: str, failure: str) -> Output:
    if (alone := _said_of_single_node(invocation)) is not None:
        return alone
    deadline = time.monotonic() + int(invocation.word("timeout"))
    while True:
        answer = invocation.api.request("GET", f"health/checks/{check}")
        if answer.status < 300:
            return None
        if time.monotonic() > deadline:
            raise Failure(UNAVAILABLE, failure + answer.reason)
        time.sleep(POLL_S)


def _post_upgrade(invocation: Invocation) -> Output:
    invocation.words["type"] = "all"
    return rebalance(invocation)


COMMANDS = (
    Command(
        "drain target?",
        "Puts the node in maintenance mode. Such node will not serve any client traffic "
        "or host any primary queue replicas",
        switches=(MACHINE,),
        check=_target,
        banner="Will put node {target} into maintenance mode. The node will no longer serve any "
        "client traffic!",
        run=_drain,
        problems=NOT_FOUND,
    ),
    Command(
        "revive target?",
        "Puts the node out of maintenance and into regular operating mode. Such nodes "
        "will again serve client traffic and host primary queue replicas",
        switches=(MACHINE,),
        check=_target,
        banner="Will put node {target} back into regular operating mode. The node will again "
        "serve client traffic and host primary queue replicas.",
        run=_revive,
        problems=NOT_FOUND,
    ),
    Command(
        "await_online_quorum_plus_one",
        "Waits for all replicated queues to have an above minimum online quorum. This "
        "makes sure that no queue would lose its quorum if the target node is shut down",
        check=_announce,
        banner="Will wait for a quorum + 1 of nodes to be online for all quorum queues for "
        "{timeout} seconds...",
        run=_await_quorum,
    ),
    Command(
        "await_online_synchronized_mirror",
        "Waits for all classic mirrored queues to have a synchronised mirror online",
        check=_announce,
        banner="Will wait for a synchronised mirror be online for all classic mirrored queues for "
        "{timeout} seconds...",
        run=_await_mirrors,
    ),
    Command(
        "post_upgrade",
        "Runs post-upgrade tasks",
        banner="Executing post upgrade tasks...",
        run=_post_upgrade,
    ),
)
