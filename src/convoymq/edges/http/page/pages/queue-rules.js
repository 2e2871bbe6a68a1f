// Why a queue behaves as it does: its bindings, the policies that match, where each setting comes from.
import { at } from "../core/api.js";
import { count, plain } from "../core/format.js";
import { to, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Arguments, Badge, Card, Name, Waiting, html } from "../core/ui.js";
import { BindingsCard } from "./bindings-table.js";

export function Rules({ row }) {
  const policies = useGet(at`convoy/queues/${row.vhost}/${row.name}/policies`, { every: 10_000 });
  const operator = useGet(
    row.operator_policy ? at`operator-policies/${row.vhost}/${row.operator_policy}` : null,
  ).data;
  const [inForce] = policies.data ?? [];
  const settings = Object.entries(row.effective_settings ?? {}).map(([key, value]) => ({
    key,
    value,
    from: sourceOf(key, value, row, inForce, operator),
  }));
  return html`<${BindingsCard} vhost=${row.vhost} path=${at`queues/${row.vhost}/${row.name}/bindings`} destination=${row.name} kind="q" />
    <${Card} title="Policies" note="Of all that match the name and the type, the one with the highest priority is in force."><${Waiting} of=${policies}>${(
      rows,
    ) =>
      html`<${Table} label="Policies" rows=${rows} keyOf=${(each) => each.name} empty="No policy matches this queue." columns=${[
        {
          id: "name",
          label: "Policy",
          cell: (each) => html`<a href="${to("policies")}"><${Name} of=${each.name} /></a>`,
        },
        {
          id: "why",
          label: "Why",
          cell: (each) => html`name matches <code>${each.pattern}</code>, applies to ${each["apply-to"]}`,
        },
        { id: "priority", label: "Priority", num: true, cell: (each) => count(each.priority) },
        {
          id: "state",
          label: "",
          cell: (each) =>
            each.name === row.policy
              ? html`<${Badge} kind="good">in force<//>`
              : html`<${Badge}>outranked<//>`,
        },
        {
          id: "definition",
          label: "Definition",
          opt: true,
          cell: (each) => html`<${Arguments} of=${each.definition} />`,
        },
      ]} />`}<//>
    ${operator && html`<p class="beside"><strong>Operator policy</strong> <bdi>${operator.name}</bdi>: <${Arguments} of=${operator.definition} /></p>`}<//>
    <${Card} title="Settings in force"><${Table} label="Settings" rows=${settings} keyOf=${(each) => each.key} empty="The defaults." columns=${[
      { id: "key", label: "Setting", cell: (each) => each.key },
      { id: "value", label: "Value", cell: (each) => html`<bdi>${plain(each.value)}</bdi>` },
      { id: "from", label: "From", cell: (each) => each.from },
    ]} /><//>`;
}

function sourceOf(key, value, row, policy, operator) {
  const same = (other) => JSON.stringify(other) === JSON.stringify(value);
  if (operator && same(operator.definition[key])) return html`operator policy <bdi>${operator.name}</bdi>`;
  if (same(row.arguments[`x-${key}`])) return "argument of the declaration";
  if (policy && same(policy.definition[key])) return html`policy <bdi>${policy.name}</bdi>`;
  return "joined";
}
