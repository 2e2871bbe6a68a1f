"""Columns and bounds of a columnar frame (compiled only): docs/formats/columnar-protocol.md."""

OFFSET: int
TIMESTAMP: int
KEY: int
VALUE: int
HEADERS: int
EXCHANGE: int
ROUTING_KEY: int
PROPERTIES: int
DELIVERY_COUNT: int
REDELIVERED: int

FRAME_HEADER_SIZE: int  # 64
ROWS_MAX: int  # of one frame, 4,194,304
BODY_MAX: int  # bytes of one frame's decompressed body, 1 GiB
COMPRESSIONS: tuple[str, ...]  # "" (none), "zstd", "lz4"

def raw_bytearray(size: int) -> bytearray:
    """Returns a bytearray whose bytes are whatever was in memory: for who writes every one of them
    before anybody reads it. Raises ValueError for a size below 0."""
