// Parts of a queue's page: members or mirrors, consumers, storage, stream.
import { at } from "../core/api.js";
import { bytes, count, duration, rate } from "../core/format.js";
import { isAdministrator, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Badge, Card, ChannelLink, Facts, Name, NodeLink, Waiting, html } from "../core/ui.js";
import { RaftTable } from "./nodes.js";
import { addMember, removeMember, setPrefetch, transferLeader } from "./queue-forms.js";
import { Members } from "./queues.js";

export function MembersCard({ row, reload }) {
  const isGroup = row.machine_version !== undefined;
  const status = useGet(isGroup ? at`queues/quorum/${row.vhost}/${row.name}/status` : null, { every: 3000 });
  const nodes = useGet(isGroup && isAdministrator() ? at`nodes` : null, {
    params: { columns: "name,running" },
  });
  if (row.slave_nodes) {
    const fresh = new Set(row.synchronised_slave_nodes);
    const rows = [
      { node: row.node, role: "master" },
      ...row.slave_nodes.map((node) => ({ node, role: "mirror", fresh: fresh.has(node) })),
    ];
    return html`<${Card} title="Mirrors"><${Table} label="Mirrors" rows=${rows} keyOf=${(each) => each.node} columns=${[
      { id: "node", label: "Node", cell: (each) => html`<${NodeLink} name=${each.node} />` },
      { id: "role", label: "Role", cell: (each) => each.role },
      {
        id: "state",
        label: "Copy",
        cell: (each) =>
          each.role === "master" || each.fresh
            ? html`<${Badge} kind="good">synchronised<//>`
            : html`<${Badge} kind="warn">not synchronised<//>`,
      },
    ]} /><//>`;
  }
  if (!isGroup) return null;
  const free = (nodes.data ?? [])
    .filter((node) => node.running && !row.members.includes(node.name))
    .map((node) => node.name);
  const act = (member) =>
    isAdministrator() &&
    row.type === "quorum" &&
    html`<span class="actions">
    ${member["Raft State"] === "follower" && html`<button type="button" class="small" onClick=${() => transferLeader(row, member["Node Name"], reload)}>Make leader…</button>`}
    ${row.members.length > 1 && html`<button type="button" class="small" onClick=${() => removeMember(row, member["Node Name"], reload)}>Remove…</button>`}</span>`;
  return html`<${Card} title="Members" note=${html`<${Members} of=${row} />`} actions=${free.length > 0 && row.type === "quorum" && html`<button type="button" onClick=${() => addMember(row, free, reload)}>Add…</button>`}>
    <${Waiting} of=${status}>${(rows) => html`<${RaftTable} rows=${rows} actions=${isAdministrator() && act} />`}<//><//>`;
}

export function Consumers({ row, reload }) {
  const columns = [
    { id: "tag", label: "Tag", cell: (each) => html`<${Name} of=${each.consumer_tag} />` },
    {
      id: "state",
      label: "State",
      cell: (each) =>
        html`<${Badge} kind=${each.active ? "good" : "idle"}>${each.active ? "active" : (each.activity_status ?? "waiting")}<//>`,
    },
    {
      id: "channel",
      label: "Channel",
      opt: true,
      cell: (each) =>
        each.channel_details?.name ? html`<${ChannelLink} of=${each.channel_details} />` : "–",
    },
    {
      id: "node",
      label: "Node",
      opt: true,
      cell: (each) => html`<bdi>${each.channel_details?.node ?? "–"}</bdi>`,
    },
    {
      id: "user",
      label: "User",
      opt: true,
      cell: (each) => html`<bdi>${each.channel_details?.user ?? "–"}</bdi>`,
    },
    { id: "acks", label: "Acks", cell: (each) => (each.ack_required ? "manual" : "automatic") },
    {
      id: "prefetch",
      label: "Prefetch",
      num: true,
      cell: (each) => (each.prefetch_count ? count(each.prefetch_count) : "no limit"),
    },
    {
      id: "timeout",
      label: "Timeout",
      num: true,
      opt: true,
      cell: (each) => (each.consumer_timeout ? duration(each.consumer_timeout) : "–"),
    },
    row.type === "quorum" && {
      id: "act",
      label: "",
      cell: (each) =>
        html`<button type="button" class="small" onClick=${() => setPrefetch(each, reload)}>Prefetch…</button>`,
    },
  ];
  return html`<${Card} title="Consumers" note=${row.single_active || row.single_active_consumer_tag ? "A single one is active; the next takes over when it goes." : "The order is that of their registration: each takes its turn while it has credit."}>
    <${Table} label="Consumers" columns=${columns} rows=${row.consumer_details ?? []} keyOf=${(each) => `${each.channel_details?.name} ${each.consumer_tag}`} empty="Nobody consumes from this queue." /><//>`;
}

export function Backing({ row }) {
  const status = row.backing_queue_status;
  const delta = Array.isArray(status.delta) ? (status.delta[2] ?? 0) : 0;
  const parts = [
    ["q1", status.q1],
    ["q2", status.q2],
    ["Δ", typeof delta === "number" ? delta : 0],
    ["q3", status.q3],
    ["q4", status.q4],
  ];
  const most = Math.max(1, ...parts.map(([, size]) => size ?? 0));
  return html`<${Card} title="Storage of this classic queue" note="Messages enter at q1 and leave at q4. q1 and q4 are in memory, q2 and q3 have their indexes there, Δ is on disk only.">
    <ol class="tiers">${parts.map(([name, size]) => html`<li key=${name}><span class="label">${name}</span><meter min="0" max=${most} value=${size ?? 0} aria-label=${name}></meter><span>${count(size ?? 0)}</span></li>`)}</ol>
    <${Facts} rows=${[
      ["In memory", `${count(row.messages_ram)} messages, ${bytes(row.message_bytes_ram)}`],
      ["On disk only", `${count(row.messages_paged_out)} messages, ${bytes(row.message_bytes_paged_out)}`],
      ["Target in memory", status.target_ram_count === "infinity" ? "all" : count(status.target_ram_count)],
      ["Rates", `in ${rate(status.avg_ingress_rate)} /s, out ${rate(status.avg_egress_rate)} /s`],
    ]} /><//>`;
}

export function StreamCard({ row }) {
  return html`<${Card} title="Stream"><${Facts} rows=${[
    ["First offset", count(row.first_offset)],
    ["Next offset", count(row.next_offset)],
    ["Committed offset", count(row.committed_offset)],
    ["Segments", count(row.segments)],
    ["Kept", row.effective_settings?.["max-age"] ?? "for ever"],
    [
      "Size at most",
      row.effective_settings?.["max-length-bytes"]
        ? bytes(row.effective_settings["max-length-bytes"])
        : "no limit",
    ],
  ]} /><//>`;
}
