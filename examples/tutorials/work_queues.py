"""2. Work queues: tasks are shared among workers, and no task is lost when a worker dies.

python examples/tutorials/work_queues.py work --name anna
python examples/tutorials/work_queues.py work --name ben
python examples/tutorials/work_queues.py submit 1 2 3 4 5
"""

from __future__ import annotations

from common import arguments, open_channel, show

QUEUE = "tutorial.tasks"
QUORUM = {"x-queue-type": "quorum"}


def fibonacci(n: int) -> int:
    """Some work that takes longer for larger numbers."""
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def submit(uri: str, tasks: list[str]) -> None:
    """Put the tasks on the queue, each confirmed."""
    with open_channel(uri) as channel:
        channel.queue_declare(QUEUE, durable=True, arguments=QUORUM)
        channel.confirm_delivery()
        for task in tasks:
            channel.basic_publish("", QUEUE, task.encode(), mandatory=True)
            show(f"submitted {task}")


def work(uri: str, name: str, count: int | None) -> None:
    """Take one task at a time, so that a busy worker leaves the next task to a free one.

    The acknowledgement comes after the work: should this worker die before, the task is handed to
    another one, with its redelivered flag set.
    """
    with open_channel(uri) as channel:
        channel.queue_declare(QUEUE, durable=True, arguments=QUORUM)
        channel.basic_qos(prefetch_count=1)
        for done, (method, _, body) in enumerate(channel.consume(QUEUE), 1):
            again = " (again)" if method.redelivered else ""
            show(f"{name}: fibonacci({body.decode()}) = {fibonacci(int(body))}{again}")
            channel.basic_ack(method.delivery_tag)
            if done == count:
                break
        channel.cancel()


def main() -> None:
    parser = arguments("Share tasks among workers")
    parser.add_argument("role", choices=("submit", "work"))
    parser.add_argument("tasks", nargs="*", default=["10"], help="numbers from 0 to 30")
    parser.add_argument("--name", default="worker")
    options = parser.parse_args()
    if options.role == "submit":
        submit(options.uri, options.tasks)
    else:
        work(options.uri, options.name, options.count)


if __name__ == "__main__":
    main()
