"""Builds the compiled modules; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import build

if __name__ == "__main__":
    editable = any(argument in ("editable_wheel", "develop") for argument in sys.argv)
    if editable:
        # `make setup` compiles in place with tools/build.py, one module at a time.
        setup()
    else:
        setup(ext_modules=build.extensions(build.kernel_modules()))
