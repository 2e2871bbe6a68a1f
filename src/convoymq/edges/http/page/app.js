// The frame of the page: log-in, navigation, what is asked before and said after, and the page in front.
import { render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/htm-preact.js";
import { del, get, at, onLoggedOut, post, reason, setCsrf } from "./core/api.js";
import { Dialog } from "./core/forms.js";
import {
  dialogs,
  isAdministrator,
  isMonitor,
  link,
  notices,
  place,
  session,
  theme,
  to,
  useGet,
  useStore,
  vhost,
} from "./core/store.js";
import { dismiss, html } from "./core/ui.js";

const always = () => true;
/** name of the page: [module, who may see it]; a module's default export gets the names behind it. */
const PAGES = {
  overview: ["overview", always],
  nodes: ["nodes", isMonitor],
  node: ["node", isMonitor],
  queues: ["queues", always],
  queue: ["queue", always],
  streams: ["streams", always],
  topics: ["topics", always],
  topic: ["topic", always],
  exchanges: ["exchanges", always],
  exchange: ["exchange", always],
  bindings: ["bindings", always],
  connections: ["connections", always],
  connection: ["connection", always],
  channels: ["channels", always],
  channel: ["channel", always],
  groups: ["groups", isMonitor],
  group: ["groups", isMonitor],
  users: ["users", isAdministrator],
  user: ["users", isAdministrator],
  vhosts: ["vhosts", always],
  vhost: ["vhosts", always],
  policies: ["policies", always],
  shovels: ["shovels", isMonitor],
  definitions: ["definitions", always],
  upgrades: ["upgrades", always],
  audit: ["audit", isMonitor],
};

const MENU = [
  [
    "",
    [
      ["overview", "Overview"],
      ["nodes", "Nodes"],
    ],
  ],
  [
    "Messages",
    [
      ["queues", "Queues"],
      ["streams", "Streams"],
      ["topics", "Ordered topics"],
      ["exchanges", "Exchanges"],
      ["bindings", "Binding graph"],
      ["groups", "Broker groups"],
    ],
  ],
  [
    "Clients",
    [
      ["connections", "Connections"],
      ["channels", "Channels and sessions"],
    ],
  ],
  [
    "Rules",
    [
      ["policies", "Policies"],
      ["vhosts", "Virtual hosts"],
      ["users", "Users"],
      ["shovels", "Shovels"],
      ["definitions", "Definitions"],
    ],
  ],
  [
    "Care",
    [
      ["upgrades", "Upgrades"],
      ["audit", "Audit"],
    ],
  ],
];
const SECTION = {
  node: "nodes",
  queue: "queues",
  topic: "topics",
  exchange: "exchanges",
  connection: "connections",
  channel: "channels",
  group: "groups",
  user: "users",
  vhost: "vhosts",
};

const modules = {};

function Front() {
  const { page, names, params } = useStore(place);
  const [loaded, setLoaded] = useState(null);
  const main = useRef(null);
  const [file, allowed] = PAGES[page] ?? [];
  const here = `${page}/${names.join("/")}`;
  useEffect(() => {
    if (!file) return undefined;
    // The module of a page that was left may come after that of the page in front.
    let isFront = true;
    const show = (next) => {
      if (isFront) setLoaded({ file, ...next });
    };
    modules[file] ??= import(`./pages/${file}.js`);
    modules[file].then(
      (module) => show({ View: module.default }),
      (error) => show({ error }),
    );
    return () => {
      isFront = false;
    };
  }, [file]);
  useEffect(() => {
    main.current?.scrollTo?.(0, 0);
    scrollTo(0, 0);
  }, [here]);
  let content;
  if (!file)
    content = html`<h1>Not found</h1><p class="empty">There is no page of this name. <a href="#/overview">To the overview</a></p>`;
  else if (!allowed())
    content = html`<h1>Not permitted</h1><div class="banner warn" role="alert"><strong>Not permitted.</strong> Your user lacks the tag for this page.</div>`;
  else if (loaded?.file !== file) content = html`<p class="waiting" role="status">Loading…</p>`;
  else if (loaded.error)
    content = html`<h1>Not loaded</h1><div class="banner bad" role="alert">A part of the page was not loaded: ${loaded.error.message}</div>`;
  else
    content = html`<${Guarded} key=${here} View=${loaded.View} page=${page} names=${names} params=${params} />`;
  return html`<main id="main" ref=${main} tabindex="-1">${content}</main>`;
}

/** A page whose own mistake does not take the frame with it. */
function Guarded({ View, ...given }) {
  const [error, again] = useErrorBoundary();
  if (!error) return html`<${View} ...${given} />`;
  return html`<h1>Not shown</h1>
    <div class="banner bad" role="alert">This page has failed: ${error.message}</div>
    <button type="button" onClick=${again}>Try again</button>`;
}

function Menu({ open, close }) {
  const { page } = useStore(place);
  const current = SECTION[page] ?? page;
  return html`<nav class="menu ${open ? "open" : ""}" aria-label="Main">${MENU.map(([title, entries]) => {
    const shown = entries.filter(([name]) => PAGES[name][1]());
    return (
      shown.length > 0 &&
      html`<div key=${title}>${title && html`<p>${title}</p>`}<ul>${shown.map(
        ([name, text]) => html`<li key=${name}>
      <a href=${to(name)} aria-current=${current === name ? "page" : undefined} onClick=${close}>${text}</a></li>`,
      )}</ul></div>`
    );
  })}</nav>`;
}

const LINKS = { live: ["good", "live"], polling: ["idle", "polling"], lost: ["bad", "no answer"] };
const NEXT = { auto: "dark", dark: "light", light: "auto" };
const THEMES = { auto: "◐", dark: "☾", light: "☀" };

function Top({ toggle, open, search }) {
  const user = useStore(session);
  const chosen = useStore(vhost);
  const state = useStore(link);
  const colours = useStore(theme);
  const name = useGet(at`cluster-name`, { every: 60_000 });
  const leave = async () => {
    try {
      await del(at`login`);
    } catch {
      /* the session is gone either way */
    }
    session.set(null);
  };
  const [kind, text] = LINKS[state];
  return html`<header class="top">
    <button type="button" class="burger quiet" aria-label="Menu" aria-expanded=${open} onClick=${toggle}>☰</button>
    <a class="brand" href="#/overview"><img src="icon.svg" alt="" width="26" height="26" /><span>ConvoyMQ</span></a>
    <span class="cluster"><bdi>${name.data?.name ?? ""}</bdi> <span class="pulse ${kind}" role="status"><span aria-hidden="true">${{ good: "●", idle: "○", bad: "■" }[kind]}</span> ${text}</span></span>
    <button type="button" class="find" onClick=${search}><span>Search</span><kbd>/</kbd></button>
    <label class="vhost"><span class="hidden">Virtual host</span><select value=${chosen} onChange=${(event) => vhost.set(event.target.value)}>
      <option value="">All virtual hosts</option>${(user.vhosts ?? []).map((each) => html`<option key=${each} value=${each} selected=${each === chosen}>${each}</option>`)}</select></label>
    <button type="button" class="quiet" title="Colours: ${colours}" aria-label="Colours: ${colours}. Change" onClick=${() => theme.set(NEXT[colours])}>${THEMES[colours]}</button>
    <details class="user"><summary aria-label="User ${user.name}"><bdi>${user.name.slice(0, 24)}</bdi></summary><div><p>${user.tags.join(", ")}</p><button type="button" onClick=${leave}>Log out</button></div></details>
  </header>`;
}

function Login() {
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    setBusy(true);
    setError("");
    try {
      enter(await post(at`login`, { username: form.get("username"), password: form.get("password") }));
    } catch (refused) {
      setError(
        refused.status === 401 && refused.message === "Login failed"
          ? "This name and password do not fit together."
          : reason(refused),
      );
      setBusy(false);
    }
  };
  useEffect(() => {
    document.title = "Log in · ConvoyMQ";
  }, []);
  return html`<main class="login"><form onSubmit=${submit}>
    <img src="icon.svg" alt="" width="56" height="56" /><h1>ConvoyMQ</h1>
    <label>User<input name="username" autocomplete="username" required autofocus /></label>
    <label>Password<input name="password" type="password" autocomplete="current-password" /></label>
    ${error && html`<p class="banner bad" role="alert">${error}</p>`}
    <button type="submit" class="primary" disabled=${busy}>${busy ? "Checking…" : "Log in"}</button>
  </form></main>`;
}

