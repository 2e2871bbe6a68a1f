"""Forks nodes off a process that has imported what a node imports; `tests.forked_nodes` starts it.

Arguments name modules whose `install` changes what nodes do. Requests come from standard input, a
line of JSON each, and have a line as their answer. The path of a configuration, that of a log and
an environment start a node: the answer is its process id. A process id alone asks for the exit code
of that node, null while it runs. The end of the input ends all nodes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from convoymq.cli import serve

LATE = re.compile(r'import_late\(\s*((?:"[\w.]+"[,\s]*)+)\)')


def import_node() -> None:
    """Imports what a node without TLS imports, in the order in which it does, and all that it would
    import later."""
    serve._import_lean_python()
    serve._import_lean_codecs()
    importlib.import_module("convoymq.edges.configuration")
    gc.disable()
    serve._import_lean(tls=False)
    importlib.import_module("convoymq.node.process")
    from convoymq.edges.http.listener import _import_server
    from convoymq.edges.registry import import_edges

    import_edges()
    _import_server()
    for path in Path(serve.__file__).parents[1].rglob("*.py"):
        for names in LATE.findall(path.read_text()):
            for name in re.findall(r"[\w.]+", names):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def start(config: str, log: str, environment: dict[str, str]) -> int:
    """Returns the process id of a new node."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(source, descriptor)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments = ["--config", config]
    sys.exit(serve.main(arguments))


def exit_code(pid: int) -> int | None:
    """Returns the exit code of a node; negative = the signal that ended it."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    """Serves requests until the input ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name).install()
    import_node()
    running: set[int] = set()
    for line in sys.stdin:
        request: Any = json.loads(line)
        if isinstance(request, int):
            answer = exit_code(request)
            if answer is not None:
                running.remove(request)
        else:
            answer = start(*request)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
