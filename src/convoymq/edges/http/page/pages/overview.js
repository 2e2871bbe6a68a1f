// Overview: rates and totals as they are now, the map of the cluster, alarms, ports.
import { at } from "../core/api.js";
import { Chart, SparkStat, fromSamples, useHistory } from "../core/charts.js";
import { bytes, count, duration, rate } from "../core/format.js";
import { isMonitor, setParams, to, useGet } from "../core/store.js";
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
const RANGES = { now: "This minute", hour: "Last hour", day: "Last day" };
const AGES = { hour: [3600, 60], day: [86_400, 3600] };

export default function Overview({ params }) {
  const found = useGet(at`overview`, {
    every: 2000,
    events: {
      query: { topics: "overview" },
      name: "overview",
      merge: (old, event) => ({ ...old, ...event }),
    },
  });
  const nodes = useGet(isMonitor() ? at`nodes` : null, {
    every: 3000,
    events: { query: { topics: "nodes" }, name: "nodes", merge: (_, rows) => rows },
  });
  const past = useHistory(found.data, found.at, NOW);
  return html`<${Page} title="Overview" />
    <${Waiting} of=${found}>${(now) => html`
      <${Alarms} nodes=${nodes.data} />
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
      <${Course} range=${params.range ?? "now"} past=${past} />
      ${nodes.data && html`<${ClusterMap} nodes=${nodes.data} /><${NodesTable} nodes=${nodes.data} />`}
      <${Ports} listeners=${now.listeners ?? []} />`}<//>`;
}

function Alarms({ nodes }) {
  const found = (nodes ?? []).flatMap((node) =>
    [
      !node.running && [node.name, "is not running"],
      node.mem_alarm && [node.name, "uses too much memory: publishers wait"],
      node.disk_free_alarm && [node.name, "has too little free disk: publishers wait"],
      node.being_drained && [node.name, "is being drained"],
      (node.partitions ?? []).length > 0 && [node.name, `does not see ${node.partitions.join(", ")}`],
    ].filter(Boolean),
  );
  return found.map(
    ([name, text]) =>
      html`<p key=${name + text} class="banner ${text.includes("drained") ? "warn" : "bad"}" role="alert"><strong><bdi>${name}</bdi></strong> ${text}</p>`,
  );
}

function Course({ range, past }) {
  const [age, incr] = AGES[range] ?? [0, 0];
  const older = useGet(age ? at`overview` : null, {
    params: { msg_rates_age: age, msg_rates_incr: incr, lengths_age: age, lengths_incr: incr },
    every: 30_000,
  });
  const pick = (name) => fromSamples(older.data?.message_stats?.[`${name}_details`], { counter: true });
  const length = (name) => fromSamples(older.data?.queue_totals?.[`${name}_details`]);
  const rates = age
    ? ["publish", "deliver_get", "ack"].map(pick)
    : ["publish", "deliver", "ack"].map((name) => ({ times: past.times, values: past.rows[name] }));
  const lengths = age
    ? ["messages_ready", "messages_unacknowledged"].map(length)
    : ["ready", "unacked"].map((name) => ({ times: past.times, values: past.rows[name] }));
  const choose = html`<label><span class="hidden">Time</span><select value=${range} onChange=${(event) => setParams({ range: event.target.value })}>${Object.entries(RANGES).map(([key, text]) => html`<option key=${key} value=${key} selected=${key === range}>${text}</option>`)}</select></label>`;
  const chart = (rows, labels, label) =>
    rows.every((row) => row?.times?.length > 1)
      ? html`<${Chart} key=${range} label=${label} times=${rows[0].times} series=${labels.map((text, i) => ({ label: text, values: rows[i].values }))} format=${label === "Rates" ? rate : count} />`
      : html`<p class="empty">${age ? "No history of this time yet." : "Collecting…"}</p>`;
  return html`<div class="grid"><${Card} title="Messages per second" actions=${choose}>${chart(rates, ["published", "delivered", "acknowledged"], "Rates")}<//>
    <${Card} title="Messages in queues">${chart(lengths, ["ready", "unacknowledged"], "Lengths")}<//></div>`;
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
