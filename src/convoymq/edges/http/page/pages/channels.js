// Channels of AMQP 0-9-1 and sessions of AMQP 1.0.
import { at } from "../core/api.js";
import { rate } from "../core/format.js";
import { useStore, vhost } from "../core/store.js";
import { List, VHOST } from "../core/table.js";
import { ChannelLink, Page, State, Tag, html } from "../core/ui.js";
import { number } from "./queues.js";

const rateOf = (name) => (row) => number(row.message_stats?.[`${name}_details`]?.rate ?? 0, rate);

export const CHANNEL_COLUMNS = [
  { id: "name", label: "Name", sort: "name", cell: (row) => html`<${ChannelLink} of=${row} given=${row.connection_details?.user_provided_name} />` },
  { id: "user", label: "User", sort: "user", opt: true, cell: (row) => html`<bdi>${row.user}</bdi>` },
  VHOST,
  { id: "node", label: "Node", sort: "node", opt: true, cell: (row) => html`<bdi>${row.node}</bdi>` },
  {
    id: "mode",
    label: "Mode",
    opt: true,
    cell: (row) =>
      html`${row.confirm && html`<${Tag} title="publisher confirms">confirm<//>`}${row.transactional && html`<${Tag} title="transactions">tx<//>`}`,
  },
  { id: "state", label: "State", sort: "state", cell: (row) => html`<${State} of=${row.state} />` },
  {
    id: "consumers",
    label: "Consumers",
    num: true,
    sort: "consumer_count",
    cell: (row) => number(row.consumer_count),
  },
  {
    id: "unacked",
    label: "Unacked",
    num: true,
    sort: "messages_unacknowledged",
    cell: (row) => number(row.messages_unacknowledged),
  },
  {
    id: "unconfirmed",
    label: "Unconfirmed",
    num: true,
    opt: true,
    sort: "messages_unconfirmed",
    cell: (row) => number(row.messages_unconfirmed),
  },
  {
    id: "prefetch",
    label: "Prefetch",
    num: true,
    opt: true,
    sort: "prefetch_count",
    cell: (row) => number(row.prefetch_count),
  },
  {
    id: "publish",
    label: "Publish/s",
    num: true,
    sort: "message_stats.publish_details.rate",
    cell: rateOf("publish"),
  },
  {
    id: "deliver",
    label: "Deliver/s",
    num: true,
    sort: "message_stats.deliver_get_details.rate",
    cell: rateOf("deliver_get"),
  },
  {
    id: "ack",
    label: "Ack/s",
    num: true,
    opt: true,
    sort: "message_stats.ack_details.rate",
    cell: rateOf("ack"),
  },
];

export default function Channels() {
  const chosen = useStore(vhost);
  return html`<${Page} title="Channels and sessions" /><section class="card"><${List} path=${chosen ? at`vhosts/${chosen}/channels` : at`channels`} columns=${CHANNEL_COLUMNS} keyOf=${(row) => row.name} label="Channels and sessions"
    events=${{ topic: "channels", params: chosen ? { vhost: chosen } : {} }} empty="No channel or session is open." /></section>`;
}
