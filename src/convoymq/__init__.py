"""ConvoyMQ: a replicated message broker and a data pipeline on it."""

__version__ = "0.1.0"
