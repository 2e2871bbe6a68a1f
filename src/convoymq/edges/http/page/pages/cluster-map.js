// The map of the cluster: nodes, their links, how many leaders each has, how far replicas are behind.
import { at } from "../core/api.js";
import { bytes, count, plural } from "../core/format.js";
import { to, useGet } from "../core/store.js";
import { useEffect, useState } from "../vendor/htm-preact.js";
import { Card, html } from "../core/ui.js";

const TALL = 78;
/** width and height of the map, width of a box. */
const WIDE = { width: 760, height: 300, box: 236 };
/** Bytes of a link that come and go within a moment. */
const QUIET = 64 * 1024;
const GAP = 34;
const NARROW = matchMedia("(max-width: 40rem)");
const narrow = (number) => ({ width: 324, height: number * (TALL + GAP) - GAP + 4, box: 206 });

/** Whether the screen is a phone's: nodes are below each other then. */
function useNarrow() {
  const [is, setIs] = useState(NARROW.matches);
  useEffect(() => {
    const change = () => setIs(NARROW.matches);
    NARROW.addEventListener("change", change);
    return () => NARROW.removeEventListener("change", change);
  }, []);
  return is;
}

/** Places of the nodes around the middle; the first is above. On a phone left and right by turns. */
function places(number, isNarrow, { width, height, box }) {
  if (number === 1) return [[width / 2, height / 2]];
  if (isNarrow)
    return Array.from({ length: number }, (_, i) => [
      i % 2 ? width - box / 2 - 2 : box / 2 + 2,
      2 + TALL / 2 + i * (TALL + GAP),
    ]);
  const angles = Array.from(
    { length: number },
    (_, i) => (2 * Math.PI * i) / number - (number === 2 ? Math.PI : Math.PI / 2),
  );
  const heights = angles.map(Math.sin);
  const [low, high] = [Math.min(...heights), Math.max(...heights)];
  // Spread over the whole height, whatever the number.
  return angles.map((angle, i) => [
    width / 2 + (Math.cos(angle) * (width - box - 4)) / 2,
    high - low < 0.01 ? height / 2 : TALL / 2 + 2 + ((heights[i] - low) / (high - low)) * (height - TALL - 4),
  ]);
}

/** Leaders of groups by node, counted from the queues' rows where nodes do not say it. */
function useLeaders(nodes) {
  const known = nodes.some((node) => node.groups_led !== undefined);
  const found = useGet(known ? null : at`queues`, {
    params: { columns: "node", disable_stats: "true", page: 1, page_size: 500 },
    every: 15_000,
  });
  if (known) return Object.fromEntries(nodes.map((node) => [node.name, node.groups_led]));
  const leads = {};
  for (const row of found.data?.items ?? []) leads[row.node] = (leads[row.node] ?? 0) + 1;
  return leads;
}

export function ClusterMap({ nodes }) {
  const own = useGet(at`convoy/node`, { every: 5000 }).data;
  const metadata = useGet(at`convoy/metadata-store/status`, { every: 5000 }).data ?? [];
  const leads = useLeaders(nodes);
  const isNarrow = useNarrow();
  const size = isNarrow ? narrow(nodes.length) : WIDE;
  const around = places(nodes.length, isNarrow, size);
  const placeOf = Object.fromEntries(nodes.map((node, i) => [node.id, around[i]]));
  const store = Object.fromEntries(metadata.map((row) => [row["Node Name"], row]));
  const newest = Math.max(0, ...metadata.map((row) => row["Last Log Index"]).filter(Number.isInteger));
  const links = linksOf(nodes, own);
  return html`<${Card} title="Cluster" note="Lines are links between nodes. They show what waits to be sent, from 64 KiB on.">
    <div class="graph"><svg viewBox="0 0 ${size.width} ${size.height}" width=${size.width} height=${size.height} class="map" role="group" aria-label="Map of ${nodes.length} nodes">
      ${links.map((each) => {
        const [[x1, y1], [x2, y2]] = [placeOf[each.from], placeOf[each.to]];
        return html`<g key="${each.from}-${each.to}" class="link ${each.kind}"><line x1=${x1} y1=${y1} x2=${x2} y2=${y2}><title>${each.title}</title></line>
          ${each.text && html`<text x=${(x1 + x2) / 2} y=${(y1 + y2) / 2 - 8} text-anchor="middle">${each.text}</text>`}</g>`;
      })}
      ${nodes.map((node, i) => {
        const [x, y] = around[i];
        const row = store[node.name];
        const isLeader = row?.["Raft State"] === "leader";
        const behind = Number.isInteger(row?.["Last Applied"]) ? newest - row["Last Applied"] : null;
        const state = !node.running
          ? "down"
          : node.mem_alarm || node.disk_free_alarm
            ? "alarm"
            : node.being_drained
              ? "draining"
              : "running";
        const lines =
          state === "down"
            ? ["does not run"]
            : [
                `${plural(leads[node.name] ?? 0, "leader")} · ${plural(node.connections ?? 0, "client")}`,
                `${isLeader ? "metadata leader" : behind > 0 ? `metadata ${count(behind)} behind` : "metadata up to date"} · ${bytes(node.mem_used)}`,
              ];
        return html`<a key=${node.name} href=${to("node", node.name)} class="map-node ${state}">
          <g transform="translate(${x - size.box / 2} ${y - TALL / 2})"><rect width=${size.box} height=${TALL} rx="10" />
          <text x="14" y="24" class="title">${{ running: "●", draining: "▲", alarm: "▲", down: "■" }[state]} ${node.name.slice(0, 24)}</text>
          ${lines.map((line, n) => html`<text key=${n} x="14" y=${44 + n * 18} class="note">${line}</text>`)}</g></a>`;
      })}
    </svg></div><//>`;
}

/** Each pair once. A pair whose links nobody has reported is drawn by whether both nodes run. */
function linksOf(nodes, own) {
  const told = new Map();
  const tell = (from, rows) => (rows ?? []).forEach((row) => told.set(`${from}-${row.node}`, row));
  if (own) tell(own.id, own.links);
  nodes.forEach((node) => tell(node.id, node.links));
  const pairs = nodes.flatMap((a, i) => nodes.slice(i + 1).map((b) => [a, b]));
  return pairs.map(([a, b]) => {
    const rows = [told.get(`${a.id}-${b.id}`), told.get(`${b.id}-${a.id}`)].filter(Boolean);
    const down = !a.running || !b.running || rows.some((row) => !row.up);
    const suspected = rows.some((row) => row.suspected);
    const waiting = rows.reduce((sum, row) => sum + row.backlog_bytes, 0);
    const kind = down ? "down" : suspected ? "warn" : "up";
    const text = down ? "no link" : suspected ? "slow" : waiting > QUIET ? `${bytes(waiting)} waiting` : "";
    return {
      from: a.id,
      to: b.id,
      kind,
      text,
      title: `${a.name} – ${b.name}: ${down ? "no link" : `${bytes(waiting)} waiting`}`,
    };
  });
}
