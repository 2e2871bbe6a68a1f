"""Keys of roles: each says something that its process looks at."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import convoymq
from convoymq.model.config.keys import Section
from convoymq.rocketmq.bridge.settings import BridgeSettings
from convoymq.rocketmq.broker.configuration import SECTIONS
from convoymq.rocketmq.namesrv.settings import NamesrvSettings

SOURCE = "\n".join(path.read_text() for path in Path(convoymq.__path__[0]).rglob("*.py"))


@pytest.mark.parametrize("kind", [*SECTIONS, NamesrvSettings, BridgeSettings])
def test_a_key_that_is_taken_is_used(kind: type[Section]) -> None:
    unused = [field.name for field in fields(kind) if not re.search(rf"\.{field.name}\b", SOURCE)]
    assert unused == []
