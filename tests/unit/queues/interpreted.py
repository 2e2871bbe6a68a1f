"""Loads a machine's modules from source, whatever is compiled beside them."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def interpreted(names: Sequence[str]) -> ModuleType:
    """The last of these modules, which import each other in this order. What was imported before
    stays as it was for everybody else."""
    compiled = {name: importlib.import_module(name) for name in names}
    try:
        for name in names:
            made = _load(name, compiled[name])
            _put(name, made)
    finally:
        for name, module in compiled.items():
            _put(name, module)
    return made


def _load(name: str, compiled: ModuleType) -> ModuleType:
    assert compiled.__file__ is not None
    path = Path(compiled.__file__).parent / f"{name.rpartition('.')[2]}.py"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _put(name: str, module: ModuleType) -> None:
    package, _, last = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[package], last, module)
