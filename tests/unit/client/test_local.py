"""What may be opened as the file of a segment read descriptor."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.client import local
from convoymq.model.errors import StorageFault


@pytest.mark.parametrize("pipe", [False, True])
def test_a_file_that_is_replaced_while_it_is_opened_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: bool
) -> None:
    """Neither another file is read, nor a pipe waited for."""
    path = tmp_path / "1.seg"
    path.write_bytes(b"x" * 100)
    found = os.stat(path)
    descriptor: Any = SimpleNamespace(
        place=(str(path), found.st_dev, found.st_ino), segment=SimpleNamespace(end=100)
    )
    other = tmp_path / "other"
    if pipe:
        os.mkfifo(other)
    else:
        other.write_bytes(b"y" * 100)

    class Late(local._File):
        def __init__(self, name: str) -> None:
            os.replace(other, name)
            super().__init__(name)

    monkeypatch.setattr(local, "_File", Late)
    with pytest.raises(StorageFault, match="another file was given its name"):
        local._Open("s", 1, descriptor, 0, 100)
