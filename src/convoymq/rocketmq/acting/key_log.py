"""Keys of messages that escaped to this broker, as its log holds them.

The log is the truth: `catch_up` reads what it has got since, on slaves too. The file
`config/escapeKeys.json` only says how far that was done.
"""

from __future__ import annotations

import msgspec

from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Generations, Key, KeyTable, key_of
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.store.store import MessageStore

READ_BYTES = 4 << 20
FIRST_READ_BYTES_MAX = 4 << 30
"""Of a log without the file: repeats come soon after the first."""
_MARK = f"{KEY_PROPERTY}\x01".encode()


class _Stored(msgspec.Struct, rename="camel"):
    scanned: int = 0
    generations: dict[str, int] = msgspec.field(default_factory=dict)
    brokers: dict[str, dict[str, list[tuple[int, int]]]] = msgspec.field(default_factory=dict)


class KeyLog:
    """See the module text.

    Args:
        own: this broker's name. Keys of its own records are its special services' business.
    """

    def __init__(self, own: str, store: MessageStore, file: ConfigFile) -> None:
        self._own = own
        self._store = store
        self._file = file
        found = file.read(_Stored) or _Stored(max(0, store.max_offset - FIRST_READ_BYTES_MAX))
        self._scanned = found.scanned
        self._written = found.scanned, found.generations
        self.generations = Generations(found.generations)
        self._table = KeyTable()
        for broker, table in found.brokers.items():
            self._table.merge(broker, table)

    def has(self, key: Key) -> bool:
        """Returns whether a message with this key is in the log."""
        self.catch_up()
        return self._table.has(key)

    def of(self, broker: str) -> dict[str, list[tuple[int, int]]]:
        """Returns the keys of a broker's records, as `KeyTable.of`."""
        self.catch_up()
        return self._table.of(broker)

    def catch_up(self) -> None:
        """Enters the keys of what the log has got."""
        end = self._store.dispatched
        if end < self._scanned:
            # The end was cut off: nothing of it was confirmed to anybody.
            self._scanned = end
        self._scanned = max(self._scanned, self._store.min_offset)
        while self._scanned < end:
            block = bytes(self._store.read_raw(self._scanned, min(READ_BYTES, end - self._scanned)))
            used = self._take(block)
            if not used:
                return
            self._scanned += used

    def _take(self, block: bytes) -> int:
        """Enters the keys of the whole records of a block; returns their length."""
        at, mark = 0, block.find(_MARK)
        while at + 4 <= len(block):
            size = int.from_bytes(block[at : at + 4], "big")
            if not size or at + size > len(block):
                break
            if at <= mark < at + size:
                self._enter(self._scanned + at)
                mark = block.find(_MARK, at + size)
            at += size
        if not at and len(block) >= 4:
            # One record that is longer than a block.
            self._enter(self._scanned)
            at = int.from_bytes(block[:4], "big")
        return at

    def _enter(self, physical: int) -> None:
        message = self._store.message_at(physical)
        key = key_of(message.properties.get(KEY_PROPERTY, "")) if message is not None else None
        if key is not None and key.broker != self._own:
            self._table.add(key)

    def persist(self) -> None:
        """Writes the file if something has changed. Raises StorageFault."""
        self.catch_up()
        state = self._scanned, dict(self.generations.known)
        if state != self._written:
            brokers = {name: self._table.of(name) for name in self._table.brokers()}
            self._file.write(_Stored(*state, brokers))
            self._written = state
