"""Tries an installed convoymq-client: `try_client.py [HOST:PORT ...]`.

Run it outside the sources. With servers, of which every one knows a stream `log` and a queue
`orders`: publishes to both and reads the stream. Without any: frames only.
"""

from __future__ import annotations

import importlib.util
import sys

import convoymq
from convoymq.client import Client, ClientConfig, errors
from convoymq.client.rows import frame_of, keys_of, values_of
from convoymq.kernels import columns
from convoymq.kernels.column_frame import ColumnFrame

VALUES = [b"%d" % number for number in range(1000)]
KEYS = [None if number % 3 else b"key" for number in range(1000)]


def main(servers: tuple[str, ...]) -> int:
    """Publishes and reads; returns the exit code."""
    for module in (convoymq, columns):
        assert "site-packages" in str(module.__file__), f"{module.__file__} is not installed"
    assert not str(columns.__file__).endswith(".py"), "the kernels are not compiled"
    for absent in ("convoymq.node", "uvloop", "starlette", "pyspark", "pyarrow"):
        assert importlib.util.find_spec(absent) is None, f"{absent} is installed as well"
    frame = frame_of(VALUES, KEYS)
    assert values_of(ColumnFrame(frame)) == VALUES
    if servers:
        with Client(ClientConfig(servers)) as client:
            assert client.produce(frame, stream="log", producer="try", sequence=1).duplicates == 0
            again = client.produce(frame, stream="log", producer="try", sequence=1)
            assert again.duplicates == len(VALUES), again
            assert client.produce(frame, queue="orders").count == len(VALUES)
            for local in (False, True):
                read: list[bytes | None] = []
                keys: list[bytes | None] = []
                while len(read) < len(VALUES):
                    result = client.fetch("log", len(read), end=len(VALUES), local=local)
                    read += values_of(result.frame)
                    keys += keys_of(result.frame)
                assert read == VALUES
                assert keys == KEYS
    else:
        try:
            Client(ClientConfig(("127.0.0.1:9",), timeout=1.0)).metadata()
        except errors.Unavailable as error:
            print(f"as it must without a server: {error}")
        else:
            raise AssertionError("a server answered")
    print(f"convoymq-client {convoymq.__version__} works: Python {sys.version.split()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
