"""Values of keys: addresses, and the text forms of all kinds of values."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """Address to listen at or to connect to. `node` is the id of who listens there, 0 when not
    given."""

    host: str
    port: int
    node: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.node}@{host}:{self.port}" if self.node else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Listener:
    """Addresses on which a section has the node listen for one purpose."""

    name: str
    """Name in the node's record, which other nodes read."""
    protocol: str
    """Name in RabbitMQ's lists of listeners."""
    title: str
    """Name for people."""
    key: str
    """Configuration key of the addresses."""
    addresses: tuple[Address, ...]
    tls: str = ""
    """Field of `Config` with its TLS; empty = it has none."""


_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}


def parse_bytes(text: str) -> int:
    """Returns a size in bytes: a number, perhaps with k, M, G (powers of 1024) or kB, MB (1000)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in _BYTE_UNITS:
        raise ValueError("not a size such as 512MiB")
    return int(float(match[1]) * _BYTE_UNITS[match[2].lower()])


def parse_bool(text: str) -> bool:
    """Returns a truth value. Raises ValueError, as all of these functions."""
    if text.lower() in ("true", "on", "yes"):
        return True
    if text.lower() in ("false", "off", "no"):
        return False
    raise ValueError("not true or false")


def parse_int(text: str) -> int:
    """Returns a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("not a whole number") from None


def parse_optional_int(text: str) -> int | None:
    """Returns a whole number, or None for "none"."""
    return None if text.lower() in ("none", "undefined", "infinity") else parse_int(text)


def parse_float(text: str) -> float:
    """Returns a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def parse_address(text: str, default_host: str = "127.0.0.1") -> Address:
    """Returns `port`, `host:port`, `[v6]:port` or `id@host:port` as an `Address`.

    Raises:
        ValueError: it is none of these, or the port is not in 0..65535.
    """
    node = 0
    if "@" in text:
        number, text = text.split("@", 1)
        node = parse_int(number)
        if not 1 <= node <= 255:
            raise ValueError("a node id is between 1 and 255")
    match = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:\s]+)):)?(\d{1,5})", text.strip())
    if match is None or int(match[3]) > 65535:
        raise ValueError("not an address such as 127.0.0.1:5672")
    return Address(match[1] or match[2] or default_host, int(match[3]), node)


def parse_listener(text: str) -> tuple[Address, ...]:
    """Returns where to listen; nothing for "none"."""
    return () if text.lower() == "none" else (parse_address(text, "localhost"),)


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Returns addresses that are separated by commas or spaces."""
    return tuple(parse_address(part) for part in re.split(r"[,\s]+", text.strip()) if part)


def parse_words(text: str) -> tuple[str, ...]:
    """Returns words that are separated by commas or spaces."""
    if text.strip().lower() == "none":
        return ()
    return tuple(part for part in re.split(r"[,\s]+", text.strip()) if part)


def parse_headers(text: str) -> tuple[str, ...]:
    """Returns headers of HTTP, as `NAME=VALUE` each. Raises ValueError."""
    words = parse_words(text)
    for word in words:
        if not re.fullmatch(r"[!-~]+?=[!-~]*", word):
            raise ValueError("each header must be NAME=VALUE")
    return words


def parse_voters(text: str) -> int:
    """Returns a number of voters: 3, 5 or 7."""
    count = parse_int(text)
    if count not in (3, 5, 7):
        raise ValueError("must be 3, 5 or 7")
    return count


def parse_processes(text: str) -> int:
    """Returns a number of processes; 0 = `auto`."""
    if text.strip() == "auto":
        return 0
    count = parse_int(text)
    if count < 1:
        raise ValueError("must be a number from 1 on, or auto")
    return count
