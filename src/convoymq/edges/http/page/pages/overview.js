// Overview: rates and totals as they are now, the map of the cluster, alarms, ports.
import { at } from "../core/api.js";
import { Chart, SparkStat } from "../core/charts.js";
import { RangeChoice, useCourse } from "../core/course.js";
import { bytes, count, duration, rate } from "../core/format.js";
import { isMonitor, to, useGet, useHeard } from "../core/store.js";
import { LocalTable } from "../core/table.js";
import { Badge, Card, NodeLink, Page, Stat, Waiting, html } from "../core/ui.js";
import { ClusterMap } from "./cluster-map.js";

const rateOf = (name) => (value) => value.message_stats?.[`${name}_details`]?.rate ?? 0;
const NOW = {
  publish: rateOf("publish"),
  confirm: rateOf("confirm"),
  deliver: rateOf("deliver_get"),
  ack: rateOf("ack"),
  redeliver: rateOf("redeliver"),
  ready: (value) => value.queue_totals?.messages_ready,
  unacked: (value) => value.queue_totals?.messages_unacknowledged,
};
const counter = (name) => [(value) => value.message_stats?.[`${name}_details`], true];
const length = (name) => [(value) => value.queue_totals?.[`${name}_details`]];
const SAMPLES = {
  publish: counter("publish"),
  confirm: counter("confirm"),
  deliver: counter("deliver_get"),
  ack: counter("ack"),
  redeliver: counter("redeliver"),
  ready: length("messages_ready"),
  unacked: length("messages_unacknowledged"),
};

export default function Overview({ params }) {
  const found = useGet(at`overview`, {
    every: 2000,
    events: {
      topic: "overview",
      merge: (old, event) => ({ ...old, ...event }),
      every: 60_000,
      tick: true,
    },
  });
  const nodes = useGet(isMonitor() ? at`nodes` : null, { every: 3000, events: { topic: "nodes" } });
  const alarms = useHeard("alarms");
  const { recent: past, shown } = useCourse(at`overview`, found, NOW, SAMPLES, params.range);
  return html`<${Page} title="Overview" />
    <${Waiting} of=${found}>${(now) => html`
      <${Alarms} nodes=${nodes.data} alarms=${alarms} />
      <div class="stats">
        ${[
          ["publish", "Published", "/s", 1],
          ["deliver", "Delivered", "/s", 3],
          ["ack", "Acknowledged", "/s", 4],
          ["redeliver", "Redelivered", "/s", 2],
        ].map(
          ([name, label, unit, series]) => html`
          <${SparkStat} key=${name} label=${label} value=${rate(NOW[name](now))} unit=${unit} series=${series} times=${past.times} values=${past.rows[name]} />`,
        )}
        <${SparkStat} label="Ready" value=${count(now.queue_totals?.messages_ready)} series=${1} times=${past.times} values=${past.rows.ready} />
        <${SparkStat} label="Unacknowledged" value=${count(now.queue_totals?.messages_unacknowledged)} series=${2} times=${past.times} values=${past.rows.unacked} />
      </div>
      <div class="stats">${[
        ["queues", "Queues"],
        ["exchanges", "Exchanges"],
        ["connections", "Connections"],
        ["channels", "Channels"],
        ["consumers", "Consumers"],
      ].map(
        ([name, label]) => html`
        <${Stat} key=${name} label=${label} value=${name === "consumers" ? count(now.object_totals?.[name]) : html`<a href=${to(name)}>${count(now.object_totals?.[name])}</a>`} />`,
      )}</div>
      <${Course} range=${params.range} course=${shown} />
      ${nodes.data && html`<${ClusterMap} nodes=${nodes.data} /><${NodesTable} nodes=${nodes.data} />`}
      <${Ports} listeners=${now.listeners ?? []} />`}<//>`;
}

