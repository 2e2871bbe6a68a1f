"""Pages for newcomers name real files, names, words and commands."""

from __future__ import annotations

import ast
import functools
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of, run_page

SOURCE = ROOT / "src" / "convoymq"
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/compatibility.md", "docs/glossary.md")
LINKING = [
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if path.name != "CHANGELOG.md"
]
REFERENCE = re.compile(r"`([\w/.]+\.py):([A-Za-z_][\w.]*)`")
FILE = re.compile(r"`([\w/]+\.py|[\w/]+/\w+\.(?:json|toml|md))`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"`[^`\n]*`|```.*?```", re.DOTALL)
ROW = re.compile(r"^- \*\*(.+?)\*\*: ", re.MULTILINE)
BANNED = re.compile(r"\b(rooms?|houses?|doors?)\b", re.IGNORECASE)
MAKE = re.compile(r"^make ([a-z-]+)", re.MULTILINE)
PATH = re.compile(r"(?<![\w/.])((?:tests|tools|src|docs|benchmarks|examples)/[\w./-]+)(?:::(\w+))?")
LINES_MAX = 250


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def find(name: str) -> Path | None:
    """A file by its path below src/convoymq, or below the root of the repository."""
    return next((p for p in (SOURCE / name, ROOT / name) if p.is_file()), None)


def targets_of(statement: ast.AST) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        yield from statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        yield statement.target


def names_in(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    """What statements define, with what its classes and their methods define of `self`."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + statement.name
        if isinstance(statement, ast.ClassDef):
            yield from names_in(statement.body, f"{prefix}{statement.name}.")
            for node in ast.walk(statement):
                for target in targets_of(node):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        yield f"{prefix}{statement.name}.{target.attr}"
        for target in targets_of(statement):
            if isinstance(target, ast.Name):
                yield prefix + target.id


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    return frozenset(names_in(ast.parse(path.read_text("utf-8")).body, ""))


def missing_in(text: str) -> list[str]:
    """References of a text that lead nowhere."""
    missing = []
    for name, defined in REFERENCE.findall(text):
        path = find(name)
        if path is None or defined not in names_of(path):
            missing.append(f"{name}:{defined}")
    return missing + [name for name in FILE.findall(text) if find(name) is None]


@pytest.mark.parametrize("page", PAGES)
def test_every_reference_is_defined(page: str) -> None:
    text = text_of(page)
    assert not missing_in(text), f"{page}: not defined: {', '.join(missing_in(text))}"
    assert REFERENCE.search(text), f"{page} has no reference: has their form changed?"


def test_a_reference_that_leads_nowhere_is_found() -> None:
    good = "`node/node.py:Node.run`, `storage/store.py:Storage.recover`, `tools/build.py:main`"
    assert missing_in(good) == []
    assert missing_in("`node/node.py:Node.walk`") == ["node/node.py:Node.walk"]
    assert missing_in("`nodes.py:Node.run`") == ["nodes.py:Node.run"]
    assert missing_in("`shells/groups/replicas.py`") == ["shells/groups/replicas.py"]


def test_links_lead_to_files() -> None:
    lost = [
        f"{page}: {target}"
        for page in LINKING
        for target, _ in LINK.findall(CODE.sub("", text_of(page)))
        if not ((ROOT / page).parent / target).exists()
    ]
    assert not lost, f"no file: {', '.join(lost)}"


def test_pages_name_files_that_exist() -> None:
    """Decision records stay as they were written."""
    lost = [
        f"{page}: {name}"
        for page in LINKING
        if "/adr/" not in page
        for name in FILE.findall(text_of(page))
        if find(name) is None
    ]
    assert not lost, f"no file: {', '.join(lost)}"


@pytest.mark.parametrize("page", PAGES)
def test_a_newcomer_is_led_to_the_page(page: str) -> None:
    assert f"({page})" in text_of("README.md")


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_plain_words(page: str) -> None:
    found = sorted(set(BANNED.findall(CODE.sub("", text_of(page)))))
    assert not found, f"{page}: {', '.join(found)}"


# --- ARCHITECTURE.md -------------------------------------------------------------------------


def test_the_architecture_stays_short() -> None:
    assert len(text_of("ARCHITECTURE.md").splitlines()) <= LINES_MAX


def test_the_order_of_imports_is_the_one_that_is_checked() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    checked = [
        {name.strip().removeprefix("convoymq.") for name in layer.split("|")} for layer in layers
    ]
    shown = next(b.text for b in blocks_of("ARCHITECTURE.md") if b.text.startswith("cli\n"))
    assert [set(line.split(" · ")) for line in shown.splitlines()] == checked


def test_every_package_is_explained() -> None:
    table = text_of("ARCHITECTURE.md").split("## Packages")[1].split("```")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = set(re.findall(r"`(\w+)`", " ".join(rows)))
    there = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert explained == there


# --- docs/glossary.md ------------------------------------------------------------------------


def test_the_glossary_is_in_alphabetical_order() -> None:
    rows = ROW.findall(text_of("docs/glossary.md"))
    terms = [term.lower().replace("-", "") for term in rows]
    assert len(terms) > 80, "the search for rows has stopped working"
    assert terms == sorted(terms)
    assert len(terms) == len(set(terms))


def test_words_of_formats_are_still_in_the_code() -> None:
    """The glossary names words other than its own only as long as a format has them."""
    sources = "\n".join(
        path.read_text("utf-8")
        for kind in ("py", "pxd", "pyi")
        for path in SOURCE.rglob(f"*.{kind}")
    )
    words = set(re.findall(r"\w+", sources))
    rows = [line for line in text_of("docs/glossary.md").splitlines() if "In formats:" in line]
    assert rows, "the search for words has stopped working"
    gone = [
        f"{ROW.findall(line)[0]}: {word}"
        for line in rows
        for word in re.findall(r"`(\w+)`", line.split("In formats:")[1])
        if word not in words
    ]
    assert not gone, f"no format has these any more: {', '.join(gone)}"


# --- CONTRIBUTING.md -------------------------------------------------------------------------


def shell_of(page: str) -> str:
    return "\n".join(block.text for block in blocks_of(page) if block.language == "sh")


def test_commands_name_what_is_there() -> None:
    text = shell_of("CONTRIBUTING.md")
    known = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(MAKE.findall(text)) <= known
    named = PATH.findall(text)
    assert len(named) > 3, "the search for paths has stopped working"
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert not test or test in names_of(ROOT / path), f"{path}::{test}"


def test_the_commands_that_can_be_run_in_passing_run(tmp_path: Path) -> None:
    # Compiled or not: as this run of pytest has it, also where it is not what is installed.
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    output = run_page(
        "CONTRIBUTING.md",
        tmp_path,
        # The same commands with a run that is six times shorter.
        replaced={".venv/bin/": "", "--seed 21": "--seed 4"},
        environment={"PYTHONPATH": paths},
        at=ROOT,
    )
    assert "1 passed" in output
    assert output.count("all promises kept") >= 2
