// One queue: its course, members, consumers, flow of messages, bindings, policies; and its messages.
import { at, post } from "../core/api.js";
import { Chart } from "../core/charts.js";
import { RangeChoice, useCourse } from "../core/course.js";
import { bytes, count, rate, when } from "../core/format.js";
import { Graph } from "../core/graph.js";
import { isMonitor, to, useGet } from "../core/store.js";
import {
  Arguments,
  Card,
  Facts,
  NodeLink,
  Page,
  Stat,
  State,
  TypeTag,
  VhostLink,
  Waiting,
  attempt,
  html,
} from "../core/ui.js";
import { canMigrate, deleteQueue, migrate, publish, purge } from "./queue-forms.js";
import { Messages } from "./queue-messages.js";
import { Backing, Consumers, MembersCard, StreamCard } from "./queue-parts.js";
import { Rules } from "./queue-rules.js";
import { Scheduled } from "./queue-scheduled.js";
import { kindOf } from "./queues.js";

const rateOf = (name) => (row) => row.message_stats?.[`${name}_details`]?.rate ?? 0;
/** A stream counts no deliveries of its own: those of its channels. */
const delivered = (row) =>
  row.message_stats?.deliver_get === undefined
    ? (row.deliveries ?? []).reduce((sum, each) => sum + (each.stats.deliver_get_details?.rate ?? 0), 0)
    : rateOf("deliver_get")(row);
const NOW = {
  ready: (row) => row.messages_ready,
  unacked: (row) => row.messages_unacknowledged,
  publish: rateOf("publish"),
  deliver: delivered,
  ack: rateOf("ack"),
};
const counter = (name) => [(row) => row.message_stats?.[`${name}_details`], true];
const SAMPLES = {
  ready: [(row) => row.messages_ready_details],
  unacked: [(row) => row.messages_unacknowledged_details],
  publish: counter("publish"),
  deliver: counter("deliver_get"),
  ack: counter("ack"),
};
const TABS = [
  ["", "Overview"],
  ["messages", "Messages"],
  ["scheduled", "Scheduled"],
  ["rules", "Bindings and policies"],
];

export default function Queue({ names: [vhost, name], params }) {
  const tab = params.tab ?? "";
  const found = useGet(at`queues/${vhost}/${name}`, {
    every: 2000,
    events: {
      queue: `${encodeURIComponent(vhost)}/${encodeURIComponent(name)}`,
      // Events have no consumers, and not where messages come from and go to.
      merge: (old, row) => old && { ...old, ...(row.gone ? { state: "gone" } : row) },
      every: 5000,
      tick: true,
    },
  });
  const { shown: course } = useCourse(at`queues/${vhost}/${name}`, found, NOW, SAMPLES, params.range);
  const row = found.data;
  const shown = TABS.filter(([key]) => key !== "scheduled" || row?.messages_delayed !== undefined);
  return html`<${Page} title=${name} kind=${row ? html`<${TypeTag} type=${kindOf(row)} /> queue in <${VhostLink} name=${vhost} />` : "Queue"} actions=${row && html`<${Actions} row=${row} reload=${found.reload} />`} />
    <nav class="tabs" aria-label="Parts">${shown.map(([key, text]) => html`<a key=${key} href="${to("queue", vhost, name)}${key && `?tab=${key}`}" aria-current=${key === tab ? "page" : undefined}>${text}</a>`)}</nav>
    <${Waiting} of=${found}>${() =>
      ({
        messages: html`<${Messages} row=${row} reload=${found.reload} />`,
        scheduled: html`<${Scheduled} row=${row} />`,
        rules: html`<${Rules} row=${row} />`,
      })[tab] ??
      html`<${Look} row=${row} course=${course} range=${params.range} reload=${found.reload} />`}<//>`;
}

function Actions({ row, reload }) {
  const sync = (action) =>
    attempt(
      () => post(at`queues/${row.vhost}/${row.name}/actions`, { action }),
      action === "sync" ? "The mirrors are being synchronised" : "Synchronising is cancelled",
    ).then(reload);
  return html`<button type="button" class="primary" onClick=${() => publish(row.vhost, "amq.default", row.name, reload)}>Publish…</button>
    ${row.slave_nodes && html`<button type="button" onClick=${() => sync("sync")}>Synchronise</button>`}
    ${canMigrate(row) && html`<button type="button" onClick=${() => migrate(row, reload)}>Migrate…</button>`}
    ${row.type !== "stream" && html`<button type="button" onClick=${() => purge(row, reload)}>Purge…</button>`}
    <button type="button" onClick=${() => deleteQueue(row)}>Delete…</button>`;
}

