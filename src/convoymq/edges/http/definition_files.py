"""Definitions of files on a node's disk: imported when it starts, and when they change.

Several nodes may have the same files: an import creates what is missing, and may be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from pathlib import Path

import structlog

from convoymq.broker.facade import Broker
from convoymq.edges.http import definitions
from convoymq.edges.http.bodies import parse
from convoymq.edges.http.config import ManagementConfig
from convoymq.edges.http.resources import INTERNAL_USER
from convoymq.model.errors import BrokerError, StorageFault
from convoymq.model.replaced_files import replace_file

log = structlog.get_logger()

FILE_BYTES_MAX = 100 << 20
SHOWN_MAX = 20
"""Parts that a line of the log names."""
RETRY_S = 1.0
"""Pause after an import for which the cluster was not ready."""


class DefinitionFiles:
    """See the module text. One per node.

    Args:
        memory: file that keeps what was imported, for `definitions.skip_if_unchanged`.
    """

    def __init__(self, broker: Broker, config: ManagementConfig, memory: Path) -> None:
        self._broker = broker
        self._path = Path(config.definitions_path)
        self._skips_parts = config.definitions_skip_unsupported
        self._skips_known = config.definitions_skip_if_unchanged
        self._interval_s = config.definitions_interval_s
        self._memory = memory
        self._digest = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to import."""
        if self._skips_known:
            with suppress(OSError):
                self._digest = self._memory.read_text("ascii", "replace")
        self._task = asyncio.ensure_future(self._follow())

    async def stop(self) -> None:
        """Ends an import under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        told = ""
        while True:
            pause_s = float(self._interval_s)
            try:
                await self._look()
                told = ""
            except BrokerError as error:
                if error.text != told:
                    told = error.text
                    log.error("definitions.not_imported", path=str(self._path), reason=told)
                pause_s = min(pause_s, RETRY_S) or RETRY_S
            if not pause_s:
                return
            await asyncio.sleep(pause_s)

    async def _look(self) -> None:
        """Imports the files unless they are what was imported last. Raises BrokerError."""
        files = await asyncio.to_thread(_read, self._path)
        digest = hashlib.sha256()
        for name, content in files:
            digest.update(f"{name} {len(content)}\n".encode() + content)
        if digest.hexdigest() == self._digest:
            return
        for name, content in files:
            await self._import(name, content)
        self._digest = digest.hexdigest()
        try:
            await asyncio.to_thread(replace_file, self._memory, self._digest.encode())
        except OSError as error:
            raise StorageFault(f"{self._memory}: {error.strerror}") from None

    async def _import(self, name: str, content: bytes) -> None:
        try:
            document = parse(content.decode())
        except (BrokerError, UnicodeDecodeError) as error:
            text = error.text if isinstance(error, BrokerError) else "the file is not UTF-8"
            raise StorageFault(f"{name}: {text}") from None
        if not isinstance(document, dict):
            raise StorageFault(f"{name}: the file is not a JSON object")
        try:
            left_out = await definitions.load(
                self._broker, document, user=INTERNAL_USER, skips=self._skips_parts
            )
        except BrokerError as error:
            raise StorageFault(f"{name}: {error.text}") from None
        log.info("definitions.imported", file=name, left_out=left_out[:SHOWN_MAX])


def _read(path: Path) -> list[tuple[str, bytes]]:
    """Returns (name, content) of a file, or of the files of a directory. Raises StorageFault."""
    try:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        found: list[tuple[str, bytes]] = []
        for file in files:
            if file.stat().st_size > FILE_BYTES_MAX:
                raise StorageFault(f"{file.name} has more than {FILE_BYTES_MAX} bytes")
            found.append((file.name, file.read_bytes()))
        return found
    except OSError as error:
        raise StorageFault(f"{error.filename or path}: {error.strerror}") from None
