// Shovels: what each moves from where to where, how far it is, and why it does not.
import { at, del, put } from "../core/api.js";
import { count } from "../core/format.js";
import { ask, confirm, jsonIn } from "../core/forms.js";
import { isAdministrator, useGet, useStore, vhost } from "../core/store.js";
import { LocalTable, NAME, VHOST } from "../core/table.js";
import { Card, Name, Page, State, Waiting, html } from "../core/ui.js";
import { vhostField } from "./queue-forms.js";

const EXAMPLE = {
  "src-protocol": "amqp091",
  "src-uri": "amqp://user:password@other.example.com",
  "src-queue": "orders",
  "dest-protocol": "amqp091",
  "dest-uri": "amqp://",
  "dest-queue": "orders",
  "ack-mode": "on-confirm",
  "src-delete-after": "never",
};

const edit = (done, row = null) =>
  ask({
    title: row ? "Change shovel" : "New shovel",
    text: "A URI without a host is this cluster.",
    fields: [
      ...(row ? [] : [vhostField(), { name: "name", label: "Name", required: true }]),
      {
        name: "value",
        label: "Definition (JSON)",
        type: "area",
        value: JSON.stringify(row?.value ?? EXAMPLE, null, 2),
        required: true,
      },
    ],
    act: (values) =>
      put(at`parameters/shovel/${row?.vhost ?? values.vhost}/${row?.name ?? values.name}`, {
        value: jsonIn(values.value, "Definition"),
      }),
    done: () => {
      done();
      return "The shovel is set";
    },
  });

const remove = (row, done) =>
  confirm({
    title: "Delete this shovel?",
    text: html`<bdi><strong>${row.name}</strong></bdi>. Messages that it has taken and not moved go back to the source.`,
    action: "Delete",
    act: () => del(at`parameters/shovel/${row.vhost}/${row.name}`),
    done: () => {
      done();
      return "The shovel is deleted";
    },
  });

const restart = (row, done) =>
  confirm({
    title: "Restart this shovel?",
    text: html`<bdi><strong>${row.name}</strong></bdi> connects to both ends anew.`,
    action: "Restart",
    act: () => del(at`shovels/vhost/${row.vhost}/${row.name}/restart`),
    done: () => {
      done();
      return "The shovel restarts";
    },
  });

const place = (row, side) =>
  html`<bdi>${row[`${side}_queue`] ?? row[`${side}_address`] ?? row[`${side}_exchange`] ?? ""}</bdi><br /><small><bdi>${row[`${side}_uri`] ?? ""}</bdi></small>`;

const state = (row) =>
  html`<${State} of=${row.state} />${row.reason && html`<br /><small><bdi>${row.reason}</bdi></small>`}`;

export default function Shovels() {
  const host = useStore(vhost);
  const found = useGet(host ? at`shovels/${host}` : at`shovels`, { every: 3_000 });
  const defined = useGet(at`parameters/shovel`, { every: 10_000 });
  const reload = () => {
    found.reload();
    defined.reload();
  };
  const definition = (row) =>
    defined.data?.find((each) => each.vhost === row.vhost && each.name === row.name);
  const columns = [
    NAME,
    VHOST,
    { id: "state", label: "State", sort: "state", cell: state },
    { id: "from", label: "From", cell: (row) => place(row, "src") },
    { id: "to", label: "To", cell: (row) => place(row, "dest") },
    {
      id: "moved",
      label: "Moved",
      num: true,
      sort: "forwarded",
      cell: (row) => count(row.forwarded),
    },
    { id: "pending", label: "Unconfirmed", num: true, opt: true, cell: (row) => count(row.pending) },
    { id: "node", label: "Node", opt: true, cell: (row) => html`<bdi>${row.node ?? ""}</bdi>` },
    isAdministrator() && {
      id: "act",
      label: "",
      cell: (row) =>
        html`<span class="actions"><button type="button" class="small" onClick=${() => edit(reload, definition(row))}>Change…</button><button type="button" class="small" onClick=${() => restart(row, reload)}>Restart…</button><button type="button" class="small" onClick=${() => remove(row, reload)}>Delete…</button></span>`,
    },
  ];
  return html`<${Page} title="Shovels" />
    <${Card} title="Shovels" note="They run on the node that leads the metadata." actions=${isAdministrator() && html`<button type="button" class="primary" onClick=${() => edit(reload)}>New…</button>`}>
    <${Waiting} of=${found}>${(rows) => html`<${LocalTable} label="Shovels" columns=${columns} rows=${rows} keyOf=${(row) => `${row.vhost} ${row.name}`} empty="There is none." first=${{ sort: "name" }} />`}<//><//>`;
}
