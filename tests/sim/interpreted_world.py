"""The simulator with cores from source, imported once for all bugs that are planted.

Each is planted in a process that is forked from one that has this module.
"""

from convoymq.sim.interpreted import use_source

use_source()

from convoymq.sim.loads import load_class  # noqa: E402
from tests.sim.planted import PLANTS  # noqa: E402

for load in {plant.load for plant in PLANTS.values()}:
    load_class(load)
