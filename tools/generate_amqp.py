"""Write src/convoymq/amqp/_spec.py from the method table below.

Run without arguments to write the file, with `--check` to fail when it is out of date.

A line of the table is `index name[*] argument:type ...`; a star marks methods that carry content.
Types: octet short long longlong bit shortstr longstr table timestamp.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "src/convoymq/amqp/_spec.py"

METHODS = """
connection 10
  10 start version_major:octet=0 version_minor:octet=9 server_properties:table mechanisms:longstr=PLAIN locales:longstr=en_US
  11 start-ok client_properties:table mechanism:shortstr=PLAIN response:longstr locale:shortstr=en_US
  20 secure challenge:longstr
  21 secure-ok response:longstr
  30 tune channel_max:short frame_max:long heartbeat:short
  31 tune-ok channel_max:short frame_max:long heartbeat:short
  40 open virtual_host:shortstr=/ reserved_1:shortstr reserved_2:bit
  41 open-ok reserved_1:shortstr
  50 close reply_code:short reply_text:shortstr class_id:short method_id:short
  51 close-ok
  60 blocked reason:shortstr
  61 unblocked
  70 update-secret new_secret:longstr reason:shortstr
  71 update-secret-ok
channel 20
  10 open reserved_1:shortstr
  11 open-ok reserved_1:longstr
  20 flow active:bit
  21 flow-ok active:bit
  40 close reply_code:short reply_text:shortstr class_id:short method_id:short
  41 close-ok
access 30
  10 request realm:shortstr exclusive:bit passive:bit=1 active:bit=1 write:bit=1 read:bit=1
  11 request-ok ticket:short=1
exchange 40
  10 declare ticket:short exchange:shortstr type:shortstr=direct passive:bit durable:bit auto_delete:bit internal:bit nowait:bit arguments:table
  11 declare-ok
  20 delete ticket:short exchange:shortstr if_unused:bit nowait:bit
  21 delete-ok
  30 bind ticket:short destination:shortstr source:shortstr routing_key:shortstr nowait:bit arguments:table
  31 bind-ok
  40 unbind ticket:short destination:shortstr source:shortstr routing_key:shortstr nowait:bit arguments:table
  51 unbind-ok
queue 50
  10 declare ticket:short queue:shortstr passive:bit durable:bit exclusive:bit auto_delete:bit nowait:bit arguments:table
  11 declare-ok queue:shortstr message_count:long consumer_count:long
  20 bind ticket:short queue:shortstr exchange:shortstr routing_key:shortstr nowait:bit arguments:table
  21 bind-ok
  30 purge ticket:short queue:shortstr nowait:bit
  31 purge-ok message_count:long
  40 delete ticket:short queue:shortstr if_unused:bit if_empty:bit nowait:bit
  41 delete-ok message_count:long
  50 unbind ticket:short queue:shortstr exchange:shortstr routing_key:shortstr arguments:table
  51 unbind-ok
basic 60
  10 qos prefetch_size:long prefetch_count:short global_:bit
  11 qos-ok
  20 consume ticket:short queue:shortstr consumer_tag:shortstr no_local:bit no_ack:bit exclusive:bit nowait:bit arguments:table
  21 consume-ok consumer_tag:shortstr
  30 cancel consumer_tag:shortstr nowait:bit
  31 cancel-ok consumer_tag:shortstr
  40 publish* ticket:short exchange:shortstr routing_key:shortstr mandatory:bit immediate:bit
  50 return* reply_code:short reply_text:shortstr exchange:shortstr routing_key:shortstr
  60 deliver* consumer_tag:shortstr delivery_tag:longlong redelivered:bit exchange:shortstr routing_key:shortstr
  70 get ticket:short queue:shortstr no_ack:bit
  71 get-ok* delivery_tag:longlong redelivered:bit exchange:shortstr routing_key:shortstr message_count:long
  72 get-empty reserved_1:shortstr
  80 ack delivery_tag:longlong multiple:bit
  90 reject delivery_tag:longlong requeue:bit=1
  100 recover-async requeue:bit
  110 recover requeue:bit
  111 recover-ok
  120 nack delivery_tag:longlong multiple:bit requeue:bit=1
confirm 85
  10 select nowait:bit
  11 select-ok
tx 90
  10 select
  11 select-ok
  20 commit
  21 commit-ok
  30 rollback
  31 rollback-ok
"""  # noqa: E501

# Bit 15 of the flags word belongs to the first property, bit 14 to the second, and so on.
PROPERTIES = """
content_type:shortstr content_encoding:shortstr headers:table delivery_mode:octet priority:octet
correlation_id:shortstr reply_to:shortstr expiration:shortstr message_id:shortstr
timestamp:timestamp type:shortstr user_id:shortstr app_id:shortstr cluster_id:shortstr
"""

REPLY_CODES = """
200 REPLY_SUCCESS
311 CONTENT_TOO_LARGE
312 NO_ROUTE
313 NO_CONSUMERS
320 CONNECTION_FORCED
402 INVALID_PATH
403 ACCESS_REFUSED
404 NOT_FOUND
405 RESOURCE_LOCKED
406 PRECONDITION_FAILED
501 FRAME_ERROR
502 SYNTAX_ERROR
503 COMMAND_INVALID
504 CHANNEL_ERROR
505 UNEXPECTED_FRAME
506 RESOURCE_ERROR
530 NOT_ALLOWED
540 NOT_IMPLEMENTED
541 INTERNAL_ERROR
"""

PYTHON_TYPES = {
    "octet": ("int", "0"),
    "short": ("int", "0"),
    "long": ("int", "0"),
    "longlong": ("int", "0"),
    "timestamp": ("int", "0"),
    "bit": ("bool", "False"),
    "shortstr": ("str", '""'),
    "longstr": ("bytes", 'b""'),
    "table": ("Table", "EMPTY"),
}

HEADER = '''"""AMQP 0-9-1 methods, properties and codes.

