"""ConvoyMQ: a replicated message broker and a data pipeline on it."""

__version__ = "0.2.0.dev0"
