// Dialogs: forms from a list of fields, and the question before a destructive act.
import { useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { reason } from "./api.js";
import { dialogs } from "./store.js";
import { html, notify } from "./ui.js";

/** Opens a dialog; `content` is a function of `close`. */
export function open(content) {
  const dialog = { id: Symbol("dialog"), content };
  dialogs.set((old) => [...old, dialog]);
  return () => dialogs.set((old) => old.filter((each) => each !== dialog));
}

export const Dialog = ({ of }) => {
  const element = useRef(null);
  const close = () => dialogs.set((old) => old.filter((each) => each !== of));
  useEffect(() => {
    element.current.showModal();
    return () => element.current?.close();
  }, []);
  return html`<dialog ref=${element} aria-labelledby="dialog-title" onCancel=${close}
    onClick=${(event) => {
      if (event.target === element.current) close();
    }}>${of.content(close)}</dialog>`;
};

/** The values of a form with nothing typed. */
const initial = (fields) =>
  Object.fromEntries(
    fields.map((field) => [
      field.name,
      field.value ??
        (field.type === "check"
          ? false
          : field.type === "arguments"
            ? []
            : field.options
              ? (field.options[0]?.[0] ?? field.options[0])
              : ""),
    ]),
  );

/**
 * Asks for values in a dialog and acts with them; a refusal is shown in the dialog.
 *
 * fields: {name, label, type: text|number|password|select|check|area|arguments|file, options,
 *   value, hint, required, when(values): whether it is asked for, suggest: names for a datalist}
 */
export function ask({ title, text, fields = [], action = "Save", danger = false, act, done }) {
  open(
    (close) =>
      html`<${Form} title=${title} text=${text} fields=${fields} action=${action} danger=${danger} act=${act} done=${done} close=${close} />`,
  );
}

function Form({ title, text, fields, action, danger, act, done, close }) {
  const [values, setValues] = useState(() => initial(fields));
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const set = (name, value) => setValues((old) => ({ ...old, [name]: value }));
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      const result = await act(values);
      if (done) notify(typeof done === "function" ? done(result, values) : done);
      close();
    } catch (refused) {
      setError(reason(refused));
      setBusy(false);
    }
  };
  const shown = fields.filter((field) => !field.when || field.when(values));
  return html`<form class="dialog" onSubmit=${submit}>
    <h2 id="dialog-title">${title}</h2>
    ${text && html`<p class="text">${typeof text === "function" ? text(values) : text}</p>`}
    ${shown.map((field) => html`<${Field} key=${field.name} field=${field} value=${values[field.name]} set=${(value) => set(field.name, value)} />`)}
    ${error && html`<p class="banner bad" role="alert">${error}</p>`}
    <div class="buttons"><button type="button" onClick=${close}>Cancel</button>
      <button type="submit" class=${danger ? "danger" : "primary"} disabled=${busy}>${busy ? "Working…" : action}</button></div>
  </form>`;
}

/** The question before an act that takes something away. */
export const confirm = ({ title, text, action, act, done, fields }) =>
  ask({ title, text, action, danger: true, act, done, fields });

