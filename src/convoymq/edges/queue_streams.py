"""Command streams into queues, which channels and sessions of all versions of AMQP have."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from convoymq.edges.stream_spans import StreamSpans
from convoymq.queues.interface import ClientEvents, Queue, QueueClient

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker


class StreamOwner(Protocol):
    """The connection of a channel or session."""

    id: int
    vhost: str


class QueueStreams(ClientEvents):
    """Part of a channel or session: streams into the queues that it uses, of which idle ones are
    closed when there are many.

    Args:
        most: streams before idle ones are closed.
    """

    VERSION: ClassVar[str]
    """Of AMQP."""

    def __init__(self, broker: Broker, connection: StreamOwner, most: int) -> None:
        self.queue_session = broker.new_session()
        """Number by which queues know the streams that are opened now."""
        self.clients: dict[Queue, QueueClient] = {}
        self.spans = StreamSpans.of(broker.spans, connection.vhost, f"amqp {self.VERSION}")
        """Gets sampled messages; None: nobody does."""
        self._broker = broker
        self._owner = connection
        self._most = most
        self._idle_seqs: dict[Queue, int] = {}

    @abstractmethod
    def clients_in_use(self) -> set[QueueClient]:
        """Returns streams that are needed even when nothing goes through them."""

    def on_idle(self, client: QueueClient) -> None:
        """A stream is closed because it is idle."""

    def find_queue(self, name: str) -> Queue:
        """Returns a queue that this connection may use. Raises BrokerError."""
        queue: Queue = self._broker.queue_admin.find_queue(self._owner.vhost, name, self._owner.id)
        return queue

    def client_of(self, queue: Queue) -> QueueClient:
        """Returns the stream into a queue; opens it if need be."""
        client = self.clients.get(queue)
        if client is None:
            if len(self.clients) >= self._most:
                self._close_idle_clients()
            client = self.clients[queue] = queue.client(self.queue_session, self)
        return client

    def forget_client(self, client: QueueClient) -> None:
        """Another queue has taken the place of a stream's."""
        self.clients.pop(client.queue, None)
        self._idle_seqs.pop(client.queue, None)

    def close_clients(self) -> None:
        """Closes all streams."""
        if self.spans is not None:
            self.spans.close()
        clients, self.clients = list(self.clients.values()), {}
        for client in clients:
            client.close()

    def _close_idle_clients(self) -> None:
        """Closes streams that nothing has gone through since this was last called."""
        used = self.clients_in_use()
        seen, self._idle_seqs = self._idle_seqs, {}
        for queue, client in list(self.clients.items()):
            if client in used or client.has_pending:
                continue
            if seen.get(queue) == client.target.seq:
                self.on_idle(client)
                del self.clients[queue]
                client.close()
                # A later stream into that queue must not be taken for the closed one.
                self.queue_session = self._broker.new_session()
            else:
                self._idle_seqs[queue] = client.target.seq
