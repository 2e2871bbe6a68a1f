"""Dispositions and flows of consumers of AMQP 1.0, by runs."""

def read_settlements(
    data: bytearray, at: int, frame_max: int, channel: int, next_outgoing_id: int
) -> tuple[int, list[tuple[int, int]], bytes, tuple[int, ...] | None] | None:
    """Reads the dispositions and flows that lie in the input from `at` on, as long as each needs no
    closer look, all dispositions have one outcome, and all flows are of one link.

    Args:
        next_outgoing_id: of the session; a flow that is ahead of it needs a closer look.

    Returns:
        None: there are none. Or the place behind them; ranges of delivery ids; the bytes of their
        outcome, empty without dispositions; the fields of the last flow, next-incoming-id to
        link-credit, which holds for those before it; None: there was no flow."""
