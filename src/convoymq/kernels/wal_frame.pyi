"""Frame around the records of a WAL batch: layout in docs/formats/storage.md."""

def wal_batch_frame(
    magic: bytes,
    generation: int,
    sequence: int,
    position: int,
    length: int,
    sizes: list[int],
    records: list[bytes],
    recent: bytearray,
    covered_from: int,
) -> tuple[bytes, bytes]:
    """Encodes the frame around the records of a WAL batch: its header and its directory. `sizes`:
    group and size in words of every record, in turn. `recent`: two maps of 64 bytes of groups in
    the batches before; this one's are added to the second. Raises ValueError."""
