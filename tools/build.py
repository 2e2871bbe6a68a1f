"""Compiles modules in place: `python tools/build.py [--all] [--force] [NAME ...]`.

Every module is built on its own and moved into place atomically, so a module that does not compile
leaves the others usable and a running node keeps the code it has loaded. NAME selects modules whose
dotted name contains it. Without names: the kernels, and of the plain modules those that are
compiled already, so that no old shared object hides an edit; with --all the plain ones, too, as
wheels and benchmarks have them (docs/adr/0098). What is up to date is left.
"""

from __future__ import annotations

import fcntl
import os
import re
import runpy
import shutil
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
WORKERS = os.cpu_count() or 1

#: Modules without pointers that are compiled as they are. Read by path: importing the package
#: would load compiled modules.
PLAIN_MODULES: tuple[str, ...] = runpy.run_path(str(SOURCE / "convoymq" / "compiled_modules.py"))[
    "PLAIN_MODULES"
]

LEVEL = "-O2"
"""Less makes compiled plain modules slower than interpreted ones."""

#: Compiled hot loops outside kernels/ that may hold pointers.
EXTRA_KERNELS: list[str] = []


def kernel_modules() -> list[str]:
    """Dotted names of all modules that are compiled."""
    kernels = sorted(
        f"convoymq.kernels.{path.stem}"
        for path in (SOURCE / "convoymq" / "kernels").glob("*.py")
        if path.stem != "__init__"
    )
    return kernels + [name for name in (*PLAIN_MODULES, *EXTRA_KERNELS) if source_of(name).exists()]


def source_of(module: str) -> Path:
    """The .py file of a dotted name."""
    return SOURCE / (module.replace(".", "/") + ".py")


def compiler_environment() -> None:
    """Points distutils at zig where the system has no C compiler, at ccache where there is one."""
    compilers = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if "CC" in os.environ:
        return
    if not compilers:
        os.environ["CC"] = f"{sys.executable} -m ziglang cc"
        os.environ["LDSHARED"] = f"{sys.executable} -m ziglang cc -shared"
    elif shutil.which("ccache"):
        os.environ["CC"] = f"ccache {compilers[0]}"
        # Another clone, or another environment, finds what this one compiled.
        os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
        os.environ.setdefault("CCACHE_NOHASHDIR", "1")


def compiler_flags() -> list[str]:
    """What the C compiler is told."""
    flags = [LEVEL, "-g0", "-fno-strict-aliasing", "-Wno-unused-function"]
    if "ziglang" in os.environ.get("CC", ""):
        flags.append("-fno-sanitize=undefined")
    return flags


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
            extra_compile_args=compiler_flags(),
            extra_link_args=["-lpthread"],
            define_macros=[("_GNU_SOURCE", None)],
        )
        for name in modules
    ]
    pointer_kernels = [m for m in made if m.name not in PLAIN_MODULES]
    plain = [m for m in made if m.name in PLAIN_MODULES]
    # Plain modules keep Python's meaning of negative indexes, bounds and division: they give the
    # same results interpreted. Pointer kernels check lengths themselves.
    return _cythonize(cythonize, pointer_kernels, root, fast=True) + _cythonize(
        cythonize, plain, root, fast=False
    )


def _cythonize(cythonize, made, root: Path, *, fast: bool):
    if not made:
        return []
    return cythonize(
        made,
        include_path=[str(root)],
        build_dir="build/cython",
        language_level=3,
        quiet=True,
        compiler_directives={
            "boundscheck": not fast,
            "wraparound": not fast,
            "cdivision": fast,
            "initializedcheck": False,
            "embedsignature": False,
            "profile": os.environ.get("CONVOY_KERNEL_PROFILE") == "1",
        },
    )


def largest_first(modules: list[str]) -> list[str]:
    """Ordered by size, so that no large one is left for the end."""
    return sorted(modules, key=lambda module: -source_of(module).stat().st_size)


def shares(modules: list[str]) -> list[list[str]]:
    """Parts of about the same size of a list that begins with the largest module."""
    return [modules[k::WORKERS] for k in range(min(WORKERS, len(modules)))]