function Look({ row, course, range, reload }) {
  const chart = (names, labels, format, label) =>
    course?.times.length > 1
      ? html`<${Chart} key=${range} label=${label} times=${course.times} format=${format} series=${names.map((each, i) => ({ label: labels[i], values: course.rows[each] }))} />`
      : html`<p class="empty">${range ? "No history of this time yet." : "Collecting…"}</p>`;
  return html`
    ${row.state === "gone" && html`<p class="banner bad" role="alert">This queue was deleted. The numbers are its last ones.</p>`}
    <div class="stats">
      <${Stat} label="State" value=${html`<${State} of=${row.state} />`} />
      <${Stat} label="Ready" value=${count(row.messages_ready)} />
      <${Stat} label="Unacknowledged" value=${count(row.messages_unacknowledged)} />
      ${row.messages_delayed !== undefined && html`<${Stat} label="Scheduled" value=${count(row.messages_delayed)} />`}
      ${row.messages_dlx !== undefined && html`<${Stat} label="Dead, under way" value=${count(row.messages_dlx)} />`}
      <${Stat} label="In" value=${rate(NOW.publish(row))} unit="/s" />
      <${Stat} label="Out" value=${rate(NOW.deliver(row))} unit="/s" />
    </div>
    <div class="grid">
      <${Card} title="Messages" actions=${html`<${RangeChoice} range=${range} />`}>${chart(["ready", "unacked"], ["ready", "unacknowledged"], count, "Messages")}<//>
      <${Card} title="Per second">${chart(["publish", "deliver", "ack"], ["in", "out", "acknowledged"], rate, "Rates")}<//>
    </div>
    <${Flow} row=${row} />
    ${row.type === "stream" && html`<${StreamCard} row=${row} />`}
    <${MembersCard} row=${row} reload=${reload} />
    <${Consumers} row=${row} reload=${reload} />
    ${row.backing_queue_status && html`<${Backing} row=${row} />`}
    <div class="grid"><${About} row=${row} /><${Totals} row=${row} /></div>`;
}

function Flow({ row }) {
  const nodes = [{ id: "queue", text: row.name, kind: "queue", note: `${count(row.messages_ready)} ready` }];
  const edges = [];
  (row.incoming ?? []).slice(0, 20).forEach(({ exchange, stats }) => {
    const id = `x ${exchange.name}`;
    nodes.push({
      id,
      text: exchange.name || "(default exchange)",
      kind: "exchange",
      href: to("exchange", exchange.vhost, exchange.name || "amq.default"),
    });
    edges.push({
      from: id,
      to: "queue",
      text: `${rate(stats.publish_details?.rate)} /s`,
      strong: stats.publish_details?.rate > 0,
    });
  });
  const flow = Object.fromEntries(
    (row.deliveries ?? []).map((each) => [each.channel_details.name, each.stats]),
  );
  (row.consumer_details ?? []).slice(0, 20).forEach((consumer) => {
    const id = `c ${consumer.channel_details?.name} ${consumer.consumer_tag}`;
    const now = flow[consumer.channel_details?.name]?.deliver_get_details?.rate;
    nodes.push({
      id,
      text: consumer.consumer_tag,
      kind: "consumer",
      href: consumer.channel_details?.name ? to("channel", consumer.channel_details.name) : undefined,
      note: consumer.active === false ? "waiting" : "active",
    });
    edges.push({ from: "queue", to: id, text: now === undefined ? "" : `${rate(now)} /s`, strong: now > 0 });
  });
  return (
    nodes.length > 1 &&
    html`<${Card} title="Flow" note="Where messages come from and go to, now."><${Graph} nodes=${nodes} edges=${edges} label="Flow of messages" /><//>`
  );
}

function About({ row }) {
  return html`<${Card} title="About"><${Facts} rows=${[
    [
      "Leader or home",
      isMonitor() ? html`<${NodeLink} name=${row.leader ?? row.node} />` : (row.leader ?? row.node),
    ],
    ["Durable", row.durable ? "yes" : "no"],
    ["Auto-delete", row.auto_delete ? "yes" : undefined],
    ["Exclusive", row.exclusive ? "yes" : undefined],
    ["Arguments", html`<${Arguments} of=${row.arguments} />`],
    ["Follows RabbitMQ", row.rabbitmq_compatibility],
    ["Delivery limit", row.delivery_limit],
    ["Dead letters", row.dead_letter_strategy],
    ["Size", bytes(row.message_bytes)],
    ["Memory", bytes(row.memory)],
    ["Idle since", row.idle_since && when(Date.parse(row.idle_since))],
    [
      "Ready by priority",
      Object.keys(row.messages_by_priority ?? {}).length > 1
        ? html`<${Arguments} of=${row.messages_by_priority} />`
        : undefined,
    ],
    [
      "Stopped replicas",
      Object.keys(row.stopped ?? {}).length ? html`<${Arguments} of=${row.stopped} />` : undefined,
    ],
  ]} /><//>`;
}

const TOTALS = {
  publish: "Published",
  deliver: "Delivered",
  ack: "Acknowledged",
  redeliver: "Redelivered",
  returned: "Returned",
  purged: "Purged",
  duplicates: "Repeats of publishers",
  deduplicated: "Dropped as known",
  dropped_expired: "Expired",
  dropped_maxlen: "Over the limit",
  dropped_delivery_limit: "Delivered too often",
  dropped_rejected: "Rejected",
  dropped_retention: "Dropped by retention",
};
const Totals = ({ row }) =>
  html`<${Card} title="Since it began"><${Facts} rows=${Object.entries(TOTALS).map(([key, text]) => [text, row.message_stats?.[key] === undefined ? undefined : count(row.message_stats[key])])} /><//>`;
