// Ordered topics: the list, and creating one.
import { at, put } from "../core/api.js";
import { count, when } from "../core/format.js";
import { ask, tableOf } from "../core/forms.js";
import { session, to, useStore, vhost } from "../core/store.js";
import { List, VHOST } from "../core/table.js";
import { Arguments, Badge, Name, Page, html } from "../core/ui.js";
import { vhostField } from "./queue-forms.js";

const SETTINGS = [
  "max-age",
  "max-length-bytes",
  "group-ttl",
  "seal-after",
  "autoscale",
  "autoscale-target-messages",
  "autoscale-target-bytes",
  "autoscale-partitions-min",
  "autoscale-partitions-max",
  "null-key",
  "weak-wait",
  "lost-after",
  "retry-exchange",
];

const create = () =>
  ask({
    title: "New ordered topic",
    text: "Messages with the same key keep their order, also while partitions are split, merged and moved.",
    fields: [
      vhostField(),
      { name: "name", label: "Name", required: true },
      {
        name: "partitions",
        label: "Partitions at the beginning",
        type: "number",
        min: 1,
        max: 1024,
        value: 3,
        hint: "They can be split and merged later",
      },
      {
        name: "logical",
        label: "Logical partitions",
        type: "number",
        min: 1,
        value: 1024,
        hint: "Fixed for ever: the finest split",
      },
      {
        name: "mode",
        label: "Mode",
        options: [
          ["strict", "strict – order above all"],
          ["weak", "weak – availability above order"],
        ],
      },
      { name: "settings", label: "Settings", type: "arguments", suggest: SETTINGS },
    ],
    action: "Create",
    act: ({ vhost: host, name, partitions, logical, mode, settings }) =>
      put(at`topics/${host}/${name}`, {
        partitions: Number(partitions),
        logical: Number(logical),
        mode,
        ...tableOf(settings),
      }),
    done: (_, values) => {
      location.hash = to("topic", values.vhost, values.name);
      return `Topic ${values.name} is there`;
    },
  });

const COLUMNS = [
  {
    id: "name",
    label: "Name",
    sort: "name",
    cell: (row) => html`<a href=${to("topic", row.vhost, row.name)}><${Name} of=${row.name} /></a>`,
  },
  VHOST,
  { id: "mode", label: "Mode", sort: "mode", cell: (row) => row.mode },
  {
    id: "partitions",
    label: "Partitions",
    num: true,
    sort: "partitions",
    cell: (row) => count(row.partitions),
  },
  {
    id: "logical",
    label: "Logical",
    num: true,
    opt: true,
    sort: "logical",
    cell: (row) => count(row.logical),
  },
  { id: "version", label: "Route version", num: true, sort: "version", cell: (row) => count(row.version) },
  { id: "groups", label: "Groups", num: true, cell: (row) => count(row.groups.length) },
  {
    id: "change",
    label: "Change",
    cell: (row) => (row.change ? html`<${Badge} kind="info">under way<//>` : ""),
  },
  { id: "settings", label: "Settings", opt: true, cell: (row) => html`<${Arguments} of=${row.settings} />` },
  {
    id: "created",
    label: "Created",
    opt: true,
    num: true,
    sort: "created_ms",
    cell: (row) => when(row.created_ms),
  },
];

export default function Topics() {
  const chosen = useStore(vhost);
  const several = (useStore(session).vhosts ?? []).length > 1 && !chosen;
  return html`<${Page} title="Ordered topics" actions=${html`<button type="button" class="primary" onClick=${create}>New topic…</button>`} />
    <section class="card"><${List} path=${chosen ? at`topics/${chosen}` : at`topics`} columns=${COLUMNS.filter((column) => several || column.id !== "vhost")} keyOf=${(row) => `${row.vhost}/${row.name}`} label="Ordered topics" every=${5000}
      empty="There is no ordered topic yet." /></section>`;
}
