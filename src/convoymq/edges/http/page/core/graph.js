// Drawn graphs: dagre places boxes and lines, the page draws them as SVG.
import { useMemo, useState } from "../vendor/htm-preact.js";
import { Graph as Layout, layout } from "../vendor/dagre.js";
import { cut } from "./format.js";
import { html } from "./ui.js";

const HEIGHT = 34;
const LETTER = 7.4;
const widthOf = (text) => Math.max(70, Math.min(260, cut(text, 32).length * LETTER + 30));

/**
 * A graph from left to right.
 *
 * @param {Array} nodes {id, text, kind, href, note}
 * @param {Array} edges {from, to, text, title, strong}
 */
export function Graph({ nodes, edges, label, empty = "Nothing to draw." }) {
  const [near, setNear] = useState(null);
  const shape = JSON.stringify([
    nodes.map((n) => [n.id, n.text, n.note]),
    edges.map((e) => [e.from, e.to, e.text]),
  ]);
  const drawn = useMemo(() => place(nodes, edges), [shape]);
  if (!nodes.length) return html`<p class="empty">${empty}</p>`;
  const lit = (edge) => near === null || edge.from === near || edge.to === near;
  return html`<div class="graph" role="region" aria-label=${label} tabindex="0"><svg width=${drawn.width} height=${drawn.height} viewBox="0 0 ${drawn.width} ${drawn.height}" role="group" aria-label="${label}: ${nodes.length} boxes, ${edges.length} lines">
    <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" class="tip" /></marker></defs>
    ${drawn.edges.map(
      (
        edge,
      ) => html`<g key=${edge.key} class="edge ${lit(edge) ? "" : "far"} ${edge.strong ? "strong" : ""}"><path d=${edge.path} marker-end="url(#tip)" /><title>${edge.title ?? edge.text}</title>
      ${edge.text && html`<g transform="translate(${edge.x} ${edge.y})"><rect x=${-edge.width / 2} y="-9" width=${edge.width} height="18" rx="4" class="plate" /><text text-anchor="middle" dy="4">${cut(edge.text, 24)}</text></g>`}</g>`,
    )}
    ${drawn.nodes.map(
      (
        node,
      ) => html`<a key=${node.id} href=${node.href} class="box ${node.kind}" onMouseEnter=${() => setNear(node.id)} onMouseLeave=${() => setNear(null)} onFocus=${() => setNear(node.id)} onBlur=${() => setNear(null)}>
      <g transform="translate(${node.x - node.width / 2} ${node.y - node.height / 2})"><title>${node.text}</title><rect width=${node.width} height=${node.height} rx=${node.kind === "exchange" ? HEIGHT / 2 : 6} />
      <text x=${node.width / 2} y=${node.note ? 18 : 22} text-anchor="middle">${cut(node.text, 32)}</text>${node.note && html`<text class="note" x=${node.width / 2} y="34" text-anchor="middle">${node.note}</text>`}</g></a>`,
    )}
  </svg></div>`;
}

function place(nodes, edges) {
  const graph = new Layout({ multigraph: true });
  graph.setGraph({ rankdir: "LR", nodesep: 16, ranksep: 70, marginx: 12, marginy: 12 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const node of nodes)
    graph.setNode(node.id, { width: widthOf(node.text), height: node.note ? 44 : HEIGHT });
  edges.forEach((edge, i) => {
    const width = edge.text ? cut(edge.text, 24).length * 6.6 + 12 : 0;
    if (graph.hasNode(edge.from) && graph.hasNode(edge.to))
      graph.setEdge(
        edge.from,
        edge.to,
        { width, height: edge.text ? 18 : 0, labelpos: "c", edge },
        String(i),
      );
  });
  layout(graph);
  const { width = 10, height = 10 } = graph.graph();
  return {
    width,
    height,
    nodes: nodes.map((node) => ({ ...node, ...graph.node(node.id) })),
    edges: graph.edges().map((name) => {
      const { edge, points, x, y, width: wide } = graph.edge(name);
      return { ...edge, key: name.name, path: smooth(points, graph.node(name.v), graph.node(name.w)), x, y, width: wide };
    }),
  };
}

/** A curve from side to side of two boxes, level at each bend: labels lie on bends. */
function smooth([first, ...rest], from, to) {
  const last = rest.pop();
  const isForward = from.x + from.width / 2 < to.x - to.width / 2;
  const begin = isForward ? { x: from.x + from.width / 2, y: from.y } : first;
  const stops = [...rest, isForward ? { x: to.x - to.width / 2, y: to.y } : last];
  let path = `M${begin.x} ${begin.y}`;
  stops.reduce((a, b) => {
    const middle = (a.x + b.x) / 2;
    path += `C${middle} ${a.y} ${middle} ${b.y} ${b.x} ${b.y}`;
    return b;
  }, begin);
  return path;
}
