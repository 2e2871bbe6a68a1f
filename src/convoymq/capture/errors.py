"""Errors of a capture."""

from __future__ import annotations


class CaptureError(Exception):
    """A capture can't begin or go on until an operator acts; the text says how."""


class DatabaseLost(Exception):
    """The connection to the database is gone; another one may go on."""
