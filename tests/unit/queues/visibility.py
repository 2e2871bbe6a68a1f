"""Has interpreted machines show what compiled ones do: calls of `cdef` methods from modules that
are not compiled fail, as they do in installed nodes."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import convoymq
from convoymq.compiled_modules import PLAIN_MODULES

_CLASS = re.compile(r"^cdef class (\w+)")
_METHOD = re.compile(r"^ +cdef (?:inline )?(?:[\w\[\]]+ )?(_\w+)\(")
SOURCE = Path(convoymq.__path__[0]).parent


def as_compiled(monkeypatch: pytest.MonkeyPatch, package: str) -> list[str]:
    """Hides what compiled classes of a package hide, and returns the names of these methods. A
    module that is compiled does it by itself."""
    hidden = []
    for name in PLAIN_MODULES:
        module = importlib.import_module(name) if name.startswith(package) else None
        if module is None or not str(module.__file__).endswith(".py"):
            continue
        for of, method in _hidden_of(name):
            made = getattr(module, of)
            monkeypatch.setattr(made, method, _hiding(getattr(made, method)))
            hidden.append(f"{of}.{method}")
    return hidden


def _hidden_of(name: str) -> Iterator[tuple[str, str]]:
    """Yields (class, method) of a module's `cdef` methods."""
    path = (SOURCE / name.replace(".", "/")).with_suffix(".pxd")
    of = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        if opened := _CLASS.match(line):
            of = opened[1]
        elif of and (found := _METHOD.match(line)):
            yield of, found[1]


def _hiding(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*arguments: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller not in PLAIN_MODULES and caller != __name__:
            raise AttributeError(f"{caller} calls {method.__qualname__}, which is a cdef method")
        return method(*arguments)

    return called
