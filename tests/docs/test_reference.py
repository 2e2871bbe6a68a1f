"""Every configuration key, command, metric and log event has its place in docs/."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.main import get_command

from convoymq.broker.node_view import NodeView
from convoymq.cli.app import app
from convoymq.edges import configuration
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.edge import AmqpEdge
from convoymq.edges.columnar.edge import FetchEdge
from convoymq.edges.http.metric_help import HELP
from convoymq.edges.http.metrics import render
from convoymq.kernels.connection_buffer import Outbox
from convoymq.kernels.flusher import Flusher
from convoymq.model.config import TraceConfig
from convoymq.node.process_info import io_info, process_info
from convoymq.rocketmq.broker import metrics as broker_metrics
from convoymq.rocketmq.namesrv import metrics as namesrv_metrics
from convoymq.settings.table import DECLARED_TYPES, KEYS
from convoymq.shells.groups.host import HostCounters
from convoymq.trace.recorder import Traces
from tests.provocation import check, documented_events, observing
from tests.unit.queues.fake_cluster import FakeCluster

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src" / "convoymq").rglob("*.py"))
EVENT = re.compile(
    r"(alarm|amqp|audit|broker|classic|clock|cluster|config|definitions|fetch|ha|identity"
    r"|link|log|machine|management|metadata|namesrv|node|operator|queue|quorum|raft"
    r"|recovery|remoting|rocketmq|role|shovel|spans|storage|tls|topics?|trace)\.[a-z_]+"
)
#: Callables that take an event's name first, or as the second part of an effect.
SAYS = frozenset(
    ("debug", "info", "warning", "error", "exception", "note", "on_note", "_note", "log")
)


@pytest.fixture(scope="module")
def trees() -> Iterator[dict[Path, ast.Module]]:
    """The sources, parsed once. The garbage collector would look at them again and again."""
    gc.disable()
    yield {path: ast.parse(path.read_text()) for path in SOURCES}
    gc.enable()


def spoken(tree: ast.AST) -> set[str]:
    """Event names in calls that log, and in notes that cores hand out."""
    found = set()
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called = node.func
            # `(log.warning if on else log.info)("an.event")` says it too.
            called = called.body if isinstance(called, ast.IfExp) else called
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            parts = node.args[:1] if name in SAYS else []
            if parts and isinstance(parts[0], ast.IfExp):
                parts = [parts[0].body, parts[0].orelse]
        elif isinstance(node, ast.Tuple) and node.elts:
            first = node.elts[0]
            is_note = isinstance(first, ast.Name) and first.id == "EFFECT_NOTE"
            parts = node.elts[1:2] if is_note else []
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                found |= {part.value} if EVENT.fullmatch(part.value) else set()
    return found


def test_configuration_page_is_the_generated_one() -> None:
    assert (DOCS / "configuration.md").read_text() == configuration.reference()


def test_a_key_in_brackets_exists(trees: dict[Path, ast.Module]) -> None:
    """Docstrings of settings name the configuration keys that set them."""
    page = (DOCS / "configuration.md").read_text()
    keys = set(re.findall(r"^### `([^`]+)`", page, re.M))
    keys.update(name for also in re.findall(r"Also: (.+)", page) for name in also.split("`")[1::2])
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} [{name}]"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for name in re.findall(r"(?<![\w`\[])\[([a-z]\w*(?:\.\w+)*)\](?![(`])", node.value.value)
        if name not in keys
    ]
    assert wrong == []


def claims(marker: str) -> set[str]:
    """What tests say that they provoke; each is held to it when it runs (`tests.provocation`)."""
    name = f"pytest.mark.{marker}"
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if name in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return found


def test_a_claim_that_is_not_kept_fails() -> None:
    with observing() as seen:
        structlog.get_logger().info("link.up", peer=2)
        structlog.get_logger().info("node.failed")
        seen.exposition("convoy_groups_led 1\nconvoy_groups_followed 1\n")
        seen.exposition("convoy_groups_led 2\nconvoy_groups_followed 1\n")
    check(seen, {"link.up"}, {"convoy_groups_led"})
    with pytest.raises(AssertionError, match=r"provoke it: link\.down"):
        check(seen, {"link.down"}, set())
    with pytest.raises(AssertionError, match="documented as"):
        check(seen, {"node.failed"}, set())
    with pytest.raises(AssertionError, match="not moved"):
        check(seen, set(), {"convoy_groups_followed"})


def test_events_are_in_operations_and_provoked(trees: dict[Path, ast.Module]) -> None:
    said = set().union(*map(spoken, trees.values()))
    assert len(said) > 30, "the search for events has stopped working"
    documented = documented_events().keys()
    missing = sorted(said - documented)
    assert not missing, f"docs/operations.md has no row for {', '.join(missing)}"
    missing = sorted(documented - said)
    assert not missing, f"docs/operations.md explains what nobody says: {', '.join(missing)}"
    missing = sorted(said - claims("provokes"))
    assert not missing, f"no test provokes {', '.join(missing)}"


def commands() -> list[str]:
    """All commands and subcommands, as typed."""
    found = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        if below:
            found += [f"{name} {each}" for each in below]
        else:
            found.append(name)
    return found


@pytest.mark.parametrize("command", commands())
def test_command_is_in_docs(command: str) -> None:
    pages = "".join(path.read_text() for path in (*DOCS.glob("*.md"), ROOT / "README.md"))
    assert re.search(rf"`?convoy {re.escape(command)}\b", pages), f"docs know no convoy {command}"


async def test_metrics_are_in_docs(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, nodes=1) as cluster:
        broker = cluster.nodes[1].broker
        edges = [
            AmqpEdge(broker=broker, settings=AmqpConfig(), outbox=Outbox()),
            FetchEdge(broker=broker),
        ]
        broker.traces = Traces(tmp_path, 1, 1, TraceConfig(), lambda: 1)
        flusher = Flusher()
        info = process_info(tmp_path) | io_info(flusher)
        flusher.close()
        cluster.raise_versions()
        await broker.topics.create("/", "orders", partitions=1)
        await broker.topics.create_group("/", "orders", "g")
        broker.topic_parts.coordinators.stalls.add(("/", "orders", "g"), 1)
        broker.topic_parts.scaling.counters.decisions["split", "load_2"] += 1
        link = {"node": 2, "bytes_out": 1, "bytes_in": 1, "full": False}
        broker.cluster.node = NodeView(info=lambda: dict(info), links=lambda: [link])
        text = await render(broker, edges)
        text += await render(broker, edges, per_object=True)
    names = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    names |= {f"convoy_raft_{name}_total" for name in HostCounters.__slots__}
    assert HELP.keys() == names, "edges/http/metric_help.py and the metrics differ"
    names |= broker_metrics.HELP.keys() | namesrv_metrics.HELP.keys()
    assert len(names) > 40, "the search for metrics has stopped working"
    page = (DOCS / "metrics.md").read_text()
    missing = sorted(name for name in names if f"`{name}`" not in page)
    assert not missing, f"docs/metrics.md does not explain {', '.join(missing)}"
    missing = sorted(names - claims("moves"))
    assert not missing, f"no test shows two values of {', '.join(missing)}"


def test_the_page_of_policies_says_which_types_serve_a_key() -> None:
    """Columns of its table: keys, one for each declared type, operator policies."""
    page = (DOCS / "policies.md").read_text().partition("## Keys")[2].partition("## ")[0]
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*) \|$", page, re.M):
        cells = [cell.strip() for cell in row.split("|")]
        for name in re.findall(r"`([a-z-]+)`", cells[0].partition(" (")[0]):
            served = {
                kind
                for kind, cell in zip(DECLARED_TYPES, cells[1:4], strict=True)
                if cell.strip(" –") and cell not in ("topics", "exchanges")
            }
            found.setdefault(name, set()).update(served)
            operator = cells[4].strip(" –")
            if operator == "yes" or not operator:
                assert (KEYS[name].operator is not None) == bool(operator), name
    unserved = {name for name, key in KEYS.items() if not key.policies}
    assert found.keys() == KEYS.keys() - unserved
    for name, served in found.items():
        assert served == set(KEYS[name].policies) & set(DECLARED_TYPES), name
