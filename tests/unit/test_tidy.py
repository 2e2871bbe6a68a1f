"""What linters cannot see: module docstrings, sizes of files and functions, how much is untyped,
asserts that are really on."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
STUBS = sorted((ROOT / "src").rglob("*.pyi"))

# Bounds of the whole source. They are lowered with what they bound, down to the goal, and never
# raised.
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
KERNEL_FUNCTION_LINES_MAX = 80
"""Inner loops of kernels stay whole where a call costs: `encode_enqueue` lost a tenth by one."""
ANY_MAX = 60
"""Goal: 60."""
# fmt: off
PRONOUNS = frozenset((
    "How", "It", "Its", "That", "There", "These", "They", "This", "Those", "What", "When", "Where",
    "Whether", "Which", "Who", "Whose", "Why",
))
# fmt: on
"""Words that no docstring begins with: it says what a thing is or does."""
UNUSED = {
    "src/convoymq/queues/quorum/delayed.py:RETRY_ALL": "one of four values of a setting",
    "src/convoymq/transport/frame_kinds.py:FREE": "numbers from it on are for others",
}
"""Names that nothing mentions, and why they are there."""
UNUSED_METHODS = {
    "src/convoymq/client/client.py:Client.seek_group": "for users: docs/topics.md",
    "src/convoymq/client/topic_consumer.py:TopicDelivery.is_current": "for users: docs/topics.md",
    "src/convoymq/kernels/channel_codec.py:ChannelCodec.next_confirm": "tests of C",
    "src/convoymq/kernels/connection_buffer.py:ConnectionBuffer.input_bytes": "tests of C",
    "src/convoymq/kernels/ordered_runs.py:OrderedTarget.slot_of": "tests of C",
    "src/convoymq/sim/loop.py:SimLoop.call_at": "asyncio calls it",
    "src/convoymq/sim/loop.py:SimLoop.get_debug": "asyncio calls it",
}
"""Likewise of classes."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A source, parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a source, walked once for all tests."""
    return tuple(ast.walk(parsed(path)))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """What was parsed is gone after these tests: it is some million objects, none of them garbage,
    which the collector would look at again and again."""
    gc.disable()
    yield
    parsed.cache_clear()
    nodes_of.cache_clear()
    names_used.cache_clear()
    gc.enable()


def test_asserts_are_on() -> None:
    assert __debug__


def test_every_module_says_what_it_is() -> None:
    first = {path: (ast.get_docstring(parsed(path)) or "").split("\n", 1)[0] for path in SOURCES}
    found = [relative(path) for path, line in first.items() if not 0 < len(line) <= 100]
    assert not found, f"no docstring, or one whose first line is longer than 100: {found}"


def test_public_names_have_docstrings() -> None:
    missing = [
        f"{relative(path)}: {node.name}"
        for path in SOURCES
        # The stub holds the docstrings of a kernel.
        if not path.with_suffix(".pyi").exists()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if not node.name.startswith("_") and not is_handler(node)
        if ast.get_docstring(node) is None
    ]
    assert not missing, f"no docstring: {', '.join(missing)}"


