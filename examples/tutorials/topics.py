"""5. Topics: keys of several words, and patterns over them: `*` is one word, `#` any number.

python examples/tutorials/topics.py listen "berlin.*" "#.storm"
python examples/tutorials/topics.py report berlin.rain "take an umbrella"
"""

from __future__ import annotations

from common import arguments, open_channel, show

EXCHANGE = "tutorial.weather"


def report(uri: str, place: str, text: str) -> None:
    """Publish under a key such as `berlin.mitte.rain`."""
    with open_channel(uri) as channel:
        channel.exchange_declare(EXCHANGE, "topic", durable=True)
        channel.confirm_delivery()
        channel.basic_publish(EXCHANGE, place, text.encode())
        show(f"reported {place}: {text}")


def listen(uri: str, patterns: list[str], count: int | None) -> None:
    """Print what matches any pattern; what matches two comes once."""
    with open_channel(uri) as channel:
        channel.exchange_declare(EXCHANGE, "topic", durable=True)
        queue = channel.queue_declare("", exclusive=True).method.queue
        for pattern in patterns:
            channel.queue_bind(queue, EXCHANGE, pattern)
        show("listening")
        for seen, (method, _, body) in enumerate(channel.consume(queue, auto_ack=True), 1):
            show(f"{method.routing_key}: {body.decode()}")
            if seen == count:
                break
        channel.cancel()


def main() -> None:
    parser = arguments("Weather reports by place and kind")
    roles = parser.add_subparsers(dest="role", required=True)
    one = roles.add_parser("report")
    one.add_argument("place")
    one.add_argument("text")
    many = roles.add_parser("listen")
    many.add_argument("patterns", nargs="+")
    options = parser.parse_args()
    if options.role == "report":
        report(options.uri, options.place, options.text)
    else:
        listen(options.uri, options.patterns, options.count)


if __name__ == "__main__":
    main()
