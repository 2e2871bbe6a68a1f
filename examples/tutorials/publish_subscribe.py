"""3. Publish and subscribe: every subscriber gets a copy, in a queue of its own.

python examples/tutorials/publish_subscribe.py subscribe
python examples/tutorials/publish_subscribe.py publish "the bridge is open"
"""

from __future__ import annotations

from common import arguments, open_channel, show

EXCHANGE = "tutorial.news"


def publish(uri: str, texts: list[str]) -> None:
    """Hand each text to the exchange; without subscribers it goes nowhere."""
    with open_channel(uri) as channel:
        channel.exchange_declare(EXCHANGE, "fanout", durable=True)
        channel.confirm_delivery()
        for text in texts:
            channel.basic_publish(EXCHANGE, "", text.encode())
            show(f"published {text}")


def subscribe(uri: str, count: int | None) -> None:
    """Listen with a queue that the broker names and removes with this connection."""
    with open_channel(uri) as channel:
        channel.exchange_declare(EXCHANGE, "fanout", durable=True)
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(queue, EXCHANGE)
        show("listening")
        for seen, (_, _, body) in enumerate(channel.consume(queue, auto_ack=True), 1):
            show(f"heard {body.decode()}")
            if seen == count:
                break
        channel.cancel()


def main() -> None:
    parser = arguments("Broadcast news to everyone who listens")
    parser.add_argument("role", choices=("publish", "subscribe"))
    parser.add_argument("texts", nargs="*", default=["no news"])
    options = parser.parse_args()
    if options.role == "publish":
        publish(options.uri, options.texts)
    else:
        subscribe(options.uri, options.count)


if __name__ == "__main__":
    main()
