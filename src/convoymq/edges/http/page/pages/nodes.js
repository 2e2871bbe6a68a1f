// Nodes of the cluster, and what is done with all of them.
import { at, post } from "../core/api.js";
import { bytes, count } from "../core/format.js";
import { ask } from "../core/forms.js";
import { isAdministrator, useGet } from "../core/store.js";
import { LocalTable, Table } from "../core/table.js";
import { Badge, Card, NodeLink, Page, Waiting, html } from "../core/ui.js";
import { ClusterMap } from "./cluster-map.js";
import { NodesTable } from "./overview.js";

export default function Nodes() {
  const found = useGet(at`nodes`, {
    every: 2000,
    events: { topic: "nodes" },
  });
  const progress = useGet(at`convoy/rebalance`, { every: 5000 });
  const actions =
    isAdministrator() && html`<button type="button" onClick=${rebalance}>Spread leaders…</button>`;
  return html`<${Page} title="Nodes" actions=${actions} />
    <${Waiting} of=${found}>${(nodes) => html`${nodes.some((node) => node.process > 1) && html`<${Machines} nodes=${nodes} />`}<${NodesTable} nodes=${nodes} /><${ClusterMap} nodes=${nodes} />`}<//>
    <${Checks} />
    <${Metadata} />
    ${progress.data?.number > 0 && html`<${Card} title="Spreading of leaders"><p>${progress.data.running ? html`<${Badge} kind="info">running<//>` : html`<${Badge} kind="good">ended<//>`} ${count(progress.data.moved)} of ${count(progress.data.planned)} moved${progress.data.failed.length > 0 && `, ${count(progress.data.failed.length)} not`}</p><//>`}`;
}

/** Machines of several processes, each of which is a node: their sums. */
function Machines({ nodes }) {
  const found = useGet(at`convoy/machines`, { every: 3000 });
  const nameOf = Object.fromEntries(nodes.map((node) => [node.id, node.name]));
  const columns = [
    { id: "machine", label: "Machine", num: true, sort: "machine", cell: (row) => count(row.machine) },
    {
      id: "state",
      label: "Processes",
      sort: "processes_running",
      cell: (row) =>
        html`<${Badge} kind=${row.processes_running === row.nodes.length ? "good" : row.processes_running ? "warn" : "bad"}>${row.processes_running} of ${row.nodes.length} run<//>${row.being_drained && html` <${Badge} kind="warn">draining<//>`}`,
    },
    {
      id: "memory",
      label: "Memory",
      num: true,
      sort: "mem_used",
      cell: (row) => bytes(row.mem_used),
      title: "Of all its processes",
    },
    {
      id: "connections",
      label: "Clients",
      num: true,
      sort: "connections",
      cell: (row) => count(row.connections),
    },
    {
      id: "files",
      label: "Files",
      num: true,
      opt: true,
      sort: "fd_used",
      cell: (row) => count(row.fd_used),
    },
    {
      id: "nodes",
      label: "Nodes",
      cell: (row) => row.nodes.map((id, i) => html`${i > 0 && ", "}<${NodeLink} name=${nameOf[id]} />`),
    },
  ];
  return html`<${Card} title="Machines" note="Each process of a machine is a node."><${Waiting} of=${found}>${(rows) => html`<${LocalTable} label="Machines" columns=${columns} rows=${rows} keyOf=${(row) => row.machine} />`}<//><//>`;
}

const rebalance = () =>
  ask({
    title: "Spread leaders over the nodes",
    text: "Leaders of queues move to nodes that have fewer. Clients stay connected; a queue that moves pauses for some milliseconds.",
    fields: [
      {
        name: "by",
        label: "Even out",
        options: [
          ["count", "numbers of leaders"],
          ["load", "load"],
        ],
      },
      { name: "rate", label: "Moves per second at most", type: "number", min: 1, value: 10 },
      { name: "dry_run", label: "Only say what would move", type: "check" },
    ],
    action: "Spread",
    act: ({ by, rate, dry_run }) => post(at`rebalance/queues`, { by, rate: Number(rate), dry_run }),
    done: (found) =>
      found
        ? `${count((found.moves ?? found.planned ?? []).length ?? found.planned)} leaders would move`
        : "Leaders begin to move",
  });

