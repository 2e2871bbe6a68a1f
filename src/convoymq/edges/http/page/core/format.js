// Numbers, sizes, times and durations for people.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const NOTHING = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? WHOLE.format(value) : NOTHING);
export const short = (value) =>
  known(value) ? (Math.abs(value) < 10_000 ? WHOLE : SHORT).format(value) : NOTHING;

/** A rate per second; small ones with a fraction. */
export function rate(value) {
  if (!known(value)) return NOTHING;
  if (value === 0) return "0";
  return (value < 10 ? ONE : value < 100_000 ? WHOLE : SHORT).format(value);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export function bytes(value) {
  if (!known(value)) return NOTHING;
  let unit = 0;
  let rest = value;
  while (Math.abs(rest) >= 1024 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit && Math.abs(rest) < 100 ? ONE.format(rest) : WHOLE.format(rest)} ${UNITS[unit]}`;
}

const SPANS = [
  ["d", 86_400_000],
  ["h", 3_600_000],
  ["min", 60_000],
  ["s", 1000],
];
export function duration(ms) {
  if (!known(ms)) return NOTHING;
  if (ms < 1000) return `${WHOLE.format(ms)} ms`;
  const at = SPANS.findIndex(([, size]) => ms >= size);
  const [name, size] = SPANS[at];
  const below = SPANS[at + 1];
  const rest = below ? Math.floor((ms % size) / below[1]) : 0;
  return `${Math.floor(ms / size)} ${name}${rest ? ` ${rest} ${below[0]}` : ""}`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
export const when = (ms) => (known(ms) && ms > 0 ? CLOCK.format(ms) : NOTHING);

export const percent = (share) => (known(share) ? `${WHOLE.format(share * 100)} %` : NOTHING);

/** A name's first characters; the whole is in a title. */
export const cut = (text, most = 60) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** An argument's value as one line. */
export const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Text for a number that counts things: plural(1, "message") = "1 message". */
export const plural = (number, noun, many = `${noun}s`) => `${count(number)} ${number === 1 ? noun : many}`;
