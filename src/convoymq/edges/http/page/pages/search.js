// Search: any object by a part of its name, from anywhere, with the key `/`.
import { useEffect, useState } from "../vendor/htm-preact.js";
import { at, get } from "../core/api.js";
import { open } from "../core/forms.js";
import { isAdministrator, isMonitor, to } from "../core/store.js";
import { Name, html } from "../core/ui.js";

const MOST = 8;
/** [kind, path, who may, columns, place of a row] */
const KINDS = [
  ["Queue", at`queues`, () => true, "name,vhost,type", (row) => to("queue", row.vhost, row.name)],
  [
    "Exchange",
    at`exchanges`,
    () => true,
    "name,vhost,type",
    (row) => to("exchange", row.vhost, row.name || "amq.default"),
  ],
  ["Topic", at`topics`, () => true, "name,vhost", (row) => to("topic", row.vhost, row.name)],
  [
    "Connection",
    at`connections`,
    () => true,
    "name,user_provided_name,user",
    (row) => to("connection", row.name),
  ],
  ["Node", at`nodes`, isMonitor, "name", (row) => to("node", row.name)],
  ["User", at`users`, isAdministrator, "name", (row) => to("user", row.name)],
  ["Policy", at`policies`, () => true, "name,vhost", () => to("policies")],
  ["Virtual host", at`vhosts`, () => true, "name", (row) => to("vhost", row.name)],
];

async function find(text, signal) {
  const asked = KINDS.filter(([, , may]) => may()).map(async ([kind, path, , columns, place]) => {
    const page = await get(
      path,
      {
        name: text,
        columns,
        page: 1,
        page_size: MOST,
        ...(kind === "Queue" ? { disable_stats: "true" } : {}),
      },
      signal,
    );
    return page.items.map((row) => ({
      kind,
      name: row.user_provided_name || row.name,
      note: [row.type, row.vhost].filter(Boolean).join(" · "),
      href: place(row),
    }));
  });
  const answers = await Promise.allSettled(asked);
  return answers.flatMap((answer) => (answer.status === "fulfilled" ? answer.value : []));
}

function Search({ close }) {
  const [text, setText] = useState("");
  const [rows, setRows] = useState(null);
  const [at_, setAt] = useState(0);
  useEffect(() => {
    if (!text) {
      setRows(null);
      return undefined;
    }
    const abort = new AbortController();
    const timer = setTimeout(
      () =>
        find(text, abort.signal).then((found) => {
          if (!abort.signal.aborted) {
            setRows(found);
            setAt(0);
          }
        }),
      150,
    );
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [text]);
  const go = (row) => {
    close();
    location.hash = row.href;
  };
  const press = (event) => {
    const steps = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (steps && rows?.length) {
      event.preventDefault();
      setAt((at_ + steps + rows.length) % rows.length);
    } else if (event.key === "Enter" && rows?.[at_]) {
      event.preventDefault();
      go(rows[at_]);
    }
  };
  return html`<div class="search"><h2 id="dialog-title" class="hidden">Search</h2>
    <input type="search" role="combobox" aria-expanded=${Boolean(rows?.length)} aria-controls="found" aria-activedescendant=${rows?.length ? `found-${at_}` : undefined} aria-label="Name of anything" placeholder="Queue, exchange, topic, connection, node, user, policy…" autofocus value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${press} />
    <ul id="found" role="listbox" aria-label="Found">${(rows ?? []).map((row, i) => html`<li key=${row.href + row.kind} id="found-${i}" role="option" aria-selected=${i === at_} onClick=${() => go(row)}><span class="kind">${row.kind}</span><${Name} of=${row.name} none="(default exchange)" /><span class="note"><bdi>${row.note}</bdi></span></li>`)}</ul>
    ${rows && !rows.length && html`<p class="empty" role="status">Nothing has a name like that.</p>`}</div>`;
}

let isOpen = false;
export function openSearch() {
  if (isOpen) return;
  isOpen = true;
  open((close) => html`<${Once} close=${close} />`);
}

function Once({ close }) {
  useEffect(
    () => () => {
      isOpen = false;
    },
    [],
  );
  return html`<${Search} close=${close} />`;
}
