// What the cluster knows of broken promises, and what an audit outside of it proves.
import { at } from "../core/api.js";
import { plain } from "../core/format.js";
import { to, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Badge, Card, Name, Page, QueueLink, Waiting, html } from "../core/ui.js";

const LOOKED_AT = 500;

export default function Audit() {
  const queues = useGet(at`queues`, {
    params: {
      page: 1,
      page_size: LOOKED_AT,
      sort: "state",
      columns: "name,vhost,type,state,stopped,effective_settings,arguments,dead_letter_warning",
    },
    every: 10_000,
  });
  const topics = useGet(at`topics`, { every: 10_000 });
  const node = useGet(at`convoy/node`, { every: 5000 });
  const rows = queues.data?.items ?? [];
  const stopped = rows.filter((row) => Object.keys(row.stopped ?? {}).length > 0);
  const unwell = rows.filter((row) => !["running", "idle"].includes(row.state));
  const warned = rows.filter((row) => row.dead_letter_warning);
  const traced = rows.filter(
    (row) => row.effective_settings?.trace === true || row.arguments?.["x-trace"] === true,
  );
  const list = (title, note, found, cell, good) =>
    html`<${Card} title=${title} note=${note}>${
      found.length
        ? html`<${Table} label=${title} rows=${found} keyOf=${(row) => `${row.vhost}/${row.name}`} columns=${[
            {
              id: "name",
              label: "Queue",
              cell: (row) => html`<${QueueLink} vhost=${row.vhost} name=${row.name} />`,
            },
            { id: "what", label: "What", cell },
          ]} />`
        : html`<p><${Badge} kind="good">${good}<//></p>`
    }<//>`;
  return html`<${Page} title="Audit" />
    <${Waiting} of=${queues}>${(page) => html`
      ${page.total_count > LOOKED_AT && html`<p class="banner warn">Looked at ${LOOKED_AT} of ${page.total_count} queues.</p>`}
      <div class="grid">
      ${list("Replicas that stopped themselves", "A replica stops when its data are damaged, or a rule of its own is broken.", stopped, (row) => html`<bdi>${plain(row.stopped)}</bdi>`, "none")}
      ${list("Queues that do not run", "Without a leader or without a majority.", unwell, (row) => html`<${Badge} kind="bad">${row.state}<//>`, "all run")}
      ${list("Dead letters that may be lost", "A fallback is in force.", warned, (row) => html`<bdi>${plain(row.dead_letter_warning)}</bdi>`, "none")}
      <${Card} title="Losses of ordered topics" note="Messages that groups go on without."><${Waiting} of=${topics}>${(all) => (all.length ? html`<ul>${all.slice(0, 20).map((topic) => html`<${Losses} key="${topic.vhost}/${topic.name}" topic=${topic} />`)}</ul>` : html`<p><${Badge}>there is no ordered topic<//></p>`)}<//><//>
      <${Card} title="Clocks and alarms">${node.data && html`<p>${node.data.alarms.length ? html`<${Badge} kind="bad">${node.data.alarms.join(", ")}<//>` : html`<${Badge} kind="good">no alarm<//>`} · clock of this node differs by ${node.data.clock_skew_ms} ms</p>`}<//>
      <${Card} title="Proof" note="That nothing was lost or reordered.">
        <p>Traced queues: ${traced.length ? traced.slice(0, 10).map((row, i) => html`${i > 0 && ", "}<${QueueLink} vhost=${row.vhost} name=${row.name} />`) : "none. The argument x-trace or the policy key trace records what becomes of each message."}</p>
        <p class="note">The proof is made outside of the brokers, by <code>convoy pipeline audit</code> from these traces. The cluster does not keep its report, so the last proof and its violations are not shown here.</p><//>
      </div>`}<//>`;
}

function Losses({ topic }) {
  const rows = useGet(at`topics/${topic.vhost}/${topic.name}/losses`, { every: 10_000 }).data;
  return html`<li><a href=${to("topic", topic.vhost, topic.name)}><${Name} of=${topic.name} /></a> ${rows === undefined ? "…" : rows.length ? html`<${Badge} kind="bad">${rows.length}<//>` : html`<${Badge} kind="good">none<//>`}</li>`;
}
