// Broker groups of RocketMQ's protocol: who is master, who acts for it, escape, logs and offsets.
import { at } from "../core/api.js";
import { bytes, count, when } from "../core/format.js";
import { to, useGet } from "../core/store.js";
import { LocalTable, Table } from "../core/table.js";
import { Badge, Card, Empty, Name, Page, Stat, Waiting, html } from "../core/ui.js";

const MASTER = 0;
const READ = 4;
const WRITE = 2;
const allowed = (permission) =>
  [permission & READ && "read", permission & WRITE && "write"].filter(Boolean).join(", ") || "nothing";
const who = (row) =>
  row.acting === null || row.acting === undefined || row.acting === ""
    ? row.master
      ? html`<${Badge} kind="good">its master<//>`
      : html`<${Badge} kind="bad">nobody<//>`
    : html`<${Badge} kind="warn">replica ${row.acting} acts<//>`;

export default function BrokerGroups({ page, names, params }) {
  if (page === "group") return html`<${Group} name=${names[0]} params=${params} />`;
  const found = useGet(at`broker-groups`, { every: 3000 });
  const none = found.error?.status === 404;
  return html`<${Page} title="Broker groups" />
    <${Card}>${
      none
        ? html`<${Empty}>This cluster shows no broker groups: its nodes have no <code>rocketmq.namesrv</code>. With it, groups of RocketMQ's protocol that are registered there appear here.<//>`
        : html`<${Waiting} of=${found}>${(rows) =>
            html`<${LocalTable} label="Broker groups" rows=${rows} keyOf=${(row) => row.name} empty="No broker group is registered." columns=${[
              {
                id: "name",
                label: "Group",
                sort: "name",
                cell: (row) => html`<a href=${to("group", row.name)}><${Name} of=${row.name} /></a>`,
              },
              {
                id: "cluster",
                label: "Cluster",
                sort: "cluster",
                opt: true,
                cell: (row) => html`<${Name} of=${row.cluster} />`,
              },
              { id: "serves", label: "Who serves", cell: who },
              {
                id: "master",
                label: "Master",
                cell: (row) =>
                  row.master ? html`<code>${row.master}</code>` : html`<${Badge} kind="bad">away<//>`,
              },
              {
                id: "members",
                label: "Members",
                cell: (row) => html`<code>${row.members.join(", ")}</code>`,
              },
            ]} />`}<//>`
    }<//>`;
}

function Group({ name, params }) {
  const found = useGet(at`broker-groups/${name}`, { every: 2000 });
  const topics = useGet(at`broker-groups/${name}/topics`, { every: 10_000 });
  return html`<${Page} title=${name} kind="Broker group" />
    <${Waiting} of=${found}>${(group) => html`
      <div class="stats"><${Stat} label="Serves as master" value=${who(group)} /><${Stat} label="Replicas" value=${count(group.replicas.filter((row) => row.running).length)} note="of ${group.replicas.length}" /><${Stat} label="Largest lag" value=${bytes(Math.max(0, ...group.replicas.map((row) => row.lag ?? 0)))} /></div>
      <${Card} title="Replicas"><${Table} label="Replicas" rows=${group.replicas} keyOf=${(row) => row.id} columns=${[
        {
          id: "id",
          label: "Replica",
          cell: (row) => html`${row.id}${Number(row.id) === MASTER ? " (master)" : ""}`,
        },
        { id: "address", label: "Address", cell: (row) => html`<code>${row.address}</code>` },
        {
          id: "state",
          label: "State",
          cell: (row) =>
            row.running
              ? html`<${Badge} kind="good">running<//>`
              : html`<${Badge} kind="bad">${row.reason ?? "no answer"}<//>`,
        },
        {
          id: "acts",
          label: "Special services",
          title: "Delayed messages, transactions and pop: run by the master, or by who acts for it",
          cell: (row) => (row.runs_special_services ? html`<${Badge} kind="info">here<//>` : ""),
        },
        {
          id: "lag",
          label: "Lag",
          num: true,
          title: "Bytes of the log that the replica does not have yet",
          cell: (row) => bytes(row.lag),
        },
        { id: "begin", label: "Log from", num: true, opt: true, cell: (row) => count(row.log_begin) },
        { id: "end", label: "Log to", num: true, cell: (row) => count(row.log_end) },
        { id: "in", label: "In", num: true, opt: true, cell: (row) => count(row.messages_in) },
        { id: "out", label: "Out", num: true, opt: true, cell: (row) => count(row.messages_out) },
        { id: "version", label: "Version", opt: true, cell: (row) => row.version ?? "–" },
      ]} /><//>`}<//>
    <${Card} title="Topics"><${Waiting} of=${topics}>${(rows) =>
      html`<${LocalTable} label="Topics" rows=${rows} keyOf=${(row) => row.name} columns=${[
        {
          id: "name",
          label: "Topic",
          sort: "name",
          cell: (row) =>
            html`<a href="${to("group", name)}?topic=${encodeURIComponent(row.name)}"><${Name} of=${row.name} /></a>`,
        },
        { id: "read", label: "Read queues", num: true, cell: (row) => count(row.read_queues) },
        { id: "write", label: "Write queues", num: true, cell: (row) => count(row.write_queues) },
        { id: "permission", label: "Clients may", cell: (row) => allowed(row.permission) },
        {
          id: "kind",
          label: "Kind",
          sort: "system",
          opt: true,
          cell: (row) => (row.system ? "of the system" : row.ordered ? "ordered" : ""),
        },
      ]} />`}<//><//>
    ${params.topic && html`<${Topic} group=${name} name=${params.topic} />`}`;
}

function Topic({ group, name }) {
  const found = useGet(at`broker-groups/${group}/topics/${name}`, { every: 5000 });
  return html`<${Card} title="Offsets of ${name}"><${Waiting} of=${found}>${(topic) =>
    html`<p>Consumer groups: ${topic.consumer_groups.length ? html`<bdi>${topic.consumer_groups.join(", ")}</bdi>` : "none"}</p><${Table} label="Queues" rows=${topic.queues} keyOf=${(row) => row.queue} columns=${[
      { id: "queue", label: "Queue", cell: (row) => count(row.queue) },
      { id: "min", label: "First", num: true, cell: (row) => count(row.min_offset) },
      { id: "max", label: "Next", num: true, cell: (row) => count(row.max_offset) },
      { id: "last", label: "Last message", num: true, cell: (row) => when(row.last_stored_ms) },
    ]} />`}<//><//>`;
}
