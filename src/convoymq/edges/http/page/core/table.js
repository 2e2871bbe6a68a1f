// Tables: sorted, filtered and paged by the server where the list is one of the API.
import { useEffect, useState } from "../vendor/htm-preact.js";
import { count } from "./format.js";
import { place, remembered, session, setParams, useGet, useStore, vhost } from "./store.js";
import { Empty, Name, VhostLink, Waiting, html } from "./ui.js";

/** Columns that many tables have. */
export const NAME = {
  id: "name",
  label: "Name",
  sort: "name",
  cell: (row) => html`<${Name} of=${row.name} />`,
};
export const VHOST = {
  id: "vhost",
  label: "Virtual host",
  sort: "vhost",
  opt: true,
  cell: (row) => html`<${VhostLink} name=${row.vhost} />`,
};

const SIZES = [25, 50, 100, 250, 500];
const pageSize = remembered("page-size", "50");

/**
 * A table of rows.
 *
 * columns: {id, label, cell(row), num: right-aligned, sort: the API's name of the column,
 *   opt: left out on phones, wide: shown on wide screens only, title: what it means}
 * The column "vhost" is left out where all rows are of one.
 */
export function Table({ columns, rows, keyOf, sort, reverse, onSort, label, empty = "Nothing here." }) {
  const chosen = useStore(vhost);
  const several = (useStore(session)?.vhosts ?? []).length > 1 && !chosen;
  const shown = columns.filter((column) => column && (several || column.id !== "vhost"));
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  const heads = shown.map((column) => {
    const sorted = sort && column.sort === sort;
    const order = sorted ? (reverse ? "descending" : "ascending") : undefined;
    const classes = classesOf(column);
    if (!column.label) return html`<td key=${column.id} class=${classes}></td>`;
    return html`<th key=${column.id} scope="col" class=${classes} aria-sort=${order} title=${column.title}>${
      column.sort && onSort
        ? html`<button type="button" onClick=${() => onSort(column.sort, sorted ? !reverse : Boolean(column.num))}>${column.label}<span class="arrow" aria-hidden="true">${sorted ? (reverse ? "▼" : "▲") : ""}</span></button>`
        : column.label
    }</th>`;
  });
  return html`<div class="scroll" role="region" aria-label=${label} tabindex="0"><table>
    <thead><tr>${heads}</tr></thead>
    <tbody>${rows.map(
      (row, i) =>
        html`<tr key=${keyOf ? keyOf(row) : i} class=${row.stale_ms ? "stale" : ""}>${shown.map(
          (column, c) =>
            c === 0 && column.label
              ? html`<th key=${column.id} scope="row">${column.cell(row)}</th>`
              : html`<td key=${column.id} class=${classesOf(column)}>${column.cell(row)}</td>`,
        )}</tr>`,
    )}</tbody>
  </table></div>`;
}

const classesOf = (column) => ["num", "opt", "wide"].filter((name) => column[name]).join(" ");

/** A table of rows that are all here, sorted here. */
export function LocalTable({ columns, rows, first, ...rest }) {
  const [order, setOrder] = useState(first ?? { sort: null, reverse: false });
  const value = (row) => order.sort.split(".").reduce((at, part) => at?.[part], row);
  const sorted = order.sort
    ? [...rows].sort((a, b) => compare(value(a), value(b)) * (order.reverse ? -1 : 1))
    : rows;
  return html`<${Table} ...${rest} columns=${columns} rows=${sorted} sort=${order.sort} reverse=${order.reverse}
    onSort=${(sort, reverse) => setOrder({ sort, reverse })} />`;
}

const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a ?? "").localeCompare(String(b ?? ""));

/**
 * A list of the API, one page at a time. The filter, the order and the page are in the address.
 *
 * events: the topic of events that carries this list, and its own params, if there is one.
 */
export function List({
  path,
  params,
  columns,
  keyOf,
  label,
  empty,
  every = 3000,
  events,
  noFilter,
  more,
  rowsOf,
}) {
  const here = useStore(place).params;
  const size = useStore(pageSize);
  const sort = here.sort ?? "";
  const reverse = here.reverse === "true";
  const asked = {
    ...params,
    page: here.page ?? 1,
    page_size: size,
    name: here.name,
    use_regex: here.regex === "true" ? "true" : undefined,
    sort,
    sort_reverse: sort && reverse ? "true" : undefined,
  };
  const live = events && { topic: events.topic, params: { ...events.params, ...asked } };
  const found = useGet(path, { params: asked, every, events: live });
  const outside = found.error?.status === 400 && Number(here.page) > 1;
  // Rows went away: the page that was looked at is behind the last one.
  useEffect(() => {
    if (outside) setParams({ page: 1 });
  }, [outside]);
  return html`
    <div class="toolbar">
      ${!noFilter && html`<${Filter} value=${here.name ?? ""} regex=${here.regex === "true"} />`}
      ${more}
      <${Pager} of=${found.data} size=${size} />
    </div>
    <${Waiting} of=${found}>${(
      page,
    ) => html`<${Table} columns=${columns} rows=${rowsOf ? rowsOf(page.items) : page.items} keyOf=${keyOf} label=${label}
      sort=${sort} reverse=${reverse} onSort=${(by, back) => setParams({ sort: by, reverse: back, page: 1 })}
      empty=${here.name ? "Nothing has a name like that." : empty} />`}<//>`;
}

function Filter({ value, regex }) {
  const [text, setText] = useState(value);
  useEffect(() => {
    setText(value);
  }, [value]);
  useEffect(() => {
    if (text === value) return undefined;
    const timer = setTimeout(() => setParams({ name: text, page: 1 }), 250);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<label class="filter"><span class="hidden">Filter by name</span>
      <input type="search" placeholder="Filter by name" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <label class="check"><input type="checkbox" checked=${regex} onChange=${(event) => setParams({ regex: event.target.checked, page: 1 })} /> Regex</label>`;
}

function Pager({ of, size }) {
  if (!of || of.page === undefined) return null;
  const { page, page_count: pages, filtered_count: found, total_count: total } = of;
  const go = (to) => () => setParams({ page: to });
  return html`<nav class="pager" aria-label="Pages">
    <span class="total">${count(found)}${found !== total ? html` of ${count(total)}` : ""}</span>
    <label><span class="hidden">Rows per page</span><select value=${size} onChange=${(event) => {
      pageSize.set(event.target.value);
      setParams({ page: 1 });
    }}>
      ${SIZES.map((n) => html`<option key=${n} value=${String(n)}>${n} rows</option>`)}</select></label>
    ${
      pages > 1 &&
      html`<button type="button" disabled=${page <= 1} onClick=${go(page - 1)} aria-label="Previous page">‹</button>
    <span>${count(page)} / ${count(pages)}</span>
    <button type="button" disabled=${page >= pages} onClick=${go(page + 1)} aria-label="Next page">›</button>`
    }
  </nav>`;
}