/** alarms: node -> kinds, as the server tells all users; without a stream nodes say theirs. */
function Alarms({ nodes, alarms }) {
  const own = (node) => [node.mem_alarm && "memory", node.disk_free_alarm && "disk"].filter(Boolean);
  const known = alarms ?? Object.fromEntries((nodes ?? []).map((node) => [node.name, own(node)]));
  const waits = { memory: "uses too much memory", disk: "has too little free disk" };
  const found = Object.entries(known).flatMap(([name, kinds]) =>
    kinds.map((kind) => [name, `${waits[kind] ?? kind}: publishers wait`]),
  );
  (nodes ?? []).forEach((node) =>
    found.push(
      ...[
        !node.running && [node.name, "is not running"],
        node.being_drained && [node.name, "is being drained"],
        (node.partitions ?? []).length > 0 && [node.name, `does not see ${node.partitions.join(", ")}`],
      ].filter(Boolean),
    ),
  );
  return found.map(
    ([name, text]) =>
      html`<p key=${name + text} class="banner ${text.includes("drained") ? "warn" : "bad"}" role="alert"><strong><bdi>${name}</bdi></strong> ${text}</p>`,
  );
}

function Course({ range, course }) {
  const chart = (names, labels, format, label) =>
    course?.times.length > 1
      ? html`<${Chart} key=${range} label=${label} times=${course.times} series=${names.map((name, i) => ({ label: labels[i], values: course.rows[name] }))} format=${format} />`
      : html`<p class="empty">${range ? "No history of this time yet." : "Collecting…"}</p>`;
  return html`<div class="grid"><${Card} title="Messages per second" actions=${html`<${RangeChoice} range=${range} />`}>${chart(["publish", "deliver", "ack"], ["published", "delivered", "acknowledged"], rate, "Rates")}<//>
    <${Card} title="Messages in queues">${chart(["ready", "unacked"], ["ready", "unacknowledged"], count, "Lengths")}<//></div>`;
}

export function NodesTable({ nodes }) {
  const columns = [
    { id: "name", label: "Node", sort: "name", cell: (node) => html`<${NodeLink} name=${node.name} />` },
    {
      id: "state",
      label: "State",
      sort: "running",
      cell: (node) =>
        !node.running
          ? html`<${Badge} kind="bad">down<//>`
          : node.being_drained
            ? html`<${Badge} kind="warn">draining<//>`
            : html`<${Badge} kind="good">running<//>`,
    },
    {
      id: "memory",
      label: "Memory",
      num: true,
      sort: "mem_used",
      cell: (node) => bytes(node.mem_used),
      title: "Memory of the process",
    },
    {
      id: "limit",
      label: "of",
      num: true,
      opt: true,
      sort: "mem_limit",
      cell: (node) => bytes(node.mem_limit),
      title: "Above this publishers wait",
    },
    { id: "disk", label: "Disk free", num: true, sort: "disk_free", cell: (node) => bytes(node.disk_free) },
    {
      id: "files",
      label: "Files",
      num: true,
      opt: true,
      sort: "fd_used",
      cell: (node) => count(node.fd_used),
    },
    {
      id: "sockets",
      label: "Sockets",
      num: true,
      opt: true,
      sort: "sockets_used",
      cell: (node) => count(node.sockets_used),
    },
    {
      id: "leads",
      label: "Leads",
      num: true,
      sort: "groups_led",
      cell: (node) => count(node.groups_led),
      title: "Groups whose leader is here",
    },
    {
      id: "uptime",
      label: "Up for",
      num: true,
      opt: true,
      sort: "uptime",
      cell: (node) => (node.running ? duration(node.uptime) : "–"),
    },
    { id: "release", label: "Release", opt: true, sort: "release", cell: (node) => node.release ?? "–" },
  ];
  const some = nodes.some((node) => node.groups_led !== undefined);
  return html`<${Card} title="Nodes"><${LocalTable} label="Nodes" columns=${columns.filter((column) => some || column.id !== "leads")} rows=${nodes} keyOf=${(node) => node.name} /><//>`;
}

function Ports({ listeners }) {
  const columns = [
    { id: "protocol", label: "Protocol", sort: "protocol", cell: (row) => row.protocol },
    { id: "node", label: "Node", sort: "node", cell: (row) => html`<bdi>${row.node}</bdi>` },
    {
      id: "address",
      label: "Address",
      sort: "ip_address",
      cell: (row) => html`<code>${row.ip_address}</code>`,
    },
    { id: "port", label: "Port", num: true, sort: "port", cell: (row) => row.port },
  ];
  return html`<details class="card"><summary><strong>Ports</strong> <span class="note">${listeners.length}</span></summary><${LocalTable} label="Ports" columns=${columns} rows=${listeners} keyOf=${(row) => `${row.node} ${row.port}`} /></details>`;
}
