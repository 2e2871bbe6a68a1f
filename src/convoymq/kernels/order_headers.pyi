"""Headers by which deliveries from an ordered topic say where their messages lie."""

PLACE_BITS: int
"""The lower bits of a message id: how far behind the base of its place the message lies."""

class Place:
    """A partition from which a consumer gets messages; those from offset `base` on."""

    pid: int
    base: int
    version: int
    late: bool
    """The group went on without the partition before: deliveries say so."""
    def __init__(self, pid: int, base: int, version: int, logical: int, seed: int) -> None:
        """
        Args:
            version: the route version that created the partition.
            logical, seed: of the topic, for the hash of order keys.
        """
