// Definitions: export to a file, import from one.
import { useState } from "../vendor/htm-preact.js";
import { at, get, post } from "../core/api.js";
import { count } from "../core/format.js";
import { confirm } from "../core/forms.js";
import { isAdministrator, session, useStore, vhost } from "../core/store.js";
import { Card, Facts, Page, attempt, html, notify } from "../core/ui.js";

const PARTS = [
  "vhosts",
  "users",
  "permissions",
  "topic_permissions",
  "parameters",
  "global_parameters",
  "policies",
  "queues",
  "exchanges",
  "bindings",
  "topics",
];

function save(definitions, name) {
  const url = URL.createObjectURL(
    new Blob([JSON.stringify(definitions, null, 2)], { type: "application/json" }),
  );
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export default function Definitions() {
  const host = useStore(vhost) || (isAdministrator() ? "" : session.get().vhosts[0]);
  const [read, setRead] = useState(null);
  const whole = host === "";
  const download = () =>
    attempt(
      async () =>
        save(
          await get(whole ? at`definitions` : at`definitions/${host}`),
          `definitions${whole ? "" : `-${host.replace(/[^\w.-]/g, "_")}`}.json`,
        ),
      "The definitions are exported",
    );
  const choose = async (event) => {
    const file = event.target.files[0];
    if (!file) return;
    try {
      setRead({ name: file.name, definitions: JSON.parse(await file.text()) });
    } catch (error) {
      setRead(null);
      notify(`${file.name}: ${error.message}`, "bad");
    }
  };
  const load = () =>
    confirm({
      title: "Import these definitions?",
      text: html`<bdi>${read.name}</bdi> goes into ${whole ? "the cluster" : html`virtual host <bdi>${host}</bdi>`}. What exists is changed where it can be; nothing is deleted.`,
      action: "Import",
      act: () => post(whole ? at`definitions` : at`definitions/${host}`, read.definitions),
      done: "The definitions are imported",
    });
  return html`<${Page} title="Definitions" kind=${whole ? "Of the whole cluster" : html`Of virtual host <bdi>${host}</bdi>`} />
    <div class="grid">
      <${Card} title="Export" note="Queues, exchanges, bindings, policies, users: everything but messages. Hashes of passwords are part of it."><button type="button" class="primary" onClick=${download}>Export to a file</button><//>
      <${Card} title="Import" note="A file of ConvoyMQ or RabbitMQ."><div class="toolbar"><label class="filter"><span class="hidden">File</span><input type="file" accept="application/json,.json" onChange=${choose} /></label>
        ${read && html`<button type="button" class="primary" onClick=${load}>Import…</button>`}</div>
        ${read && html`<${Facts} rows=${[["From", read.definitions.product_name ?? "RabbitMQ"], ["Version", read.definitions.product_version ?? read.definitions.rabbitmq_version ?? read.definitions.rabbit_version], ...PARTS.filter((part) => Array.isArray(read.definitions[part])).map((part) => [part.replaceAll("_", " "), count(read.definitions[part].length)])]} />`}<//>
    </div>`;
}
