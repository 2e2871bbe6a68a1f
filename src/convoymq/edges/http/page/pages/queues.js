// Queues of every type, one page at a time.
import { at } from "../core/api.js";
import { bytes, rate, short } from "../core/format.js";
import { session, useStore, vhost } from "../core/store.js";
import { List } from "../core/table.js";
import { Name, Page, QueueLink, State, Tag, TypeTag, VhostLink, html } from "../core/ui.js";
import { declareQueue } from "./queue-forms.js";

export const keyOfQueue = (row) => `${encodeURIComponent(row.vhost)}/${encodeURIComponent(row.name)}`;
export const number = (value, format = short) =>
  value === 0 ? html`<span class="quiet-zero">0</span>` : format(value);
export const kindOf = (row) => (row.slave_nodes ? "mirrored" : row.type);

const MARKS = [
  ["durable", "D", "durable"],
  ["auto_delete", "AD", "deleted with its last consumer"],
  ["exclusive", "Excl", "of one connection"],
];
export const Features = ({
  of,
}) => html`${MARKS.filter(([key]) => of[key]).map(([key, text, title]) => html`<${Tag} key=${key} title=${title}>${text}<//>`)}
  ${of.arguments?.["x-single-active-consumer"] && html`<${Tag} title="single active consumer">SAC<//>`}
  ${of.policy && html`<${Tag} title="policy ${of.policy}">${of.policy.slice(0, 16)}<//>`}`;

/** Members that are online, of all: signs and a number. */
export function Members({ of }) {
  const members = of.members ?? [];
  const online = new Set(of.online ?? []);
  if (!members.length) return null;
  return html`<span class="members" title=${members.map((each) => `${each}: ${online.has(each) ? "online" : "offline"}`).join("\n")}><span aria-hidden="true">${members.map((each) => html`<span key=${each} class=${online.has(each) ? "up" : "down"}>${online.has(each) ? "●" : "○"}</span>`)}</span> ${online.size}/${members.length}</span>`;
}

export const QUEUE_COLUMNS = [
  {
    id: "name",
    label: "Name",
    sort: "name",
    cell: (row) => html`<${QueueLink} vhost=${row.vhost} name=${row.name} most=${40} />`,
  },
  {
    id: "vhost",
    label: "Virtual host",
    sort: "vhost",
    opt: true,
    cell: (row) => html`<${VhostLink} name=${row.vhost} />`,
  },
  { id: "type", label: "Type", sort: "type", cell: (row) => html`<${TypeTag} type=${kindOf(row)} />` },
  { id: "state", label: "State", sort: "state", cell: (row) => html`<${State} of=${row.state} />` },
  {
    id: "ready",
    label: "Ready",
    num: true,
    sort: "messages_ready",
    cell: (row) => number(row.messages_ready),
  },
  {
    id: "unacked",
    label: "Unacked",
    num: true,
    sort: "messages_unacknowledged",
    cell: (row) => number(row.messages_unacknowledged),
  },
  {
    id: "scheduled",
    label: "Sched.",
    num: true,
    opt: true,
    sort: "messages_delayed",
    title: "Waiting for their time",
    cell: (row) => (row.messages_delayed === undefined ? "" : number(row.messages_delayed)),
  },
  {
    id: "dead",
    label: "Dead",
    num: true,
    opt: true,
    sort: "messages_dlx",
    title: "On their way to the dead-letter target",
    cell: (row) => (row.messages_dlx === undefined ? "" : number(row.messages_dlx)),
  },
  {
    id: "in",
    label: "In/s",
    num: true,
    sort: "message_stats.publish_details.rate",
    cell: (row) => number(row.message_stats?.publish_details?.rate ?? 0, rate),
  },
  {
    id: "out",
    label: "Out/s",
    num: true,
    opt: true,
    sort: "message_stats.deliver_get_details.rate",
    cell: (row) => number(row.message_stats?.deliver_get_details?.rate ?? 0, rate),
  },
  {
    id: "consumers",
    label: "Cons.",
    num: true,
    opt: true,
    sort: "consumers",
    title: "Consumers",
    cell: (row) => number(row.consumers),
  },
  {
    id: "leader",
    label: "Leader, members",
    sort: "node",
    opt: true,
    title: "Leader, master or home; and how many members are online",
    cell: (row) => html`<${Name} of=${row.leader ?? row.node ?? ""} most=${18} /> <${Members} of=${row} />`,
  },
  { id: "features", label: "Features", opt: true, cell: (row) => html`<${Features} of=${row} />` },
  {
    id: "size",
    label: "Bytes",
    num: true,
    opt: true,
    sort: "message_bytes",
    cell: (row) => number(row.message_bytes, bytes),
  },
  {
    id: "memory",
    label: "Memory",
    num: true,
    opt: true,
    sort: "memory",
    cell: (row) => number(row.memory, bytes),
  },
];

export default function Queues() {
  const chosen = useStore(vhost);
  const several = (useStore(session).vhosts ?? []).length > 1 && !chosen;
  return html`<${Page} title="Queues" actions=${html`<button type="button" class="primary" onClick=${() => declareQueue()}>New queue…</button>`} />
    <section class="card"><${List} path=${chosen ? at`queues/${chosen}` : at`queues`} columns=${QUEUE_COLUMNS.filter((column) => several || column.id !== "vhost")} keyOf=${keyOfQueue} label="Queues"
      events=${{ topic: "queues", keyOf: keyOfQueue, params: chosen ? { vhost: chosen } : {} }}
      empty="There is no queue yet." /></section>`;
}
