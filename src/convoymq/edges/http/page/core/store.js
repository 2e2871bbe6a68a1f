// What modules share: the session, the place in the address, values that are fetched again and again.
import { useCallback, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { get, query } from "./api.js";

/** A value that components watch with `useStore`. */
export function store(value) {
  const watchers = new Set();
  return {
    get: () => value,
    set(next) {
      value = typeof next === "function" ? next(value) : next;
      watchers.forEach((watcher) => watcher(value));
    },
    watch(watcher) {
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    },
  };
}

export function useStore(from) {
  const [value, setValue] = useState(from.get());
  useEffect(() => {
    setValue(from.get());
    return from.watch((next) => setValue(() => next));
  }, [from]);
  return value;
}

/** A choice that this browser remembers. */
export function remembered(name, first) {
  const kept = store(localStorage.getItem(`convoy.${name}`) ?? first);
  kept.watch((value) => localStorage.setItem(`convoy.${name}`, value));
  return kept;
}

export const session = store(null);
export const vhost = remembered("vhost", "");
export const theme = remembered("theme", "auto");
/** "live", "polling" or "lost": how the page in front gets its numbers. */
export const link = store("polling");
export const dialogs = store([]);
export const notices = store([]);

/** Whether the user has one of these tags; administrators have all. */
export const has = (...tags) => {
  const own = session.get()?.tags ?? [];
  return own.includes("administrator") || tags.some((tag) => own.includes(tag));
};
export const isAdministrator = () => has();
export const isMonitor = () => has("monitoring");

// --- the place: #/queue/NAME?tab=messages --------------------------------------------------------

export function parsePlace(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  let parts;
  try {
    parts = path.split("/").map(decodeURIComponent);
  } catch {
    parts = [""];
  }
  return {
    page: parts[0] || "overview",
    names: parts.slice(1),
    params: Object.fromEntries(new URLSearchParams(search)),
  };
}

export const place = store(parsePlace(location.hash));
addEventListener("hashchange", () => place.set(parsePlace(location.hash)));

/** The address of a page: to("queue", vhost, name). */
export const to = (page, ...names) => `#/${[page, ...names.map(encodeURIComponent)].join("/")}`;

/** Changes parameters of the place; nothing is added to the history. */
export function setParams(changes) {
  const { page, names, params } = place.get();
  const next = { ...params, ...changes };
  history.replaceState(null, "", to(page, ...names) + query(next));
  place.set(parsePlace(location.hash));
}

// --- values of the API ---------------------------------------------------------------------------

const LIVE_POLL_MS = 15_000;

/**
 * Fetches a path and keeps it fresh. What is shown stays until there is something newer.
 *
 * @param {string|null} path null: nothing is fetched.
 * @param {object} options params of the query; every: ms between requests, 0 = once;
 *   events: {query, name, merge(old, event)}: events of the server instead of most requests.
 * @returns {{data, error, reload, at}}
 */
export function useGet(path, { params, every = 0, events } = {}) {
  const key = path === null ? null : path + query(params);
  const [state, setState] = useState({ key, data: undefined, error: null, at: 0 });
  const turn = useRef(0);
  const live = useRef(false);
  const merge = useRef(null);
  merge.current = events?.merge;

  const load = useCallback(
    async (signal) => {
      if (key === null) return;
      try {
        const data = await get(key, undefined, signal);
        if (!signal?.aborted) setState({ key, data, error: null, at: Date.now() });
        if (every) link.set(live.current ? "live" : "polling");
      } catch (error) {
        if (error.name === "AbortError" || signal?.aborted) return;
        if (error.status === 0) link.set("lost");
        setState((old) => ({ ...old, key, error, data: old.key === key ? old.data : undefined }));
      }
    },
    [key, every],
  );

  useEffect(() => {
    if (key === null) return undefined;
    const abort = new AbortController();
    let timer = 0;
    const round = async () => {
      const mine = (turn.current += 1);
      if (!document.hidden) await load(abort.signal);
      if (!every || abort.signal.aborted || mine !== turn.current) return;
      timer = setTimeout(round, live.current ? LIVE_POLL_MS : every);
    };
    const shown = () => {
      if (!document.hidden) {
        clearTimeout(timer);
        round();
      }
    };
    round();
    if (every) document.addEventListener("visibilitychange", shown);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [key, every, load]);

  const eventQuery = events ? query(events.query) : "";
  useEffect(() => {
    if (!eventQuery || key === null) return undefined;
    const source = new EventSource(`/api/events${eventQuery}`);
    source.addEventListener(events.name, (event) => {
      const value = JSON.parse(event.data);
      live.current = true;
      link.set("live");
      setState((old) =>
        old.data === undefined || old.key !== key
          ? old
          : { ...old, data: merge.current(old.data, value), error: null, at: Date.now() },
      );
    });
    source.addEventListener("end", () => source.close());
    source.onerror = () => {
      live.current = false;
    };
    return () => {
      live.current = false;
      source.close();
    };
  }, [eventQuery, key]);

  const shown = state.key === key ? state : { data: undefined, error: null, at: 0 };
  return { data: shown.data, error: shown.error, at: shown.at, reload: load };
}

/** Applies an event about a page of a list to that page. */
export const mergePage = (keyOf) => (old, event) => {
  const known = new Map((old.items ?? []).map((row) => [keyOf(row), row]));
  const items = event.keys.map((key) => event.rows[key] ?? known.get(key)).filter(Boolean);
  const { page, page_size, page_count, filtered_count, total_count } = event;
  return {
    ...old,
    items,
    page,
    page_size,
    page_count,
    filtered_count,
    total_count,
    item_count: items.length,
  };
};
