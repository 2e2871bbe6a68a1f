// What modules share: the session, the place in the address, values that are fetched again and again.
import { useCallback, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { get, query } from "./api.js";
import { follow, isLive, onLive } from "./events.js";

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

const TICK_MS = 3000;
const replace = (_, event) => event;

onLive((is) => link.set(is ? "live" : "polling"));

/**
 * Fetches a path and keeps it fresh. What is shown stays until there is something newer.
 *
 * @param {string|null} path null: nothing is fetched.
 * @param {object} options params of the query; every: ms between requests, 0 = once;
 *   events: {topic or queue, params, merge(old, event), every, tick}: the server's events, and ms
 *   between requests for what they lack; without a stream all is fetched. tick: `at` goes on every 3 s
 *   although nothing changes.
 * @returns {{data, error, reload, at}}
 */
export function useGet(path, { params, every = 0, events } = {}) {
  const key = path === null ? null : path + query(params);
  const [state, setState] = useState({ key, data: undefined, error: null, at: 0 });
  const turn = useRef(0);
  const own = useRef({ isLive: false, event: null });
  const merge = events?.merge ?? replace;
  /** What was fetched may be older than what was heard. */
  const merged = (old) => (own.current.event === null ? old : merge(old, own.current.event));

  const load = useCallback(
    async (signal) => {
      if (key === null) return;
      try {
        const data = await get(key, undefined, signal);
        if (!signal?.aborted) setState({ key, data: merged(data), error: null, at: Date.now() });
        if (every) link.set(isLive() ? "live" : "polling");
      } catch (error) {
        if (error.name === "AbortError" || signal?.aborted) return;
        if (error.status === 0) link.set("lost");
        setState((old) => ({ ...old, key, error, data: old.key === key ? old.data : undefined }));
      }
    },
    [key, every],
  );

  const again = useRef(null);
  useEffect(() => {
    if (key === null) return undefined;
    const abort = new AbortController();
    let timer = 0;
    const round = async () => {
      const mine = (turn.current += 1);
      if (!document.hidden) await load(abort.signal);
      const pause = own.current.isLive ? events.every : every;
      if (pause && !abort.signal.aborted && mine === turn.current) timer = setTimeout(round, pause);
    };
    const shown = () => {
      if (document.hidden) return;
      clearTimeout(timer);
      round();
    };
    again.current = shown;
    round();
    if (every) document.addEventListener("visibilitychange", shown);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [key, every, load]);

  const followed = events && key !== null ? JSON.stringify(events) : "";
  useEffect(() => {
    if (!followed) return undefined;
    const renew = () =>
      setState((old) => {
        const data = merged(old.key === key ? old.data : undefined);
        return data === undefined ? old : { key, data, error: null, at: Date.now() };
      });
    let tick = 0;
    const end = follow({
      ...JSON.parse(followed),
      heard(event) {
        clearInterval(tick);
        if (events.tick) tick = setInterval(renew, TICK_MS);
        own.current = { isLive: true, event };
        link.set("live");
        renew();
      },
      live(is) {
        if (is) return;
        clearInterval(tick);
        own.current = { isLive: false, event: null };
        again.current?.();
      },
    });
    return () => {
      clearInterval(tick);
      own.current = { isLive: false, event: null };
      end();
    };
  }, [followed, key]);

  const shown = state.key === key ? state : { data: undefined, error: null, at: 0 };
  return { data: shown.data, error: shown.error, at: shown.at, reload: load };
}

/** The last event of a topic that no path gives; undefined without a stream. */
export function useHeard(topic) {
  const [value, setValue] = useState();
  useEffect(() => follow({ topic, heard: setValue, live: () => setValue(undefined) }), [topic]);
  return value;
}
