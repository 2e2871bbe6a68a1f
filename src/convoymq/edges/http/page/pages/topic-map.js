// The route history of a topic: partitions as ranges of logical partitions over route versions.
import { bytes, count } from "../core/format.js";
import { html } from "../core/ui.js";

const [HEIGHT, LEFT, TOP, COLUMN_MIN, WIDTH] = [340, 64, 26, 92, 1040];

/** rows: all partitions of the lineage; details: those that are not deleted, with their sizes. */
export function RouteMap({ topic, rows, details, chosen, choose }) {
  const known = new Map(details.map((row) => [row.pid, row]));
  const first = Math.min(topic.version, ...rows.map((row) => row.created_version));
  const versions = topic.version - first + 1;
  const wide = Math.max(COLUMN_MIN, Math.min(260, (WIDTH - LEFT) / versions));
  const width = LEFT + wide * versions + 10;
  const y = (slot) => TOP + (HEIGHT * slot) / topic.logical;
  const x = (version) => LEFT + (version - first) * wide;
  const nodes = [...new Set(rows.map((row) => row.node).filter(Boolean))].sort();
  const marks = [...new Set(rows.flatMap((row) => [row.lo, row.hi]))].sort((a, b) => a - b);
  const press = (pid) => (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(pid);
    }
  };
  return html`<div class="graph route" role="region" aria-label="Route history" tabindex="0"><svg width=${width} height=${HEIGHT + TOP + 14} viewBox="0 0 ${width} ${HEIGHT + TOP + 14}" role="group" aria-label="Ranges of ${rows.length} partitions over ${versions} route versions">
    ${Array.from({ length: versions }, (_, i) => html`<text key=${i} class="note" x=${x(first + i) + wide / 2} y="16" text-anchor="middle">version ${first + i}</text>`)}
    ${spaced(marks, y).map((mark) => html`<text key=${mark} class="note" x=${LEFT - 8} y=${y(mark) + 4} text-anchor="end">${count(mark)}</text>`)}
    ${rows.map((row) => {
      const end = row.sealed_version ?? topic.version + 1;
      const [left, top, w, h] = [
        x(row.created_version) + 1.5,
        y(row.lo) + 1.5,
        wide * Math.max(end - row.created_version, 0.15) - 3,
        Math.max(y(row.hi) - y(row.lo) - 3, 3),
      ];
      const detail = known.get(row.pid);
      const isOpen = row.state === "open";
      const text = `partition ${row.pid}, ${row.state}, ${row.lo}–${row.hi - 1}${row.node ? `, on ${row.node}` : ""}${detail?.messages != null ? `, ${count(detail.messages)} messages, ${bytes(detail.bytes)}` : ""}`;
      return html`<g key=${row.pid} class="span ${row.state} on-${nodes.indexOf(row.node) % 5} ${chosen.includes(row.pid) ? "chosen" : ""}" role=${isOpen ? "button" : "img"} tabindex=${isOpen ? 0 : undefined} data-pid=${row.pid} aria-pressed=${isOpen ? chosen.includes(row.pid) : undefined} onClick=${isOpen && (() => choose(row.pid))} onKeyDown=${isOpen && press(row.pid)}>
        <title>${text}</title><rect x=${left} y=${top} width=${w} height=${h} rx="5" />
        ${h > 15 && html`<text x=${left + 10} y=${top + Math.min(h / 2 + 5, 22)}>${row.pid}${isOpen && w > 150 && row.node ? ` · ${row.node.split("@")[0].slice(0, 16)}` : ""}</text>`}
        ${h > 36 && w > 110 && detail?.messages != null && html`<text class="note" x=${left + 10} y=${top + Math.min(h / 2 + 22, 40)}>${count(detail.messages)} messages</text>`}</g>`;
    })}
  </svg></div>
  <ul class="legend">${nodes.map((node, i) => html`<li key=${node}><span class="swatch on-${i % 5}" aria-hidden="true"></span><bdi>${node}</bdi></li>`)}<li><span class="swatch retired" aria-hidden="true"></span>closed</li></ul>`;
}

/** Marks that are far enough apart to be read. */
function spaced(marks, y) {
  const kept = [];
  for (const mark of marks) if (!kept.length || y(mark) - y(kept[kept.length - 1]) > 14) kept.push(mark);
  return kept;
}
