"""6. Requests and replies: a call over the broker, with the answer sent straight back.

python examples/tutorials/rpc.py serve
python examples/tutorials/rpc.py call 7 12
"""

from __future__ import annotations

import time
import uuid

from common import arguments, open_channel, show
from pika import BasicProperties  # type: ignore[import-untyped]

QUEUE = "tutorial.square"
REPLY_TO = "amq.rabbitmq.reply-to"
PATIENCE_S = 30.0


def serve(uri: str, count: int | None) -> None:
    """Answer every request with the square of its number, to the address that it names."""
    with open_channel(uri) as channel:
        channel.queue_declare(QUEUE, durable=True)
        channel.basic_qos(prefetch_count=1)
        show("serving")
        for done, (method, request, body) in enumerate(channel.consume(QUEUE), 1):
            answer = BasicProperties(correlation_id=request.correlation_id)
            channel.basic_publish("", request.reply_to, str(int(body) ** 2).encode(), answer)
            channel.basic_ack(method.delivery_tag)
            if done == count:
                break
        channel.cancel()


def call(uri: str, numbers: list[str]) -> None:
    """Ask for each number; the correlation id tells which answer belongs to which request.

    Raises: TimeoutError when nobody answers.
    """
    waiting: dict[str, str] = {}

    def on_answer(_channel: object, _method: object, answer: BasicProperties, body: bytes) -> None:
        show(f"{waiting.pop(answer.correlation_id)} squared is {body.decode()}")

    with open_channel(uri) as channel:
        channel.queue_declare(QUEUE, durable=True)
        # Replies come to a pseudo-queue of this channel; it is consumed before anything is asked.
        channel.basic_consume(REPLY_TO, on_answer, auto_ack=True)
        for number in numbers:
            request = str(uuid.uuid4())
            waiting[request] = number
            properties = BasicProperties(reply_to=REPLY_TO, correlation_id=request)
            channel.basic_publish("", QUEUE, number.encode(), properties)
        deadline = time.monotonic() + PATIENCE_S
        while waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {PATIENCE_S:.0f} s")
            channel.connection.process_data_events(time_limit=1)


def main() -> None:
    parser = arguments("Squares over the broker")
    parser.add_argument("role", choices=("serve", "call"))
    parser.add_argument("numbers", nargs="*", default=["7"])
    options = parser.parse_args()
    if options.role == "serve":
        serve(options.uri, options.count)
    else:
        call(options.uri, options.numbers)


if __name__ == "__main__":
    main()
