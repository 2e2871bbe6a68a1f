// Dialogs that act on queues: declare, publish, purge, delete, migrate, members.
import { at, del, post, put } from "../core/api.js";
import { plural } from "../core/format.js";
import { ask, confirm, tableOf } from "../core/forms.js";
import { session, to, vhost } from "../core/store.js";
import { html } from "../core/ui.js";

const ARGUMENTS = {
  quorum: [
    "x-max-length",
    "x-max-length-bytes",
    "x-overflow",
    "x-message-ttl",
    "x-expires",
    "x-delivery-limit",
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-dead-letter-strategy",
    "x-single-active-consumer",
    "x-quorum-initial-group-size",
    "x-queue-leader-locator",
    "x-consumer-timeout",
    "x-deduplication-time",
    "x-link-resume-timeout",
    "x-delayed-retry-type",
    "x-trace",
  ],
  classic: [
    "x-max-length",
    "x-max-length-bytes",
    "x-overflow",
    "x-message-ttl",
    "x-expires",
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-max-priority",
    "x-single-active-consumer",
    "x-queue-master-locator",
  ],
  stream: ["x-max-age", "x-max-length-bytes", "x-stream-max-segment-size-bytes", "x-queue-leader-locator"],
};
export const vhostField = () => ({
  name: "vhost",
  label: "Virtual host",
  options: session.get().vhosts.length ? session.get().vhosts : ["/"],
  value: vhost.get() || session.get().vhosts[0],
});

export const declareQueue = (type = "quorum") =>
  ask({
    title: type === "stream" ? "New stream" : "New queue",
    fields: [
      vhostField(),
      { name: "name", label: "Name", required: true },
      {
        name: "type",
        label: "Type",
        value: type,
        options: [
          ["quorum", "quorum – replicated, nothing is lost"],
          ["classic", "classic – on one node, or mirrored by a policy"],
          ["stream", "stream – a log that is read again and again"],
        ],
      },
      {
        name: "durable",
        label: "Durable: survives a restart",
        type: "check",
        value: true,
        when: (values) => values.type === "classic",
      },
      {
        name: "auto_delete",
        label: "Deleted with its last consumer",
        type: "check",
        when: (values) => values.type === "classic",
      },
      ...Object.entries(ARGUMENTS).map(([kind, suggest]) => ({
        name: `arguments-${kind}`,
        label: "Arguments",
        type: "arguments",
        suggest,
        when: (values) => values.type === kind,
      })),
    ],
    action: "Declare",
    act: (values) =>
      put(at`queues/${values.vhost}/${values.name}`, {
        durable: values.type !== "classic" || values.durable,
        auto_delete: values.type === "classic" && values.auto_delete,
        arguments: { "x-queue-type": values.type, ...tableOf(values[`arguments-${values.type}`]) },
      }),
    done: (_, values) => {
      location.hash = to("queue", values.vhost, values.name);
      return `Queue ${values.name} is there`;
    },
  });

const PROPERTIES = [
  "content_type",
  "message_id",
  "correlation_id",
  "reply_to",
  "expiration",
  "priority",
  "type",
  "app_id",
];

/** exchange: a name; with a queue's name as key the message goes to that queue. */
export const publish = (host, exchange, key = "", done = () => {}) =>
  ask({
    title: "Publish a message",
    fields: [
      { name: "key", label: exchange === "amq.default" ? "Queue" : "Routing key", value: key },
      { name: "persistent", label: "Persistent", type: "check", value: true },
      { name: "headers", label: "Headers", type: "arguments" },
      { name: "properties", label: "Properties", type: "arguments", suggest: PROPERTIES },
      { name: "payload", label: "Payload", type: "area" },
      {
        name: "encoding",
        label: "Payload is",
        options: [
          ["string", "text"],
          ["base64", "Base64 of bytes"],
        ],
      },
    ],
    action: "Publish",
    act: ({ key: routing_key, persistent, headers, properties, payload, encoding }) =>
      post(at`exchanges/${host}/${exchange}/publish`, {
        routing_key,
        payload,
        payload_encoding: encoding,
        properties: { delivery_mode: persistent ? 2 : 1, ...tableOf(properties), headers: tableOf(headers) },
      }),
    done: ({ routed }) => {
      done();
      return routed ? "Published, and in a queue" : "Published, but no queue took it";
    },
  });

const named = (name) => html`<bdi><strong>${name}</strong></bdi>`;

export const purge = (row, done) =>
  confirm({
    title: "Purge this queue?",
    text: html`${plural(row.messages_ready ?? 0, "ready message")} of ${named(row.name)} will be gone. Unacknowledged messages stay.`,
    action: "Purge",
    act: () => del(at`queues/${row.vhost}/${row.name}/contents`),
    done: () => {
      done();
      return "The queue is purged";
    },
  });

export const deleteQueue = (row) =>
  confirm({
    title: "Delete this queue?",
    text: html`${named(row.name)} with ${plural(row.messages ?? 0, "message")} and ${plural(row.consumers ?? 0, "consumer")} will be gone.`,
    fields: [
      { name: "empty", label: "Only if it is empty", type: "check", value: !row.messages },
      { name: "unused", label: "Only if it has no consumers", type: "check", value: !row.consumers },
    ],
    action: "Delete",
    act: ({ empty, unused }) =>
      del(at`queues/${row.vhost}/${row.name}`, {
        params: { "if-empty": empty || undefined, "if-unused": unused || undefined },
      }),
    done: () => {
      location.hash = to("queues");
      return `Queue ${row.name} is deleted`;
    },
  });