Generated by tools/generate_amqp.py: do not edit, change the table there.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import msgspec

from convoymq.model.tables import EMPTY, Table

FRAME_METHOD = 1
FRAME_HEADER = 2
FRAME_BODY = 3
FRAME_HEARTBEAT = 8
FRAME_END = 206
PROTOCOL_HEADER = b"AMQP\\x00\\x00\\x09\\x01"


class FieldType(Enum):
    """Encoding of an argument or property in a frame."""

    OCTET = "octet"
    SHORT = "short"
    LONG = "long"
    LONGLONG = "longlong"
    BIT = "bit"
    SHORTSTR = "shortstr"
    LONGSTR = "longstr"
    TABLE = "table"
    TIMESTAMP = "timestamp"


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all methods."""

    # A dataclass for each would take 14 KB of a node's memory.

    CLASS_ID: ClassVar[int]
    METHOD_ID: ClassVar[int]
    NAME: ClassVar[str]
    HAS_CONTENT: ClassVar[bool]
    ARGUMENTS: ClassVar[tuple[tuple[str, FieldType], ...]]
'''


def main() -> int:
    """Write or check the file; return the exit code."""
    text = _formatted(_generate())
    if "--check" in sys.argv[1:]:
        same = TARGET.exists() and TARGET.read_text() == text
        print("up to date" if same else f"{TARGET} is out of date: run tools/generate_amqp.py")
        return 0 if same else 1
    TARGET.write_text(text)
    return 0


def _generate() -> str:
    parts = [HEADER]
    names: list[str] = []
    class_name, class_id = "", 0
    for line in METHODS.strip().splitlines():
        words = line.split()
        if not line.startswith(" "):
            class_name, class_id = words[0], int(words[1])
            parts.append(f"\n{class_name.upper()} = {class_id}\n")
            continue
        method_id, method, *arguments = words
        names.append(_python_name(class_name, method))
        parts.append(_method(class_name, class_id, int(method_id), method, arguments))
    parts.append(_properties())
    table = "".join(f"({name}.CLASS_ID, {name}.METHOD_ID): {name}," for name in names)
    parts.append(f"\nMETHODS: dict[tuple[int, int], type[Method]] = {{{table}}}\n")
    for line in REPLY_CODES.strip().splitlines():
        code, name = line.split()
        parts.append(f"{name} = {code}\n")
    return "".join(parts)


def _python_name(class_name: str, method: str) -> str:
    words = [class_name, *method.rstrip("*").split("-")]
    return "".join(word.capitalize() for word in words)


def _method(class_name: str, class_id: int, index: int, method: str, arguments: list[str]) -> str:
    wire_name = f"{class_name}.{method.rstrip('*')}"
    pairs = [argument.split(":") for argument in arguments]
    fields = ", ".join(
        f'("{name}", FieldType.{kind.split("=")[0].upper()})' for name, kind in pairs
    )
    lines = [
        f"\n\nclass {_python_name(class_name, method)}(Method, frozen=True, kw_only=True):\n"
        f'    """{wire_name}."""\n\n'
        f"    CLASS_ID: ClassVar[int] = {class_id}\n"
        f"    METHOD_ID: ClassVar[int] = {index}\n"
        f'    NAME: ClassVar[str] = "{wire_name}"\n'
        f"    HAS_CONTENT: ClassVar[bool] = {method.endswith('*')}\n"
        "    ARGUMENTS: ClassVar[tuple[tuple[str, FieldType], ...]] = "
        f"({fields}{',' if pairs else ''})\n\n"
    ]
    lines += [f"    {name}: {_annotated(kind)}\n" for name, kind in pairs]
    return "".join(lines)


def _annotated(kind: str) -> str:
    kind, _, default = kind.partition("=")
    python_type, zero = PYTHON_TYPES[kind]
    if not default:
        return f"{python_type} = {zero}"
    value = {
        "bool": lambda: str(default == "1"),
        "str": lambda: repr(default),
        "bytes": lambda: repr(default.encode()),
        "int": lambda: default,
    }[python_type]()
    return f"{python_type} = {value}"


def _properties() -> str:
    pairs = [word.split(":") for word in PROPERTIES.split()]
    fields = ", ".join(f'("{name}", FieldType.{kind.upper()})' for name, kind in pairs)
    lines = [
        "\n\nclass Properties(msgspec.Struct, frozen=True, kw_only=True):\n"
        '    """The properties of a message; None stands for absent."""\n\n'
        f"    FIELDS: ClassVar[tuple[tuple[str, FieldType], ...]] = ({fields})\n\n"
    ]
    lines += [f"    {name}: {PYTHON_TYPES[kind][0]} | None = None\n" for name, kind in pairs]
    return "".join(lines) + "\n\n"


def _formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
