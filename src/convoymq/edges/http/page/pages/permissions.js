// Permissions and topic permissions, of a user or of a virtual host.
import { at, del, put } from "../core/api.js";
import { ask, confirm } from "../core/forms.js";
import { session, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Card, UserLink, VhostLink, Waiting, html } from "../core/ui.js";

const who = ({ user, vhost }) =>
  [
    user === undefined && { name: "user", label: "User", required: true },
    vhost === undefined && { name: "vhost", label: "Virtual host", options: session.get().vhosts },
  ].filter(Boolean);

const pattern = (name, label, value) => ({
  name,
  label,
  value: value ?? ".*",
  hint: name === "configure" ? "Patterns of names; empty: nothing" : undefined,
});

/** user or vhost: the end that is given. */
export function Permissions({ user, vhost }) {
  const given = user === undefined ? { vhost } : { user };
  const plain = useGet(user === undefined ? at`vhosts/${vhost}/permissions` : at`users/${user}/permissions`);
  const topic = useGet(
    user === undefined ? at`vhosts/${vhost}/topic-permissions` : at`users/${user}/topic-permissions`,
  );
  const set = (row = {}) =>
    ask({
      title: "Permissions",
      fields: [
        ...(row.user ? [] : who(given)),
        pattern("configure", "Configure", row.configure),
        pattern("write", "Write", row.write),
        pattern("read", "Read", row.read),
      ],
      act: ({ configure, write, read, ...ends }) => {
        const at_ = { ...given, ...row, ...ends };
        return put(at`permissions/${at_.vhost}/${at_.user}`, { configure, write, read });
      },
      done: () => {
        plain.reload();
        return "The permissions are set";
      },
    });
  const setTopic = (row = {}) =>
    ask({
      title: "Topic permissions",
      text: "Patterns of routing keys, for publishes to and bindings of a topic exchange.",
      fields: [
        ...(row.user
          ? []
          : [...who(given), { name: "exchange", label: "Exchange", value: "amq.topic", required: true }]),
        pattern("write", "Write", row.write),
        pattern("read", "Read", row.read),
      ],
      act: ({ write, read, ...ends }) => {
        const at_ = { ...given, ...row, ...ends };
        return put(at`topic-permissions/${at_.vhost}/${at_.user}`, { exchange: at_.exchange, write, read });
      },
      done: () => {
        topic.reload();
        return "The topic permissions are set";
      },
    });
  const clear = (row) =>
    confirm({
      title: "Take the permissions away?",
      text: html`Of <bdi>${row.user}</bdi> in <bdi>${row.vhost}</bdi>.`,
      action: "Take away",
      act: () => del(at`permissions/${row.vhost}/${row.user}`),
      done: () => {
        plain.reload();
        return "The permissions are taken away";
      },
    });
  const clearTopic = (row) =>
    confirm({
      title: "Take the topic permissions away?",
      text: html`Of <bdi>${row.user}</bdi> for <bdi>${row.exchange}</bdi> in <bdi>${row.vhost}</bdi>.`,
      action: "Take away",
      act: () => del(at`topic-permissions/${row.vhost}/${row.user}/${row.exchange}`),
      done: () => {
        topic.reload();
        return "The topic permissions are taken away";
      },
    });
  const end =
    user === undefined
      ? { id: "user", label: "User", cell: (row) => html`<${UserLink} name=${row.user} />` }
      : { id: "vhost", label: "Virtual host", cell: (row) => html`<${VhostLink} name=${row.vhost} />` };
  const text = (name, label) => ({
    id: name,
    label,
    cell: (row) => html`<code><bdi>${row[name] || "(nothing)"}</bdi></code>`,
  });
  const act = (change, take) => ({
    id: "act",
    label: "",
    cell: (row) =>
      html`<span class="actions"><button type="button" class="small" onClick=${() => change(row)}>Change…</button><button type="button" class="small" onClick=${() => take(row)}>Clear…</button></span>`,
  });
  return html`<${Card} title="Permissions" actions=${html`<button type="button" onClick=${() => set()}>Set…</button>`}><${Waiting} of=${plain}>${(rows) => html`<${Table} label="Permissions" rows=${rows} keyOf=${(row) => `${row.user} ${row.vhost}`} empty="No permissions." columns=${[end, text("configure", "Configure"), text("write", "Write"), text("read", "Read"), act(set, clear)]} />`}<//><//>
    <${Card} title="Topic permissions" note="Where there are none, routing keys are free." actions=${html`<button type="button" onClick=${() => setTopic()}>Set…</button>`}><${Waiting} of=${topic}>${(rows) => html`<${Table} label="Topic permissions" rows=${rows} keyOf=${(row) => `${row.user} ${row.vhost} ${row.exchange}`} empty="No topic permissions." columns=${[end, { id: "exchange", label: "Exchange", cell: (row) => html`<bdi>${row.exchange}</bdi>` }, text("write", "Write"), text("read", "Read"), act(setTopic, clearTopic)]} />`}<//><//>`;
}
