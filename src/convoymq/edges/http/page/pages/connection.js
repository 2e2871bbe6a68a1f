// One connection: who, from where, what it has under way; closing it.
import { at, del } from "../core/api.js";
import { Chart, useHistory } from "../core/charts.js";
import { bytes, count, when } from "../core/format.js";
import { confirm } from "../core/forms.js";
import { useGet } from "../core/store.js";
import { LocalTable } from "../core/table.js";
import { Arguments, Card, Facts, Page, State, Waiting, html } from "../core/ui.js";
import { CHANNEL_COLUMNS } from "./channels.js";

const NOW = { in: (row) => row.recv_oct_details?.rate ?? 0, out: (row) => row.send_oct_details?.rate ?? 0 };

export default function Connection({ names: [name] }) {
  const found = useGet(at`connections/${name}`, { every: 2000 });
  const channels = useGet(at`connections/${name}/channels`, { every: 3000 });
  const past = useHistory(found.data, found.at, NOW, name);
  const row = found.data;
  const close = () =>
    confirm({
      title: "Close this connection?",
      text: html`<bdi>${row.user_provided_name || name}</bdi> of user <bdi>${row.user}</bdi>. Most clients connect again by themselves; unacknowledged messages go back to their queues.`,
      fields: [{ name: "why", label: "Reason", value: "Closed by an operator", hint: "The client is told" }],
      action: "Close",
      act: ({ why }) =>
        del(at`connections/${name}`, {
          headers: { "X-Reason": encodeURIComponent(why).replaceAll("%20", " ") },
        }),
      done: () => {
        location.hash = "#/connections";
        return "The connection is closed";
      },
    });
  return html`<${Page} title=${row?.user_provided_name || name} kind="Connection" actions=${row && html`<button type="button" onClick=${close}>Close…</button>`} />
    <${Waiting} of=${found}>${() => html`<div class="grid">
      <${Card} title="Bytes per second">${
        past.times.length > 1
          ? html`<${Chart} label="Bytes per second" times=${past.times} format=${bytes} series=${[
              { label: "from the client", values: past.rows.in },
              { label: "to the client", values: past.rows.out },
            ]} />`
          : html`<p class="empty">Collecting…</p>`
      }<//>
      <${Card} title="About"><${Facts} rows=${[
        ["Name", html`<bdi>${row.name}</bdi>`],
        ["State", html`<${State} of=${row.state} />`],
        ["User", html`<bdi>${row.user}</bdi>`],
        ["Virtual host", html`<bdi>${row.vhost}</bdi>`],
        ["Node", html`<bdi>${row.node}</bdi>`],
        ["Protocol", row.protocol],
        ["Log-in", row.auth_mechanism],
        ["TLS", row.ssl ? [row.ssl_protocol, row.ssl_cipher].filter(Boolean).join(", ") || "yes" : "no"],
        ["Connected", when(row.connected_at)],
        ["Heartbeat", row.timeout ? `${row.timeout} s` : "off"],
        ["Largest frame", bytes(row.frame_max)],
        ["Channels at most", count(row.channel_max)],
        ["Received", bytes(row.recv_oct)],
        ["Sent", bytes(row.send_oct)],
        ["Waits to be sent", bytes(row.send_pend)],
      ]} /><//>
      <${Card} title="Channels and sessions" wide><${Waiting} of=${channels}>${(rows) => html`<${LocalTable} label="Channels" columns=${CHANNEL_COLUMNS.filter((each) => !["user", "vhost", "node"].includes(each.id))} rows=${rows} keyOf=${(each) => each.name} empty="None is open." />`}<//><//>
      <${Card} title="Said by the client" wide><${Arguments} of=${row.client_properties} /><//>
    </div>`}<//>`;
}
