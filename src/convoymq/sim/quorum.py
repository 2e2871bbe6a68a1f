"""Quorum queues: the load that every other one is compared with, and the policies of its queues."""

from __future__ import annotations

from random import Random

from convoymq.model.compatibility import COMPATIBILITY, RELEASES
from convoymq.queues.dead_letter_publisher import DeadLetterOptions
from convoymq.queues.driver import GroupOptions
from convoymq.queues.group_queue import GroupQueue
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.settings import machine_settings, settings_of_release
from convoymq.sim.clients import Channel
from convoymq.sim.dead_letters import POLICIES
from convoymq.sim.group_node import GroupNode
from convoymq.sim.group_world import GroupLoad, GroupWorld
from convoymq.sim.operations import Arrivals, Choosing, ChosenModel, ChosenRoutes
from convoymq.sim.records import IDENTITY_BYTES
from convoymq.sim.referee import Referee
from convoymq.sim.senders import WatchedQueue
from convoymq.sim.world import ChannelKind

POLICY_EVERY_US = 500_000
POLICY_PAUSE = 0.8
"""Share of these times at which no policy changes."""
LIMITED = 0.4
"""Share of the policies, where messages have attributes, with a limit of each kind."""
MORE_LIMITS = 0.4
"""Share of the worlds in which policies name bytes and times for nodes that are away."""
ORDERS: tuple[dict[str, object], ...] = (
    {},
    {},
    {"requeue-position": "original"},
    {"requeue-position": "front"},
    {"requeue-position": "tail", "priority-mode": "two-classes"},
    {"priority-mode": "two-classes"},
)
"""Policies for the order of deliveries."""


