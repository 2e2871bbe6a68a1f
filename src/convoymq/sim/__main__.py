"""`python -m convoymq.sim`: runs seeds, prints what was simulated, and how to replay failures."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from convoymq.sim.interpreted import use_source
from convoymq.sim.registry import DEFAULT, LOADS


def main(
    seeds: Annotated[int, typer.Option(help="How many seeds to run.")] = 100,
    first: Annotated[int, typer.Option(help="The first of them.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Run this one seed, and print its trace.")
    ] = None,
    load: Annotated[
        str, typer.Option(help="What is simulated; `--load help` lists the loads.")
    ] = DEFAULT,
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
    keep_going: Annotated[bool, typer.Option(help="Go on after a failure.")] = False,
) -> None:
    """Simulates clusters of real replicas under faults; exit code 1 when a promise broke."""
    if interpreted:
        use_source()
    # Only now: what is imported decides which code runs.
    from convoymq.sim import loads, runner

    if load == "help":
        for name in LOADS:
            print(f"{name:14}{loads.load_class(name).text}")
        return
    chosen = runner.parse_faults(faults, load)
    options = (" --interpreted" if interpreted else "") + (f" --faults {faults}" if faults else "")
    options += f" --load {load}" if load != DEFAULT else ""
    if seed is not None:
        sys.exit(runner.run_one(seed, chosen, options, show_all=trace, load=load))
    sys.exit(
        runner.run_many(first, seeds, chosen, options, jobs=jobs, keep_going=keep_going, load=load)
    )


def expand(arguments: list[str]) -> list[str]:
    """Returns arguments with `--load NAME` in place of `--NAME`."""
    return [
        part
        for argument in arguments
        for part in (("--load", argument[2:]) if argument[2:] in LOADS else (argument,))
    ]


if __name__ == "__main__":
    sys.argv[1:] = expand(sys.argv[1:])
    typer.run(main)
