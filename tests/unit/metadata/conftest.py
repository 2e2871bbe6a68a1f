"""Declarations are checked against the queue types of this release."""

import convoymq.queues.drivers  # noqa: F401
