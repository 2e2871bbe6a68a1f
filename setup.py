"""Builds the compiled modules; everything else about the package is in pyproject.toml."""

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import build


def compiled() -> list:
    """All extensions, with their C sources made on every processor."""
    modules = build.largest_first(build.kernel_modules())
    with ProcessPoolExecutor(max_workers=build.WORKERS) as pool:
        list(pool.map(build.translate, build.shares(modules)))
    return build.extensions(modules)


if __name__ == "__main__":
    # An editable install compiles nothing here: `make setup` runs tools/build.py, module by module.
    compiles = {"build", "build_ext", "bdist_wheel", "install"} & set(sys.argv)
    setup(
        ext_modules=compiled() if compiles else [],
        options={"build_ext": {"parallel": build.WORKERS}},
    )
