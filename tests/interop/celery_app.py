"""The Celery application of the tests; the test and its worker both load it.

The environment gives it everything: `CELERY_TEST_BROKER` (nodes, separated by `;`),
`CELERY_TEST_QUEUE`, `CELERY_TEST_QUEUE_TYPE`.
"""

from __future__ import annotations

import os

from celery import Celery  # type: ignore[import-untyped]
from kombu.entity import Queue

QUEUE = os.environ.get("CELERY_TEST_QUEUE", "interop-celery")
KIND = os.environ.get("CELERY_TEST_QUEUE_TYPE", "quorum")

app = Celery("interop", broker=os.environ.get("CELERY_TEST_BROKER", ""), backend="rpc://")
task_queue = Queue(  # type: ignore[no-untyped-call]
    QUEUE, routing_key=QUEUE, queue_arguments={"x-queue-type": KIND}
)
app.conf.update(
    task_queues=[task_queue],
    task_default_queue=QUEUE,
    task_default_exchange=QUEUE,
    task_default_routing_key=QUEUE,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=4,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_connection_timeout=3,
    broker_heartbeat=10,
    result_expires=60,
)


@app.task(name="interop.square")  # type: ignore[untyped-decorator]
def square(number: int) -> int:
    return number * number


@app.task(name="interop.fail")  # type: ignore[untyped-decorator]
def fail() -> None:
    raise ValueError("on purpose")
