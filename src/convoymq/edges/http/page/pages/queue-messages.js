// The messages of a queue: browse with a filter, and move, retry, republish or delete chosen ones.
import { useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { at, del, exchangeInPath, post, reason } from "../core/api.js";
import { bytes, count, plural, when } from "../core/format.js";
import { ask, confirm, rowsOf, tableOf } from "../core/forms.js";
import { has, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Arguments, Badge, Card, Empty, Facts, Name, Tag, html, attempt } from "../core/ui.js";
import { FILTER_FIELDS, filterOf } from "./queue-forms.js";

const PAGE = 50;
const SHOWN_BYTES = 20_000;

export function Messages({ row, reload }) {
  return row.type === "quorum"
    ? html`<${Browse} row=${row} reload=${reload} />`
    : html`<${Get} row=${row} reload=${reload} />`;
}

function Browse({ row, reload }) {
  const [filter, setFilter] = useState({});
  const [page, setPage] = useState(null);
  const [cursors, setCursors] = useState([null]);
  const [chosen, setChosen] = useState(new Set());
  const [error, setError] = useState("");
  const path = [row.vhost, row.name];
  const cursor = cursors[cursors.length - 1];
  const turn = useRef(0);
  const load = async () => {
    const mine = (turn.current += 1);
    try {
      const found = await post(at`convoy/queues/${path[0]}/${path[1]}/messages/browse`, {
        filter,
        count: PAGE,
        truncate: SHOWN_BYTES,
        ...(cursor ? { cursor } : {}),
      });
      // An answer to an earlier question may come last.
      if (mine === turn.current) {
        setPage(found);
        setError("");
      }
    } catch (refused) {
      if (mine === turn.current) setError(reason(refused));
    }
  };
  useEffect(() => {
    setChosen(new Set());
    load();
  }, [cursor, JSON.stringify(filter)]);
  const again = () => {
    setCursors([null]);
    setChosen(new Set());
    load();
    reload();
  };
  const isFiltered = Object.keys(filter).length > 0;
  const toggle = (id) =>
    setChosen((old) => {
      const next = new Set(old);
      if (!next.delete(id)) next.add(id);
      return next;
    });
  const askFilter = () =>
    ask({
      title: "Show only messages with…",
      fields: FILTER_FIELDS,
      action: "Show",
      act: (values) => {
        setCursors([null]);
        setFilter(filterOf(values));
      },
    });
  const choice = chosen.size ? { ids: [...chosen] } : { filter };
  const what = chosen.size
    ? plural(chosen.size, "chosen message")
    : isFiltered
      ? "all messages of the filter"
      : "all ready messages";
  return html`<${Card} title="Ready messages" note="They stay in the queue, unchanged. Messages at consumers are not shown.">
    <div class="toolbar">
      <button type="button" onClick=${load}>Reload</button><button type="button" onClick=${askFilter}>Filter…</button>
      ${
        isFiltered &&
        html`<button type="button" class="quiet" onClick=${() => {
          setCursors([null]);
          setFilter({});
        }}>No filter</button>`
      }
      <span class="actions"><button type="button" onClick=${() => move(path, choice, what, again)}>Move…</button>
      <button type="button" onClick=${() => retry(path, choice, what, again)}>Retry dead letters…</button>
      <button type="button" onClick=${() => remove(path, choice, what, again)}>Delete…</button></span>
      <span class="pager"><span class="total">${chosen.size > 0 ? `${count(chosen.size)} chosen of ` : ""}${page ? count(page.messages_ready) : "–"} ready</span>
        ${cursors.length > 1 && html`<button type="button" aria-label="Previous page" onClick=${() => setCursors(cursors.slice(0, -1))}>‹</button>`}
        ${page?.cursor && html`<button type="button" aria-label="Next page" onClick=${() => setCursors([...cursors, page.cursor])}>›</button>`}</span>
    </div>
    ${error && html`<p class="banner bad" role="alert">${error}</p>`}
    ${page && !page.messages.length && html`<${Empty}>${isFiltered ? "No message is like that." : "There is no ready message."}<//>`}
    ${page?.messages.map((message) => html`<${Message} key=${message.id} message=${message} chosen=${chosen.has(message.id)} toggle=${() => toggle(message.id)} republish=${() => republish(path, message, again)} />`)}<//>
    <${Operations} path=${path} />`;
}

function Message({ message, chosen, toggle, republish }) {
  const properties = message.properties ?? {};
  const { headers, ...others } = properties;
  const box =
    toggle &&
    html`<input type="checkbox" aria-label="Choose message ${message.position}" checked=${chosen} onChange=${toggle} />`;
  return html`<div class="message">${box}<details><summary>
      <strong>${message.position === undefined ? "" : `#${count(message.position)}`}</strong>
      ${
        message.unreadable
          ? html`<${Badge} kind="bad">unreadable<//>`
          : html`<${Name} of=${message.routing_key} none="no routing key" /><span class="note">${bytes(message.payload_bytes)}</span>
      <span class="note preview"><bdi>${message.payload_encoding === "string" ? (message.payload ?? "").slice(0, 80) : ""}</bdi></span>
      ${message.first_death && html`<${Tag} kind="warn" title="died in ${message.first_death.queue}">${message.first_death.reason}<//>`}
      ${message.redelivered && html`<${Tag}>redelivered<//>`}`
      }</summary>
    <div><${Facts} rows=${[
      ["Exchange", html`<${Name} of=${message.exchange} none="(default exchange)" />`],
      ["Routing key", html`<${Name} of=${message.routing_key} />`],
      ["Enqueued", message.enqueued_at && when(message.enqueued_at)],
      ["Deliveries", message.acquired_count],
      ["Failed deliveries", message.delivery_count],
      ["First death", message.first_death && html`<${Death} of=${message.first_death} />`],
      ["Last death", message.last_death && html`<${Death} of=${message.last_death} />`],
      ["Properties", html`<${Arguments} of=${others} />`],
      ["Headers", html`<${Arguments} of=${headers} />`],
    ]} />
    <pre tabindex="0" aria-label="Payload"><bdi>${pretty(message)}</bdi></pre>
    ${message.truncated && html`<p class="note">Only the first part is shown: ${bytes(message.payload_bytes)} in all.</p>`}
    ${republish && html`<div class="actions"><button type="button" class="small" onClick=${republish}>Edit and republish…</button></div>`}</div></details></div>`;
}

const Death = ({ of }) =>
  html`<bdi>${of.reason}</bdi> in <bdi>${of.queue}</bdi>${of.count > 1 ? `, ${count(of.count)} times` : ""}`;

function pretty(message) {
  if (!String(message.properties?.content_type ?? "").includes("json") || message.truncated)
    return message.payload ?? "";
  try {
    return JSON.stringify(JSON.parse(message.payload), null, 2);
  } catch {
    return message.payload;
  }
}

const operated = (again) => (result) => {
  again();
  return `${count(result.selected)} chosen, ${result.state}`;
};

const move = (path, choice, what, again) =>
  confirm({
    title: "Move messages?",
    text: `${what[0].toUpperCase()}${what.slice(1)} will be published elsewhere and removed here.`,
    fields: [
      {
        name: "to",
        label: "To",
        options: [
          ["queue", "a queue"],
          ["exchange", "an exchange"],
        ],
      },
      { name: "name", label: "Its name", required: true },
      {
        name: "key",
        label: "Routing key",
        hint: "Empty: each message keeps its own",
        when: (values) => values.to === "exchange",
      },
    ],
    action: "Move",
    act: ({ to, name, key }) =>
      post(at`convoy/queues/${path[0]}/${path[1]}/messages/move`, {
        ...choice,
        ...(to === "queue"
          ? { queue: name }
          : { exchange: exchangeInPath(name), ...(key ? { routing_key: key } : {}) }),
      }),
    done: operated(again),
  });

const retry = (path, choice, what, again) =>
  confirm({
    title: "Retry dead letters?",
    text: `Of ${what}, those that died go back to where they came from. The others stay.`,
    fields: [
      {
        name: "to",
        label: "Back to",
        options: [
          ["first", "the queue of the first death"],
          ["last", "the queue of the last death"],
          ...(has() ? [["origin", "the exchange they were published to"]] : []),
        ],
      },
    ],
    action: "Retry",
    act: ({ to }) => post(at`convoy/queues/${path[0]}/${path[1]}/messages/retry`, { ...choice, to }),
    done: operated(again),
  });

const remove = (path, choice, what, again) =>
  confirm({
    title: "Delete messages?",
    text: `${what[0].toUpperCase()}${what.slice(1)} will be gone.`,
    action: "Delete",
    act: () => post(at`convoy/queues/${path[0]}/${path[1]}/messages/delete`, choice),
    done: operated(again),
  });

function republish(path, message, again) {
  const { headers, ...others } = message.properties ?? {};
  ask({
    title: "Edit and republish",
    text: "The message is published with this content and removed here.",
    fields: [
      { name: "queue", label: "To the queue", value: message.first_death?.queue ?? path[1], required: true },
      { name: "properties", label: "Properties", type: "arguments", value: rowsOf(others) },
      { name: "headers", label: "Headers", type: "arguments", value: rowsOf(headers) },
      {
        name: "payload",
        label: message.payload_encoding === "base64" ? "Payload (Base64)" : "Payload",
        type: "area",
        value: message.payload ?? "",
      },
    ],
    action: "Republish",
    act: ({ queue, properties, headers: named, payload }) => {
      if (message.truncated)
        throw new Error("The payload is not here in full: use the command line for this message.");
      return post(at`convoy/queues/${path[0]}/${path[1]}/messages/republish`, {
        id: message.id,
        queue,
        payload,
        payload_encoding: message.payload_encoding,
        properties: { ...tableOf(properties), headers: tableOf(named) },
      });
    },
    done: operated(again),
  });
}

function Operations({ path }) {
  const found = useGet(at`convoy/queues/${path[0]}/${path[1]}/operations`, { every: 3000 });
  if (!found.data?.length) return null;
  const cancel = (id) =>
    attempt(
      () => del(at`convoy/queues/${path[0]}/${path[1]}/operations/${id}`),
      "The rest is back in the queue",
    ).then(found.reload);
  const cell = (key) => ({ id: key, label: key, num: true, cell: (each) => count(each[key]) });
  return html`<${Card} title="Operations on messages"><${Table} label="Operations" rows=${found.data} keyOf=${(each) => each.operation} columns=${[
    { id: "operation", label: "operation", cell: (each) => html`<bdi>${each.operation.slice(0, 16)}</bdi>` },
    {
      id: "state",
      label: "state",
      cell: (each) => html`<${Badge} kind=${each.state === "done" ? "good" : "info"}>${each.state}<//>`,
    },
    ...["selected", "moved", "deleted", "returned", "gone", "waiting"].map(cell),
    { id: "waits", label: "waits for", opt: true, cell: (each) => each.waits_for },
    {
      id: "act",
      label: "",
      cell: (each) =>
        each.state !== "done" &&
        html`<button type="button" class="small" onClick=${() => cancel(each.operation)}>Cancel</button>`,
    },
  ]} /><//>`;
}

