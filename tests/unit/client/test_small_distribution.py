"""What convoymq-client ships (packages/client) is what the client needs, no less and no more."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "packages" / "client"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
ARROW = PROJECT["optional-dependencies"]["arrow"]
"""Of one module, which imports it at once; Arrow imports NumPy where it is there."""
IMPORTS = """
import importlib, json, pkgutil, sys

own, others = map(set, json.loads(sys.argv[1]))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top == "convoymq":
            known = name in own
        else:
            known = top in others or top in sys.stdlib_module_names
        if not known:
            raise ImportError(f"{name} is not in convoymq-client")

sys.meta_path.insert(0, Refuse())
import convoymq.client
for module in pkgutil.iter_modules(convoymq.client.__path__, "convoymq.client."):
    importlib.import_module(module.name)
from convoymq.client.rows import frame_of, values_of
from convoymq.kernels.column_frame import ColumnFrame
assert values_of(ColumnFrame(frame_of([b"a", b""]))) == [b"a", b""]
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "convoymq")))
"""


def shipped() -> list[str]:
    """Dotted names of the modules that files.txt names."""
    found = set()
    for pattern in (PACKAGE / "files.txt").read_text().split():
        paths = [path for path in ROOT.glob(pattern) if path.is_file()]
        assert paths, f"files.txt: there is no {pattern}"
        for path in paths:
            if path.suffix == ".py" and path.is_relative_to(ROOT / "src"):
                name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
                found.add(name.removesuffix(".__init__"))
    # For the build, not for the client.
    return sorted(found - {"convoymq.compiled_modules"})


def names_of(requirements: list[str]) -> set[str]:
    return {requirement.partition(">")[0] for requirement in requirements}


def test_the_client_imports_all_that_is_shipped_and_nothing_else() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            IMPORTS,
            json.dumps([shipped(), sorted(names_of(PROJECT["dependencies"] + ARROW) | {"numpy"})]),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == shipped()


def test_its_requirements_are_those_of_the_whole() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["compression"]
    assert set(wanted) <= set(whole["dependencies"])
    assert PROJECT["requires-python"] == whole["requires-python"]


def test_both_distributions_in_one_place_are_refused(tmp_path: Path) -> None:
    package = tmp_path / "convoymq"
    package.mkdir()
    shutil.copy(ROOT / "src" / "convoymq" / "__init__.py", package)

    def imported() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-Sc", "import sys; sys.path.insert(0, '.'); import convoymq"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    (package / "client_only.py").touch()
    assert imported().returncode == 0
    (package / "node.py").touch()
    assert "pip uninstall -y convoymq convoymq-client" in imported().stderr
