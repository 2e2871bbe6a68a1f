// Policies, operator policies and parameters.
import { at, del, put } from "../core/api.js";
import { count, plain } from "../core/format.js";
import { ask, confirm, jsonIn, rowsOf, tableOf } from "../core/forms.js";
import { has, isAdministrator, useGet, useStore, vhost } from "../core/store.js";
import { LocalTable, NAME, Table, VHOST } from "../core/table.js";
import { Arguments, Card, Name, Page, Waiting, html } from "../core/ui.js";
import { vhostField } from "./queue-forms.js";

const KEYS = [
  "max-length",
  "max-length-bytes",
  "overflow",
  "message-ttl",
  "expires",
  "dead-letter-exchange",
  "dead-letter-routing-key",
  "dead-letter-strategy",
  "delivery-limit",
  "target-group-size",
  "queue-leader-locator",
  "alternate-exchange",
  "ha-mode",
  "ha-params",
  "ha-sync-mode",
  "max-age",
  "stream-max-segment-size-bytes",
  "autoscale",
  "consumer-timeout",
  "single-active-take-over",
  "deduplication-time",
  "link-resume-timeout",
  "delayed-retry-type",
  "delayed-retry-min",
  "delayed-retry-max",
];
const APPLY = ["all", "queues", "classic_queues", "quorum_queues", "streams", "exchanges"];

const one = (operator, host, name) =>
  operator ? at`operator-policies/${host}/${name}` : at`policies/${host}/${name}`;

const edit = (operator, done, row = null) =>
  ask({
    title: `${row ? "Change" : "New"} ${operator ? "operator policy" : "policy"}`,
    text: operator
      ? "Joined with the users' policies: the stricter value of each key is in force."
      : "Of all that match a name, the one with the highest priority is in force, alone.",
    fields: [
      ...(row ? [] : [vhostField(), { name: "name", label: "Name", required: true }]),
      {
        name: "pattern",
        label: "Pattern of names",
        value: row?.pattern ?? "",
        hint: "A regular expression, for instance ^orders\\.",
        required: true,
      },
      {
        name: "apply",
        label: "Applies to",
        options: operator ? APPLY.filter((each) => each !== "exchanges" && each !== "all") : APPLY,
        value: row?.["apply-to"] ?? (operator ? "queues" : "all"),
      },
      { name: "priority", label: "Priority", type: "number", value: row?.priority ?? 0 },
      {
        name: "definition",
        label: "Definition",
        type: "arguments",
        suggest: KEYS,
        value: row ? rowsOf(row.definition) : [{ name: "", value: "", kind: "auto" }],
      },
    ],
    act: (values) =>
      put(one(operator, row?.vhost ?? values.vhost, row?.name ?? values.name), {
        pattern: values.pattern,
        "apply-to": values.apply,
        priority: Number(values.priority),
        definition: tableOf(values.definition),
      }),
    done: () => {
      done();
      return "The policy is set";
    },
  });

const remove = (operator, row, done) =>
  confirm({
    title: "Delete this policy?",
    text: html`<bdi><strong>${row.name}</strong></bdi>. The queues and exchanges that it matches follow the next policy, or none, at once.`,
    action: "Delete",
    act: () => del(one(operator, row.vhost, row.name)),
    done: () => {
      done();
      return "The policy is deleted";
    },
  });

function Policies({ operator, host, title, note, editable }) {
  const all = operator
    ? host
      ? at`operator-policies/${host}`
      : at`operator-policies`
    : host
      ? at`policies/${host}`
      : at`policies`;
  const found = useGet(all, { every: 10_000 });
  const columns = [
    NAME,
    VHOST,
    {
      id: "pattern",
      label: "Pattern",
      sort: "pattern",
      cell: (row) => html`<code><bdi>${row.pattern}</bdi></code>`,
    },
    { id: "apply", label: "Applies to", sort: "apply-to", opt: true, cell: (row) => row["apply-to"] },
    { id: "priority", label: "Priority", num: true, sort: "priority", cell: (row) => count(row.priority) },
    { id: "definition", label: "Definition", cell: (row) => html`<${Arguments} of=${row.definition} />` },
    editable && {
      id: "act",
      label: "",
      cell: (row) =>
        html`<span class="actions"><button type="button" class="small" onClick=${() => edit(operator, found.reload, row)}>Change…</button><button type="button" class="small" onClick=${() => remove(operator, row, found.reload)}>Delete…</button></span>`,
    },
  ];
  return html`<${Card} title=${title} note=${note} actions=${editable && html`<button type="button" class=${operator ? "" : "primary"} onClick=${() => edit(operator, found.reload)}>New…</button>`}>
    <${Waiting} of=${found}>${(rows) => html`<${LocalTable} label=${title} columns=${columns} rows=${rows} keyOf=${(row) => `${row.vhost} ${row.name}`} empty="There is none." first=${{ sort: "priority", reverse: true }} />`}<//><//>`;
}

function Parameters() {
  const found = useGet(at`global-parameters`, { every: 10_000 });
  const edit = (row) =>
    ask({
      title: "Global parameter",
      fields: [
        ...(row ? [] : [{ name: "name", label: "Name", required: true }]),
        {
          name: "value",
          label: "Value (JSON)",
          type: "area",
          value: row ? JSON.stringify(row.value, null, 2) : "",
        },
      ],
      act: ({ name, value }) =>
        put(at`global-parameters/${row?.name ?? name}`, { value: jsonIn(value, "Value") }),
      done: () => {
        found.reload();
        return "The parameter is set";
      },
    });
  const remove = (row) =>
    confirm({
      title: "Delete this parameter?",
      text: html`<bdi>${row.name}</bdi>`,
      action: "Delete",
      act: () => del(at`global-parameters/${row.name}`),
      done: () => {
        found.reload();
        return "The parameter is deleted";
      },
    });
  return html`<${Card} title="Global parameters" actions=${isAdministrator() && html`<button type="button" onClick=${() => edit(null)}>New…</button>`}><${Waiting} of=${found}>${(
    rows,
  ) =>
    html`<${Table} label="Global parameters" rows=${rows} keyOf=${(row) => row.name} empty="There is none." columns=${[
      { id: "name", label: "Name", cell: (row) => html`<${Name} of=${row.name} />` },
      { id: "value", label: "Value", cell: (row) => html`<bdi>${plain(row.value)}</bdi>` },
      isAdministrator() && {
        id: "act",
        label: "",
        cell: (row) =>
          html`<span class="actions"><button type="button" class="small" onClick=${() => edit(row)}>Change…</button><button type="button" class="small" onClick=${() => remove(row)}>Delete…</button></span>`,
      },
    ]} />`}<//><//>`;
}

export default function Rules() {
  const host = useStore(vhost);
  return html`<${Page} title="Policies" />
    <${Policies} title="Policies" host=${host} editable=${has("policymaker")} />
    <${Policies} title="Operator policies" note="Limits that users cannot lift." operator host=${host} editable=${isAdministrator()} />
    ${has("policymaker") && html`<${Parameters} />`}`;
}
