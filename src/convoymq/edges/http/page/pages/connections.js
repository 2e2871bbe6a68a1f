// Connections of clients, of both protocols.
import { at } from "../core/api.js";
import { bytes, duration, when } from "../core/format.js";
import { useStore, vhost } from "../core/store.js";
import { List, VHOST } from "../core/table.js";
import { ConnectionLink, Page, State, Tag, html } from "../core/ui.js";
import { number } from "./queues.js";

const COLUMNS = [
  {
    id: "name",
    label: "Name",
    sort: "user_provided_name",
    cell: (row) => html`<${ConnectionLink} name=${row.name} shown=${row.user_provided_name} />`,
  },
  {
    id: "peer",
    label: "From",
    sort: "peer_host",
    opt: true,
    cell: (row) => html`<code>${row.peer_host}:${row.peer_port}</code>`,
  },
  {
    id: "protocol",
    label: "Protocol",
    sort: "protocol",
    cell: (row) => html`${row.protocol}${row.ssl && html` <${Tag} title="TLS">TLS<//>`}`,
  },
  { id: "user", label: "User", sort: "user", cell: (row) => html`<bdi>${row.user}</bdi>` },
  VHOST,
  {
    id: "node",
    wide: true,
    label: "Node",
    sort: "node",
    opt: true,
    cell: (row) => html`<bdi>${row.node}</bdi>`,
  },
  { id: "state", label: "State", sort: "state", cell: (row) => html`<${State} of=${row.state} />` },
  {
    id: "channels",
    label: "Channels",
    num: true,
    sort: "channels",
    title: "Channels, or sessions of AMQP 1.0",
    cell: (row) => number(row.channels),
  },
  {
    id: "in",
    label: "In",
    num: true,
    sort: "recv_oct_details.rate",
    cell: (row) => `${bytes(row.recv_oct_details?.rate ?? 0)}/s`,
  },
  {
    id: "out",
    label: "Out",
    num: true,
    sort: "send_oct_details.rate",
    cell: (row) => `${bytes(row.send_oct_details?.rate ?? 0)}/s`,
  },
  {
    id: "since",
    wide: true,
    label: "For",
    opt: true,
    num: true,
    sort: "connected_at",
    cell: (row) =>
      html`<span title=${when(row.connected_at)}>${duration(Date.now() - row.connected_at)}</span>`,
  },
];

export default function Connections() {
  const chosen = useStore(vhost);
  return html`<${Page} title="Connections" /><section class="card"><${List} path=${chosen ? at`vhosts/${chosen}/connections` : at`connections`} columns=${COLUMNS} keyOf=${(row) => row.name} label="Connections"
    events=${{ topic: "connections", params: chosen ? { vhost: chosen } : {} }} empty="No client is connected." /></section>`;
}
