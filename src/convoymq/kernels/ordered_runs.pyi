"""Records of an ordered topic: their order keys, the hash of these, and the partitions they go to.

`PublishTarget` is the base of `OrderedTarget`: channels publish to it as to that of any queue.
"""

from collections.abc import Sequence
from typing import Protocol

from convoymq.kernels.batch import PendingCommand, PublishTarget

SLOT_NEW: int
"""Nobody has looked at the partition: the first record asks the owner of the target."""
SLOT_WAIT: int
"""Records that come wait in the slot."""
SLOT_SEND: int
"""Records that come go to the sender."""

UNTAGGED: int
"""Records without a tag get tags from here on, so that each has an outcome."""

class Slot:
    """Place of one partition in an `OrderedTarget`."""

    state: int
    sender: PublishTarget | None
    """The target of the partition's client; there is one in the state SEND."""
    waiter: PublishTarget | None
    sent: int
    """Records that the sender got so far."""
    waiting_bytes: int
    owner: object
    def __init__(self, owner: object = None) -> None: ...

class OrderedOwner(Protocol):
    """Owner of an `OrderedTarget`, called while a record is placed."""

    def open_slot(self, slot: Slot) -> None:
        """The first record for a slot in state NEW has come: gives it another state."""

    def check_flow(self) -> None:
        """More bytes wait than may; called once until `OrderedTarget.over` is reset."""

class OrderedTarget(PublishTarget):
    """Takes a channel's publishes to a topic, and places each in the target of its partition.

    Attributes of its base: `pending_bytes` are those that wait here, `pending_bytes_max` the bound
    of them; `seq` rises with every record; nothing is ever in `pending`.
    """

    over: bool
    keyless_lp: int
    """Place of messages without a key: -1 as the empty key has, or to the range of this logical
    partition, or, with `spreads_keyless`, to one range after the other."""
    spreads_keyless: bool
    def __init__(self, logical: int, seed: int, owner: OrderedOwner) -> None: ...
    def set_ranges(self, starts: Sequence[int], slots: Sequence[Slot]) -> None:
        """Range i begins at logical partition starts[i] and belongs to slots[i]. Raises
        ValueError."""
    def slot_of(self, key: bytes) -> Slot:
        """Returns the slot of the range that an order key belongs to."""
    def hold(self, size: int) -> int:
        """So many bytes wait here, too; below 0: so many less."""
    def take_waiting(self, slot: Slot) -> list[PendingCommand]:
        """Returns the sealed commands of what waits for the slot's partition, in order, and keeps
        them no more."""
    def append(self, command: PendingCommand) -> None:
        """Places the records of a sealed ENQUEUE command, in order, with the tags that they have.
        Raises ValueError: it is damaged, or not every record has a tag."""

def order_hash(key: bytes, seed: int = 0) -> int:
    """MurmurHash3 x86 32, as `topics.rules.hashing.murmur3`."""

def order_key(record: bytes) -> bytes:
    """Returns the order key of a record; b"" when it has none, or is damaged."""

def key_hashes(block: bytes, command: int, first: int, count: int) -> bytes:
    """Returns 64 bits of hash, little-endian, of the order key of each of `count` records from
    `first` on; see `topics.rules.hashing.key_hashes`. Raises ValueError when the command does not
    have them."""

def find_misplaced(
    body: bytes,
    table: int,
    lps: Sequence[int],
    counts: Sequence[int],
    logical: int,
    seed: int = 0,
    keyless: bool = False,
) -> tuple[int, int] | None:
    """Looks for the first record of an ENQUEUE whose order key does not belong to the logical
    partition of its run: run i has counts[i] records of lps[i].

    Args:
        body: the command without its head.
        table: where its offsets lie, in the command.
        keyless: records without a key are right in any run.

    Returns:
        (record, logical partition that its key belongs to; -1: it has no key), or None.
    Raises:
        ValueError: records and runs do not fit.
    """

def count_tags(tags: Sequence[int]) -> int:
    """Returns how many tags the ranges (first, last, first, last, …) have."""

def tagged(tags: Sequence[int]) -> Sequence[int]:
    """Returns the ranges (first, last, …) of tags that a channel gave: without those of records
    that nobody waits for."""
