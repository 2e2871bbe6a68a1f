"""Declarations are checked against the queue types of this release."""

import convoymq.broker.drivers  # noqa: F401
