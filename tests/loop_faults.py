"""Errors that reach the handler of an event loop, where a node logs `node.fault`."""

from __future__ import annotations

import asyncio


def loop_faults() -> list[object]:
    """Returns the list to which the running loop adds them from now on."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _loop, fault: faults.append(fault["exception"])
    )
    return faults
