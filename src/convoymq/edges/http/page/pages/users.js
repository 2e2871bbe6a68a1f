// Users: the list, and one with tags, password, permissions and limits. For administrators.
import { at, del, put } from "../core/api.js";
import { ask, confirm } from "../core/forms.js";
import { session, to, useGet } from "../core/store.js";
import { List } from "../core/table.js";
import { Arguments, Badge, Card, Facts, Page, Tag, UserLink, Waiting, html } from "../core/ui.js";
import { Permissions } from "./permissions.js";
import { Limits } from "./vhosts.js";

const TAGS = ["administrator", "monitoring", "policymaker", "management"];
const TAG_TEXTS = {
  administrator: "everything",
  monitoring: "sees all nodes, connections and virtual hosts",
  policymaker: "sets policies in own virtual hosts",
  management: "this page, for own virtual hosts",
};
const tagFields = (own = []) =>
  TAGS.map((tag) => ({
    name: `tag-${tag}`,
    label: tag,
    hint: TAG_TEXTS[tag],
    type: "check",
    value: own.includes(tag),
  }));
const tagsIn = (values, others = []) => [...TAGS.filter((tag) => values[`tag-${tag}`]), ...others];
const others = (row) => row.tags.filter((tag) => !TAGS.includes(tag));

const add = () =>
  ask({
    title: "New user",
    fields: [
      { name: "name", label: "Name", required: true },
      {
        name: "password",
        label: "Password",
        type: "password",
        hint: "Empty: no log-in by password, for instance for certificates",
      },
      ...tagFields(),
    ],
    action: "Add",
    act: ({ name, password, ...values }) =>
      put(at`users/${name}`, { ...(password ? { password } : { password_hash: "" }), tags: tagsIn(values) }),
    done: (_, { name }) => {
      location.hash = to("user", name);
      return `User ${name} is there; give permissions next`;
    },
  });

const COLUMNS = [
  { id: "name", label: "Name", sort: "name", cell: (row) => html`<${UserLink} name=${row.name} />` },
  {
    id: "tags",
    label: "Tags",
    cell: (row) => row.tags.map((tag) => html`<${Tag} key=${tag}><bdi>${tag}</bdi><//>`),
  },
  {
    id: "password",
    label: "Password",
    cell: (row) => (row.password_hash ? "set" : html`<${Badge} kind="warn">none<//>`),
  },
  { id: "limits", label: "Limits", opt: true, cell: (row) => html`<${Arguments} of=${row.limits} />` },
];

export default function Users({ page, names }) {
  if (page === "user") return html`<${User} name=${names[0]} />`;
  const bare = useGet(at`users/without-permissions`, { every: 10_000 }).data ?? [];
  return html`<${Page} title="Users" actions=${html`<button type="button" class="primary" onClick=${add}>New user…</button>`} />
    ${bare.length > 0 && html`<p class="banner warn">Without any permission: ${bare.slice(0, 10).map((row, i) => html`${i > 0 && ", "}<${UserLink} name=${row.name} />`)}</p>`}
    <section class="card"><${List} path=${at`users`} columns=${COLUMNS} keyOf=${(row) => row.name} label="Users" every=${10_000} /></section>`;
}

function User({ name }) {
  const found = useGet(at`users/${name}`, { every: 10_000 });
  const row = found.data;
  const change = () =>
    ask({
      title: "Change this user",
      fields: [
        { name: "password", label: "New password", type: "password", hint: "Empty: as it is" },
        ...tagFields(row.tags),
      ],
      act: ({ password, ...values }) =>
        put(at`users/${name}`, {
          ...(password
            ? { password }
            : { password_hash: row.password_hash, hashing_algorithm: row.hashing_algorithm }),
          tags: tagsIn(values, others(row)),
        }),
      done: () => {
        found.reload();
        return "The user is changed";
      },
    });
  const remove = () =>
    confirm({
      title: "Delete this user?",
      text: html`<bdi><strong>${name}</strong></bdi> and all permissions will be gone; open connections are closed.`,
      action: "Delete",
      act: () => del(at`users/${name}`),
      done: () => {
        location.hash = to("users");
        return `User ${name} is deleted`;
      },
    });
  const kick = () =>
    confirm({
      title: "Close all connections of this user?",
      text: html`Of <bdi>${name}</bdi>. Most clients connect again by themselves.`,
      action: "Close all",
      act: () => del(at`connections/username/${name}`),
      done: "The connections are closed",
    });
  return html`<${Page} title=${name} kind="User" actions=${row && html`<button type="button" onClick=${change}>Change…</button><button type="button" onClick=${kick}>Close connections…</button>${name !== session.get().name && html`<button type="button" onClick=${remove}>Delete…</button>`}`} />
    <${Waiting} of=${found}>${() => html`<div class="grid"><${Card} title="About"><${Facts} rows=${[
      [
        "Tags",
        row.tags.length
          ? row.tags.map((tag) => html`<${Tag} key=${tag}><bdi>${tag}</bdi><//>`)
          : "none: no log-in here",
      ],
      ["Password", row.password_hash ? `set (${row.hashing_algorithm})` : "none"],
    ]} /><//>
      <${Limits} path=${at`user-limits/${name}`} limits=${["max-connections", "max-channels"]} set=${(limit, value) => put(at`user-limits/${name}/${limit}`, { value })} clear=${(limit) => del(at`user-limits/${name}/${limit}`)} editable=${true} /></div>
      <${Permissions} user=${name} />`}<//>`;
}
