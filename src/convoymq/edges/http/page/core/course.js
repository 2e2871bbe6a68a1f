// The course of numbers: of the last minutes as they come, of an hour or a day from the server.
import { samplesOf, useHistory } from "./charts.js";
import { setParams, useGet } from "./store.js";
import { html } from "./ui.js";

const RANGES = {
  now: ["Last minutes", 60, 1],
  hour: ["Last hour", 3600, 60],
  day: ["Last day", 86_400, 3600],
};
const paramsOf = ([, age, incr]) => ({
  msg_rates_age: age,
  msg_rates_incr: incr,
  lengths_age: age,
  lengths_incr: incr,
});

/**
 * @param {object} found what `useGet` returns of the path.
 * @param {object} pick as `useHistory` takes it. samples: as `samplesOf` takes it, the same names.
 * @returns {{recent, shown}} histories: of the last minutes, and of the range (null: there is none).
 */
export function useCourse(path, found, pick, samples, range = "now") {
  const isOlder = range in RANGES && range !== "now";
  const before = useGet(path, { params: paramsOf(RANGES.now) });
  const older = useGet(isOlder ? path : null, {
    params: paramsOf(RANGES[range] ?? RANGES.now),
    every: 30_000,
  });
  const past = before.data ? samplesOf(before.data, samples, before.at) : null;
  const recent = useHistory(found.data, found.at, pick, path, past);
  return { recent, shown: isOlder ? older.data && samplesOf(older.data, samples) : recent };
}

export const RangeChoice = ({ range = "now" }) =>
  html`<label><span class="hidden">Time</span><select value=${range} onChange=${(event) => setParams({ range: event.target.value })}>${Object.entries(
    RANGES,
  ).map(
    ([key, [text]]) => html`<option key=${key} value=${key} selected=${key === range}>${text}</option>`,
  )}</select></label>`;
