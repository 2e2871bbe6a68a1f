"""The traces of a node, as its configuration wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from convoymq.metadata.machine import MetadataMachine
from convoymq.model.config import Config
from convoymq.trace.recorder import Traces


def make_traces(
    config: Config,
    data: Path,
    node: int,
    incarnation: int,
    machine: MetadataMachine,
    now_us: Callable[[], int],
) -> Traces:
    """Returns what writes the traces of a node's queues, by the clock that its entries have. Of
    topics of traced virtual hosts the metadata machine records from now on what it decides."""
    trace = config.trace
    traces = Traces(
        Path(trace.directory).expanduser() if trace.directory else data / "trace",
        node,
        incarnation,
        trace,
        now_us,
    )
    if trace.vhosts:
        # Late: it imports all rules of topics, which a node without topics need not know.
        from convoymq.metadata.topic_trace import TopicTrace

        # Incarnations are told as unknown: one in which no topic changed writes no file.
        topics = traces.open_topics(lambda: [(each, 0, True) for each in machine.nodes])
        if topics is not None:
            machine.topic_trace = TopicTrace(trace.vhosts)
            topics.attach(machine.topic_trace)
    return traces
