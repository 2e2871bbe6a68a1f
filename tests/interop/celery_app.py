"""The Celery application of the tests; the worker process loads `app`, made from its environment:

`CELERY_TEST_BROKER` (nodes, separated by `;`), `CELERY_TEST_QUEUE`, `CELERY_TEST_QUEUE_TYPE`
and, where it is not `direct`, `CELERY_TEST_EXCHANGE_TYPE`.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery  # type: ignore[import-untyped]
from kombu.entity import Exchange, Queue


def make_app(broker: str, queue: str, kind: str, exchange_type: str = "direct") -> Any:
    """An application with one task queue of the given type and results over the broker.

    Args: `exchange_type`: with `topic` Celery leaves tasks with an ETA to the broker, where a queue
    is a quorum queue; with `direct` the worker holds them.
    """
    made = Celery("interop", broker=broker, backend="rpc://", set_as_current=False)
    made.conf.update(
        task_queues=[
            Queue(  # type: ignore[no-untyped-call]
                queue,
                Exchange(queue, type=exchange_type),  # type: ignore[no-untyped-call]
                routing_key=queue,
                queue_arguments={"x-queue-type": kind},
            )
        ],
        task_default_queue=queue,
        task_default_exchange=queue,
        task_default_exchange_type=exchange_type,
        task_default_routing_key=queue,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=4,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_transport_options={"confirm_publish": True},
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=3,
        # A worker is silent while it declares the queues of native delayed delivery at each node.
        broker_heartbeat=60,
        result_expires=60,
    )
    made.task(square, name="interop.square")
    made.task(fail, name="interop.fail")
    return made


def square(number: int) -> int:
    return number * number


def fail() -> None:
    raise ValueError("on purpose")


if "CELERY_TEST_BROKER" in os.environ:
    app = make_app(
        os.environ["CELERY_TEST_BROKER"],
        os.environ["CELERY_TEST_QUEUE"],
        os.environ["CELERY_TEST_QUEUE_TYPE"],
        os.environ.get("CELERY_TEST_EXCHANGE_TYPE", "direct"),
    )
