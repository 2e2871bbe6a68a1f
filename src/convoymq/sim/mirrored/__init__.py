"""The load `mirrored`: classic queues with mirrors."""
