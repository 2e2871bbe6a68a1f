// One channel or session: what it publishes and gets, now and in total.
import { at } from "../core/api.js";
import { Chart, useHistory } from "../core/charts.js";
import { count, rate } from "../core/format.js";
import { useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import {
  Card,
  ConnectionLink,
  ExchangeLink,
  Facts,
  Page,
  QueueLink,
  State,
  Waiting,
  html,
} from "../core/ui.js";

const rateOf = (name) => (row) => row.message_stats?.[`${name}_details`]?.rate ?? 0;
const NOW = { publish: rateOf("publish"), deliver: rateOf("deliver_get"), ack: rateOf("ack") };

export default function Channel({ names: [name] }) {
  const found = useGet(at`channels/${name}`, { every: 2000 });
  const past = useHistory(found.data, found.at, NOW, name);
  const row = found.data;
  const flow = (rows, key, Link, stat) =>
    html`<${Table} label=${key} rows=${rows ?? []} keyOf=${(each) => each[key].name} empty="Nothing yet." columns=${[
      {
        id: "name",
        label: key === "queue" ? "Queue" : "Exchange",
        cell: (each) => html`<${Link} vhost=${each[key].vhost} name=${each[key].name} />`,
      },
      {
        id: "rate",
        label: "per second",
        num: true,
        cell: (each) => rate(each.stats[`${stat}_details`]?.rate),
      },
      { id: "total", label: "total", num: true, cell: (each) => count(each.stats[stat]) },
    ]} />`;
  return html`<${Page} title=${name} kind="Channel or session" />
    <${Waiting} of=${found}>${() => html`<div class="grid">
      <${Card} title="Per second">${past.times.length > 1 ? html`<${Chart} label="Rates" times=${past.times} format=${rate} series=${["publish", "deliver", "ack"].map((each) => ({ label: each, values: past.rows[each] }))} />` : html`<p class="empty">Collecting…</p>`}<//>
      <${Card} title="About"><${Facts} rows=${[
        [
          "Connection",
          row.connection_details?.name &&
            html`<${ConnectionLink} name=${row.connection_details.name} shown=${row.connection_details.user_provided_name} />`,
        ],
        ["State", html`<${State} of=${row.state} />`],
        ["User", html`<bdi>${row.user}</bdi>`],
        ["Virtual host", html`<bdi>${row.vhost}</bdi>`],
        ["Node", html`<bdi>${row.node}</bdi>`],
        ["Confirms", row.confirm ? "on" : "off"],
        ["Transactions", row.transactional ? "on" : "off"],
        ["Consumers", count(row.consumer_count)],
        ["Prefetch", row.prefetch_count ? count(row.prefetch_count) : "no limit"],
        ["Prefetch of the channel", row.global_prefetch_count ? count(row.global_prefetch_count) : undefined],
        ["Unacknowledged", count(row.messages_unacknowledged)],
        ["Unconfirmed", count(row.messages_unconfirmed)],
      ]} /><//>
      <${Card} title="Publishes to">${flow(row.publishes, "exchange", ExchangeLink, "publish")}<//>
      <${Card} title="Gets from">${flow(row.deliveries, "queue", QueueLink, "deliver_get")}<//>
    </div>`}<//>`;
}
