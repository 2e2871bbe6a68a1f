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

_HASHES = ("_md5", "_sha1", "_sha3", "_sha2" if sys.version_info >= (3, 12) else "_sha256")
"""Python's own hash functions, which some distributions leave out."""


class _Later(ModuleType):
    """Stands in for a module and imports it when one of its names is used, but for those given."""

    def __init__(self, name: str, **given: object) -> None:
        super().__init__(name)
        vars(self).update(given)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


class _NoTls(ModuleType):
    """Stands in for `ssl` where classes and numbers of it are looked up that are never used."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0 if name.isupper() else type(name, (OSError,), {})


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
    del parser
    if not chosen.check:
        # Before the configuration, whose sections import them.
        _import_lean_python()
        _import_lean_codecs()
    from convoymq.edges.configuration import load, tls_in_use
    from convoymq.model.config import ConfigError

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
        from convoymq.model.errors import BrokerError
        from convoymq.node.preflight import check_files

        try:
            check_files(config)
        except BrokerError as error:
            print(f"convoy node: {error.text}", file=sys.stderr)
            return 2
        print("the configuration is good", file=sys.stderr)
        return 0
    if not path:
        print(introduction(config), file=sys.stderr, flush=True)
    # Nothing that is made while starting is garbage; `Node` freezes it and turns this on again.
    gc.disable()
    _import_lean(tls=bool([*tls_in_use(config)] or config.cluster.tls_certfile))
    from convoymq.node.process import run

    if config.node.processes != 1:
        from convoymq.node.supervisor import run_machine

        return run_machine(config)
    # But for classes that were made again with slots: what is imported later takes their memory.
    gc.collect()
    return run(config, load=lambda: load(path, os.environ, flags))


def introduction(config: Config) -> str:
    """Says what a node without a configuration file uses."""
    from convoymq.edges.configuration import listeners

    places = {listener.title: listener.addresses for listener in listeners(config)}
    places["other nodes"] = (config.link_address,)
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


def _import_lean_python() -> None:
    """Imports modules of Python without what they need for functions that a node does not call; the
    first call imports it."""
    # What is imported from here on takes the memory of the parser of the command line.
    for name in ("argparse", "gettext"):
        sys.modules.pop(name, None)
    gc.collect()
    # For source code.
    _import_without("inspect", {"ast": _Later("ast", NodeVisitor=object)})
    # For addresses in URLs.
    _import_without("urllib.parse", {"ipaddress": _Later("ipaddress")})
    # For text from other programs.
    _import_without("subprocess", {"locale": _Later("locale")})
    _import_without("uuid", {"platform": _Later("platform", system=lambda: os.uname().sysname)})


def _import_lean_codecs() -> None:
    """Imports msgspec and crc32c without what they load and a node never uses."""
    # What Python's own typing has as well, and what is for looking at types.
    types = ModuleType("msgspec.inspect")
    _import_without("msgspec", {"typing_extensions": None, "msgspec.inspect": types})
    # Its own version number, for which the metadata of packages would be read.
    versions = ModuleType("importlib.metadata")
    vars(versions)["version"] = lambda _name: ""
    _import_without("crc32c", {"importlib.metadata": versions})


def _import_lean(*, tls: bool) -> None:
    """Imports the other libraries without what they load and a node never uses.

    Args:
        tls: whether the node serves or dials with TLS.
    """
    if not tls:
        # First: what follows imports asyncio.
        _import_without_openssl()
    # Tracebacks that no node prints, loggers that are copied into other processes or threads.
    pickle = importlib.import_module("_pickle")
    _import_without("structlog", {"rich": None, "pickle": pickle, "uuid": _Later("uuid")})


def _import_without_openssl() -> None:
    """Imports what would load OpenSSL, a tenth of a node's memory, without it."""
    # Python can be built without OpenSSL, and asyncio knows that: it raises when asked for TLS.
    _import_without("asyncio", {"ssl": None})
    # uvloop refuses a context that is not of the class that it has found here.
    _import_without("uvloop", {"ssl": _NoTls("ssl")})
    try:
        for name in _HASHES:
            importlib.import_module(name)
    except ImportError:
        # This Python has no hash functions but OpenSSL's.
        return
    for name in ("hashlib", "hmac"):
        _import_without(name, {"_hashlib": None})


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
