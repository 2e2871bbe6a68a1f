// One ordered topic: route history, partitions on nodes, groups and their lag, changes by a click.
import { useState } from "../vendor/htm-preact.js";
import { at, del, post, put } from "../core/api.js";
import { bytes, count, duration, plural } from "../core/format.js";
import { ask, confirm } from "../core/forms.js";
import { isMonitor, to, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import {
  Arguments,
  Badge,
  Card,
  ExchangeLink,
  Facts,
  Name,
  Page,
  Stat,
  VhostLink,
  Waiting,
  html,
} from "../core/ui.js";
import { publish } from "./queue-forms.js";
import { number } from "./queues.js";
import { Group } from "./topic-group.js";
import { RouteMap } from "./topic-map.js";

export default function Topic({ names: [vhost, name], params }) {
  const found = useGet(at`topics/${vhost}/${name}`, { every: 3000 });
  const lineage = useGet(at`topics/${vhost}/${name}/route`, { params: { lineage: "true" }, every: 5000 });
  const [chosen, setChosen] = useState([]);
  if (params.group !== undefined) return html`<${Group} vhost=${vhost} topic=${name} name=${params.group} />`;
  const topic = found.data;
  const reload = () => {
    found.reload();
    lineage.reload();
  };
  const remove = () =>
    confirm({
      title: "Delete this topic?",
      text: html`<bdi><strong>${name}</strong></bdi> with all its messages and ${plural(topic.groups.length, "group")} will be gone.`,
      fields: [{ name: "typed", label: "Type its name to go on", required: true }],
      action: "Delete",
      act: async ({ typed }) => {
        if (typed !== name) throw new Error("This is not its name.");
        await del(at`topics/${vhost}/${name}`);
      },
      done: () => {
        location.hash = to("topics");
        return `Topic ${name} is deleted`;
      },
    });
  return html`<${Page} title=${name} kind=${html`${topic?.mode ?? ""} ordered topic in <${VhostLink} name=${vhost} />`} actions=${topic && html`<button type="button" class="primary" onClick=${() => publish(vhost, name, "", reload)}>Publish…</button><button type="button" onClick=${remove}>Delete…</button>`} />
    <${Waiting} of=${found}>${() => {
      const open = topic.partition_rows.filter((row) => row.state === "open");
      const picked = open.filter((row) => chosen.includes(row.pid)).sort((a, b) => a.lo - b.lo);
      const choose = (pid) =>
        setChosen((old) => (old.includes(pid) ? old.filter((each) => each !== pid) : [...old, pid]));
      const done = () => {
        setChosen([]);
        reload();
      };
      return html`<div class="stats">
          <${Stat} label="Partitions" value=${count(open.length)} /><${Stat} label="Route version" value=${count(topic.version)} /><${Stat} label="Logical partitions" value=${count(topic.logical)} />
          <${Stat} label="Messages kept" value=${count(topic.partition_rows.reduce((sum, row) => sum + (row.messages ?? 0), 0))} /><${Stat} label="Size" value=${bytes(topic.partition_rows.reduce((sum, row) => sum + (row.bytes ?? 0), 0))} /><${Stat} label="Groups" value=${count(topic.groups.length)} />
        </div>
        <${Card} title="Route history" note="Each box is a partition: its range of logical partitions, and the versions in which it was open. Choose open ones to change them." actions=${html`<${Changes} topic=${topic} picked=${picked} done=${done} />`}>
          ${lineage.data && html`<${RouteMap} topic=${topic} rows=${lineage.data} details=${topic.partition_rows} chosen=${chosen} choose=${choose} />`}<//>
        <${Change} topic=${topic} reload=${reload} />
        <${Partitions} rows=${topic.partition_rows} />
        <${Groups} topic=${topic} />
        <div class="grid"><${About} topic=${topic} /><${Autoscale} topic=${topic} /></div>
        <${Losses} topic=${topic} />`;
    }}<//>`;
}

function Changes({ topic, picked, done }) {
  const { vhost, name } = topic;
  const [one] = picked;
  const nodes = useGet(isMonitor() ? at`nodes` : null, { params: { columns: "name,running" } });
  const adjacent = picked.length > 1 && picked.every((row, i) => i === 0 || picked[i - 1].hi === row.lo);
  const split = () =>
    confirm({
      title: `Split partition ${one.pid}?`,
      text: `It has the logical partitions ${one.lo} to ${one.hi - 1}. Two new partitions take its keys; its messages stay where they are until they are read.`,
      fields: [
        {
          name: "at",
          label: "Cut at",
          hint: `Between ${one.lo + 1} and ${one.hi - 1}; several between commas; empty: in the middle`,
        },
      ],
      action: "Split",
      act: ({ at: text }) =>
        post(at`topics/${vhost}/${name}/split`, {
          pid: one.pid,
          at: text.split(/[, ]+/).filter(Boolean).map(Number),
        }),
      done: () => {
        done();
        return "The split has begun";
      },
    });
  const merge = () =>
    confirm({
      title: `Merge ${plural(picked.length, "partition")}?`,
      text: `Partitions ${picked.map((row) => row.pid).join(", ")} become one.`,
      action: "Merge",
      act: () => post(at`topics/${vhost}/${name}/merge`, { pids: picked.map((row) => row.pid) }),
      done: () => {
        done();
        return "The merge has begun";
      },
    });
  const move = () =>
    confirm({
      title: `Move partition ${one.pid}?`,
      text: html`It is on <bdi>${one.node}</bdi>.`,
      fields: [
        nodes.data
          ? {
              name: "node",
              label: "To",
              options: nodes.data
                .filter((each) => each.running && each.name !== one.node)
                .map((each) => each.name),
            }
          : { name: "node", label: "To node", required: true },
      ],
      action: "Move",
      act: ({ node }) => post(at`topics/${vhost}/${name}/move`, { pid: one.pid, node }),
      done: () => {
        done();
        return "The move has begun";
      },
    });
  return html`<button type="button" disabled=${picked.length !== 1 || one.hi - one.lo < 2} onClick=${split}>Split…</button>
    <button type="button" disabled=${!adjacent} title="Choose neighbours" onClick=${merge}>Merge…</button>
    <button type="button" disabled=${picked.length !== 1} onClick=${move}>Move…</button>`;
}

const PHASES = ["prepared", "targets_ready", "sealing", "sealed", "published", "done"];

function Change({ topic, reload }) {
  const { vhost, name } = topic;
  const times = useGet(at`topics/${vhost}/${name}/durations`, { every: 5000 });
  const running = topic.latest_change && !topic.latest_change.is_finished ? topic.latest_change : null;
  const abort = () =>
    confirm({
      title: "Give this change up?",
      text: "It is possible until it has closed a partition.",
      action: "Give up",
      act: () => del(at`topics/${vhost}/${name}/changes/${running.change_id}`),
      done: () => {
        reload();
        return "The change is given up";
      },
    });
  if (!running && !times.data?.length) return null;
  return html`<${Card} title="Changes" actions=${running && html`<button type="button" onClick=${abort}>Give up…</button>`}>
    ${running && html`<p>${running.kind} of ${running.sources.join(", ")} → ${running.targets.map((each) => each.pid).join(", ")}: <${Badge} kind="info">${running.phase}<//> step ${PHASES.indexOf(running.phase) + 1} of ${PHASES.length}</p>`}
    <${Table} label="Durations of changes" rows=${(times.data ?? []).slice().reverse().slice(0, 10)} keyOf=${(row) => row.change_id} empty="None was seen by this node." columns=${[
      { id: "id", label: "Change", cell: (row) => html`<code>${row.change_id}</code>` },
      { id: "kind", label: "Kind", cell: (row) => row.kind },
      {
        id: "phase",
        label: "Phase",
        cell: (row) =>
          html`<${Badge} kind=${row.phase === "done" ? "good" : row.phase === "aborted" ? "warn" : "info"}>${row.phase}<//>`,
      },
      ...PHASES.slice(0, -1).map((phase) => ({
        id: phase,
        label: phase.replace("_", " "),
        num: true,
        opt: true,
        cell: (row) => (row.phases_ms[phase] === undefined ? "–" : duration(row.phases_ms[phase])),
      })),
      {
        id: "sum",
        label: "In all",
        num: true,
        cell: (row) => duration(Object.values(row.phases_ms).reduce((a, b) => a + b, 0)),
      },
    ]} /><//>`;
}

const STATES = { open: "good", creating: "info", sealed: "warn", retired: "idle", lost: "bad" };

const Partitions = ({ rows }) =>
  html`<${Card} title="Partitions on nodes"><${Table} label="Partitions" rows=${rows} keyOf=${(row) => row.pid} columns=${[
    { id: "pid", label: "Partition", num: false, cell: (row) => count(row.pid) },
    {
      id: "state",
      label: "State",
      cell: (row) => html`<${Badge} kind=${STATES[row.state]}>${row.state}<//>`,
    },
    { id: "range", label: "Range", cell: (row) => `${row.lo} – ${row.hi - 1}` },
    { id: "node", label: "Leader", cell: (row) => html`<${Name} of=${row.node} />` },
    { id: "members", label: "Members", opt: true, cell: (row) => html`<bdi>${row.members.join(", ")}</bdi>` },
    { id: "messages", label: "Messages", num: true, cell: (row) => number(row.messages, count) },
    { id: "bytes", label: "Size", num: true, cell: (row) => number(row.bytes, bytes) },
    { id: "start", label: "First offset", num: true, opt: true, cell: (row) => count(row.log_start) },
    { id: "end", label: "End", num: true, opt: true, cell: (row) => count(row.end_offset) },
    {
      id: "versions",
      label: "Versions",
      opt: true,
      cell: (row) =>
        `${row.created_version} – ${row.sealed_version === null ? "now" : row.sealed_version - 1}`,
    },
  ]} /><//>`;

