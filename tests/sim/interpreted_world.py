"""The simulator with cores from source, imported once for all bugs that are planted.

Each is planted in a process that is forked from one that has this module.
"""

from convoymq.sim.interpreted import use_source

use_source()

from convoymq.sim import loads, runner  # noqa: E402, F401
