// Small parts that all pages use: names, badges, cards, facts, notices, states of loading.
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { reason } from "./api.js";
import { cut, plain } from "./format.js";
import { notices, to } from "./store.js";

export { html };

/** A name of anything, which may contain anything: isolated, and cut where it is long. */
export const Name = ({ of, most = 60, none = "" }) =>
  of === "" || of == null
    ? html`<span class="none">${none || "(none)"}</span>`
    : html`<bdi title=${of.length > most ? of : undefined}>${cut(of, most)}</bdi>`;

export const QueueLink = ({ vhost, name, most }) =>
  html`<a href=${to("queue", vhost, name)}><${Name} of=${name} most=${most} /></a>`;
export const ExchangeLink = ({ vhost, name }) =>
  html`<a href=${to("exchange", vhost, name)}><${Name} of=${name} none="(default exchange)" /></a>`;
export const NodeLink = ({ name }) =>
  name ? html`<a href=${to("node", name)}><${Name} of=${name} /></a>` : "–";
export const ConnectionLink = ({ name, shown }) =>
  html`<a href=${to("connection", name)}><${Name} of=${shown || name} /></a>`;
/** of: a channel's details, or its row. The client's own name of the connection says more than addresses. */
export const ChannelLink = ({ of, given = of.user_provided_name }) => html`<a href=${to("channel", of.name)} title=${of.name}><${Name} of=${given ? `${given} (${of.number})` : of.name} /></a>`;
export const UserLink = ({ name }) => html`<a href=${to("user", name)}><${Name} of=${name} /></a>`;
export const VhostLink = ({ name }) => html`<a href=${to("vhost", name)}><${Name} of=${name} /></a>`;

/** A word with a sign before it: no meaning lies in the colour alone. */
const SIGNS = { good: "●", warn: "▲", bad: "■", idle: "○", info: "◆" };
export const Badge = ({ kind = "idle", title, children }) =>
  html`<span class="badge ${kind}" title=${title}><span aria-hidden="true">${SIGNS[kind]}</span> ${children}</span>`;

export const Tag = ({ title, children, kind = "" }) =>
  html`<span class="tag ${kind}" title=${title}>${children}</span>`;

const STATES = {
  running: "good",
  starting: "warn",
  terminated: "bad",
  idle: "good",
  flow: "warn",
  minority: "warn",
  syncing: "warn",
  down: "bad",
  crashed: "bad",
  stopped: "bad",
  blocked: "warn",
  blocking: "warn",
  closed: "bad",
};
export const State = ({ of }) => html`<${Badge} kind=${STATES[of] ?? "info"}>${of ?? "unknown"}<//>`;

export const TypeTag = ({ type }) => html`<span class="type ${type}">${type}</span>`;

export const Page = ({ title, kind, actions, children }) => {
  useEffect(() => {
    document.title = `${typeof title === "string" ? title : kind} · ConvoyMQ`;
  }, [title, kind]);
  return html`<header class="page-head">
      <div>${kind && html`<p class="kind">${kind}</p>`}<h1 tabindex="-1">${typeof title === "string" ? html`<${Name} of=${title} most=${120} />` : title}</h1></div>
      <div class="actions">${actions}</div>
    </header>${children}`;
};

let cards = 0;
export const Card = ({ title, note, actions, wide, children, class: more = "" }) => {
  const [id] = useState(() => `card-${(cards += 1)}`);
  return html`<section class="card ${wide ? "wide" : ""} ${more}" aria-labelledby=${title ? id : undefined}>
    ${title && html`<header><h2 id=${id}>${title}</h2>${actions && html`<div class="actions">${actions}</div>`}${note && html`<p class="note">${note}</p>`}</header>`}
    ${children}
  </section>`;
};

/** Names and values; rows without a value are left out. */
export const Facts = ({ rows }) =>
  html`<dl class="facts">${rows
    .filter((row) => row && row[1] !== undefined && row[1] !== null && row[1] !== "")
    .map(
      ([name, value, title]) => html`<div key=${name}><dt title=${title}>${name}</dt><dd>${value}</dd></div>`,
    )}</dl>`;

export const Stat = ({ label, value, unit, note, kind = "" }) => html`<div class="stat ${kind}">
    <span class="label">${label}</span><span class="value">${value}${unit && html`<small> ${unit}</small>`}</span>${note && html`<span class="note">${note}</span>`}
  </div>`;

/** A share of a limit as a native meter, with its number beside it. */
export const Meter = ({ value, most, label, text, high = 0.8 }) => html`<span class="meter">
    <meter min="0" max=${most || 1} value=${value ?? 0} high=${(most || 1) * high} optimum="0" aria-label=${label}></meter><span>${text}</span></span>`;

export const Arguments = ({ of }) => {
  const entries = Object.entries(of ?? {});
  return entries.length === 0
    ? html`<span class="none">none</span>`
    : html`<ul class="arguments">${entries.map(
        ([name, value]) =>
          html`<li key=${name}><bdi class="key">${name}</bdi><bdi>${cut(plain(value), 200)}</bdi></li>`,
      )}</ul>`;
};

/** What a page shows before its first value, or instead of it. */
export const Waiting = ({ of, children }) => {
  if (of.data !== undefined) {
    return html`${of.error && html`<p class="banner warn" role="status"><span aria-hidden="true">▲ </span>${reason(of.error)} The numbers are from before.</p>`}${children(of.data)}`;
  }
  if (!of.error) return html`<p class="waiting" role="status">Loading…</p>`;
  const refused = of.error.status === 401 || of.error.status === 403;
  return html`<div class="banner ${refused ? "warn" : "bad"}" role="alert"><strong>${refused ? "Not permitted." : of.error.status === 404 ? "Not found." : "No answer."}</strong> ${reason(of.error)}</div>`;
};

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

let number = 0;
/** Shows a line for some seconds; errors stay until they are closed. */
export function notify(text, kind = "good") {
  const id = (number += 1);
  notices.set((old) => [...old.slice(-3), { id, text, kind }]);
  if (kind === "good") setTimeout(() => dismiss(id), 5000);
}
export const dismiss = (id) => notices.set((old) => old.filter((notice) => notice.id !== id));

/** Does something that may be refused, and says how it went. */
export async function attempt(act, done) {
  try {
    const value = await act();
    if (done) notify(typeof done === "function" ? done(value) : done);
    return true;
  } catch (error) {
    notify(reason(error), "bad");
    return false;
  }
}
