"""Compiles the kernels in place: `python tools/build.py [--force] [NAME ...]`.

Every module is built on its own and moved into place atomically, so a module that does not compile
leaves the others usable and a running node keeps the code it has loaded. NAME selects modules whose
dotted name contains it; without names, all that are out of date.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

#: Modules without pointers that are compiled as they are and can also run interpreted.
PLAIN_MODULES = [
    "convoymq.replication.raft.core",
    "convoymq.replication.raft.progress",
    "convoymq.queues.quorum.machine",
    "convoymq.queues.quorum.runs",
    "convoymq.cluster.replica",
]

#: Compiled hot loops outside kernels/ that may hold pointers.
EXTRA_KERNELS: list[str] = []


def kernel_modules() -> list[str]:
    """Dotted names of all modules that are compiled."""
    kernels = sorted(
        f"convoymq.kernels.{path.stem}"
        for path in (SOURCE / "convoymq" / "kernels").glob("*.py")
        if path.stem != "__init__"
    )
    return kernels + [name for name in PLAIN_MODULES + EXTRA_KERNELS if source_of(name).exists()]


def source_of(module: str) -> Path:
    """The .py file of a dotted name."""
    return SOURCE / (module.replace(".", "/") + ".py")


def compiler_environment() -> None:
    """Points distutils at zig where the system has no C compiler."""
    if any(shutil.which(name) for name in ("cc", "gcc", "clang")) or "CC" in os.environ:
        return
    os.environ["CC"] = f"{sys.executable} -m ziglang cc"
    os.environ["LDSHARED"] = f"{sys.executable} -m ziglang cc -shared"


def extensions(modules: list[str], root: Path = SOURCE):
    """Cythonized setuptools extensions of the modules."""
    from Cython.Build import cythonize
    from setuptools import Extension

    compiler_environment()
    (ROOT / "build").mkdir(exist_ok=True)
    made = [
        Extension(
            name,
            [os.path.relpath(source_of(name), ROOT)],
            extra_compile_args=["-O2", "-g1", "-fno-strict-aliasing", "-Wno-unused-function"],
            extra_link_args=["-lpthread"],
            define_macros=[("_GNU_SOURCE", None)],
        )
        for name in modules
    ]
    return cythonize(
        made,
        include_path=[str(root)],
        build_dir="build/cython",
        language_level=3,
        quiet=True,
        compiler_directives={
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "embedsignature": False,
            "profile": os.environ.get("CONVOY_KERNEL_PROFILE") == "1",
        },
    )


def built_file(module: str) -> Path:
    """Where the shared object of a module lies."""
    return source_of(module).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))


def newest_input(module: str) -> float:
    """The change time of the newest file that the module may depend on."""
    inputs = [source_of(module), *(SOURCE / "convoymq").rglob("*.pxd")]
    return max(path.stat().st_mtime for path in inputs)


def build_one(module: str) -> None:
    """Compiles one module and moves it into place."""
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    with tempfile.TemporaryDirectory(dir=ROOT / "build") as work:
        distribution = Distribution({"name": "convoymq", "ext_modules": extensions([module])})
        command = build_ext(distribution)
        command.build_lib = work
        command.build_temp = work + "/temp"
        command.ensure_finalized()
        command.run()
        made = next(Path(work).rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")))
        os.replace(made, built_file(module))


def main(arguments: list[str]) -> int:
    """Builds what is asked for; returns the number of modules that failed."""
    force = "--force" in arguments
    names = [argument for argument in arguments if not argument.startswith("--")]
    os.chdir(ROOT)
    (ROOT / "build").mkdir(exist_ok=True)
    failed = []
    with open(ROOT / "build" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for module in kernel_modules():
            if names and not any(name in module for name in names):
                continue
            target = built_file(module)
            fresh = target.exists() and target.stat().st_mtime >= newest_input(module)
            if fresh and not force:
                continue
            try:
                build_one(module)
                print(f"built {module}", flush=True)
            except (Exception, SystemExit) as error:
                failed.append(module)
                print(f"FAILED {module}: {error}", file=sys.stderr, flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
