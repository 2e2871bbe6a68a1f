"""What a process outside the broker uses: a blocking client of the columnar protocol."""

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
