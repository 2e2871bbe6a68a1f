// One node: what it uses, what it is, drain and revive.
import { at, del, post } from "../core/api.js";
import { Chart, useHistory } from "../core/charts.js";
import { bytes, count, duration } from "../core/format.js";
import { confirm } from "../core/forms.js";
import { isAdministrator, useGet } from "../core/store.js";
import { Badge, Card, Facts, Meter, Page, Stat, Waiting, html } from "../core/ui.js";

const NOW = {
  memory: (node) => node.mem_used,
  sockets: (node) => node.sockets_used,
  files: (node) => node.fd_used,
};

export default function Node({ names: [name] }) {
  const found = useGet(at`nodes/${name}`, {
    every: 2000,
    events: {
      topic: "nodes",
      merge: (old, rows) => old && { ...old, ...rows.find((row) => row.name === name) },
      tick: true,
    },
  });
  const memory = useGet(at`nodes/${name}/memory`, { every: 10_000 });
  const past = useHistory(found.data, found.at, NOW, name);
  const node = found.data;
  const actions =
    node &&
    isAdministrator() &&
    html`
    ${node.being_drained ? html`<button type="button" onClick=${() => revive(name, found.reload)}>Revive</button>` : html`<button type="button" onClick=${() => drain(name, found.reload)}>Drain…</button>`}
    ${!node.running && html`<button type="button" class="danger" onClick=${() => forget(name)}>Forget…</button>`}`;
  return html`<${Page} title=${name} kind="Node" actions=${actions} />
    <${Waiting} of=${found}>${() => html`
      <div class="stats">
        <${Stat} label="State" value=${node.running ? (node.being_drained ? "draining" : "running") : "down"} kind=${node.running ? "" : "bad"} />
        <${Stat} label="Memory" value=${bytes(node.mem_used)} note="of ${bytes(node.mem_limit)}" kind=${node.mem_alarm ? "bad" : ""} />
        <${Stat} label="Disk free" value=${bytes(node.disk_free)} note="alarm below ${bytes(node.disk_free_limit)}" kind=${node.disk_free_alarm ? "bad" : ""} />
        <${Stat} label="Connections" value=${count(node.connections)} />
        <${Stat} label="Up for" value=${duration(node.uptime)} />
      </div>
      <div class="grid">
        <${Card} title="Memory">${past.times.length > 1 ? html`<${Chart} label="Memory" times=${past.times} series=${[{ label: "used", values: past.rows.memory }]} format=${bytes} />` : html`<p class="empty">Collecting…</p>`}
          ${
            memory.data?.memory &&
            html`<${Facts} rows=${Object.entries(memory.data.memory)
              .filter(([key, value]) => value > 0 && key !== "total")
              .sort(([, a], [, b]) => b - a)
              .map(([key, value]) => [MEMORY[key] ?? key.replaceAll("_", " "), bytes(value)])} />`
          }<//>
        <${Card} title="About"><${Facts} rows=${[
          ["Number", node.id],
          [
            "Machine",
            node.machine !== undefined && `${count(node.machine)}, its process ${count(node.process)}`,
          ],
          ["Release", node.release],
          ["Build", node.build],
          ["Process", node.os_pid],
          [
            "Addresses",
            html`<ul>${Object.entries(node.addresses ?? {}).map(([kind, address]) => html`<li key=${kind}>${kind} <code>${address}</code></li>`)}</ul>`,
          ],
          ["Data", html`<code>${node.db_dir}</code>`],
          ["Configuration", html`<code>${(node.config_files ?? []).join(", ")}</code>`],
          ["Log", html`<code>${(node.log_files ?? []).join(", ")}</code>`],
          ["Log-in", (node.auth_mechanisms ?? []).map((each) => each.name).join(", ")],
          [
            "Versions",
            Object.entries(node.supported_versions ?? {})
              .map(([kind, [from, last]]) => `${kind} ${from}–${last}`)
              .join(", "),
          ],
          [
            "Alarms",
            node.mem_alarm || node.disk_free_alarm
              ? html`<${Badge} kind="bad">${[node.mem_alarm && "memory", node.disk_free_alarm && "disk"].filter(Boolean).join(", ")}<//>`
              : html`<${Badge} kind="good">none<//>`,
          ],
        ]} /><//>
        <${Card} title="Use" wide><${Facts} rows=${[
          [
            "Memory",
            html`<${Meter} label="Memory" value=${node.mem_used} most=${node.mem_limit} text="${bytes(node.mem_used)} of ${bytes(node.mem_limit)}" />`,
          ],
          [
            "Open files",
            html`<${Meter} label="Open files" value=${node.fd_used} most=${node.fd_total} text="${count(node.fd_used)} of ${count(node.fd_total)}" />`,
          ],
          [
            "Sockets",
            html`<${Meter} label="Sockets" value=${node.sockets_used} most=${node.sockets_total} text="${count(node.sockets_used)} of ${count(node.sockets_total)}" />`,
          ],
          [
            "Threads",
            html`<${Meter} label="Threads" value=${node.proc_used} most=${node.proc_total} text="${count(node.proc_used)} of ${count(node.proc_total)}" />`,
          ],
          ["Processors", count(node.processors)],
        ]} /><//>
      </div>`}<//>`;
}

const MEMORY = {
  quorum_queue_procs: "Indexes of quorum queues",
  stream_queue_procs: "Indexes of streams",
  binary: "Log entries in memory",
  other_proc: "The rest",
};

const drain = (name, reload) =>
  confirm({
    title: "Drain this node?",
    text: html`<bdi>${name}</bdi> closes its ports and connections and hands its leaders to other nodes. "Revive" ends it.`,
    action: "Drain",
    act: () => post(at`convoy/nodes/${name}/drain`),
    done: () => {
      reload();
      return "The node is being drained";
    },
  });
const revive = (name, reload) =>
  confirm({
    title: "Revive this node?",
    text: html`<bdi>${name}</bdi> takes clients again.`,
    action: "Revive",
    act: () => post(at`convoy/nodes/${name}/revive`),
    done: () => {
      reload();
      return "The node takes clients again";
    },
  });
const forget = (name) =>
  confirm({
    title: "Forget this node?",
    text: html`<bdi>${name}</bdi> is removed from all queues and from the cluster. It cannot come back with its data.`,
    fields: [{ name: "force", label: "Even where queues cannot let go of it now", type: "check" }],
    action: "Forget",
    act: ({ force }) => del(at`convoy/nodes/${name}`, { params: force ? { force: "true" } : {} }),
    done: () => {
      location.hash = "#/nodes";
      return "The node is forgotten";
    },
  });