function Groups({ topic }) {
  const { vhost, name } = topic;
  const found = useGet(at`topics/${vhost}/${name}/groups`, { every: 3000 });
  const create = () =>
    ask({
      title: "New group",
      fields: [
        { name: "group", label: "Name", required: true },
        {
          name: "position",
          label: "Begins at",
          options: [
            ["earliest", "the first message"],
            ["latest", "new messages"],
          ],
        },
        {
          name: "advance",
          label: "Takes changes",
          options: [
            ["linear", "one version after the other"],
            ["dag", "each partition when its ancestors are read"],
          ],
        },
      ],
      action: "Create",
      act: ({ group, position, advance }) =>
        put(at`topics/${vhost}/${name}/groups/${group}`, { position, advance }),
      done: () => {
        found.reload();
        return "The group is there";
      },
    });
  return html`<${Card} title="Groups of consumers" actions=${html`<button type="button" onClick=${create}>New group…</button>`}><${Waiting} of=${found}>${(
    rows,
  ) =>
    html`<${Table} label="Groups" rows=${rows} keyOf=${(row) => row.group} empty="Nobody reads this topic yet." columns=${[
      {
        id: "name",
        label: "Group",
        cell: (row) =>
          html`<a href="${to("topic", vhost, name)}?group=${encodeURIComponent(row.group)}"><${Name} of=${row.group} /></a>`,
      },
      {
        id: "state",
        label: "State",
        cell: (row) =>
          html`<${Badge} kind=${{ active: "good", idle: "idle" }[row.state] ?? "bad"}>${row.state}<//>`,
      },
      {
        id: "lag",
        label: "Lag",
        num: true,
        cell: (row) => html`<${Lag} vhost=${vhost} topic=${name} group=${row.group} />`,
      },
      { id: "members", label: "Members", num: true, cell: (row) => count(row.members.length) },
      { id: "mode", label: "Takes changes", opt: true, cell: (row) => row.mode },
      { id: "version", label: "At version", num: true, cell: (row) => `${row.cv} of ${row.latest}` },
      { id: "waits", label: "Still reads", opt: true, cell: (row) => row.waits_for.join(", ") || "–" },
    ]} />`}<//><//>`;
}

