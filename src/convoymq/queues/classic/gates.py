# cython: annotation_typing=False
"""Effects of a classic queue that wait for its disk, in their order. Pure."""

from __future__ import annotations

from collections.abc import Callable

from convoymq.queues.classic.machine import APPLIED, Effect

Gate = list[bool]
"""One fact: whether the effects behind the gate may go."""


class Gates:
    """See the module text.

    Args:
        hand_on: carries an effect out.
        refuse: tells a session that its commands up to a number are not safe.
    """

    def __init__(
        self, hand_on: Callable[[Effect], None], refuse: Callable[[int, int], object]
    ) -> None:
        self._hand_on = hand_on
        self._refuse = refuse
        self._waiting: list[tuple[Gate, list[Effect]]] = []
        self._held: list[Effect] | None = None
        """The last effects of which all kinds wait."""

    @property
    def holds(self) -> bool:
        """Returns whether effects of all kinds wait: what comes now may not overtake them."""
        return self._held is not None

    def add(self, gate: Gate, effects: list[Effect], *, holds: bool = False) -> None:
        """Adds effects behind all others. `holds`: not only confirms."""
        self._waiting.append((gate, effects))
        if holds:
            self._held = effects

    def open(self) -> None:
        """Lets the effects go whose gates are open, as do all before them."""
        while self._waiting and self._waiting[0][0][0]:
            effects = self._waiting.pop(0)[1]
            for effect in effects:
                self._hand_on(effect)
            if effects is self._held:
                self._held = None

    def refuse(self) -> None:
        """The disk failed: no command that waits for it is safe."""
        waiting, self._waiting = self._waiting, []
        self._held = None
        for gate, effects in waiting:
            gate[0] = True
            for effect in effects:
                if effect[0] == APPLIED:
                    self._refuse(effect[1], effect[2])
                else:
                    self._hand_on(effect)

    def forget(self, session: int) -> None:
        """Drops what waits for a session."""
        for _, effects in self._waiting:
            effects[:] = [effect for effect in effects if effect[1:2] != (session,)]