def translate(modules: list[str]) -> str:
    """Makes the C sources of several modules; what was wrong, or "". One call parses the
    declarations that they share once: it takes a third of the time of a call for each."""
    try:
        extensions(modules)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def built_file(module: str) -> Path:
    """Where the shared object of a module lies."""
    return source_of(module).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))


def declarations_of(path: Path, found: set[Path]) -> set[Path]:
    """The .pxd files that a source file names, and those that these name."""
    own = path.with_suffix(".pxd")
    named = {own} if own != path and own.exists() else set()
    for module in re.findall(
        r"(?:cython\.cimports\.|^from |^cimport )(convoymq[.\w]*)", path.read_text(), re.M
    ):
        base = SOURCE / module.replace(".", "/")
        named |= {base.with_suffix(".pxd")} if base.with_suffix(".pxd").exists() else set()
        named |= set(base.glob("*.pxd")) if base.is_dir() else set()
    for declaration in named - found:
        found.add(declaration)
        declarations_of(declaration, found)
    return found


def newest_input(module: str) -> float:
    """The change time of the newest file that the module depends on."""
    source = source_of(module)
    inputs = [source, *declarations_of(source, set())]
    return max(path.stat().st_mtime for path in inputs)


def build_one(module: str) -> None:
    """Compiles one module and moves it into place."""
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    began = time.time()
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as work:
        distribution = Distribution({"name": "convoymq", "ext_modules": extensions([module])})
        command = build_ext(distribution)
        command.build_lib = work
        command.build_temp = work + "/temp"
        command.ensure_finalized()
        command.run()
        made = next(Path(work).rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")))
        # What was edited meanwhile is not in it.
        os.utime(made, (began, began))
        os.replace(made, built_file(module))


def remove_others() -> None:
    """Removes the shared objects of modules that are compiled no more: they would hide edits."""
    wanted = {built_file(module) for module in kernel_modules()}
    for built in SOURCE.rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")):
        if built not in wanted:
            built.unlink()


def try_to_build(module: str) -> str:
    """Builds one module in a process of its own; what was wrong, or ""."""
    try:
        build_one(module)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def is_due(module: str, *, everything: bool) -> bool:
    """Whether a module is to be built that nobody named."""
    target = built_file(module)
    if not target.exists():
        return everything or module not in PLAIN_MODULES
    return target.stat().st_mtime < newest_input(module)


class Progress:
    """One line about all modules: it is rewritten in a terminal, else its begin and its end."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.began = time.monotonic()
        self.live = sys.stderr.isatty()
        if total:
            self._say(f"compiling {total} modules", end="" if self.live else "\n")

    def built(self) -> None:
        """One more is ready."""
        self.done += 1
        if self.live:
            self._say(f"\rcompiling: {self.done} of {self.total} modules")

    def end(self) -> None:
        """All are."""
        if self.total:
            taken = time.monotonic() - self.began
            self._say(f"{chr(13) * self.live}compiled {self.total} modules in {taken:.0f} s", "\n")

    def _say(self, text: str, end: str = "") -> None:
        print(text, end=end, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Builds what is asked for; returns the number of modules that failed."""
    force, everything = "--force" in arguments, "--all" in arguments
    names = [argument for argument in arguments if not argument.startswith("--")]
    os.chdir(ROOT)
    (ROOT / "build").mkdir(exist_ok=True)
    failed = []
    with open(ROOT / "build" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_others()
        due = []
        for module in kernel_modules():
            if names and not any(name in module for name in names):
                continue
            if is_due(module, everything=everything or bool(names)) or (
                force and (everything or names or module not in PLAIN_MODULES)
            ):
                due.append(module)
        due = largest_first(due)
        progress = Progress(len(due))
        with ProcessPoolExecutor(max_workers=max(1, min(len(due), WORKERS))) as pool:
            # A module that does not translate is named below, where each is built on its own.
            list(pool.map(translate, shares(due)))
            for module, error in zip(due, pool.map(try_to_build, due), strict=True):
                if error:
                    failed.append(module)
                    print(f"FAILED {module}: {error}", file=sys.stderr, flush=True)
                else:
                    progress.built()
        progress.end()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
