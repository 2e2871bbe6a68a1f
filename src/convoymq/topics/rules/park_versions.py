"""Versions of what a member knows of its partition's parked keys: which answer is the newer one.

A partition counts the changes of a group's parked keys, and says the count in every answer. A view
has all keys; the answer to a command has the command's key only. Answers come in any order: a view
that was made before a key changed may arrive behind the answer to that change. It is news for all
other keys then, and must not bring back what is done: that would be handed out again, behind later
messages of its key.

Source: ordered topics, section 9.3.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class ParkVersions:
    """Versions of what is known of one partition."""

    known: int = -1
    """Every change up to it is known, of all keys."""
    ahead: dict[bytes, int] = field(default_factory=dict)
    """Keys of which an answer has said more, and its version."""

    def take_answer(self, key: bytes, version: int, *, changed: bool) -> bool:
        """Returns whether an answer to a command is news of its key. `changed`: the command has
        made the step to this version, so it is known of all keys when the one before it is."""
        if version < max(self.known, self.ahead.get(key, self.known)):
            return False
        if changed and version == self.known + 1:
            self.known = version
            self.ahead.pop(key, None)
        elif version > self.known:
            self.ahead[key] = version
        return True

    def take_view(self, version: int) -> Collection[bytes] | None:
        """Returns the keys of which more is known than a view says; None when it says nothing new
        of any key."""
        if version < self.known:
            return None
        self.known = version
        self.ahead = {key: of_key for key, of_key in self.ahead.items() if of_key > version}
        return self.ahead.keys()
