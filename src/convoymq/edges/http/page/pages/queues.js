// Queues of every type, one page at a time.
import { at } from "../core/api.js";
import { bytes, rate, short } from "../core/format.js";
import { setParams, useStore, vhost } from "../core/store.js";
import { List, VHOST } from "../core/table.js";
import { Name, Page, QueueLink, State, Tag, TypeTag, html } from "../core/ui.js";
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
  if (!members.length) return html`<span class="quiet-zero">–</span>`;
  return html`<span class="members" title=${members.map((each) => `${each}: ${online.has(each) ? "online" : "offline"}`).join("\n")}><span aria-hidden="true">${members.map((each) => html`<span key=${each} class=${online.has(each) ? "up" : "down"}>${online.has(each) ? "●" : "○"}</span>`)}</span> ${online.size}/${members.length}</span>`;
}

export const QUEUE_COLUMNS = [
  {
    id: "name",
    label: "Name",
    sort: "name",
    cell: (row) => html`<${QueueLink} vhost=${row.vhost} name=${row.name} most=${32} />`,
  },
  VHOST,
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
    cell: (row) => (row.messages_delayed === undefined ? "–" : number(row.messages_delayed)),
  },
  {
    id: "dead",
    label: "Dead",
    num: true,
    opt: true,
    sort: "messages_dlx",
    title: "On their way to the dead-letter target",
    cell: (row) => (row.messages_dlx === undefined ? "–" : number(row.messages_dlx)),
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
    id: "members",
    label: "Members",
    opt: true,
    title: "How many members are online",
    cell: (row) => html`<${Members} of=${row} />`,
  },
  {
    id: "leader",
    label: "Leader",
    sort: "node",
    title: "Leader, master or home",
    opt: true,
    cell: (row) => html`<${Name} of=${row.leader ?? row.node ?? ""} most=${18} />`,
  },
  {
    id: "features",
    wide: true,
    label: "Features",
    opt: true,
    cell: (row) => html`<${Features} of=${row} />`,
  },
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

/** Partitions belong to the page of their topic. */
const TYPES = "classic,quorum,stream";

export default function Queues({ params }) {
  const chosen = useStore(vhost);
  const all = params.partitions === "true";
  const more = html`<label class="check"><input type="checkbox" checked=${all} onChange=${(event) => setParams({ partitions: event.target.checked ? "true" : "", page: 1 })} /> Partitions of topics</label>`;
  return html`<${Page} title="Queues" actions=${html`<button type="button" class="primary" onClick=${() => declareQueue()}>New queue…</button>`} />
    <section class="card"><${List} path=${chosen ? at`queues/${chosen}` : at`queues`} columns=${QUEUE_COLUMNS} params=${{ type: all ? "" : TYPES }} more=${more} keyOf=${keyOfQueue} label="Queues"
      events=${{ topic: "queues", params: chosen ? { vhost: chosen } : {} }}
      empty="There is no queue yet." /></section>`;
}
