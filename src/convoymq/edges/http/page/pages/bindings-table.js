// Bindings as a table, with bind and unbind; and as boxes and lines of a graph.
import { at, del, exchangeInPath, post } from "../core/api.js";
import { ask, confirm, tableOf } from "../core/forms.js";
import { plain } from "../core/format.js";
import { to, useGet } from "../core/store.js";
import { LocalTable } from "../core/table.js";
import { Arguments, Card, ExchangeLink, Name, QueueLink, Tag, Waiting, html } from "../core/ui.js";

const short = (kind) => (kind === "queue" ? "q" : "e");

/** source or destination: the end that is given; the other one is asked for. */
const bind = ({ vhost, source, destination, kind }, done) =>
  ask({
    title: "New binding",
    fields: [
      source === undefined && { name: "source", label: "From exchange", required: true },
      destination === undefined && {
        name: "kind",
        label: "To",
        options: [
          ["q", "a queue"],
          ["e", "an exchange"],
        ],
      },
      destination === undefined && { name: "destination", label: "Its name", required: true },
      { name: "key", label: "Routing key" },
      { name: "arguments", label: "Arguments", type: "arguments", suggest: ["x-match"] },
    ].filter(Boolean),
    action: "Bind",
    act: (values) =>
      post(
        at`bindings/${vhost}/e/${exchangeInPath(source ?? values.source)}/${kind ?? values.kind}/${destination ?? values.destination}`,
        { routing_key: values.key, arguments: tableOf(values.arguments) },
      ),
    done: () => {
      done();
      return "Bound";
    },
  });

const unbind = (row, done) =>
  confirm({
    title: "Remove this binding?",
    text: html`<bdi>${row.source}</bdi> → <bdi>${row.destination}</bdi> with key <bdi>${row.routing_key || "(none)"}</bdi>. Messages no longer take this way.`,
    action: "Unbind",
    act: () =>
      del(
        at`bindings/${row.vhost}/e/${exchangeInPath(row.source)}/${short(row.destination_type)}/${exchangeInPath(row.destination)}/${row.properties_key}`,
      ),
    done: () => {
      done();
      return "Unbound";
    },
  });

export function BindingsCard({ vhost, path, source, destination, kind, title = "Bindings" }) {
  const found = useGet(path, { every: 5000 });
  const columns = [
    destination !== undefined && {
      id: "source",
      label: "From",
      sort: "source",
      cell: (row) => html`<${ExchangeLink} vhost=${row.vhost} name=${row.source} />`,
    },
    source !== undefined && {
      id: "destination",
      label: "To",
      sort: "destination",
      cell: (row) =>
        html`${row.destination_type === "queue" ? html`<${QueueLink} vhost=${row.vhost} name=${row.destination} />` : html`<${ExchangeLink} vhost=${row.vhost} name=${row.destination} />`} <${Tag}>${row.destination_type}<//>`,
    },
    {
      id: "key",
      label: "Routing key",
      sort: "routing_key",
      cell: (row) => html`<${Name} of=${row.routing_key} />`,
    },
    { id: "arguments", label: "Arguments", cell: (row) => html`<${Arguments} of=${row.arguments} />` },
    {
      id: "act",
      label: "",
      cell: (row) =>
        row.source !== "" &&
        html`<button type="button" class="small" onClick=${() => unbind(row, found.reload)}>Unbind…</button>`,
    },
  ];
  const add =
    source !== "" &&
    html`<button type="button" onClick=${() => bind({ vhost, source, destination, kind }, found.reload)}>Bind…</button>`;
  return html`<${Card} title=${title} actions=${add}><${Waiting} of=${found}>${(rows) => html`<${LocalTable} label=${title} columns=${columns} rows=${rows} keyOf=${(row) => `${row.source} ${row.destination_type} ${row.destination} ${row.properties_key}`} empty="There is no binding." />`}<//><//>`;
}

const hrefOf = (kind, vhost, name) =>
  kind === "queue" ? to("queue", vhost, name) : to("exchange", vhost, name || "amq.default");

/** Boxes and lines of bindings; several bindings between two ends are one line. */
export function graphOf(rows, vhost) {
  const nodes = new Map();
  const edges = new Map();
  const box = (kind, name) => {
    const id = `${kind} ${name}`;
    if (!nodes.has(id))
      nodes.set(id, { id, kind, text: name || "(default exchange)", href: hrefOf(kind, vhost, name) });
    return id;
  };
  for (const row of rows) {
    const [from, end] = [box("exchange", row.source), box(row.destination_type, row.destination)];
    const label =
      row.routing_key ||
      (Object.keys(row.arguments).length
        ? Object.entries(row.arguments)
            .map(([key, value]) => `${key}=${plain(value)}`)
            .join(" ")
        : "");
    const known = edges.get(`${from} ${end}`) ?? { from, to: end, labels: [] };
    known.labels.push(label || "(no key)");
    edges.set(`${from} ${end}`, known);
  }
  return {
    nodes: [...nodes.values()],
    edges: [...edges.values()].map(({ labels, ...ends }) => ({
      ...ends,
      text: labels.length > 1 ? `${labels.length} bindings` : labels[0] === "(no key)" ? "" : labels[0],
      title: labels.join("\n"),
    })),
  };
}
