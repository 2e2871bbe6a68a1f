"""Lists of broker groups of RocketMQ's protocol and of their topics (docs/rocketmq.md)."""

from __future__ import annotations

from convoymq.cli.ctl.command import CTL, Columns, Command, Request, plain
from convoymq.cli.ctl.failures import UNAVAILABLE, Problem

GROUP_COLUMNS: Columns = plain("name", "cluster", "master", "acting", "members")
TOPIC_COLUMNS: Columns = plain(
    "name", "permission", "read_queues", "write_queues", "ordered", "system"
)

COMMANDS = (
    Command(
        "list_broker_groups column*",
        "Lists the broker groups that the name servers of rocketmq.namesrv know",
        tools=(CTL,),
        banner="Listing broker groups ...",
        request=Request("GET", "broker-groups"),
        columns=GROUP_COLUMNS,
        shown=tuple(GROUP_COLUMNS),
        problems={404: Problem(UNAVAILABLE, "rocketmq.namesrv is not set")},
    ),
    Command(
        "list_group_topics group column*",
        "Lists the topics of a broker group",
        tools=(CTL,),
        banner="Listing topics of broker group {group} ...",
        request=Request("GET", "broker-groups/{group}/topics"),
        columns=TOPIC_COLUMNS,
        shown=tuple(TOPIC_COLUMNS),
        problems={404: Problem(UNAVAILABLE, "there is no broker group '{group}'")},
    ),
)
