"""The checkpoint of a pipeline: its id, and what Spark noted of its batches."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from pathlib import Path

from convoymq.spark.errors import SourceError
from convoymq.spark.pipelines.manifest import sync_directory, sync_files

APP_FILE = "convoymq-app"


class CheckpointError(SourceError):
    """The checkpoint has other messages for a batch than those that were archived as that batch."""


def app_id(checkpoint: Path) -> str:
    """Returns the pipeline's id: as old as its checkpoint."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    path = checkpoint / APP_FILE
    if not path.exists():
        draft = checkpoint / f".{APP_FILE}-{uuid.uuid4().hex}"
        draft.write_text(uuid.uuid4().hex)
        sync_files([draft])
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        sync_directory(checkpoint)
    return path.read_text().strip()


def offsets_of(checkpoint: Path, batch_id: int) -> str:
    """Returns where a batch ends by the checkpoint: canonical JSON. Raises SourceError."""
    try:
        return (checkpoint / "offsets" / str(batch_id)).read_text().splitlines()[2]
    except (FileNotFoundError, IndexError) as error:
        raise SourceError(
            f"{checkpoint}: the offsets of batch {batch_id} can't be read: {error!r}"
        ) from error


def plan_id(offsets: str) -> str:
    """Names the offsets of a batch."""
    return hashlib.sha256(offsets.encode()).hexdigest()[:16]
