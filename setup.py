"""Builds the compiled modules; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import build

if __name__ == "__main__":
    # An editable install compiles nothing here: `make setup` runs tools/build.py, module by module.
    compiles = {"build", "build_ext", "bdist_wheel", "install"} & set(sys.argv)
    setup(ext_modules=build.extensions(build.kernel_modules()) if compiles else [])