class QuorumLoad(GroupLoad):
    """Quorum queues; their policies change, and messages are chosen, moved and deleted."""

    text = "quorum queues"
    machine_class = QuorumMachine
    world_class = GroupWorld
    referee_class: type[Referee] = Referee
    has_operations = True

    def begin(self, world: GroupWorld) -> None:
        super().begin(world)
        self._policy_rng = world.own_rng(0x9011C7)
        self.dead_letter_rng = world.own_rng(0xDEAD)
        self._window_rng = world.own_rng(0xDED1)
        self._retry_rng = world.own_rng(0x2E72)
        self._release_rng = world.own_rng(0xC0417)
        self._limit_rng = world.own_rng(0x11419)
        self._has_more_limits = self._limit_rng.random() < MORE_LIMITS
        self._clients = world.plan.clients
        self.releases: dict[int, str] = {}
        """Group -> the release of RabbitMQ whose rules it follows."""
        self.policies: dict[int, dict[str, object]] = {}
        """Group -> its effective settings, as the metadata would have them."""
        self.moved: set[bytes] = set()
        """Identities of the dead letters that their target has taken."""
        self.arrivals = Arrivals(world)
        self.chosen: dict[int, ChosenModel] = {}

    def start(self) -> None:
        self.world.scheduler.after(POLICY_EVERY_US, None, self._change_policy)
        if self.has_operations:
            Choosing(self).start()

    # A group.

    def make_referee(self, group: int, settings: dict[str, int]) -> Referee:
        release = self.releases[group] = self._release_rng.choice(RELEASES)
        settings |= settings_of_release(release)
        referee = self.referee_class(group, settings, clients=True)
        referee.model.moved = self.moved
        referee.model.chosen = self.chosen[group] = ChosenModel(self.arrivals.taken)
        self._begin_policy(group, settings["delivery_limit"])
        return referee

    def make_queue(self, node: GroupNode, parts: GroupOptions) -> GroupQueue:
        routes = ChosenRoutes(self, node.process)
        options = DeadLetterOptions(routes=routes, confirm_timeout_ms=2_000)
        queue = WatchedQueue(**parts, dead_letters=options)
        queue.watch(self.world.workload, self.world.plan.lag_entries_max)
        return queue

    def configure(self, group: int, queue: GroupQueue) -> None:
        if group in self.policies:
            queue.configure(self.settings_of(group))

    def channel_kind(self, group: int) -> ChannelKind:
        return Channel

    # Policies.

    def _begin_policy(self, group: int, delivery_limit: int) -> None:
        """Some queues begin with a policy for dead letters."""
        chosen = self.dead_letter_rng.choice(POLICIES)
        if chosen:
            self.policies[group] = {"delivery-limit": delivery_limit, **chosen}
        if self._clients.repeat_chance:
            before = self.policies.get(group, {"delivery-limit": delivery_limit})
            self.policies[group] = {**before, **self._draw_window()}

    def _draw_window(self) -> dict[str, object]:
        """For how long a queue remembers message-ids."""
        draw, window = self._window_rng, dict[str, object]()
        if draw.random() < 0.7:
            window["deduplication-count"] = draw.choice((0, 1, 5, 40, 1_000))
        if draw.random() < 0.4:
            window["deduplication-time"] = draw.choice((1, 50, 1_000, 60_000))
        return window

    def _draw_limits(self) -> dict[str, object]:
        """Returns limits by bytes, and for how long nodes may be away."""
        draw = self._limit_rng
        limits: dict[str, object] = {}
        body = self._clients.body_fixed
        if body >= 0 and draw.random() < LIMITED:
            one = IDENTITY_BYTES + body
            limits["max-length-bytes"] = draw.choice((0, one - 1, 5 * one, 40 * one + 1))
            limits["overflow"] = draw.choice(("drop-head", "reject-publish"))
        if draw.random() < LIMITED:
            limits["consumer-disconnected-timeout"] = draw.choice((0, 200, 2_000))
        return limits

    def _draw_retry(self) -> dict[str, object]:
        """Returns which messages that come back wait, and for how long."""
        draw = self._retry_rng
        kind = draw.choice(("disabled", "all", "failed", "returned"))
        times = {"delayed-retry-min": draw.choice((1, 50)), "delayed-retry-max": 200}
        return {"delayed-retry-type": kind, **times}

    def _change_policy(self) -> None:
        """All nodes hear that a policy gives a queue another limit, as from the metadata."""
        if self.world.quiet:
            return
        self.world.scheduler.after(POLICY_EVERY_US, None, self._change_policy)
        pause = LIMITED if self._clients.attribute_chance else POLICY_PAUSE
        if self._policy_rng.random() < pause:
            return
        group = self._policy_rng.choice(sorted(self.world.places))
        choice = self._policy_rng.choice
        policy: dict[str, object] = {"delivery-limit": choice((1, 3, 20, -1))}
        # Drawn apart: the other draws of a seed stay as they were.
        more = Random(choice((0, 1)) << 32 | self.world.scheduler.now_us ^ self.world.plan.seed)
        if self._clients.attribute_chance and more.random() < LIMITED:
            policy["message-ttl"] = more.choice((0, 20, 300, 3_000))
        if self._clients.attribute_chance and more.random() < LIMITED:
            policy["max-length"] = more.choice((0, 1, 5, 40))
            policy["overflow"] = more.choice(("drop-head", "reject-publish"))
        if self._clients.attribute_chance and more.random() < LIMITED:
            policy["expires"] = more.choice((1, 500))
        order = Random(self.world.scheduler.now_us ^ self.world.plan.seed ^ 0x50)
        policy |= order.choice(ORDERS)
        if self._clients.attribute_chance and order.random() < LIMITED:
            policy["message-expiry"] = "due"
        if self._has_more_limits:
            policy.update(self._draw_limits())
        if self._clients.repeat_chance:
            policy.update(self._draw_window())
        if self._clients.delay_chance:
            policy.update(self._draw_retry())
        self.policies[group] = {**policy, **self.dead_letter_rng.choice(POLICIES)}
        for node in self.world.nodes.values():
            if node.alive and group in node.queues:
                node.queues[group].configure(self.settings_of(group))

    def settings_of(self, group: int) -> dict[str, object]:
        """Returns the effective settings of a queue that has some."""
        release: dict[str, object] = {}
        if group in self.releases:
            release[COMPATIBILITY] = self.releases[group]
        return {**self.policies[group], **release}

    # The end.

    def unfinished(self) -> list[str]:
        return self._unapplied_policies() + self._refusing_handles()

    def _refusing_handles(self) -> list[str]:
        """Nodes that still refuse publishes, although the queues are empty."""
        return [
            f"{node.name} refuses publishes to group {group}"
            for node in self.world.nodes.values()
            for group, queue in node.queues.items()
            if queue.refuses_publishes
        ]

    def _unapplied_policies(self) -> list[str]:
        return [
            f"{node.name} has not {name} = {value} of group {group}"
            for group in self.policies
            for name, value in machine_settings(self.settings_of(group)).items()
            for node, replica in self.world.replicas_of(group)
            if replica.machine.settings.get(name, -1) != value
        ]
