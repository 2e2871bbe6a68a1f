// Upgrades: releases of the nodes, feature flags, deprecated features, what may go wrong next.
import { at, put } from "../core/api.js";
import { ask } from "../core/forms.js";
import { isAdministrator, isMonitor, useGet } from "../core/store.js";
import { LocalTable, Table } from "../core/table.js";
import { Badge, Card, Page, Waiting, html } from "../core/ui.js";

const enable = (row, done) =>
  ask({
    title: `Enable ${row.name}?`,
    text: "It cannot be disabled again.",
    action: "Enable",
    act: () => put(at`feature-flags/${row.name}/enable`),
    done: () => {
      done();
      return "Enabled";
    },
  });

export default function Upgrades() {
  const flags = useGet(at`feature-flags`, { every: 10_000 });
  const nodes = useGet(isMonitor() ? at`nodes` : null, { every: 10_000 });
  const deprecated = useGet(at`deprecated-features`, { every: 30_000 });
  const used = useGet(at`deprecated-features/used`, { every: 30_000 });
  const releases = [...new Set((nodes.data ?? []).map((node) => node.release).filter(Boolean))];
  return html`<${Page} title="Upgrades" />
    ${
      nodes.data &&
      html`<${Card} title="Releases" note=${releases.length > 1 ? "The upgrade is under way: not all nodes have the same release." : "All nodes have the same release."}>
      <${Table} label="Releases" rows=${nodes.data} keyOf=${(node) => node.name} columns=${[
        { id: "name", label: "Node", cell: (node) => html`<bdi>${node.name}</bdi>` },
        { id: "release", label: "Release", cell: (node) => node.release ?? "–" },
        { id: "build", label: "Build", opt: true, cell: (node) => node.build ?? "–" },
        {
          id: "versions",
          label: "Versions of the machines",
          cell: (node) =>
            Object.entries(node.supported_versions ?? {})
              .map(([kind, [from, last]]) => `${kind} ${from}–${last}`)
              .join(" · "),
        },
        {
          id: "state",
          label: "State",
          cell: (node) =>
            html`<${Badge} kind=${node.running ? "good" : "bad"}>${node.running ? (node.being_drained ? "draining" : "running") : "down"}<//>`,
        },
      ]} /><//>`
    }
    <${Card} title="Feature flags" note="They are enabled by themselves when all nodes support them."><${Waiting} of=${flags}>${(
      rows,
    ) =>
      ["convoymq", "rabbit"].map((by) => {
        const own = rows.filter((row) => (row.provided_by === "convoymq") === (by === "convoymq"));
        const table = html`<${LocalTable} label="Feature flags of ${by}" rows=${own} keyOf=${(row) => row.name} columns=${[
          { id: "name", label: "Flag", sort: "name", cell: (row) => html`<code>${row.name}</code>` },
          {
            id: "state",
            label: "State",
            sort: "state",
            cell: (row) => html`<${Badge} kind=${row.state === "enabled" ? "good" : "warn"}>${row.state}<//>`,
          },
          { id: "desc", label: "Meaning", opt: true, cell: (row) => row.desc },
          isAdministrator() && {
            id: "act",
            label: "",
            cell: (row) =>
              row.state !== "enabled" &&
              html`<button type="button" class="small" onClick=${() => enable(row, flags.reload)}>Enable…</button>`,
          },
        ]} />`;
        return by === "convoymq"
          ? table
          : html`<details><summary>RabbitMQ's flags, ${own.filter((row) => row.state === "enabled").length} of ${own.length} enabled</summary>${table}</details>`;
      })}<//><//>
    <${Card} title="Deprecated features"><${Waiting} of=${deprecated}>${(rows) =>
      html`<${Table} label="Deprecated features" rows=${rows} keyOf=${(row) => row.name} columns=${[
        { id: "name", label: "Feature", cell: (row) => html`<code>${row.name}</code>` },
        { id: "state", label: "State", cell: (row) => row.state },
        {
          id: "used",
          label: "In use now",
          cell: (row) =>
            (used.data ?? []).some((each) => each.name === row.name)
              ? html`<${Badge} kind="warn">yes<//>`
              : "no",
        },
      ]} />`}<//><//>`;
}
