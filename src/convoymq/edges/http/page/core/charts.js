// Charts over time, drawn by uPlot: lines with axes, and sparklines.
import { useEffect, useRef, useState } from "../vendor/htm-preact.js";
import uPlot from "../vendor/uplot.js";
import { bytes, count } from "./format.js";
import { theme, useStore } from "./store.js";
import { html } from "./ui.js";

const KEPT = 300;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const SERIES = ["series-1", "series-2", "series-3", "series-4", "series-5"];
/** Steps of axes: whole seconds to days, powers of two for bytes, whole numbers of things. */
const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400,
];
const BYTE_STEPS = Array.from({ length: 50 }, (_, i) => 2 ** i);
const WHOLE_STEPS = Array.from({ length: 15 }, (_, i) => [1, 2, 5].map((step) => step * 10 ** i)).flat();
const STEPS = new Map([
  [bytes, BYTE_STEPS],
  [count, WHOLE_STEPS],
]);
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 2]];

/**
 * Keeps what was seen of some numbers while a page is open.
 *
 * @param {object} pick name -> function of the value that returns a number.
 * @param {object} before a history of the time before that, once it is there.
 */
export function useHistory(value, at, pick, key = "", before = null) {
  const kept = useRef({ key: null });
  const own = kept.current;
  if (own.key !== key)
    Object.assign(own, {
      key,
      begun: false,
      times: [],
      rows: Object.fromEntries(Object.keys(pick).map((name) => [name, []])),
    });
  if (before && !own.begun) {
    own.begun = true;
    const number = before.times.filter((time) => !(time >= own.times[0])).length;
    own.times.unshift(...before.times.slice(0, number));
    for (const name of Object.keys(pick)) own.rows[name].unshift(...before.rows[name].slice(0, number));
  }
  const second = at / 1000;
  if (value && at && !(own.times[own.times.length - 1] >= second)) {
    own.times.push(second);
    for (const [name, read] of Object.entries(pick)) own.rows[name].push(read(value) ?? null);
    while (own.times.length > KEPT) [own.times, ...Object.values(own.rows)].forEach((list) => list.shift());
  }
  return own;
}

/**
 * A history from samples that the server kept; null while there are not two.
 *
 * @param {object} samples name -> [function of the value that returns its details, is a counter].
 * @param {number} at where the newest is put, if the clock of the server is not to count.
 */
export function samplesOf(value, samples, at = 0) {
  const found = Object.entries(samples).map(([name, [read, isCounter]]) => [
    name,
    fromSamples(read(value)?.samples, isCounter),
  ]);
  const times = [...new Set(found.flatMap(([, each]) => [...each.keys()]))].sort((a, b) => a - b);
  if (times.length < 2) return null;
  const shift = at ? at / 1000 - times[times.length - 1] : 0;
  return {
    times: times.map((time) => time + shift),
    rows: Object.fromEntries(
      found.map(([name, each]) => [name, times.map((time) => each.get(time) ?? null)]),
    ),
  };
}

/** Second -> value; counters become rates between two samples. */
function fromSamples(samples = [], isCounter = false) {
  const rows = samples.map((each) => [each.timestamp / 1000, each.sample]).reverse();
  if (!isCounter) return new Map(rows);
  return new Map(
    rows.slice(1).map(([time, total], i) => [time, Math.max(0, (total - rows[i][1]) / (time - rows[i][0]))]),
  );
}

function useChart(options, data) {
  const box = useRef(null);
  const chart = useRef(null);
  const chosen = useStore(theme);
  const [dark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const change = () => setDark(media.matches);
    media.addEventListener("change", change);
    return () => media.removeEventListener("change", change);
  }, []);
  const shape = JSON.stringify([options.height, options.series.map((each) => each.label), chosen, dark]);
  useEffect(() => {
    const size = () => ({ width: Math.max(40, box.current.clientWidth), height: options.height });
    chart.current = new uPlot({ ...options.build(), ...size() }, data, box.current);
    const observer = new ResizeObserver(() => chart.current?.setSize(size()));
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      chart.current.destroy();
      chart.current = null;
    };
  }, [shape]);
  useEffect(() => {
    chart.current?.setData(data);
  });
  return box;
}

/** series: [{label, values}]; several lines differ in colour and in dashes. */
export function Chart({ times, series, format, height = 180, label }) {
  const data = [times, ...series.map((each) => each.values)];
  const build = () => {
    const [ink, grid] = [colour("ink-soft"), colour("line")];
    const axis = {
      stroke: ink,
      grid: { stroke: grid, width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    return {
      cursor: { y: false, points: { size: 6 } },
      legend: { live: true },
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.1] } },
      axes: [
        {
          ...axis,
          space: 80,
          size: 30,
          incrs: TIME_STEPS,
          values: (_, splits) => splits.map((at) => clock(at, times)),
        },
        {
          ...axis,
          size: 66,
          ...(STEPS.has(format) ? { incrs: STEPS.get(format) } : {}),
          values: (_, splits) => splits.map(format),
        },
      ],
      series: [
        { value: (_, at) => (at == null ? "now" : clock(at, times)) },
        ...series.map((each, i) => ({
          label: each.label,
          stroke: colour(SERIES[i]),
          width: 2,
          dash: DASHES[i],
          points: { show: false },
          spanGaps: true,
          value: (plot, at) => format(at ?? lastOf(plot.data[i + 1])),
        })),
      ],
    };
  };
  const box = useChart({ series, height, build }, data);
  const said = series.map((each) => `${each.label} ${format(lastOf(each.values))}`).join(", ");
  return html`<div class="chart" ref=${box} role="img" aria-label="${label}: ${said}"></div>`;
}

const clock = (at, times) =>
  new Date(at * 1000).toLocaleTimeString(
    "en-GB",
    times[times.length - 1] - times[0] > 7200 ? { hour: "2-digit", minute: "2-digit" } : {},
  );

const lastOf = (values) => {
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] != null) return values[i];
  return null;
};

export function Spark({ times, values, label, series = 1, height = 38 }) {
  const build = () => ({
    cursor: { show: false },
    legend: { show: false },
    padding: [2, 0, 2, 0],
    scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.08] } },
    axes: [{ show: false }, { show: false }],
    series: [
      {},
      {
        stroke: colour(`series-${series}`),
        fill: colour(`series-${series}-fill`),
        width: 1.5,
        points: { show: false },
        spanGaps: true,
      },
    ],
  });
  const box = useChart({ series: [{ label }], height, build }, [times, values]);
  return html`<div class="spark" ref=${box} role="img" aria-label=${label}></div>`;
}

/** A number with its recent course. */
export const SparkStat = ({ label, value, unit, times, values, series }) => html`<div class="stat spark-stat">
    <span class="label">${label}</span><span class="value">${value}${unit && html`<small> ${unit}</small>`}</span>
    <${Spark} times=${times} values=${values} label="${label}, the last minutes" series=${series} /></div>`;