function Field({ field, value, set }) {
  const [id] = useState(() => `field-${Math.random().toString(36).slice(2)}`);
  const { label, type = "text", hint, required, options, suggest } = field;
  const about = hint ? `${id}-hint` : undefined;
  if (type === "check") {
    return html`<div class="field check"><input id=${id} type="checkbox" checked=${value} onChange=${(event) => set(event.target.checked)} aria-describedby=${about} />
      <label for=${id}>${label}</label>${hint && html`<small id=${about}>${hint}</small>`}</div>`;
  }
  if (type === "arguments")
    return html`<${ArgumentsField} label=${label} hint=${hint} rows=${value} set=${set} suggest=${suggest} />`;
  const common = { id, required, "aria-describedby": about, name: field.name };
  let input;
  if (options) {
    input = html`<select ...${common} value=${value} onChange=${(event) => set(event.target.value)}>${options.map(
      (option) => {
        const [key, text] = Array.isArray(option) ? option : [option, option];
        return html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`;
      },
    )}</select>`;
  } else if (type === "area") {
    input = html`<textarea ...${common} rows=${field.rows ?? 6} spellcheck=${false} value=${value} onInput=${(event) => set(event.target.value)}></textarea>`;
  } else if (type === "file") {
    input = html`<input ...${common} type="file" accept=${field.accept} onChange=${(event) => set(event.target.files[0])} />`;
  } else {
    input = html`<input ...${common} type=${type} value=${value} min=${field.min} max=${field.max} placeholder=${field.placeholder} autocomplete=${type === "password" ? "new-password" : "off"}
      list=${suggest ? `${id}-list` : undefined} onInput=${(event) => set(event.target.value)} />
      ${suggest && html`<datalist id="${id}-list">${suggest.map((each) => html`<option key=${each} value=${each}></option>`)}</datalist>`}`;
  }
  return html`<div class="field"><label for=${id}>${label}</label>${input}${hint && html`<small id=${about}>${hint}</small>`}</div>`;
}

const KINDS = [
  ["auto", "auto"],
  ["string", "text"],
  ["number", "number"],
  ["boolean", "yes / no"],
  ["json", "JSON"],
];

function ArgumentsField({ label, hint, rows, set, suggest = [] }) {
  const [list] = useState(() => `names-${Math.random().toString(36).slice(2)}`);
  const edit = (i, changes) => set(rows.map((row, at) => (at === i ? { ...row, ...changes } : row)));
  return html`<fieldset class="field"><legend>${label}</legend>${hint && html`<small>${hint}</small>`}
    <datalist id=${list}>${suggest.map((name) => html`<option key=${name} value=${name}></option>`)}</datalist>
    ${rows.map(
      (row, i) => html`<div class="argument" key=${i}>
      <input aria-label="Name" list=${list} value=${row.name} onInput=${(event) => edit(i, { name: event.target.value })} />
      <input aria-label="Value" value=${row.value} onInput=${(event) => edit(i, { value: event.target.value })} />
      <select aria-label="Kind" value=${row.kind} onChange=${(event) => edit(i, { kind: event.target.value })}>${KINDS.map(([key, text]) => html`<option key=${key} value=${key} selected=${key === row.kind}>${text}</option>`)}</select>
      <button type="button" class="quiet" aria-label="Remove" onClick=${() => set(rows.filter((_, at) => at !== i))}>✕</button></div>`,
    )}
    <button type="button" class="quiet" onClick=${() => set([...rows, { name: "", value: "", kind: "auto" }])}>+ Add one</button>
  </fieldset>`;
}

/** The rows of an existing table of arguments. */
export const rowsOf = (table) =>
  Object.entries(table ?? {}).map(([name, value]) =>
    typeof value === "string"
      ? { name, value, kind: "string" }
      : { name, value: JSON.stringify(value), kind: "json" },
  );

/** The table that rows mean. Throws an Error with a line for the user. */
export function tableOf(rows) {
  const table = {};
  for (const { name, value, kind } of rows) if (name) table[name] = valueOf(name, value.trim(), kind, value);
  return table;
}

function valueOf(name, text, kind, whole) {
  if (kind === "string") return whole;
  if (kind === "boolean") return ["true", "yes", "1", "on"].includes(text.toLowerCase());
  if (kind === "number" || (kind === "auto" && /^-?\d+(\.\d+)?$/.test(text))) {
    const number = Number(text);
    if (text === "" || Number.isNaN(number)) throw new Error(`${name}: ${text || "nothing"} is no number`);
    if (Number.isInteger(number) && !Number.isSafeInteger(number))
      throw new Error(`${name}: ${text} is too large for a browser; use the command line`);
    return number;
  }
  if (kind === "auto" && (text === "true" || text === "false")) return text === "true";
  if (kind !== "json") return whole;
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${name}: the value is no JSON`);
  }
}

export const jsonIn = (text, what) => {
  try {
    return text.trim() ? JSON.parse(text) : {};
  } catch (error) {
    throw new Error(`${what}: ${error.message}`);
  }
};
