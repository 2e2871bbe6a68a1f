// One exchange: its bindings drawn and listed, rates, publish, delete.
import { at, del, exchangeInPath } from "../core/api.js";
import { Chart, useHistory } from "../core/charts.js";
import { rate } from "../core/format.js";
import { confirm } from "../core/forms.js";
import { Graph } from "../core/graph.js";
import { to, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import {
  Arguments,
  Card,
  ChannelLink,
  Facts,
  Page,
  QueueLink,
  VhostLink,
  Waiting,
  html,
} from "../core/ui.js";
import { BindingsCard, graphOf } from "./bindings-table.js";
import { publish } from "./queue-forms.js";

const rateOf = (name) => (row) => row.message_stats?.[`${name}_details`]?.rate ?? 0;
const NOW = { in: rateOf("publish_in"), out: rateOf("publish_out") };

export default function Exchange({ names: [vhost, given] }) {
  const path = exchangeInPath(given);
  const found = useGet(at`exchanges/${vhost}/${path}`, { every: 3000 });
  const past = useHistory(found.data, found.at, NOW, `${vhost}/${path}`);
  const row = found.data;
  const isOwn = row && row.name !== "" && !row.name.startsWith("amq.");
  const remove = () =>
    confirm({
      title: "Delete this exchange?",
      text: html`<bdi><strong>${row.name}</strong></bdi> and its bindings will be gone.`,
      fields: [{ name: "unused", label: "Only if it has no bindings", type: "check" }],
      action: "Delete",
      act: ({ unused }) =>
        del(at`exchanges/${vhost}/${path}`, { params: { "if-unused": unused || undefined } }),
      done: () => {
        location.hash = to("exchanges");
        return `Exchange ${row.name} is deleted`;
      },
    });
  const actions =
    row &&
    html`${!row.internal && html`<button type="button" class="primary" onClick=${() => publish(vhost, path)}>Publish…</button>`}${isOwn && html`<button type="button" onClick=${remove}>Delete…</button>`}`;
  return html`<${Page} title=${row ? row.name || "(default exchange)" : given} kind=${html`${row?.type ?? ""} exchange in <${VhostLink} name=${vhost} />`} actions=${actions} />
    <${Waiting} of=${found}>${() => html`
      ${row.name !== "" && html`<${Drawn} vhost=${vhost} name=${row.name} />`}
      <div class="grid">
        <${Card} title="Per second">${
          past.times.length > 1
            ? html`<${Chart} label="Rates" times=${past.times} format=${rate} series=${[
                { label: "in", values: past.rows.in },
                { label: "out to queues", values: past.rows.out },
              ]} />`
            : html`<p class="empty">Collecting…</p>`
        }<//>
        <${Card} title="About"><${Facts} rows=${[
          ["Type", row.type],
          ["Durable", row.durable ? "yes" : "no"],
          ["Auto-delete", row.auto_delete ? "yes" : undefined],
          ["Internal", row.internal ? "yes" : undefined],
          ["Arguments", html`<${Arguments} of=${row.arguments} />`],
          ["Policy", row.policy],
          ["Settings of policies", html`<${Arguments} of=${row.effective_policy_definition} />`],
        ]} />
          <${Reasons} vhost=${vhost} path=${path} policy=${row.policy} /><//>
        <${Card} title="Published by">${partners(row.incoming, "channel_details", (each) => html`<${ChannelLink} of=${each.channel_details} />`)}<//>
        <${Card} title="Taken by">${partners(row.outgoing, "queue", (each) => html`<${QueueLink} vhost=${each.queue.vhost} name=${each.queue.name} />`)}<//>
      </div>
      <${BindingsCard} title="Bindings from here" vhost=${vhost} path=${at`exchanges/${vhost}/${path}/bindings/source`} source=${row.name} />
      ${row.name !== "" && html`<${BindingsCard} title="Bindings to here" vhost=${vhost} path=${at`exchanges/${vhost}/${path}/bindings/destination`} destination=${row.name} kind="e" />`}`}<//>`;
}

function Reasons({ vhost, path, policy }) {
  const found = useGet(policy ? at`convoy/exchanges/${vhost}/${path}/policies` : null).data ?? [];
  return found.map(
    (each) =>
      html`<p key=${each.name} class="note"><bdi>${each.name}</bdi>: name matches <code>${each.pattern}</code>, priority ${each.priority}${each.name === policy ? ", in force" : ""}</p>`,
  );
}

const partners = (rows, key, link) =>
  html`<${Table} label=${key} rows=${rows ?? []} keyOf=${(each) => each[key].name} empty="Nobody now." columns=${[
    { id: "name", label: "Name", cell: link },
    { id: "rate", label: "per second", num: true, cell: (each) => rate(each.stats.publish_details?.rate) },
  ]} />`;

function Drawn({ vhost, name }) {
  const from = useGet(at`exchanges/${vhost}/${name}/bindings/source`, { every: 5000 });
  const into = useGet(at`exchanges/${vhost}/${name}/bindings/destination`, { every: 5000 });
  const rows = [...(into.data ?? []), ...(from.data ?? [])];
  if (!rows.length || rows.length > 300) return null;
  const { nodes, edges } = graphOf(rows, vhost);
  return html`<${Card} title="Ways of messages"><${Graph} nodes=${nodes} edges=${edges} label="Bindings of this exchange" /><//>`;
}
