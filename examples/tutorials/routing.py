"""4. Routing: a subscriber names the keys that it wants.

python examples/tutorials/routing.py listen error warning
python examples/tutorials/routing.py log error "disk is full"
"""

from __future__ import annotations

from common import arguments, open_channel, show

EXCHANGE = "tutorial.logs"
LEVELS = ("debug", "info", "warning", "error")


def log(uri: str, level: str, text: str) -> None:
    """Publish one line under its level."""
    with open_channel(uri) as channel:
        channel.exchange_declare(EXCHANGE, "direct", durable=True)
        channel.confirm_delivery()
        channel.basic_publish(EXCHANGE, level, text.encode())
        show(f"logged {level}: {text}")


def listen(uri: str, levels: list[str], count: int | None) -> None:
    """Print the lines of some levels: one binding for each."""
    with open_channel(uri) as channel:
        channel.exchange_declare(EXCHANGE, "direct", durable=True)
        queue = channel.queue_declare("", exclusive=True).method.queue
        for level in levels:
            channel.queue_bind(queue, EXCHANGE, level)
        show("listening")
        for seen, (method, _, body) in enumerate(channel.consume(queue, auto_ack=True), 1):
            show(f"{method.routing_key}: {body.decode()}")
            if seen == count:
                break
        channel.cancel()


def main() -> None:
    parser = arguments("Log lines by level")
    roles = parser.add_subparsers(dest="role", required=True)
    one = roles.add_parser("log")
    one.add_argument("level", choices=LEVELS)
    one.add_argument("text")
    many = roles.add_parser("listen")
    many.add_argument("levels", nargs="+", choices=LEVELS)
    options = parser.parse_args()
    if options.role == "log":
        log(options.uri, options.level, options.text)
    else:
        listen(options.uri, options.levels, options.count)


if __name__ == "__main__":
    main()
