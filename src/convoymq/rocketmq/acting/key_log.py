"""Keys of messages that escaped to this broker, as its log holds them.

The log is the truth: `catch_up` reads its new records, on slaves too. The file
`config/escapeKeys.json` only says how far that was done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from convoymq.model.errors import StorageFault
from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Generations, Key, KeyTable, key_of
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.store.store import MessageStore

READ_BYTES = 4 << 20
FIRST_READ_BYTES_MAX = 4 << 30
"""Of a log without the file: repeats come soon after the first."""
_MARK = f"{KEY_PROPERTY}\x01".encode()


HOLDER_MS = 60_000
"""So long a broker that no name server lists any more is waited for."""
SEEN_STEP_MS = 5_000


class Holder(msgspec.Struct, rename="camel", frozen=True):
    """A broker that may hold keys of this one's records. `seen_ms`: wall clock, when a name server
    listed it last, to some seconds."""

    seen_ms: int
    addresses: dict[int, str]


class _Stored(msgspec.Struct, rename="camel"):
    scanned: int = 0
    generations: dict[str, int] = msgspec.field(default_factory=dict)
    holders: dict[str, Holder] = msgspec.field(default_factory=dict)
    brokers: dict[str, dict[str, list[tuple[int, int]]]] = msgspec.field(default_factory=dict)
    targets: list[str] = msgspec.field(default_factory=list)
    is_complete: bool = False


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
        self._holders = found.holders
        self.generations = Generations(found.generations)
        self.targets = dict.fromkeys(found.targets)
        """Brokers that this replica has sent to, or begun to."""
        self.is_complete = found.is_complete
        """True once no earlier life, of which there is no file, can have sent to others."""
        self._written = self._state()
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
        """Enters the keys of new records."""
        end = self._store.dispatched
        if end < self._scanned:
            # The end was cut off: nothing of it was confirmed to anybody.
            self._scanned = end
        self._scanned = max(self._scanned, self._store.min_offset)
        for key in keys_between(self._store, self._scanned, end):
            if key.broker != self._own:
                self._table.add(key)
        self._scanned = max(self._scanned, end)

    def on_listed(self, brokers: Mapping[str, dict[int, str]], now_ms: int) -> None:
        """Name servers list these brokers of the cluster."""
        for name, addresses in brokers.items():
            known = self._holders.get(name)
            is_fresh = (
                known is not None and known.addresses == addresses
                and 0 <= now_ms - known.seen_ms < SEEN_STEP_MS
            )  # fmt: skip
            if name != self._own and not is_fresh:
                self._holders[name] = Holder(now_ms, addresses)
        for name, known in list(self._holders.items()):
            if name not in brokers and not 0 <= now_ms - known.seen_ms < HOLDER_MS:
                del self._holders[name]

    def holders(self) -> Mapping[str, dict[int, str]]:
        """Returns the brokers that may hold keys: those that are listed, or were not long ago."""
        return {name: known.addresses for name, known in self._holders.items()}

    def begin(self, target: str, generation: int) -> bool:
        """Notes a broker before the first message leaves for it; returns False when another replica
        has asked for the list meanwhile, with a later generation. Raises StorageFault."""
        if target not in self.targets:
            if not self.generations.takes(self._own, generation):
                return False
            self.targets[target] = None
            try:
                self.persist()
            except StorageFault:
                del self.targets[target]
                raise
        return True

    def lasting_targets(self) -> list[str]:
        """Returns the targets that are listed, or were not long ago."""
        return [name for name in self.targets if name in self._holders]

    def complete(self, targets: Iterable[str]) -> None:
        """All brokers were asked, and these have messages of this one. Raises StorageFault."""
        self.targets.update(dict.fromkeys(targets))
        self.is_complete = True
        self.persist()

    def persist(self) -> None:
        """Writes the file if something has changed. Raises StorageFault."""
        self.catch_up()
        state = self._state()
        if state != self._written:
            scanned, generations, holders, targets, is_complete = state
            brokers = {name: self._table.of(name) for name in self._table.brokers()}
            self._file.write(_Stored(scanned, generations, holders, brokers, targets, is_complete))
            self._written = state

    def _state(self) -> tuple[int, dict[str, int], dict[str, Holder], list[str], bool]:
        generations = dict(self.generations.known)
        return self._scanned, generations, dict(self._holders), [*self.targets], self.is_complete


def keys_between(store: MessageStore, begin: int, end: int) -> Iterator[Key]:
    """Yields the keys of records between two physical offsets."""
    at = begin
    while at < end:
        block = bytes(store.read_raw(at, min(READ_BYTES, end - at)))
        used = 0
        for size, has_key in _records(block):
            if has_key:
                yield from _key_at(store, at + used)
            used += size
        if not used:
            # One record that is longer than what was read at once, or a blank.
            yield from _key_at(store, at)
            used = int.from_bytes(block[:4], "big")
        if not used:
            return
        at += used


def _records(block: bytes) -> Iterator[tuple[int, bool]]:
    """Yields the size of each whole record of a block, and whether it may have a key."""
    mark = block.find(_MARK)
    at = 0
    while at + 4 <= len(block):
        size = int.from_bytes(block[at : at + 4], "big")
        if not size or at + size > len(block):
            return
        has_key = at <= mark < at + size
        if has_key:
            mark = block.find(_MARK, at + size)
        yield size, has_key
        at += size


def _key_at(store: MessageStore, physical: int) -> Iterator[Key]:
    message = store.message_at(physical)
    key = key_of(message.properties.get(KEY_PROPERTY, "")) if message is not None else None
    if key is not None:
        yield key
