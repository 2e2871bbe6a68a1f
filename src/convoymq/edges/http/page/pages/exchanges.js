// Exchanges, and declaring one.
import { at, get, put } from "../core/api.js";
import { rate } from "../core/format.js";
import { ask, tableOf } from "../core/forms.js";
import { session, to, useStore, vhost } from "../core/store.js";
import { List, VHOST } from "../core/table.js";
import { ExchangeLink, Name, Page, Tag, html } from "../core/ui.js";
import { vhostField } from "./queue-forms.js";
import { number } from "./queues.js";

const COLUMNS = [
  {
    id: "name",
    label: "Name",
    sort: "name",
    cell: (row) => html`<${ExchangeLink} vhost=${row.vhost} name=${row.name} />`,
  },
  VHOST,
  { id: "type", label: "Type", sort: "type", cell: (row) => row.type },
  {
    id: "features",
    label: "Features",
    opt: true,
    cell: (row) =>
      html`${row.durable && html`<${Tag} title="durable">D<//>`}${row.auto_delete && html`<${Tag} title="deleted with its last binding">AD<//>`}${row.internal && html`<${Tag} title="clients cannot publish to it">internal<//>`}${row.arguments["alternate-exchange"] && html`<${Tag} title="alternate exchange">AE<//>`}`,
  },
  {
    id: "policy",
    label: "Policy",
    sort: "policy",
    opt: true,
    cell: (row) => (row.policy ? html`<${Name} of=${row.policy} />` : ""),
  },
  {
    id: "in",
    label: "In/s",
    num: true,
    sort: "message_stats.publish_in_details.rate",
    cell: (row) => number(row.message_stats?.publish_in_details?.rate ?? 0, rate),
  },
  {
    id: "out",
    label: "Out/s",
    num: true,
    sort: "message_stats.publish_out_details.rate",
    cell: (row) => number(row.message_stats?.publish_out_details?.rate ?? 0, rate),
  },
];

async function declare() {
  const { exchange_types: types } = await get(at`overview`, {
    columns: "exchange_types",
    disable_stats: "true",
  });
  ask({
    title: "New exchange",
    fields: [
      vhostField(),
      { name: "name", label: "Name", required: true },
      {
        name: "type",
        label: "Type",
        options: types.map((each) => [each.name, `${each.name} – ${each.description}`]),
      },
      { name: "durable", label: "Durable: survives a restart", type: "check", value: true },
      { name: "auto_delete", label: "Deleted with its last binding", type: "check" },
      { name: "internal", label: "Internal: only other exchanges publish to it", type: "check" },
      {
        name: "arguments",
        label: "Arguments",
        type: "arguments",
        suggest: ["alternate-exchange", "hash-header", "x-delayed-type"],
      },
    ],
    action: "Declare",
    act: ({ vhost: host, name, arguments: rows, ...rest }) =>
      put(at`exchanges/${host}/${name}`, { ...rest, arguments: tableOf(rows) }),
    done: (_, values) => {
      location.hash = to("exchange", values.vhost, values.name);
      return `Exchange ${values.name} is there`;
    },
  });
}

export default function Exchanges() {
  const chosen = useStore(vhost);
  const several = (useStore(session).vhosts ?? []).length > 1 && !chosen;
  return html`<${Page} title="Exchanges" actions=${html`<a class="button" href="#/bindings">Binding graph</a><button type="button" class="primary" onClick=${declare}>New exchange…</button>`} />
    <section class="card"><${List} path=${chosen ? at`exchanges/${chosen}` : at`exchanges`} columns=${COLUMNS.filter((column) => several || column.id !== "vhost")} keyOf=${(row) => `${row.vhost}/${row.name}`} label="Exchanges" empty="There is no exchange." /></section>`;
}
