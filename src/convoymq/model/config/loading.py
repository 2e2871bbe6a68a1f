"""Building a configuration from a file, the environment and flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from convoymq.model.config.config import Config, Keys
from convoymq.model.config.keys import Key, Section, number_text
from convoymq.model.config.rabbitmq_keys import in_flat_file, refusal
from convoymq.model.config.tls_sections import SslConfig
from convoymq.model.config.values import Listener, parse_bool
from convoymq.model.errors import Refused
from convoymq.model.near_names import hint, near_names

ENVIRONMENT_PREFIX = "CONVOY_"
ENVIRONMENT_OTHERS = ("CONVOY_KERNEL_", "CONVOY_TEST_", "CONVOY_SIM_", "CONVOY_DEMO_")
"""Variables with these beginnings belong to tools and are no configuration."""
FILE_SIZE_MAX = 1 << 20


class ConfigError(Refused):
    """A key is unknown or a value is not acceptable; the text names key and place."""


class _Builder:
    """Collects values by place; later sources replace what earlier ones said."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.values: dict[tuple[str, str], Any] = {}
        self.collected: dict[tuple[str, str], dict[str, object]] = {}

    def source(self, pairs: Iterable[tuple[str, str, str]]) -> None:
        """Takes (key, value, where it stands) of one source."""
        seen: dict[str, str] = {}
        collected: dict[tuple[str, str], dict[str, object]] = {}
        for name, text, where in pairs:
            if name in seen:
                raise ConfigError(f"{where}: {name} was already given at {seen[name]}")
            seen[name] = where
            flat = in_flat_file(name)
            place = self.keys.by_name.get(name) or self.keys.by_name.get(flat)
            if place is not None:
                self.values[place] = value_of(self.keys.table[place], name, text, where)
                continue
            why = refusal(flat, text)
            if why is not None:
                if why:
                    raise ConfigError(f"{where}: {name} = {text}: not served: {why}")
                continue
            prefix = self._prefix_of(name)
            place = self.keys.by_prefix.get(prefix)
            if place is None or len(name) == len(prefix) or self._is_misspelt(name, prefix):
                raise ConfigError(f"{where}: unknown key {name}{hint(name, self.keys.by_name)}")
            collected.setdefault(place, {})[name[len(prefix) :]] = self._member(
                place, name, text, where
            )
        for place, members in collected.items():
            self._merge(place, members)

    def _prefix_of(self, name: str) -> str:
        """Returns the part of a key in front of what its user named: names may have dots where the
        configuration keeps them."""
        for prefix, place in self.keys.by_prefix.items():
            if self.keys.table[place].named and name.startswith(prefix):
                return prefix
        return name[: name.rfind(".") + 1]

    def _is_misspelt(self, name: str, prefix: str) -> bool:
        """Returns whether a name of the user's choice after the prefix is nearly that of a known
        key."""
        own = [key[len(prefix) :] for key in self.keys.by_name if key.startswith(prefix)]
        return bool(near_names(name[len(prefix) :], own, 0.7))

    def _member(self, place: tuple[str, str], name: str, text: str, where: str) -> object:
        key = self.keys.table[place]
        try:
            if key.collects == "loopback_users.":
                return parse_bool(text)
            return key.parse(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {name} = {text}: {error}") from None

    def _merge(self, place: tuple[str, str], members: dict[str, Any]) -> None:
        key = self.keys.table[place]
        if key.collects == "loopback_users.":
            users = list(self.values.get(place, ("guest",)))
            for user, restricted in members.items():
                if user in users:
                    users.remove(user)
                if restricted:
                    users.append(user)
            self.values[place] = tuple(users)
            return
        before = self.values.get(place, ())
        if key.named:
            self.values[place] = tuple({**dict(before), **members}.items())
            return
        self.values[place] = before + tuple(a for one in members.values() for a in one)

    def build(self, file: str) -> Config:
        chosen: dict[str, dict[str, object]] = {}
        for (section, name), value in self.values.items():
            chosen.setdefault(section, {})[name] = value
        kinds = self.keys.sections
        made = {name: kinds[name](**values) for name, values in chosen.items()}
        edges = {kind: made.pop(kind.NAME) for kind in self.keys.edges if kind.NAME in made}
        config = Config(file=file, edges=edges, **made)
        _validate(config)
        return config


def value_of(key: Key, name: str, text: str, where: str) -> object:
    """Returns the value that a text gives a key. Raises ConfigError."""
    if key.named:
        raise ConfigError(f"{where}: {name} = {text}: write {key.collects}NAME = VALUE")
    try:
        value = key.parse(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} = {text}: {error}") from None
    if key.choices and value not in key.choices:
        raise ConfigError(f"{where}: {name} = {text}: must be one of {', '.join(key.choices)}")
    if value is None or not isinstance(value, (int, float)):
        return value
    if (key.low is not None and value < key.low) or (key.high is not None and value > key.high):
        bounds = f"{number_text(key.low)} and {number_text(key.high)}"
        raise ConfigError(f"{where}: {name} = {text}: must lie between {bounds}")
    return value


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _validate_tls(config: Config, listener: Listener) -> None:
    if not (listener.tls and listener.addresses):
        return
    options: SslConfig = getattr(config, listener.tls)
    certificate, key, _ = options.files()
    if not (options.certfile and options.keyfile):
        raise ConfigError(f"{listener.key} needs {certificate} and {key}")


def _validate(config: Config) -> None:
    """Refuses combinations that no single key can judge."""
    cluster = config.cluster
    if cluster.suspect_max_ms < cluster.suspect_min_ms:
        raise ConfigError(
            "cluster.suspect_after_max must not be smaller than cluster.suspect_after_min"
        )
    if cluster.suspect_min_ms < 2 * cluster.heartbeat_ms:
        raise ConfigError(
            "cluster.suspect_after_min must be at least twice cluster.heartbeat_interval"
        )
    hosts = [config.link_address.host, *(peer.host for peer in cluster.peers)]
    if not (cluster.secret or cluster.secret_file) and not all(map(_is_loopback, hosts)):
        raise ConfigError("cluster.secret must be set when nodes link beyond loopback addresses")
    if bool(cluster.tls_certfile) != bool(cluster.tls_keyfile):
        raise ConfigError("cluster.tls.certfile and cluster.tls.keyfile go together")
    if cluster.tls_certfile and not cluster.tls_cacertfile:
        raise ConfigError("cluster.tls.cacertfile must be set with cluster.tls.certfile")
    for section in (config.listeners, *config.edges.values()):
        for listener in section.listeners():
            _validate_tls(config, listener)
    for section in config.edges.values():
        try:
            section.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None
    try:
        config.identity.check()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    ids = [peer.node for peer in cluster.peers]
    if any(ids) and not all(ids):
        raise ConfigError("cluster.peers must have an id in front of every address, or of none")
    if any(ids) and len(set(ids)) != len(ids):
        raise ConfigError("cluster.peers names an id twice")
    if any(ids) and config.node.id not in ids:
        raise ConfigError(f"cluster.peers lacks this node, node.id = {config.node.id}")
    if len(cluster.peers) > cluster.peers_max:
        raise ConfigError("cluster.peers has more nodes than cluster.nodes_max")


def parse_text(text: str, where: str = "convoy.conf") -> list[tuple[str, str, str]]:
    """Returns (key, value, place) of each line of a configuration file.

    Raises:
        ConfigError: a line is neither empty, a comment nor `key = value`.
    """
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        name, equals, value = bare.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
            raise ConfigError(f"{where}:{number}: not a line of the form key = value")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        else:
            value = re.split(r"\s+#", value, maxsplit=1)[0]
        pairs.append((name, value, f"{where}:{number}"))
    return pairs


def _environment_pairs(
    environment: Mapping[str, str], known: Iterable[str]
) -> list[tuple[str, str, str]]:
    names = {_variable(name): name for name in known}
    pairs = []
    for variable in sorted(environment):
        ignored = variable.startswith(ENVIRONMENT_OTHERS) or variable == "CONVOY_CONFIG_FILE"
        if not variable.startswith(ENVIRONMENT_PREFIX) or ignored:
            continue
        if variable not in names:
            raise ConfigError(f"environment: unknown variable {variable}{hint(variable, names)}")
        pairs.append((names[variable], environment[variable], f"environment, {variable}"))
    return pairs


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + re.sub(r"[.\-]", "_", name).upper()


def load(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    edges: Iterable[type[Section]] = (),
) -> Config:
    """Returns the configuration: defaults < file < environment < flags.

    Args:
        path: the file; None = none.
        environment: usually `os.environ`; variables without the prefix are ignored.
        flags: key → value as text, as given on the command line.
        edges: sections of the edges (`edges.configuration`).

    Raises:
        ConfigError: unknown key, bad value or a bad combination; the text names key and place.
    """
    builder = _Builder(Keys(edges))
    if path is not None:
        file = Path(path)
        try:
            if file.stat().st_size > FILE_SIZE_MAX:
                raise ConfigError(f"{file}: larger than {FILE_SIZE_MAX} bytes")
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from None
        builder.source(parse_text(text, str(file)))
    builder.source(_environment_pairs(environment or {}, builder.keys.by_name))
    builder.source((name, value, "flag") for name, value in (flags or {}).items())
    return builder.build("" if path is None else str(Path(path).absolute()))
