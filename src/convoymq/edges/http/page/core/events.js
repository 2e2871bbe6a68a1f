// Events of the server: one stream for all that the page in front follows, since browsers open few
// connections to a node. While the tab is hidden there is none.
import { query } from "./api.js";

const RETRY_MS = 15_000;
/** The server says something every 10 s, even if nothing has changed. */
const SILENCE_MS = 30_000;
const NAMES = ["overview", "nodes", "queues", "connections", "channels", "queue", "alarms", "beat"];

const followers = new Set();
/** Those whose topics the stream has; others wait for the next one. */
const served = new Set();
let source = null;
let opening = 0;
let silence = 0;
let live = false;
let rows = {};
let whenChanged = () => {};

/** Whether the stream is open and was heard. */
export const isLive = () => live;
export const onLive = (act) => {
  whenChanged = act;
};

/**
 * Follows a topic, or one queue.
 *
 * @param {object} follower topic or queue, params of the topic's list; heard(value) for each event;
 *   live(is) when the stream begins or ends, and others are to ask for what they show.
 * @returns {function} ends it.
 */
export function follow(follower) {
  followers.add(follower);
  openSoon();
  return () => {
    followers.delete(follower);
    served.delete(follower);
    openSoon();
  };
}

function openSoon(ms = 0) {
  clearTimeout(opening);
  opening = setTimeout(open, ms);
}

function open() {
  close();
  if (document.hidden || !followers.size) {
    setLive(false);
    return;
  }
  const asked = { topics: new Set() };
  for (const { topic = "alarms", queue, params } of followers) {
    asked.topics.add(topic);
    Object.assign(asked, params, queue && { queue });
  }
  followers.forEach((each) => served.add(each));
  silence = setTimeout(fallSilent, SILENCE_MS);
  source = new EventSource(`/api/events${query({ ...asked, topics: [...asked.topics].join(",") })}`);
  NAMES.forEach((name) => source.addEventListener(name, hear));
  source.addEventListener("end", () => {
    close();
    setLive(false);
    openSoon(RETRY_MS);
  });
  source.onopen = () => {
    rows = {};
  };
  source.onerror = () => {
    setLive(false);
    // A refusal (429, 401) ends the stream; after a broken connection the browser comes again.
    if (source.readyState === EventSource.CLOSED) openSoon(RETRY_MS);
  };
}

function close() {
  clearTimeout(silence);
  source?.close();
  source = null;
  served.clear();
  rows = {};
}

function fallSilent() {
  setLive(false);
  open();
}

function hear({ type, data }) {
  clearTimeout(silence);
  silence = setTimeout(fallSilent, SILENCE_MS);
  setLive(true);
  const value = whole(type, JSON.parse(data));
  served.forEach((each) => (each.queue ? "queue" : each.topic) === type && each.heard(value));
}

/** An event of a list has the rows that have changed: returns the whole page. */
function whole(type, event) {
  if (Array.isArray(event) || !event.keys) return event;
  const { keys, rows: changed, ...page } = event;
  rows[type] = Object.fromEntries(keys.map((key) => [key, changed[key] ?? rows[type]?.[key]]));
  return { ...page, items: keys.map((key) => rows[type][key]) };
}

function setLive(is) {
  if (live === is) return;
  live = is;
  whenChanged(is);
  followers.forEach((each) => each.live(is));
}

document.addEventListener("visibilitychange", () => openSoon());
