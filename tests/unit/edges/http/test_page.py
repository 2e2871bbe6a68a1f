"""Files of the management page, without a browser: references, paths of the API, what a strict
content security policy forbids, licences. `make test-page` uses the page in a browser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.handlers import ROUTES
from convoymq.edges.http.page_files import PAGE
from convoymq.edges.http.routes import find

MODULE_LINES_MAX = 400
METHODS = {"get": "GET", "useGet": "GET", "put": "PUT", "post": "POST", "del": "DELETE"}
ANY = ("GET", "PUT", "POST", "DELETE")
VENDOR = PAGE / "vendor"
MODULES = sorted(path for path in PAGE.rglob("*.js") if VENDOR not in path.parents)
STYLES = sorted((PAGE / "css").glob("*.css"))
INDEX = (PAGE / "index.html").read_text()

IMPORT = re.compile(r"""(?:from|import)\s*\(?\s*["`](\.[^"`]+)["`]""")
PATH = re.compile(r"\bat`([^`]*)`")
VERB = re.compile(r"\b(useGet|get|put|post|del)\(\s*(?:[^()`]*(?:\(\))?\s*\?\s*)?$")
NAME = re.compile(r"\$\{[^}]*\}")


def name_of(path: Path) -> str:
    return str(path.relative_to(PAGE))


def imported(module: Path) -> Iterator[Path]:
    """Yields the files that a module imports; a name in `${…}` stands for each page of the menu."""
    for reference in IMPORT.findall(module.read_text()):
        if "${" in reference:
            listed = re.findall(r'^  \w+: \["(\w+)",', module.read_text(), re.MULTILINE)
            assert listed, f"{name_of(module)} imports {reference}, and lists no page"
            yield from (module.parent / NAME.sub(page, reference) for page in listed)
        else:
            yield (module.parent / reference).resolve()


def paths_in(module: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the paths of the API that a module names, with the methods that it uses."""
    text = module.read_text()
    for found in PATH.finditer(text):
        verb = VERB.search(text[max(0, found.start() - 80) : found.start()])
        yield (METHODS[verb[1]],) if verb else ANY, found[1]


def is_route(method: str, path: str) -> bool:
    """Returns whether the server has a path; names must stand where the route has names, but for
    the component of a parameter."""
    segments = NAME.sub("\0", path).split("/")
    try:
        _, names = find(ROUTES, method, segments)
    except ApiError:
        return False
    chosen = [value for name, value in names.items() if name != "component"]
    return all("\0" in value for value in chosen if value in segments)


def test_every_file_that_the_page_refers_to_exists() -> None:
    referred = {PAGE / name for name in re.findall(r'(?:src|href)="([^"/][^"]*)"', INDEX)}
    for module in MODULES:
        referred |= set(imported(module))
    missing = [name_of(path) for path in referred if not path.is_file()]
    assert not missing, f"not there: {missing}"
    unused = [path for path in (*MODULES, *STYLES) if path not in referred]
    assert not unused, f"nothing refers to {', '.join(map(name_of, unused))}"


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_paths_of_a_module_are_routes_of_the_server(module: Path) -> None:
    wrong = [
        f"{'/'.join(methods)} {path}"
        for methods, path in paths_in(module)
        if not any(is_route(method, path) for method in methods)
    ]
    assert not wrong, f"no such path: {', '.join(wrong)}"


def test_paths_are_found() -> None:
    assert sum(1 for module in MODULES for _ in paths_in(module)) > 100
    assert is_route("DELETE", "queues/${vhost}/${name}/contents")
    assert not is_route("GET", "queues/${vhost}/${name}/contents")
    assert not is_route("GET", "queues/${a}/${b}/${c}")


def test_nothing_needs_an_exception_of_the_content_security_policy() -> None:
    assert re.findall(r"<script[^>]*>", INDEX) == ['<script type="module" src="app.js">']
    assert "<style" not in INDEX
    assert not re.search(r"\s(on\w+|style)=", INDEX)
    for path in (*MODULES, *STYLES):
        text = path.read_text()
        outside = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, f"{name_of(path)} loads from elsewhere: {outside}"
        assert "@import" not in text


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_text_becomes_text_and_never_markup(module: Path) -> None:
    markup = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML"
        r"|createContextualFragment|srcdoc|\beval\(|new Function|javascript:|\bon[a-z]+="
    )
    found = re.findall(markup, module.read_text())
    assert not found, f"{name_of(module)}: {found}"


def test_modules_are_short_and_say_what_they_are() -> None:
    for module in MODULES:
        lines = module.read_text().splitlines()
        assert lines[0].startswith("// "), f"{name_of(module)} does not say what it is"
        assert len(lines) <= MODULE_LINES_MAX, f"{name_of(module)} has {len(lines)} lines"


def test_libraries_are_as_published_and_have_their_licences() -> None:
    text = (VENDOR / "LICENSES.md").read_text()
    rows = dict(
        re.findall(r"^\| (\S+\.(?:js|css)) \|.*\| `([0-9a-f]{64})` \|$", text, re.MULTILINE)
    )
    files = {path.name: path for path in VENDOR.iterdir() if path.suffix != ".md"}
    assert rows.keys() == files.keys()
    for name, path in files.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == rows[name], f"{name} was changed"
    for licence in ("Apache License", "MIT License", "Permission is hereby granted"):
        assert licence in text
