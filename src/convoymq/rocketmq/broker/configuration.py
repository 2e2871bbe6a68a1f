"""The configuration of a broker: one file, whose keys are sections of its parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar, cast

from convoymq.model.config.keys import Section
from convoymq.replication.group.types import GroupSettings
from convoymq.rocketmq.acting.settings import ActingSettings
from convoymq.rocketmq.broker.settings import UNSERVED, BrokerSettings
from convoymq.rocketmq.broker.tracing import TraceSettings
from convoymq.rocketmq.settings import build_all, pairs_of, read_pairs
from convoymq.rocketmq.special.settings import SpecialSettings
from convoymq.rocketmq.store.settings import StoreSettings

S = TypeVar("S", bound=Section)

SECTIONS: tuple[type[Section], ...] = (
    BrokerSettings, StoreSettings, GroupSettings, ActingSettings, SpecialSettings,
    TraceSettings,
)  # fmt: skip
"""Every part adds its own."""


class Configuration:
    """All sections. `passed_over`: keys of RocketMQ's without a meaning here."""

    def __init__(self, pairs: Iterable[tuple[str, str, str]]) -> None:
        self._sections, self.passed_over = build_all(SECTIONS, pairs, UNSERVED)

    @classmethod
    def load(cls, path: str | Path | None, flags: Iterable[str]) -> Configuration:
        """Returns the configuration: defaults < file < `key=value` flags. Raises ConfigError."""
        return cls(read_pairs(path, flags))

    def section(self, kind: type[S]) -> S:
        """Returns a section."""
        return cast(S, self._sections[kind])

    def pairs(self, *, shown: bool = False) -> list[tuple[str, str, str]]:
        """Returns all keys with their values, each once; `shown`: without secrets."""
        return pairs_of(self._sections.values(), shown=shown)

    def changed(self, pairs: Iterable[tuple[str, str, str]]) -> Configuration:
        """Returns the configuration with other values. Raises ConfigError."""
        return Configuration([*self.pairs(), *pairs])
