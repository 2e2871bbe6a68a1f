"""PEP 517 backend of `convoymq-client`: the repository's own build with the files of files.txt.

The files are copied from the repository into this folder. In a source distribution they are there
already, and there is no repository.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def gather() -> None:
    """Copies what files.txt names; leaves nothing of an earlier copy."""
    for folder in ("src", "tools", "build"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
    for pattern in (HERE / "files.txt").read_text().split():
        for source in REPOSITORY.glob(pattern):
            if source.is_file():
                target = HERE / source.relative_to(REPOSITORY)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    # By this `convoymq/__init__.py` knows this distribution.
    (HERE / "src/convoymq/client_only.py").write_text('"""Installed by convoymq-client."""\n')


if (REPOSITORY / "packages/client/files.txt").exists():
    gather()
sys.path.insert(0, str(HERE / "tools"))
from build_backend import *  # noqa: E402, F403