def is_handler(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether this handles a path of HTTP, which says what it does."""
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func) in ("routes.add", "routes.listing")
        for each in node.decorator_list
    )


def docstrings(path: Path) -> Iterator[ast.Constant]:
    """Yields the docstrings of modules, classes and functions, and those below attributes."""
    for node in nodes_of(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def test_docstrings_begin_with_no_pronoun() -> None:
    found = [
        f"{relative(path)}:{docstring.lineno}: {word}"
        for path in (*SOURCES, *STUBS)
        for docstring in docstrings(path)
        if (word := docstring.value.split(maxsplit=1)[0]) in PRONOUNS
    ]
    assert not found, ", ".join(found)


def test_files_are_within_their_bound() -> None:
    sizes = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    long = {name: size for name, size in sizes.items() if size > FILE_LINES_MAX}
    assert not long, f"longer than {FILE_LINES_MAX}: {long}"


def test_functions_are_within_their_bound() -> None:
    long = {}
    for path in SOURCES:
        is_kernel = path.parent.name == "kernels"
        bound = KERNEL_FUNCTION_LINES_MAX if is_kernel else FUNCTION_LINES_MAX
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > bound:
                    long[f"{relative(path)}:{node.name}"] = lines
    assert not long, f"longer than their bound: {long}"


def test_uses_of_any_are_within_their_bound() -> None:
    """As types: imports do not count."""
    uses = {
        relative(path): sum(
            isinstance(node, ast.Name) and node.id == "Any" for node in nodes_of(path)
        )
        for path in (*SOURCES, *STUBS)
    }
    most = sorted(((n, name) for name, n in uses.items() if n), reverse=True)[:10]
    assert sum(uses.values()) <= ANY_MAX, f"{sum(uses.values())} uses of Any, most in {most}"


def read_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the plain names that a source reads: its own, and imported ones."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                yield name


def named_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the names of other modules that a source may mean: imports, attributes, text."""
    for node in nodes:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.alias(name=name):
                yield name.rpartition(".")[2]
            case ast.Constant(value=str() as text) if re.fullmatch(r"[\w.:]+", text):
                yield from re.findall(r"\w+", text)


def defined_in(path: Path) -> Iterator[str]:
    """Yields the names that a module defines at its top. What a decorator registers is used.
    Constants of kernels are left out: tests compare with them what C has."""
    for node in parsed(path).body:
        match node:
            case ast.ClassDef(decorator_list=[ast.Call(func=ast.Name(id="_method"))]):
                pass
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name, decorator_list=[]):
                yield name
            case ast.AsyncFunctionDef(name=name, decorator_list=[]):
                yield name
            case ast.Assign(targets=targets) if path.parent.name != "kernels":
                for target in targets:
                    yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)) if path.parent.name != "kernels":
                yield name


@functools.cache
def names_used() -> frozenset[str]:
    """What other modules, tools, examples and the code of the docs mention. Tests do not count:
    what only they need is theirs."""
    used = {name for path in SOURCES for name in named_in(nodes_of(path))}
    for folder in ("benchmarks", "examples", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            used.update(named_in(ast.walk(ast.parse(path.read_text()))))
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.pxd")]
    for page in (ROOT / "docs").rglob("*.md"):
        texts += re.findall(r"^```.*?^```", page.read_text(), re.M | re.S)
    used.update(name for text in texts for name in re.findall(r"\w+", text))
    return frozenset(used)


def test_module_level_names_are_used() -> None:
    unused = {
        f"{relative(path)}:{name}"
        for path in SOURCES
        for name in {*defined_in(path)} - {*read_in(nodes_of(path))} - names_used()
        if not name.startswith("__")
    }
    assert unused == set(UNUSED)


def test_methods_are_called() -> None:
    """But those that a base of another library calls."""
    found = [
        (path, node)
        for path in SOURCES
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    ]
    classes = {node.name: (path, node) for path, node in found}

    def is_ours(node: ast.ClassDef) -> bool:
        bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
        return all(
            base in ("Protocol", "Generic", "NamedTuple", "TypedDict")
            or (base in classes and is_ours(classes[base][1]))
            for base in bases
        )

    unused = {
        f"{relative(path)}:{node.name}.{method.name}"
        for path, node in found
        if is_ours(node)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and method.name not in names_used()
        and not method.name.startswith("__")
    }
    assert unused == set(UNUSED_METHODS)


def empty_sections(lines: list[str]) -> Iterator[str]:
    """Yields headings that no section follows. A heading is a comment between two empty lines."""
    filled = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    for (number, line), (below, after) in zip(filled, [*filled[1:], (0, "")], strict=True):
        margin = len(line) - len(line.lstrip())
        if not line.lstrip().startswith("# ") or (number > 1 and lines[number - 2].strip()):
            continue
        is_heading = below != number + 1
        is_followed = after[:margin] == line[:margin] and after.strip() != ""
        next_is_heading = after[margin:].startswith("# ") and not "".join(lines[below:][:1]).strip()
        if is_heading and (not is_followed or next_is_heading):
            yield f"line {number}: {line.strip()}"


def test_a_heading_has_a_section() -> None:
    found = {
        relative(path): each
        for path in SOURCES
        for each in empty_sections(path.read_text().splitlines())
    }
    assert not found
