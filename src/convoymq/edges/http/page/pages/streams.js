// Streams: logs that are read again and again, with their offsets.
import { at } from "../core/api.js";
import { bytes, count, plain, rate, short } from "../core/format.js";
import { useStore, vhost } from "../core/store.js";
import { List, VHOST } from "../core/table.js";
import { Page, QueueLink, State, html } from "../core/ui.js";
import { declareQueue } from "./queue-forms.js";
import { Members, keyOfQueue, number } from "./queues.js";

const COLUMNS = [
  {
    id: "name",
    label: "Name",
    sort: "name",
    cell: (row) => html`<${QueueLink} vhost=${row.vhost} name=${row.name} />`,
  },
  VHOST,
  { id: "state", label: "State", sort: "state", cell: (row) => html`<${State} of=${row.state} />` },
  {
    id: "leader",
    wide: true,
    label: "Leader",
    sort: "leader",
    opt: true,
    cell: (row) => html`<bdi>${row.leader ?? "–"}</bdi>`,
  },
  { id: "members", label: "Members", opt: true, cell: (row) => html`<${Members} of=${row} />` },
  { id: "messages", label: "Messages", num: true, sort: "messages", cell: (row) => number(row.messages) },
  {
    id: "first",
    wide: true,
    label: "First offset",
    num: true,
    sort: "first_offset",
    opt: true,
    cell: (row) => count(row.first_offset),
  },
  { id: "next", label: "Next offset", num: true, sort: "next_offset", cell: (row) => count(row.next_offset) },
  {
    id: "committed",
    wide: true,
    label: "Committed",
    num: true,
    sort: "committed_offset",
    opt: true,
    cell: (row) => count(row.committed_offset),
  },
  {
    id: "in",
    label: "In/s",
    num: true,
    sort: "message_stats.publish_details.rate",
    cell: (row) => number(row.message_stats?.publish_details?.rate ?? 0, rate),
  },
  {
    id: "size",
    label: "Size",
    num: true,
    sort: "message_bytes",
    cell: (row) => number(row.message_bytes, bytes),
  },
  {
    id: "segments",
    wide: true,
    label: "Segments",
    num: true,
    opt: true,
    sort: "segments",
    cell: (row) => short(row.segments),
  },
  {
    id: "retention",
    wide: true,
    label: "Kept",
    opt: true,
    title: "Retention",
    cell: (row) =>
      ["max-age", "max-length-bytes"]
        .map((key) => row.effective_settings?.[key])
        .filter((value) => value !== undefined)
        .map((value) => (typeof value === "number" ? bytes(value) : plain(value)))
        .join(", ") || "for ever",
  },
  {
    id: "readers",
    label: "Readers",
    num: true,
    sort: "consumers",
    opt: true,
    cell: (row) => number(row.consumers),
  },
];

export default function Streams() {
  const chosen = useStore(vhost);
  return html`<${Page} title="Streams" actions=${html`<button type="button" class="primary" onClick=${() => declareQueue("stream")}>New stream…</button>`} />
    <section class="card"><${List} path=${chosen ? at`queues/${chosen}` : at`queues`} columns=${COLUMNS} params=${{ type: "stream" }} keyOf=${keyOfQueue} label="Streams"
      events=${{ topic: "queues", params: chosen ? { vhost: chosen } : {} }} empty="There is no stream yet. A stream keeps its messages and can be read again." /></section>`;
}
