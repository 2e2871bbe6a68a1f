// The graph of all bindings of a virtual host.
import { at } from "../core/api.js";
import { count } from "../core/format.js";
import { Graph } from "../core/graph.js";
import { session, setParams, useGet, useStore, vhost } from "../core/store.js";
import { Card, Page, Waiting, html } from "../core/ui.js";
import { graphOf } from "./bindings-table.js";

const DRAWN_MAX = 400;

export default function Bindings({ params }) {
  const chosen = useStore(vhost) || session.get().vhosts[0];
  const found = useGet(chosen ? at`bindings/${chosen}` : null, { every: 10_000 });
  const word = (params.name ?? "").toLowerCase();
  return html`<${Page} title="Binding graph" kind=${html`Virtual host <bdi>${chosen}</bdi>`} />
    <${Card}><div class="toolbar"><label class="filter"><span class="hidden">Only bindings with</span><input type="search" placeholder="Only names or keys with…" value=${params.name ?? ""} onInput=${(event) => setParams({ name: event.target.value })} /></label>
      <span class="note">Point at a box to see its own ways. The default exchange is left out: it leads to each queue by name.</span></div>
    <${Waiting} of=${found}>${(all) => {
      const rows = all.filter(
        (row) =>
          row.source !== "" &&
          (!word ||
            [row.source, row.destination, row.routing_key].some((text) => text.toLowerCase().includes(word))),
      );
      const { nodes, edges } = graphOf(rows.slice(0, DRAWN_MAX), chosen);
      return html`${rows.length > DRAWN_MAX && html`<p class="banner warn">The first ${count(DRAWN_MAX)} of ${count(rows.length)} bindings are drawn: choose fewer by a word.</p>`}
        <${Graph} nodes=${nodes} edges=${edges} label="Bindings" empty="There is no binding like that." />`;
    }}<//><//>`;
}
