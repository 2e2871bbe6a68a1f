"""Wrong names are answered with the nearest right ones, in every tool."""

from __future__ import annotations

import pytest
from tests.unit.cli.test_ctl import FakeApi, api, printed, run

from convoymq.cli import _main as convoy
from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, QUEUES, TOPICS, UPGRADE
from convoymq.model.config.loading import ConfigError, load
from convoymq.model.errors import ValidationFailed
from convoymq.model.near_names import NEAR_MAX, did_you_mean, near_names
from convoymq.settings.definitions import checked_definition

__all__ = ["api"]

TABLE = [
    (CTL, ["list_queuse"], "Did you mean 'list_queues'"),
    (CTL, ["set_polcy", "p", "^", "{}"], "Did you mean 'set_policy'"),
    (DIAGNOSTICS, ["chek_running"], "Did you mean 'check_running'"),
    (QUEUES, ["quorum_staus", "q"], "Did you mean 'quorum_status'"),
    (UPGRADE, ["drian"], "Did you mean 'drain'"),
    (TOPICS, ["rout"], "Did you mean 'route'"),
    (CTL, ["list_queues", "--vhots", "/"], "--vhots : ; did you mean --vhost"),
    (CTL, ["list_queues", "mesages"], "mesages are not supported; did you mean messages"),
    (CTL, ["list_queues", "-p", "prodution"], "does not exist\nDid you mean production?"),
    (CTL, ["delete_queue", "order"], "Did you mean orders or orders2?"),
    (CTL, ["set_permissions", "alcie", "a", "b", "c"], "Did you mean alice?"),
    (CTL, ["clear_policy", "tll"], "Did you mean ttl?"),
    (CTL, ["delete_vhost", "prodution"], "Did you mean production?"),
    (QUEUES, ["peek", "order", "1"], "Did you mean orders or orders2?"),
]


@pytest.fixture
def known(api: FakeApi) -> FakeApi:
    lists = {
        "vhosts": ["/", "production"],
        "users": ["guest", "alice"],
        "queues/%2F": ["orders", "orders2", "q"],
        "policies/%2F": ["ttl"],
    }
    for path, names in lists.items():
        api.has(f"{path}?columns=name", [{"name": name} for name in names])
    api.has("queues/%2F", [])
    return api


@pytest.mark.parametrize(("tool", "arguments", "hint"), TABLE, ids=lambda each: str(each))
def test_tools_answer_with_near_names(
    known: FakeApi,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    arguments: list[str],
    hint: str,
) -> None:
    assert run(*arguments, tool=tool) != 0
    assert hint in printed(capsys)[1]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["stauts"], "status"),
        (["status", "--formt", "json"], "--format"),
        (["top", "--list", "queus"], "did you mean queues"),
    ],
)
def test_convoy_answers_with_near_names(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    hint: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["convoy", *arguments])
    with pytest.raises(SystemExit):
        convoy(arguments)
    assert hint in printed(capsys)[1]


def test_keys_of_configuration_and_policies_have_near_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean listeners\.tcp\.default"):
        load(flags={"listeners.tcp.defalt": "1"})
    with pytest.raises(ValidationFailed, match="max-lenght: did you mean max-length"):
        checked_definition({"max-lenght": 5})


def test_what_is_like_nothing_gets_no_hint() -> None:
    assert did_you_mean("xyz", ["orders"]) == ""
    assert near_names("ORDERS", ["orders"]) == ["orders"]
    assert len(near_names("queue", [f"queue{k}" for k in range(9)])) == NEAR_MAX
