"""Log entries: layout in docs/formats/entries-and-frames.md."""

HEADER_SIZE: int  # 48

ENTRY_NOOP: int
ENTRY_COMMANDS: int
ENTRY_MEMBERSHIP: int
ENTRY_VERSION: int

class Entry:
    """One log entry: its bytes and, unpacked, its header."""

    data: bytes
    index: int
    term: int
    time_ms: int
    group: int
    kind: int
    size: int
    def __init__(self, data: bytes) -> None:
        """Unpacks the header. Raises ValueError when length or CRC32C do not fit, and
        UnsupportedVersion for another format."""

def make_entry(group: int, index: int, term: int, time_ms: int, kind: int, body: bytes) -> Entry:
    """Returns an entry of any kind; `body` is padded to a multiple of 8."""

def encode_version(version: int) -> bytes:
    """Returns the body of a machine version entry."""

def decode_version(data: bytes) -> int:
    """Returns the version in a machine version entry (`data` = the whole entry). Raises
    ValueError."""

def split_entries(data: bytes, offset: int) -> list[Entry]:
    """Returns the entries of an APPEND body, each verified and copied. Raises ValueError, and
    UnsupportedVersion for an entry of another format."""