function Notices() {
  const shown = useStore(notices);
  return html`<div class="notices" role="log" aria-label="Notices" aria-live="polite">${shown.map(
    (
      each,
    ) => html`<p key=${each.id} class="notice ${each.kind}"><span aria-hidden="true">${each.kind === "good" ? "✓" : "■"}</span><bdi>${each.text}</bdi>
    <button type="button" class="quiet" aria-label="Close" onClick=${() => dismiss(each.id)}>✕</button></p>`,
  )}</div>`;
}

/** Where keys lead: g, then a letter. */
const GO = {
  o: "overview",
  n: "nodes",
  q: "queues",
  s: "streams",
  t: "topics",
  e: "exchanges",
  b: "bindings",
  c: "connections",
  p: "policies",
  u: "users",
};

function useKeys(search) {
  useEffect(() => {
    let before = 0;
    const press = (event) => {
      if (
        event.ctrlKey ||
        event.metaKey ||
        event.altKey ||
        event.target.closest("input, textarea, select, dialog")
      )
        return;
      if (event.key === "/") {
        event.preventDefault();
        search();
      } else if (event.key === "g") {
        before = event.timeStamp;
      } else if (event.timeStamp - before < 1500 && GO[event.key] && PAGES[GO[event.key]][1]()) {
        before = 0;
        location.hash = to(GO[event.key]);
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

const search = () => {
  import("./pages/search.js").then((module) => module.openSearch());
};

function Frame() {
  const [open, setOpen] = useState(false);
  useKeys(search);
  return html`<a class="skip" href="#main" onClick=${(event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  }}>To the content</a>
    <${Top} toggle=${() => setOpen(!open)} open=${open} search=${search} />
    <div class="columns"><${Menu} open=${open} close=${() => setOpen(false)} /><${Front} /></div>`;
}

function App() {
  const user = useStore(session);
  const shown = useStore(dialogs);
  return html`${user ? html`<${Frame} />` : html`<${Login} />`}
    ${shown.map((dialog) => html`<${Dialog} key=${dialog.id} of=${dialog} />`)}<${Notices} />`;
}

function enter(user) {
  setCsrf(user.csrf);
  if (!user.vhosts.includes(vhost.get())) vhost.set("");
  session.set(user);
}

const paint = (chosen) => {
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
};
theme.watch(paint);
paint(theme.get());
onLoggedOut(() => {
  dialogs.set([]);
  session.set(null);
});

const app = document.getElementById("app");
const start = () => {
  app.textContent = "";
  render(html`<${App} />`, app);
};
get(at`login`)
  .then(enter, () => {})
  .then(start);
