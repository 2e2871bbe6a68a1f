"""The hot loops of `convoy perf` by AMQP 1.0."""

from convoymq.kernels.perfclient import Consumer, Publisher

class Publisher10(Publisher):
    def start(
        self,
        fd: int,
        template: bytes,
        stamp_at: int,
        number_at: int,
        distinct: int,
        places: tuple[int, int, int, int],
    ) -> None:
        """Starts on a fresh link. `places`: of delivery-id and -tag; transfers of a message; the
        session's window."""

class Consumer10(Consumer):
    def start(self, fd: int, window: int, modified: bool = False) -> None:
        """Starts on a fresh link with credit for so many messages at a time. `modified`: they are
        given back as failed."""