function Lag({ vhost, topic, group }) {
  const rows = useGet(at`topics/${vhost}/${topic}/groups/${group}/lag`, { every: 4000 }).data;
  return rows
    ? number(
        rows.reduce((sum, row) => sum + (row.lag ?? 0), 0),
        count,
      )
    : "…";
}

const About = ({ topic }) =>
  html`<${Card} title="About"><${Facts} rows=${[
    ["Mode", topic.mode],
    ["Exchange", html`<${ExchangeLink} vhost=${topic.vhost} name=${topic.name} />`],
    ["Settings", html`<${Arguments} of=${topic.settings} />`],
    ["Oldest version kept", count(topic.min_version)],
  ]} /><//>`;

function Autoscale({ topic }) {
  const { vhost, name } = topic;
  const found = useGet(at`topics/${vhost}/${name}/autoscale`, { every: 5000 });
  const change = (policy) =>
    ask({
      title: "Autoscaling",
      fields: [
        {
          name: "autoscale",
          label: "Splits, merges and moves by itself",
          options: ["off", "on"],
          value: policy.autoscale,
        },
        {
          name: "autoscale-target-messages",
          label: "Messages per second of a partition",
          type: "number",
          value: policy.target_messages,
        },
        {
          name: "autoscale-partitions-min",
          label: "Partitions at least",
          type: "number",
          value: policy.partitions_min,
        },
        {
          name: "autoscale-partitions-max",
          label: "Partitions at most",
          type: "number",
          value: policy.partitions_max,
        },
      ],
      act: (values) =>
        put(
          at`topics/${vhost}/${name}/autoscale`,
          Object.fromEntries(
            Object.entries(values).map(([key, value]) => [key, key === "autoscale" ? value : Number(value)]),
          ),
        ),
      done: () => {
        found.reload();
        return "Autoscaling is changed";
      },
    });
  return html`<${Card} title="Autoscaling" actions=${found.data && html`<button type="button" onClick=${() => change(found.data.policy)}>Change…</button>`}><${Waiting} of=${found}>${(
    row,
  ) =>
    html`<${Facts} rows=${[
      ["State", row.policy.autoscale === "on" ? html`<${Badge} kind="good">on<//>` : html`<${Badge}>off<//>`],
      ["Decision", row.decision],
      ["Rule", row.rule],
      ["Held back by", row.held],
      [
        "Target of a partition",
        `${count(row.policy.target_messages)} messages or ${bytes(row.policy.target_bytes)} a second`,
      ],
      ["Partitions", `${row.policy.partitions_min} to ${row.policy.partitions_max}`],
      ["Hot", row.hot.length ? plural(row.hot.length, "logical partition") : undefined],
    ]} />`}<//><//>`;
}

function Losses({ topic }) {
  const rows = useGet(at`topics/${topic.vhost}/${topic.name}/losses`, { every: 10_000 }).data ?? [];
  return (
    rows.length > 0 &&
    html`<${Card} title="Losses" note="Messages that groups go on without."><${Table} label="Losses" rows=${rows} columns=${[
      { id: "group", label: "Group", cell: (row) => html`<${Name} of=${row.group} />` },
      { id: "pid", label: "Partition", num: true, cell: (row) => count(row.pid) },
      {
        id: "range",
        label: "Offsets",
        cell: (row) => `${count(row.first)} – ${row.end === null ? "?" : count(row.end - 1)}`,
      },
      { id: "reason", label: "Reason", cell: (row) => html`<${Badge} kind="bad">${row.reason}<//>` },
    ]} /><//>`
  );
}
