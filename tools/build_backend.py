"""PEP 517 backend: setuptools, plus a C compiler from PyPI where the system has none."""

import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def _compiler_requirement() -> list[str]:
    has_compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return [] if has_compiler else ["ziglang>=0.13"]


def get_requires_for_build_wheel(config_settings=None):
    """The requirements of setuptools and, without a system compiler, ziglang."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _compiler_requirement()


def get_requires_for_build_editable(config_settings=None):
    """As for a wheel."""
    return build_meta.get_requires_for_build_editable(config_settings) + _compiler_requirement()
