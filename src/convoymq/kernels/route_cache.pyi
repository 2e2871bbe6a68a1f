"""Route cache: a channel's memory of where messages go (compiled only)."""

class RouteCacheVersion:
    """A number that moves whenever remembered routes and permissions have to be forgotten."""

    value: int
    def bump(self) -> None:
        """Forgets what was remembered."""

class RouteCount:
    """Messages that went one way, from an exchange to the same queues."""

    messages: int
