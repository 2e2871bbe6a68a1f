"""Goes through the commands of an entry."""

class CommandWalk:
    """Goes through the commands of an entry, without an object for each.

    Raises ValueError at once when anything does not fit; never reads outside `data`."""

    def __init__(self, data: bytes) -> None: ...
    type: int
    flags: int
    session: int
    seq: int
    count: int
    arg: int
    offset: int
    """Of the command in the entry."""
    length: int
    def next(self) -> bool:
        """Goes to the next command; False behind the last one."""
