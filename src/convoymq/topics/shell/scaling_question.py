"""Questions for what the autoscaler of a topic decides, on any node: the metadata leader knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from convoymq.metadata.topics import get_topic
from convoymq.model.errors import PeerError, Unavailable
from convoymq.topics.shell.scaling_loop import ScalingLoop
from convoymq.topics.shell.scaling_rows import ScalingRow
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_TOPIC_SCALING

if TYPE_CHECKING:
    from convoymq.metadata.store import MetadataStore


class ScalingQuestion:
    """See the module text. One per node: it asks, and answers where it leads."""

    def __init__(
        self, loop: ScalingLoop, store: MetadataStore, control: ControlPlane, timeout_s: float
    ) -> None:
        self._loop = loop
        self._store = store
        self._control = control
        self._timeout_s = timeout_s
        control.handle(KIND_TOPIC_SCALING, self._on_question)

    async def _on_question(self, _node: int, body: object) -> ScalingRow:
        if not self._loop.leads:
            raise Unavailable("this node does not lead the metadata group")
        match body:
            case [str(vhost), str(name)]:
                return self._loop.explain(get_topic(self._store.tree, vhost, name))
            case _:
                raise PeerError("malformed question about an autoscaler")

    async def __call__(self, vhost: str, name: str) -> ScalingRow:
        """Returns what is decided. Raises NotFound, Unavailable."""
        leader = self._store.leader
        if leader is None:
            raise Unavailable("the metadata group has no leader")
        found = await self._control.request(
            leader, KIND_TOPIC_SCALING, [vhost, name], self._timeout_s
        )
        try:
            return msgspec.convert(found, ScalingRow)
        except msgspec.ValidationError as error:
            raise PeerError(f"malformed answer about an autoscaler: {error}") from error
