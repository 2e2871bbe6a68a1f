// What the cluster knows of broken promises, and what an audit outside of it proves.
import { at } from "../core/api.js";
import { count, plain, plural, when } from "../core/format.js";
import { to, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Badge, Card, Name, Page, QueueLink, Waiting, html } from "../core/ui.js";

const LOOKED_AT = 500;
/** The global parameter that `convoy pipeline audit --report` sets. */
const LAST_AUDIT = "convoymq-last-audit";

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
        <${LastProof} /><//>
      </div>`}<//>`;
}

function LastProof() {
  const last = useGet(at`global-parameters/${LAST_AUDIT}`, { every: 30_000 });
  if (last.error?.status === 404) {
    return html`<p class="note">No proof was reported yet. <code>convoy pipeline audit</code> makes one from these traces, outside of the brokers; with <code>--report URL</code> its result is shown here.</p>`;
  }
  if (last.error && !last.data) {
    return html`<p class="note">Administrators and policymakers see the last proof.</p>`;
  }
  const found = last.data?.value;
  if (!found) return html`<p class="note">…</p>`;
  const kind = found.violations > 0 ? "bad" : found.proved === true ? "good" : "warn";
  const open = (found.invariants ?? []).filter((each) => each.violations > 0 || each.unproved > 0);
  const queues = found.queues ?? [];
  return html`<p><${Badge} kind=${kind}>${plain(found.text ?? "")}<//> ${when(found.at_ms)}</p>
    <p class="note">${count(found.rows)} rows of the traces of ${plural(found.queue_count ?? 0, "queue")}: <bdi>${queues.map(plain).join(", ")}</bdi>${found.queue_count > queues.length && " …"}</p>
    ${open.length > 0 && html`<${Table} label="Promises that are not proved" rows=${open} keyOf=${(row) => row.number} columns=${[
      { id: "title", label: "Promise", cell: (row) => html`<bdi>${plain(row.title ?? "")}</bdi>` },
      { id: "violations", label: "Violations", num: true, cell: (row) => count(row.violations) },
      { id: "unproved", label: "Not proved", num: true, cell: (row) => count(row.unproved) },
    ]} />`}`;
}

function Losses({ topic }) {
  const rows = useGet(at`topics/${topic.vhost}/${topic.name}/losses`, { every: 10_000 }).data;
  return html`<li><a href=${to("topic", topic.vhost, topic.name)}><${Name} of=${topic.name} /></a> ${rows === undefined ? "…" : rows.length ? html`<${Badge} kind="bad">${rows.length}<//>` : html`<${Badge} kind="good">none<//>`}</li>`;
}
