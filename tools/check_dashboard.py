"""Lists the expressions of Grafana dashboards for which a Prometheus has no data.

    python tools/check_dashboard.py http://127.0.0.1:9090 deploy/grafana/convoymq.json

Exit code 1: there is at least one. Variables of dashboards get the values below; a dashboard of
somebody else may use others.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

INTERVALS = {"__rate_interval": "20s", "__range": "5m", "__interval": "5s"}
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
TIMEOUT_S = 10.0


class Expression(NamedTuple):
    """An expression of a panel."""

    panel: str
    text: str


def expressions_of(path: Path, variables: Mapping[str, str]) -> list[Expression]:
    """Returns the expressions of a dashboard. Raises KeyError: a variable has no value."""
    found = []
    for panel in _panels(json.loads(path.read_text())["panels"]):
        for target in panel.get("targets", ()):
            if target.get("expr"):
                text = VARIABLE.sub(lambda each: variables[each[1]], target["expr"])
                found.append(Expression(str(panel.get("title", panel.get("type"))), text))
    return found


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def query(base: str, expression: str) -> list[dict[str, Any]]:
    """Returns the series that a Prometheus has for an expression now."""
    url = f"{base}/api/v1/query?{urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        found = json.load(answer)["data"]["result"]
    assert isinstance(found, list)
    return found


def variables_of(base: str, endpoint: str = "aggregated") -> dict[str, str]:
    """Returns values for the variables of our dashboard and RabbitMQ's: of the first cluster that
    the Prometheus knows."""
    (known, *_) = query(base, f'rabbitmq_identity_info{{rabbitmq_endpoint="{endpoint}"}}')
    labels = known["metric"]
    cluster = labels["rabbitmq_cluster"]
    own = {"cluster": cluster, "rabbitmq_cluster": cluster, "endpoint": endpoint}
    return {**INTERVALS, **own, "namespace": labels.get("namespace", "")}


def main() -> int:
    """See the module text."""
    base, *paths = sys.argv[1:]
    empty = 0
    for path in map(Path, paths):
        for each in expressions_of(path, variables_of(base)):
            if not query(base, each.text):
                empty += 1
                print(f"{path.name}: {each.panel}: no data for {' '.join(each.text.split())}")
    return int(empty > 0)


if __name__ == "__main__":
    sys.exit(main())