const TYPES = { classic: ["quorum", "stream"], quorum: ["classic", "stream"], stream: [] };
export const canMigrate = (row) =>
  (TYPES[row.type] ?? []).length > 0 && !row.slave_nodes && !row.exclusive && !row.auto_delete;

/** First says what the new type would not keep, then asks. */
export const migrate = (row, done) =>
  ask({
    title: "Migrate to another type",
    text: "The queue keeps its name, bindings, messages and clients. First you see what the new type would not keep.",
    fields: [
      { name: "to", label: "New type", options: TYPES[row.type] },
      { name: "rate", label: "Messages per second at most (0: no limit)", type: "number", min: 0, value: 0 },
    ],
    action: "Look first",
    act: async ({ to: type, rate }) => {
      const plan = await post(at`convoy/queues/${row.vhost}/${row.name}/migration`, {
        to: type,
        dry_run: true,
      });
      confirm({
        title: `Migrate to ${type}?`,
        text: html`${named(row.name)}: ${plural(plan.messages, "message")}, ${plural(plan.consumers, "consumer")}. Publishers wait meanwhile.
        ${plan.dropped_arguments.length > 0 && html`<br />Arguments that ${type} does not serve: <bdi>${plan.dropped_arguments.join(", ")}</bdi>`}
        ${plan.notes.map((note) => html`<br key=${note} /><bdi>${note}</bdi>`)}`,
        fields: plan.dropped_arguments.length
          ? [{ name: "drop", label: "Leave these arguments out", type: "check" }]
          : [],
        action: "Migrate",
        act: ({ drop }) =>
          post(at`convoy/queues/${row.vhost}/${row.name}/migration`, {
            to: type,
            drop_arguments: Boolean(drop),
            rate: Number(rate),
            wait: 30,
          }),
        done: (result) => {
          done();
          return `Migration: ${result.state}`;
        },
      });
    },
  });

export const addMember = (row, nodes, done) =>
  ask({
    title: "Add a member",
    text: "The new member gets a copy of the queue, and a vote when it has caught up.",
    fields: [{ name: "node", label: "Node", options: nodes }],
    action: "Add",
    act: ({ node }) => post(at`queues/quorum/${row.vhost}/${row.name}/replicas/add`, { node }),
    done: () => {
      done();
      return "The member is being added";
    },
  });

export const removeMember = (row, node, done) =>
  confirm({
    title: "Remove this member?",
    text: html`The copy of ${named(row.name)} on <bdi>${node}</bdi> will be gone.`,
    action: "Remove",
    act: () => del(at`queues/quorum/${row.vhost}/${row.name}/replicas/delete`, { body: { node } }),
    done: () => {
      done();
      return "The member is removed";
    },
  });

export const transferLeader = (row, node, done) =>
  confirm({
    title: "Move the leader?",
    text: html`The leader of ${named(row.name)} moves to <bdi>${node}</bdi>. The queue pauses for some milliseconds.`,
    action: "Move",
    act: () => post(at`queues/quorum/${row.vhost}/${row.name}/leader/transfer`, { node }),
    done: () => {
      done();
      return "The leader moves";
    },
  });

export const setPrefetch = (consumer, done) =>
  ask({
    title: "Another prefetch for this consumer",
    text: html`<bdi>${consumer.consumer_tag}</bdi>`,
    fields: [
      {
        name: "count",
        label: "Prefetch",
        type: "number",
        min: 0,
        max: 65535,
        value: consumer.prefetch_count,
        required: true,
      },
    ],
    act: ({ count }) =>
      put(
        at`convoy/consumers/${consumer.queue.vhost}/${consumer.queue.name}/${consumer.consumer_tag}/prefetch`,
        { prefetch_count: Number(count) },
      ),
    done: () => {
      done();
      return "The prefetch is changed";
    },
  });

/** Asks for a filter of `browse`; all fields are optional. */
export const FILTER_FIELDS = [
  { name: "headers", label: "Headers with these values", type: "arguments" },
  { name: "exists", label: "Headers that exist", hint: "Names between commas" },
  { name: "from", label: "Position from", type: "number", min: 1 },
  { name: "until", label: "Position to", type: "number", min: 1 },
  { name: "since", label: "Enqueued after", type: "datetime-local" },
  { name: "before", label: "Enqueued before", type: "datetime-local" },
  {
    name: "reason",
    label: "First died because",
    options: [["", "any reason"], "rejected", "expired", "maxlen", "delivery_limit"],
  },
  { name: "queue", label: "First died in queue" },
];

export function filterOf(values) {
  const time = (text) => (text ? new Date(text).getTime() : undefined);
  const some = (object) => (Object.values(object).some((value) => value !== undefined) ? object : undefined);
  const filter = {
    headers: some(tableOf(values.headers)),
    header_exists: values.exists
      ? values.exists
          .split(",")
          .map((each) => each.trim())
          .filter(Boolean)
      : undefined,
    position: some({
      from: values.from ? Number(values.from) : undefined,
      to: values.until ? Number(values.until) : undefined,
    }),
    time: some({ from: time(values.since), to: time(values.before) }),
    first_death: some({ queue: values.queue || undefined, reason: values.reason || undefined }),
  };
  return JSON.parse(JSON.stringify(filter));
}
