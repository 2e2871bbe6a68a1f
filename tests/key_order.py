"""Referee of order per key: holds what consumers got against the order of publishing.

Message `number` has the key `number % keys` and is the `number // keys`-th one of it, so a body
that is a number says both. The first delivery of each message of a key must come after that of the
message before it. A message may come again, with the place in the topic that it had, or another one
if its publisher sent it twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Delivery(NamedTuple):
    """One delivery, in the order in which consumers got them."""

    number: int
    token: str = ""
    """Its order token; "" where there are none."""


@dataclass(slots=True)
class _Key:
    reached: int = -1
    token: str = ""


@dataclass(slots=True)
class KeyOrder:
    """What deliveries violate.

    Args:
        keys: how many keys there are.
        sent_again: messages that their publisher has sent more than once.
    """

    keys: int
    sent_again: Collection[int] = ()
    violations: list[str] = field(default_factory=list)
    tokens: dict[int, set[str]] = field(default_factory=dict)
    """By message."""
    _by_key: dict[int, _Key] = field(default_factory=dict)

    def take(self, deliveries: Iterable[Delivery]) -> None:
        """Looks at further deliveries."""
        for each in deliveries:
            self._take(each)

    def _take(self, delivery: Delivery) -> None:
        number, token = delivery
        key = self._by_key.setdefault(number % self.keys, _Key())
        place = number // self.keys
        known = self.tokens.get(number)
        if known is not None:
            if token not in known and number not in self.sent_again:
                self.violations.append(f"{number} is stored as {min(known)} and as {token}")
            known.add(token)
            return
        self.tokens[number] = {token}
        if place != key.reached + 1:
            self.violations.append(f"key {number % self.keys}: {place} came after {key.reached}")
        elif token and token <= key.token:
            self.violations.append(f"{number} has the token {token}, not behind {key.token}")
        key.reached = max(key.reached, place)
        key.token = max(key.token, token)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Returns those that nobody got."""
        return sorted(number for number in numbers if number not in self.tokens)