/** Queues that cannot be browsed: their first messages are taken and put back. */
function Get({ row, reload }) {
  const [messages, setMessages] = useState(null);
  const take = () =>
    ask({
      title: "Get messages",
      text: "The queue hands the first messages out, as to a consumer. Those that go back are marked as redelivered.",
      fields: [
        { name: "count", label: "How many", type: "number", min: 1, max: 1000, value: 10 },
        {
          name: "mode",
          label: "Then",
          options: [
            ["ack_requeue_true", "put them back"],
            ["ack_requeue_false", "acknowledge: they are gone"],
            ["reject_requeue_false", "reject: they become dead letters, or are gone"],
          ],
        },
      ],
      action: "Get",
      act: async ({ count: number, mode }) => {
        setMessages(
          await post(at`queues/${row.vhost}/${row.name}/get`, {
            count: Number(number),
            ackmode: mode,
            encoding: "auto",
            truncate: SHOWN_BYTES,
          }),
        );
        reload();
      },
    });
  return html`<${Card} title="Messages" note="Queues of this type cannot be browsed without a trace." actions=${html`<button type="button" onClick=${take}>Get messages…</button>`}>
    ${messages === null ? html`<${Empty}>Nothing is shown yet.<//>` : !messages.length ? html`<${Empty}>The queue has no ready message.<//>` : messages.map((message, i) => html`<${Message} key=${i} message=${message} />`)}<//>`;
}
