"""Blocking client of the columnar protocol, for processes outside the broker."""

from convoymq.client import errors
from convoymq.client.client import Client
from convoymq.client.config import ClientConfig, TlsConfig
from convoymq.client.results import FetchResult, ProduceResult, QueueInfo

__all__ = [
    "Client",
    "ClientConfig",
    "FetchResult",
    "ProduceResult",
    "QueueInfo",
    "TlsConfig",
    "errors",
]
