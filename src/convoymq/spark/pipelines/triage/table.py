"""The Delta table of a triage: messages with their deaths and decisions, and what is carried out.

A batch is one commit with an app transaction, as in an archive (`delta_sink`). That a batch was
carried out is another transaction of the same table.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

from convoymq.spark.pipelines.delta_sink import Commit, DeltaSink
from convoymq.spark.pipelines.manifest import sync_directory, sync_files
from convoymq.spark.pipelines.triage.rules import Rules

if TYPE_CHECKING:
    from deltalake import DeltaTable

RULES_DIRECTORY = "_rules"


class TriageTable(DeltaSink):
    """See the module text."""

    @property
    def _executed(self) -> str:
        return f"{self.app}/executed"

    def executed(self) -> int:
        """Returns the last batch that was carried out; -1 = none."""
        table = self._table()
        version = None if table is None else table.transaction_version(self._executed)
        return -1 if version is None else int(version)

    def mark_executed(self, batch_id: int) -> None:
        """Notes that a batch was carried out. Raises SupersededError."""

        def change(table: DeltaTable) -> Commit:
            self._check_run(table)
            return Commit((), {self._executed: batch_id}, {})

        self._transact(change)

    def keep_rules(self, rules: Rules) -> None:
        """Puts the text of a rule file beside the table, under its hash."""
        place = self.root / RULES_DIRECTORY / f"{rules.hash}.toml"
        if place.exists():
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
        draft.write_text(rules.text, "utf-8")
        sync_files([draft])
        os.replace(draft, place)
        sync_directory(place.parent)