const CHECKS = [
  ["alarms", "No alarm in the cluster", at`health/checks/alarms`],
  [
    "node-is-quorum-critical",
    "Queues keep a majority without this node",
    at`health/checks/node-is-quorum-critical`,
  ],
  [
    "quorum-queues-without-elected-leaders",
    "All quorum queues have a leader",
    at`health/checks/quorum-queues-without-elected-leaders/all-vhosts/pattern/${".*"}`,
  ],
  ["virtual-hosts", "All virtual hosts run", at`health/checks/virtual-hosts`],
  [
    "quorum-queue-replicas-initial-sync",
    "New members have caught up",
    at`health/checks/quorum-queue-replicas-initial-sync`,
  ],
  [
    "node-is-mirror-sync-critical",
    "Mirrored queues have a synchronised copy elsewhere",
    at`health/checks/node-is-mirror-sync-critical`,
  ],
];

function Checks() {
  return html`<${Card} title="Health checks" note="Of the node that serves this page."><ul class="checks">${CHECKS.map(([name, text, path]) => html`<${Check} key=${name} text=${text} path=${path} />`)}</ul><//>`;
}

function Check({ text, path }) {
  const found = useGet(path, { every: 10_000 });
  const failed = found.error && found.error.status === 503;
  return html`<li>${found.data ? html`<${Badge} kind="good">passes<//>` : failed ? html`<${Badge} kind="bad">fails<//>` : html`<${Badge}>unknown<//>`} ${text}${failed && html` <span class="note">${found.error.message}</span>`}</li>`;
}

function Metadata() {
  const found = useGet(at`convoy/metadata-store/status`, { every: 5000 });
  return html`<${Card} title="Metadata" note="The replicated tree of queues, exchanges, users and policies."><${Waiting} of=${found}>${(rows) => html`<${RaftTable} rows=${rows} />`}<//><//>`;
}

/** Members of a Raft group: role, and how far each is. */
export function RaftTable({ rows, actions }) {
  const newest = Math.max(0, ...rows.map((row) => row["Last Log Index"]).filter(Number.isInteger));
  const lag = (row) => (Number.isInteger(row["Last Applied"]) ? newest - row["Last Applied"] : null);
  const columns = [
    { id: "node", label: "Node", cell: (row) => html`<bdi>${row["Node Name"]}</bdi>` },
    {
      id: "role",
      label: "Role",
      cell: (row) =>
        html`<${Badge} kind=${row["Raft State"] === "leader" ? "info" : row["Raft State"] === "follower" ? "good" : "bad"}>${row["Raft State"]}<//>`,
    },
    { id: "membership", wide: true, label: "Membership", opt: true, cell: (row) => row.Membership },
    {
      id: "lag",
      label: "Behind",
      num: true,
      title: "Log entries that the member has not applied yet",
      cell: (row) => count(lag(row)),
    },
    { id: "log", label: "Log", num: true, opt: true, cell: (row) => count(row["Last Log Index"]) },
    { id: "commit", label: "Committed", num: true, opt: true, cell: (row) => count(row["Commit Index"]) },
    {
      id: "snapshot",
      wide: true,
      label: "Snapshot",
      num: true,
      opt: true,
      cell: (row) => count(row["Snapshot Index"]),
    },
    { id: "term", label: "Term", num: true, opt: true, cell: (row) => count(row.Term) },
    {
      id: "version",
      wide: true,
      label: "Version",
      num: true,
      opt: true,
      cell: (row) => count(row["Machine Version"]),
    },
    { id: "reason", label: "Remark", cell: (row) => row.Reason || "" },
    actions && { id: "actions", label: "", cell: actions },
  ];
  return html`<${Table} label="Members" columns=${columns} rows=${rows} keyOf=${(row) => row["Node Name"]} />`;
}
