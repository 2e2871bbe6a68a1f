"""ConvoyMQ: a replicated message broker and a data pipeline on it."""

from os.path import dirname, exists

__version__ = "0.4.0"

if exists(f"{dirname(__file__)}/client_only.py") and exists(f"{dirname(__file__)}/node.py"):
    # The files that both have are those of whichever was installed last.
    raise ImportError(
        "convoymq and convoymq-client are installed together, and both contain convoymq.client: "
        "pip uninstall -y convoymq convoymq-client, then install one of them"
    )
