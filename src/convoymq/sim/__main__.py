"""`python -m convoymq.sim`: runs seeds, prints what was simulated, and how to replay failures."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from convoymq.sim.interpreted import use_source


def main(
    seeds: Annotated[int, typer.Option(help="How many seeds to run.")] = 100,
    first: Annotated[int, typer.Option(help="The first of them.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Run this one seed, and print its trace.")
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            help="Comma separated kinds of faults instead of the seed's; `none` for none."
        ),
    ] = None,
    interpreted: Annotated[bool, typer.Option(help="Run the cores from their source.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    trace: Annotated[
        bool, typer.Option(help="With --seed: print every line, not the tail.")
    ] = False,
    streams: Annotated[bool, typer.Option(help="Streams instead of quorum queues.")] = False,
    partitions: Annotated[
        bool, typer.Option(help="Partitions of topics, each on its own.")
    ] = False,
    reservations: Annotated[bool, typer.Option(help="Some channels use reservations.")] = False,
    cluster: Annotated[
        bool, typer.Option(help="Queues and members come and go by the metadata group.")
    ] = False,
    mixed: Annotated[
        bool, typer.Option(help="Nodes of two releases, upgraded on the way.")
    ] = False,
    topics: Annotated[bool, typer.Option(help="Ordered topics instead of queues.")] = False,
    keep_going: Annotated[bool, typer.Option(help="Go on after a failure.")] = False,
) -> None:
    """Simulates clusters of real replicas under faults; exit code 1 when a promise broke."""
    if interpreted:
        use_source()
    # Only now: what is imported decides which code runs.
    from convoymq.sim import runner

    chosen = runner.parse_faults(faults, "topics" if topics else "")
    options = (" --interpreted" if interpreted else "") + (f" --faults {faults}" if faults else "")
    loads = {
        "streams": streams,
        "partitions": partitions,
        "reservations": reservations,
        "cluster": cluster,
        "mixed": mixed,
        "topics": topics,
    }
    load = next((name for name, wanted in loads.items() if wanted), "")
    options += f" --{load}" if load else ""
    if seed is not None:
        sys.exit(runner.run_one(seed, chosen, options, show_all=trace, load=load))
    sys.exit(
        runner.run_many(first, seeds, chosen, options, jobs=jobs, keep_going=keep_going, load=load)
    )


if __name__ == "__main__":
    typer.run(main)
