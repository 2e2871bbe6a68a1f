"""Errors of the data sources. Spark shows the class and the text of these in the driver."""

from __future__ import annotations


class SourceError(Exception):
    """Anything that a data source reports on purpose."""


class OptionError(SourceError, ValueError):
    """An option is unknown, missing, has a wrong value or does not fit the others."""


class SchemaError(SourceError, ValueError):
    """The user's schema, or a frame that is written, has columns that do not fit."""


class DataLoss(SourceError):
    """Messages that should be read are gone, and `failOnDataLoss` is true."""


class ReservationLost(DataLoss):
    """Loss of what the broker held for this query: see the text for what follows."""
