// Virtual hosts: the list, and one with its limits, permissions and tracing.
import { at, del, put } from "../core/api.js";
import { count } from "../core/format.js";
import { ask, confirm } from "../core/forms.js";
import { isAdministrator, to, useGet } from "../core/store.js";
import { List, Table } from "../core/table.js";
import { Badge, Card, Facts, Page, State, Tag, VhostLink, Waiting, html } from "../core/ui.js";
import { number } from "./queues.js";
import { Permissions } from "./permissions.js";

const known = (value) => (value === "undefined" ? "" : value);
const FIELDS = (row = {}) => [
  { name: "description", label: "Description", value: row.description ?? "" },
  { name: "tags", label: "Tags", value: (row.tags ?? []).join(", "), hint: "Words between commas" },
  {
    name: "default_queue_type",
    label: "Type of queues that name none",
    value: known(row.default_queue_type) ?? "",
    options: [["", "that of the node"], "quorum", "classic", "stream"],
  },
];
const body = ({ description, tags, default_queue_type: type }) => ({
  description,
  tags,
  ...(type ? { default_queue_type: type } : {}),
});

const add = () =>
  ask({
    title: "New virtual host",
    fields: [{ name: "name", label: "Name", required: true }, ...FIELDS()],
    action: "Add",
    act: ({ name, ...rest }) => put(at`vhosts/${name}`, body(rest)),
    done: (_, { name }) => {
      location.hash = to("vhost", name);
      return `Virtual host ${name} is there`;
    },
  });

const COLUMNS = [
  { id: "name", label: "Name", sort: "name", cell: (row) => html`<${VhostLink} name=${row.name} />` },
  { id: "description", label: "Description", opt: true, cell: (row) => html`<bdi>${row.description}</bdi>` },
  {
    id: "tags",
    label: "Tags",
    opt: true,
    cell: (row) => row.tags.map((tag) => html`<${Tag} key=${tag}><bdi>${tag}</bdi><//>`),
  },
  {
    id: "state",
    label: "State",
    cell: (row) =>
      html`<${State} of=${Object.values(row.cluster_state ?? {}).every((state) => state === "running") ? "running" : "minority"} />`,
  },
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
  { id: "type", label: "Default type", opt: true, cell: (row) => known(row.default_queue_type) },
  {
    id: "trace",
    label: "Tracing",
    opt: true,
    cell: (row) => (row.tracing ? html`<${Badge} kind="warn">on<//>` : "off"),
  },
];

export default function Vhosts({ page, names }) {
  if (page === "vhost") return html`<${Vhost} name=${names[0]} />`;
  return html`<${Page} title="Virtual hosts" actions=${isAdministrator() && html`<button type="button" class="primary" onClick=${add}>New virtual host…</button>`} />
    <section class="card"><${List} path=${at`vhosts`} columns=${COLUMNS} keyOf=${(row) => row.name} label="Virtual hosts" /></section>`;
}

function Vhost({ name }) {
  const found = useGet(at`vhosts/${name}`, { every: 5000 });
  const row = found.data;
  const isAdmin = isAdministrator();
  const edit = () =>
    ask({
      title: "Change this virtual host",
      fields: [
        ...FIELDS(row),
        {
          name: "tracing",
          label: "Tracing: copies of all messages go to amq.rabbitmq.trace",
          type: "check",
          value: row.tracing,
        },
      ],
      act: ({ tracing, ...rest }) => put(at`vhosts/${name}`, { ...body(rest), tracing }),
      done: () => {
        found.reload();
        return "Changed";
      },
    });
  const remove = () =>
    confirm({
      title: "Delete this virtual host?",
      text: html`<bdi><strong>${name}</strong></bdi> with all its queues, exchanges, policies and ${count(row.messages)} messages will be gone.`,
      fields: [{ name: "typed", label: "Type its name to go on", required: true }],
      action: "Delete",
      act: async ({ typed }) => {
        if (typed !== name) throw new Error("This is not its name.");
        await del(at`vhosts/${name}`);
      },
      done: () => {
        location.hash = to("vhosts");
        return "The virtual host is deleted";
      },
    });
  return html`<${Page} title=${name} kind="Virtual host" actions=${row && isAdmin && html`<button type="button" onClick=${edit}>Change…</button><button type="button" onClick=${remove}>Delete…</button>`} />
    <${Waiting} of=${found}>${() => html`<div class="grid">
      <${Card} title="About"><${Facts} rows=${[
        ["Description", row.description && html`<bdi>${row.description}</bdi>`],
        ["Tags", row.tags.join(", ")],
        ["Messages", count(row.messages)],
        ["Ready", count(row.messages_ready)],
        ["Unacknowledged", count(row.messages_unacknowledged)],
        ["Default type", known(row.default_queue_type)],
        ["Follows RabbitMQ", known(row.rabbitmq_compatibility)],
        ["Tracing", row.tracing ? "on" : "off"],
        [
          "State",
          html`<ul>${Object.entries(row.cluster_state ?? {}).map(([node, state]) => html`<li key=${node}><bdi>${node}</bdi> <${State} of=${state} /></li>`)}</ul>`,
        ],
      ]} /><//>
      <${Limits} path=${at`vhost-limits/${name}`} limits=${["max-connections", "max-queues"]} set=${(limit, value) => put(at`vhost-limits/${name}/${limit}`, { value })} clear=${(limit) => del(at`vhost-limits/${name}/${limit}`)} editable=${isAdmin} />
    </div>
    ${isAdmin && html`<${Permissions} vhost=${name} />`}`}<//>`;
}

/** Limits of a virtual host or a user. */
export function Limits({ path, limits, set, clear, editable }) {
  const found = useGet(path);
  const change = (limit, value) =>
    ask({
      title: `Limit ${limit}`,
      fields: [
        {
          name: "value",
          label: "At most",
          type: "number",
          value: value ?? "",
          hint: "Empty: no limit; 0: none at all",
        },
      ],
      act: ({ value: text }) => (text === "" ? clear(limit) : set(limit, Number(text))),
      done: () => {
        found.reload();
        return "The limit is changed";
      },
    });
  return html`<${Card} title="Limits"><${Waiting} of=${found}>${(rows) => {
    const values = rows[0]?.value ?? {};
    return html`<${Table} label="Limits" rows=${limits} keyOf=${(limit) => limit} columns=${[
      { id: "name", label: "Limit", cell: (limit) => limit },
      {
        id: "value",
        label: "At most",
        num: true,
        cell: (limit) => (values[limit] === undefined ? "no limit" : count(values[limit])),
      },
      editable && {
        id: "act",
        label: "",
        cell: (limit) =>
          html`<button type="button" class="small" onClick=${() => change(limit, values[limit])}>Change…</button>`,
      },
    ]} />`;
  }}<//><//>`;
}
