"""Facts about a queue that lists show, whatever its type."""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.queues.classic.limits import DROP_HEAD
from convoymq.queues.quorum.queue import REJECT_PUBLISH_DLX
from convoymq.routing.policies import Policies, effective_settings
from convoymq.routing.types import Queue, QueueType


def settings_in_force(queue: Queue, policies: Policies) -> tuple[Mapping[str, object], str]:
    """Returns the settings that act in a queue, and a warning, or "". A quorum queue takes
    `reject-publish-dlx` as `drop-head`."""
    settings = dict(effective_settings(queue, policies))
    if queue.type is not QueueType.QUORUM or settings.get("overflow") != REJECT_PUBLISH_DLX:
        return settings, ""
    warning = (
        f"quorum queues do not serve {REJECT_PUBLISH_DLX}: "
        "what is over the limit is dropped from the head"
    )
    return {**settings, "overflow": DROP_HEAD}, warning
