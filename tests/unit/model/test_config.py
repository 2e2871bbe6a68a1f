"""Configuration: sources and their order, errors that name the key, the page made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.edges import configuration
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.configuration import load
from convoymq.model import config
from convoymq.model.config import Address, ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_defaults_build() -> None:
    assert load() == config.Config()
    assert load().link_address == Address("127.0.0.1", 25672)


def test_file_is_below_environment_and_environment_below_flags(tmp_path: Path) -> None:
    path = tmp_path / "convoy.conf"
    path.write_text("heartbeat = 1 # s\nframe_max=8192\n\n# note\nchannel_max = 3\n")
    made = load(path, {"CONVOY_FRAME_MAX": "9000", "CONVOY_CHANNEL_MAX": "4"}, {"channel_max": "5"})
    amqp = made.of(AmqpConfig)
    assert (amqp.heartbeat_s, amqp.frame_max, amqp.channel_max) == (1, 9000, 5)


def test_unknown_key_names_the_nearest_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "convoy.conf"
    path.write_text("node.id = 1\nraft.segment_max_entrees = 7\n")
    with pytest.raises(ConfigError, match=r"conf:2: .*mean raft\.segment_max_entries\?"):
        load(path)


@pytest.mark.parametrize("key", ["listeners.tcp.defualt", "listeners.ssl.Default"])
def test_a_misspelt_name_is_no_name_of_the_users_choice(key: str) -> None:
    nearest = key[: key.rfind(".")] + ".default"
    with pytest.raises(ConfigError, match=f"unknown key {key}; did you mean {nearest}\\?"):
        load(flags={key: "5672"})


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean CONVOY_HEARTBEAT"):
        load(environment={"CONVOY_HEARTBEET": "1"})
    assert load(environment={"CONVOY_KERNEL_PROFILE": "1", "HOME": "/"}) == config.Config()


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("raft.segment_max_entries", ["1", "65535"], ["0", "65536", "x", ""]),
        ("raft.wal_max_size_bytes", ["64KiB", "512MB"], ["64k b", "65535", "-1"]),
        ("node.id", ["1", "255"], ["0", "256"]),
        ("frame_max", ["8192", "131072"], ["8191", "131073"]),
        ("raft.wal_sync_method", ["datasync", "none"], ["fsync"]),
        ("vm_memory_high_watermark.relative", ["0.01", "1"], ["0", "1.1"]),
        ("consumer_timeout", ["none", "10000"], ["9999", "soon"]),
        ("listeners.tcp.default", ["5672", "0.0.0.0:5672", "[::1]:1", "none"], ["host", "70000"]),
        ("raft.wal_preallocate", ["true", "off"], ["2"]),
    ],
)
def test_values_at_the_bound_and_one_past_it(key: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        load(flags={key: text})
    for text in bad:
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            load(flags={key: text})


def test_every_bound_is_enforced_and_every_default_lies_inside() -> None:
    for (section, name), key in configuration.keys().table.items():
        default = getattr(configuration.keys().part(config.Config(), section), name)
        if key.low is None or key.high is None or default is None:
            continue
        assert key.low <= default <= key.high, key.name
        with pytest.raises(ConfigError):
            load(flags={key.name: str(key.high + 1)})


def test_peers_listeners_and_loopback_users_are_collected() -> None:
    made = load(
        flags={
            "cluster.peers": "1@127.0.0.1:1, 2@127.0.0.1:2",
            "listeners.tcp.a": "1",
            "listeners.tcp.b": "127.0.0.2:2",
            "loopback_users.guest": "false",
            "loopback_users.eve": "true",
        }
    )
    assert made.cluster.peers == (Address("127.0.0.1", 1, 1), Address("127.0.0.1", 2, 2))
    assert made.listeners.tcp == (Address("localhost", 1), Address("127.0.0.2", 2))
    assert made.defaults.loopback_users == ("eve",)


@pytest.mark.parametrize(
    "flags",
    [
        {"cluster.listen": "10.0.0.1:5"},
        {"cluster.peers": "1@127.0.0.1:1 2@10.0.0.2:1"},
        {"cluster.peers": "1@127.0.0.1:1 127.0.0.1:2"},
        {"cluster.peers": "1@127.0.0.1:1 1@127.0.0.1:2"},
        {"cluster.peers": "2@127.0.0.1:1"},
        {"cluster.suspect_after_min": "500", "cluster.suspect_after_max": "400"},
        {"cluster.suspect_after_min": "150"},
        {"listeners.ssl.default": "5671"},
        {"cluster.tls.certfile": "a"},
    ],
)
def test_bad_combinations_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        load(flags=flags)


def test_a_line_without_a_value_a_repeated_key_and_a_missing_file_are_errors(
    tmp_path: Path,
) -> None:
    path = tmp_path / "convoy.conf"
    for text in ("heartbeat", "heartbeat = 1\nheartbeat = 2", "a b = 1"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"convoy\.conf"):
            load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.conf")


def test_secrets_are_not_printed() -> None:
    made = load(flags={"cluster.secret": "hush-hush", "default_pass": "hush-hush"})
    assert "hush-hush" not in repr(made)


def test_the_page_is_what_the_program_says() -> None:
    assert PAGE.read_text("utf-8") == configuration.reference()
