"""Links with distribution-mode copy: the ready messages of a queue, which stay where they are.

The link gets each message that is ready when it comes to it, once, in the order of delivery. At the
end of the queue it is over: credit that is left is drained, and nothing more comes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.amqp10.errors import Scope, fault_of
from convoymq.edges.amqp10.outgoing import Direct
from convoymq.edges.amqp10.performatives import Attach, Flow, Source
from convoymq.edges.amqp10.states import LinkState
from convoymq.kernels.batch import record
from convoymq.kernels.content import split_record
from convoymq.messages.amqp10.message import transfer_of
from convoymq.messages.record import read_names
from convoymq.model.errors import BrokerError, StorageFault
from convoymq.queues.interface import Queue

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session
    from convoymq.queues.reservation_reads import ReservedRun

log = structlog.get_logger()

COPY = "copy"
"""Distribution mode of sources."""
PAGE_BYTES = 1 << 20
"""Of messages that are read at once; one always fits."""


class Browser(Direct):
    """A link that looks at a queue."""

    def __init__(self, session: Session, attach: Attach, queue: Queue) -> None:
        source = attach.source
        assert isinstance(source, Source)
        shown = replace(source, filter=None, default_outcome=None, outcomes=(), capabilities=())
        super().__init__(session, replace(attach, source=shown))
        self._queue = queue
        self._cursor: list[int] | None = None
        """Place behind the messages that were read; None: nothing was, or the end was reached."""
        self._at_end = False
        self._reading = False
        self._drains = False
        self._echoes = False

    def check_access(self) -> None:
        """Raises AccessRefused: the user may not look at the queue any more."""
        self.session.permissions.check("read", "queue", self._queue.name)

    def on_flow(self, flow: Flow) -> None:
        """Takes the client's credit."""
        self.take_credit(flow)
        self._drains = flow.drain
        self._echoes |= flow.echo
        self._go_on()

    def count_sent(self, count: int) -> None:
        """Messages were sent."""
        super().count_sent(count)
        if not self.waiting:
            self._go_on()

    def _go_on(self) -> None:
        """Reads a page when the last one is sent, or answers the client's flow."""
        if self._reading or self.state is not LinkState.ATTACHED:
            return
        if not self._at_end and self.credit > self.waiting:
            if not self.waiting:
                self._reading = True
                self.session.connection.shell.spawn(self._read())
            return
        if self._drains:
            self._drains = self._echoes = False
            self.behind(self.send_drained)
        elif self._echoes:
            self._echoes = False
            self.behind(self.send_echo)
        self.session.pump()

    async def _read(self) -> None:
        session = self.session
        rows = min(self.credit, session.settings.queue_credit_large)
        try:
            self._cursor, runs = await self._queue.browse(self._cursor, rows, PAGE_BYTES)
            self._at_end = self._cursor is None
            for run in runs:
                self._push(run)
        except BrokerError as error:
            self.fail(fault_of(error, Scope.LINK))
        except Exception:
            log.exception("amqp.method_failed", connection=session.connection.name, method="flow")
            session.fail(fault_of(BrokerError("internal error"), Scope.SESSION))
        finally:
            self._reading = False
        if not self.waiting:
            self._go_on()

    def _push(self, run: ReservedRun) -> None:
        """Sends the messages of a run. Raises StorageFault."""
        block, command, first, messages = run[:4]
        for number in range(first, first + messages):
            try:
                names, content = split_record(record(block, command, number))
                message = transfer_of(
                    *read_names(names), content, acquired_count=run[6], failed_count=run[7]
                )
            except ValueError as error:
                raise StorageFault(f"stored message is damaged: {error}") from error
            self.push(message)
