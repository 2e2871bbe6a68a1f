"""Attributes of compiled classes are declared: interpreted runs do not notice one that is not."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from convoymq.compiled_modules import PLAIN_MODULES

SOURCE = Path(__file__).parents[2] / "src"
DECLARED = [
    path
    for path in ((SOURCE / name.replace(".", "/")).with_suffix(".py") for name in PLAIN_MODULES)
    if path.with_suffix(".pxd").exists()
]
KERNELS = sorted((SOURCE / "convoymq" / "kernels").glob("*.py"))
_CLASS = re.compile(r"^cdef class (\w+)(?:\((\w+)\))?:")
_ATTRIBUTE = re.compile(
    r"^ +cdef (?:public |readonly )?[\w.\[\]]+(?: [\w.\[\]]+)*? ((?:\w+, )*\w+)$"
)


def declarations(text: str) -> dict[str, tuple[str, set[str]]]:
    """Class of a .pxd file → (its base, its attributes)."""
    found: dict[str, tuple[str, set[str]]] = {}
    current = ""
    for line in text.splitlines():
        opened = _CLASS.match(line)
        if opened:
            current = opened[1]
            found[current] = (opened[2] or "", set())
        elif current and "(" not in line:
            names = _ATTRIBUTE.match(line.split("#")[0].rstrip())
            if names:
                found[current][1].update(names[1].split(", "))
    return found


ALL = {
    name: known
    for path in SOURCE.rglob("*.pxd")
    for name, known in declarations(path.read_text()).items()
}


def attributes_of(name: str, declared: dict[str, tuple[str, set[str]]]) -> set[str]:
    """The attributes of a compiled class of a file, and of its bases."""
    base, own = declared.get(name) or ALL.get(name, ("", set()))
    return own | (attributes_of(base, declared) if base else set())


def assigned(node: ast.ClassDef) -> set[str]:
    """The attributes of itself that a class assigns."""
    found = set()
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            found.add(child.attr)
    return found


def undeclared(source: str, declared: dict[str, tuple[str, set[str]]]) -> dict[str, set[str]]:
    """Class → attributes that it assigns, and no .pxd file declares."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in declared:
            # A setter's property is no attribute.
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            missing = assigned(node) - attributes_of(node.name, declared) - methods
            if missing:
                found[node.name] = missing
    return found


@pytest.mark.parametrize("path", DECLARED, ids=lambda path: path.stem)
def test_every_assigned_attribute_is_declared(path: Path) -> None:
    declared = declarations(path.with_suffix(".pxd").read_text())
    assert undeclared(path.read_text(), declared) == {}


def test_an_undeclared_attribute_is_found() -> None:
    known = declarations("cdef class Peer:\n    cdef public int64_t taken, told\n")
    text = "class Peer:\n    def f(self):\n        self.taken = self.other = 1\n"
    assert undeclared(text, known) == {"Peer": {"other"}}


CALLERS_MAX = 5


def test_functions_that_many_compiled_modules_call_are_compiled() -> None:
    """Compiled code pays for a frame of the interpreter with each call of an interpreted function.
    One that many compiled modules call is called in each round."""
    compiled = {*PLAIN_MODULES, *(f"convoymq.kernels.{path.stem}" for path in KERNELS)}
    callers: Counter[tuple[str, str]] = Counter()
    for module in compiled:
        tree = ast.parse((SOURCE / module.replace(".", "/")).with_suffix(".py").read_text())
        for line in tree.body:
            if isinstance(line, ast.ImportFrom) and line.module and line.module not in compiled:
                callers.update((line.module, name.name) for name in line.names)
    often = [place for place, count in callers.items() if count > CALLERS_MAX]
    assert [place for place in often if _is_function(*place)] == []


def _is_function(module: str, name: str) -> bool:
    path = (SOURCE / module.replace(".", "/")).with_suffix(".py")
    if not path.exists():
        return False
    functions = (x for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef))
    return name in {function.name for function in functions}


_METHOD = re.compile(r"^ +cdef (?:inline )?(?:[\w\[\]]+ )?(_\w+)\(", re.MULTILINE)


def test_interpreted_modules_call_no_methods_that_only_compiled_ones_see() -> None:
    """A `cdef` method has no name at run time: a call from an interpreted module fails, in compiled
    builds only. Modules of queues get machines as `Any`, so the type checker is no help."""
    hidden = {name for path in DECLARED for name in _METHOD.findall(_types_of(path))}
    found = []
    for path in sorted((SOURCE / "convoymq" / "queues").rglob("*.py")):
        if path not in DECLARED:
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and not isinstance(node.func.value, ast.Name)
                    and node.func.attr in hidden
                ):
                    found.append(f"{path.stem}:{node.lineno} {node.func.attr}")
    assert "_accept" in hidden
    assert found == []


def _types_of(path: Path) -> str:
    return path.with_suffix(".pxd").read_text()
