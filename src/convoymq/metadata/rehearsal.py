"""A copy of the tree, in which commands are carried out that nobody proposes.

It says what many commands would be answered one after another, before the first of them goes into
the log. What others change meanwhile is not seen.
"""

from __future__ import annotations

from convoymq.metadata.commands import Command
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.validation import validated


class Rehearsal:
    """See the module text. It may be used in a thread of its own."""

    def __init__(self, snapshot: bytes) -> None:
        self.tree = MetadataMachine()
        self.tree.restore(snapshot)

    def carry_out(self, command: Command) -> object:
        """Changes the copy and returns the reply. Raises BrokerError."""
        reply = self.tree.carry_out(validated(command, self.tree), 0)
        self.tree.changes.clear()
        return reply
