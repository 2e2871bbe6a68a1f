"""Deliveries of a link that its client does not settle in time: they return to the queue, and the
client is told `released`. The link goes on, as in RabbitMQ 4.3.

The time-out is the link's property `rabbitmq:consumer-timeout` (ms), else the queue's; without
either there is none. Time is that of scans, which note the next delivery id: a delivery is late
when it was made two scans ago, half a time-out each, and never too early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from convoymq.edges.amqp10.outcomes import ranges_of
from convoymq.edges.amqp10.performatives import Attach, Disposition, Released
from convoymq.edges.amqp10.serial import WINDOW_MAX
from convoymq.messages.amqp10.values import UInt
from convoymq.queues.interface import Queue

if TYPE_CHECKING:
    from convoymq.edges.amqp10.sending import Sender

log = structlog.get_logger()

TIMEOUT = "rabbitmq:consumer-timeout"


def timeout_ms_of(attach: Attach, queue: Queue) -> int:
    """Returns how long deliveries of a consumer may be unsettled; 0: for as long as it takes."""
    asked = (attach.properties or {}).get(TIMEOUT)
    if not queue.features.times_consumers:
        return 0
    # Of another type, it is none.
    return int(asked) if isinstance(asked, UInt) else queue.consumer_timeout_ms or 0


class SettleTimeout:
    """Time-out of one link's deliveries."""

    def __init__(self, link: Sender, timeout_ms: int) -> None:
        self._link = link
        self._timeout_ms = timeout_ms
        self._before = self._last = link.session.next_delivery_id
        """Next delivery ids at the two last scans."""
        self._wait()

    def stop(self) -> None:
        """The link ends."""
        self._timer.cancel()

    def _wait(self) -> None:
        shell = self._link.session.connection.shell
        self._timer = shell.call_later(self._timeout_ms / 2000, self._scan)

    def _scan(self) -> None:
        link, session = self._link, self._link.session
        late = session.unsettled.take_before(self._before, link)
        self._before, self._last = self._last, session.next_delivery_id
        self._wait()
        if not late:
            return
        log.warning(
            "amqp.acknowledgement_late",
            vhost=link.queue.vhost,
            queue=link.queue.name,
            consumer_tag=str(link.handle),
            connection=session.connection.name,
            timeout_ms=self._timeout_ms,
            count=sum(run.count for run in late),
        )
        ids = ranges_of(run.message_ids for run in late)
        link.client.return_(link.number, ids, failed=False)
        for run in late:
            first, last = run.first & WINDOW_MAX, (run.first + run.count - 1) & WINDOW_MAX
            session.send(Disposition(role=False, first=first, last=last, state=Released()))
        session.pump()
