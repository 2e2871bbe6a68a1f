"""`convoy node`: one node in this process. Kept free of everything that a node does not need."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from convoymq.model.config import Config


def main(arguments: Sequence[str]) -> int:
    """Parses the command line and runs the node; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="convoy node",
        description="Run one node in the foreground, until SIGTERM or Ctrl-C.",
        epilog="Without FILE, CONVOY_CONFIG_FILE names it; without both, the node runs with the "
        "defaults. Keys: `convoy config`.",
    )
    parser.add_argument("--config", metavar="FILE", help="configuration file (key = value)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one key, over file and environment; repeatable",
    )
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    chosen = parser.parse_args(arguments)
    from convoymq.model.config import ConfigError, load

    try:
        flags = {}
        for text in chosen.set:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
            flags[key.strip()] = value.strip()
        path = chosen.config or os.environ.get("CONVOY_CONFIG_FILE")
        config = load(path, os.environ, flags)
    except ConfigError as error:
        print(f"convoy node: {error.text}", file=sys.stderr)
        return 2
    if chosen.check:
        print("the configuration is good", file=sys.stderr)
        return 0
    if not path:
        print(introduction(config), file=sys.stderr, flush=True)
    # Nothing that is made while starting is garbage; `Node` freezes it and turns this on again.
    gc.disable()
    _import_lean()
    from convoymq.node_process import run

    return run(config)


def introduction(config: Config) -> str:
    """Says what a node without a configuration file uses."""
    places = {
        "AMQP": config.listeners.tcp,
        "AMQP with TLS": config.listeners.ssl,
        "HTTP API": config.management.tcp,
        "metrics": config.management.prometheus,
        "other nodes": (config.link_address,),
    }
    listening = "".join(
        f"  {name}: {', '.join(map(str, addresses))}\n"
        for name, addresses in places.items()
        if addresses
    )
    return (
        f"convoy node: node {config.node.id} without a configuration file (--config FILE)\n"
        f"  data: {os.path.abspath(config.node.data_dir)}\n"
        f"{listening}"
        "  For a cluster on this machine, `convoy up`; for all options, `convoy node --help`."
    )


def _import_lean() -> None:
    """Imports libraries without what they load and a node never uses, a tenth of its memory."""
    # Tracebacks that no node prints.
    _import_without("structlog", {"rich": None})
    # What Python's own typing has as well.
    _import_without("msgspec", {"typing_extensions": None})
    # Its own version number, for which the metadata of packages would be read.
    versions = ModuleType("importlib.metadata")
    vars(versions)["version"] = lambda _name: ""
    _import_without("crc32c", {"importlib.metadata": versions})


def _import_without(name: str, others: dict[str, ModuleType | None]) -> None:
    """Imports a module with stand-ins for others that it would load; None = cannot be imported."""
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    hidden = {other: module for other, module in others.items() if other not in modules}
    modules.update(hidden)
    try:
        importlib.import_module(name)
    finally:
        for other in hidden:
            del modules[other]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
