"""1. Hello: one program sends a message, another receives it.

python examples/tutorials/hello.py receive
python examples/tutorials/hello.py send "Good morning"
"""

from __future__ import annotations

from common import arguments, open_channel, show

QUEUE = "tutorial.hello"


def send(uri: str, texts: list[str]) -> None:
    """Send each text and wait until the cluster has it on disk on a majority of nodes."""
    with open_channel(uri) as channel:
        channel.queue_declare(QUEUE, durable=True)
        channel.confirm_delivery()
        for text in texts:
            channel.basic_publish("", QUEUE, text.encode(), mandatory=True)
            show(f"sent {text}")


def receive(uri: str, count: int | None) -> None:
    """Print what comes; a message is removed once it has been acknowledged."""
    with open_channel(uri) as channel:
        channel.queue_declare(QUEUE, durable=True)
        for seen, (method, _, body) in enumerate(channel.consume(QUEUE), 1):
            show(f"received {body.decode()}")
            channel.basic_ack(method.delivery_tag)
            if seen == count:
                break
        channel.cancel()


def main() -> None:
    parser = arguments("Send and receive a greeting")
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("texts", nargs="*", default=["Hello"])
    options = parser.parse_args()
    if options.role == "send":
        send(options.uri, options.texts)
    else:
        receive(options.uri, options.count)


if __name__ == "__main__":
    main()
