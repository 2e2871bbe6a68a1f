// One group of a topic's consumers: lag by partition, parked keys, seek.
import { at, del, post } from "../core/api.js";
import { count, plain, plural } from "../core/format.js";
import { ask, confirm } from "../core/forms.js";
import { to, useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Badge, Card, ChannelLink, Empty, Name, Page, Stat, Waiting, html } from "../core/ui.js";

export function Group({ vhost, topic, name }) {
  const groups = useGet(at`topics/${vhost}/${topic}/groups`, { every: 3000 });
  const lag = useGet(at`topics/${vhost}/${topic}/groups/${name}/lag`, { every: 3000 });
  const row = groups.data?.find((each) => each.group === name);
  const expired = (lag.data ?? []).some((each) => each.data_expired);
  const seek = () =>
    confirm({
      title: "Move this group?",
      text: "Its members must be gone. It reads from there on; messages may come again, or be passed over.",
      fields: [
        {
          name: "to",
          label: "To",
          options: [
            ["earliest", "the first message"],
            ["latest", "new messages"],
            ["time", "a time"],
          ],
        },
        {
          name: "time",
          label: "Time",
          type: "datetime-local",
          when: (values) => values.to === "time",
          required: true,
        },
      ],
      action: "Move",
      act: ({ to: position, time }) =>
        post(
          at`topics/${vhost}/${topic}/groups/${name}/seek`,
          position === "time" ? { time: new Date(time).getTime() } : { position },
        ),
      done: () => {
        lag.reload();
        return "The group is moved";
      },
    });
  const accept = () =>
    confirm({
      title: "Go on behind the gap?",
      text: "Retention deleted messages that this group has not read. They are lost for it.",
      action: "Accept the loss",
      act: () => post(at`topics/${vhost}/${topic}/groups/${name}/accept-loss`),
      done: () => {
        lag.reload();
        return "The group goes on";
      },
    });
  const remove = () =>
    confirm({
      title: "Delete this group?",
      text: html`The position of <bdi><strong>${name}</strong></bdi> will be gone.`,
      action: "Delete",
      act: () => del(at`topics/${vhost}/${topic}/groups/${name}`),
      done: () => {
        location.hash = to("topic", vhost, topic);
        return "The group is deleted";
      },
    });
  return html`<${Page} title=${name} kind=${html`Group of topic <a href=${to("topic", vhost, topic)}><${Name} of=${topic} /></a>`} actions=${html`${expired && html`<button type="button" onClick=${accept}>Accept the loss…</button>`}<button type="button" onClick=${seek}>Seek…</button><button type="button" onClick=${remove}>Delete…</button>`} />
    ${groups.data && !row && html`<p class="banner bad" role="alert">There is no such group (any more).</p>`}
    ${row && html`<div class="stats"><${Stat} label="State" value=${row.state} /><${Stat} label="Lag" value=${count((lag.data ?? []).reduce((sum, each) => sum + (each.lag ?? 0), 0))} /><${Stat} label="Members" value=${count(row.members.length)} /><${Stat} label="At version" value="${row.cv} of ${row.latest}" /></div>`}
    <${Card} title="Lag by partition"><${Waiting} of=${lag}>${(rows) => {
      const most = Math.max(1, ...rows.map((each) => each.lag ?? 0));
      return html`<${Table} label="Lag" rows=${rows} keyOf=${(each) => each.pid} columns=${[
        { id: "pid", label: "Partition", cell: (each) => count(each.pid) },
        { id: "state", label: "State", cell: (each) => each.state },
        { id: "lag", label: "Lag", num: true, cell: (each) => count(each.lag) },
        {
          id: "bar",
          label: "",
          cell: (each) =>
            html`<meter min="0" max=${most} value=${each.lag ?? 0} aria-label="Lag of partition ${each.pid}"></meter>`,
        },
        { id: "mark", label: "Acknowledged to", num: true, opt: true, cell: (each) => count(each.watermark) },
        { id: "end", label: "End", num: true, opt: true, cell: (each) => count(each.end_offset) },
        {
          id: "owner",
          label: "Owner",
          opt: true,
          cell: (each) => html`<${Name} of=${each.owner} most=${28} none="nobody" />`,
        },
        { id: "parked", label: "Parked keys", num: true, cell: (each) => count(each.parked_keys) },
        {
          id: "remark",
          label: "",
          cell: (each) =>
            each.data_expired
              ? html`<${Badge} kind="bad">messages expired unread<//>`
              : each.waits_for.length
                ? `waits for ${each.waits_for.join(", ")}`
                : "",
        },
      ]} />`;
    }}<//><//>
    <${Members} vhost=${vhost} queue="${topic}/${name}" />
    <${Parked} vhost=${vhost} topic=${topic} group=${name} />`;
}

/** The consumers that are members: their own names, which owners in the log do not have. */
function Members({ vhost, queue }) {
  const found = useGet(at`consumers/${vhost}`, { every: 5000 });
  const columns = [
    { id: "tag", label: "Tag", cell: (each) => html`<${Name} of=${each.consumer_tag} />` },
    {
      id: "channel",
      label: "Channel",
      cell: (each) =>
        each.channel_details?.name ? html`<${ChannelLink} of=${each.channel_details} />` : "–",
    },
    { id: "node", label: "Node", opt: true, cell: (each) => html`<bdi>${each.channel_details?.node}</bdi>` },
    { id: "user", label: "User", opt: true, cell: (each) => html`<bdi>${each.channel_details?.user}</bdi>` },
    {
      id: "prefetch",
      label: "Prefetch",
      num: true,
      cell: (each) => (each.prefetch_count ? count(each.prefetch_count) : "no limit"),
    },
  ];
  return html`<${Card} title="Members"><${Waiting} of=${found}>${(rows) => html`<${Table} label="Members" columns=${columns} rows=${rows.filter((row) => row.queue?.name === queue)} keyOf=${(each) => `${each.channel_details?.name} ${each.consumer_tag}`} empty="Nobody consumes as this group." />`}<//><//>`;
}

function Parked({ vhost, topic, group }) {
  const found = useGet(at`topics/${vhost}/${topic}/groups/${group}/park`, { every: 5000 });
  const keyed = (row) => ({ keys: [row.key], ...(row.encoding ? { encoding: row.encoding } : {}) });
  const act = (text, title, path) => (row) =>
    confirm({
      title,
      text: html`Key <bdi>${plain(row.key)}</bdi>`,
      action: text,
      act: () => post(path, keyed(row)),
      done: () => {
        found.reload();
        return "Done";
      },
    });
  const resume = act(
    "Resume",
    "Deliver this key's messages again?",
    at`topics/${vhost}/${topic}/groups/${group}/park/resume`,
  );
  const retry = act(
    "Retry",
    "Deliver the first message of this key again?",
    at`topics/${vhost}/${topic}/groups/${group}/park/retry`,
  );
  const skip = act(
    "Skip",
    "Give the first message of this key up?",
    at`topics/${vhost}/${topic}/groups/${group}/park/skip`,
  );
  const replace = (row) =>
    ask({
      title: "Replace the first message's body",
      fields: [{ name: "payload", label: "Payload", type: "area" }],
      act: ({ payload }) =>
        post(at`topics/${vhost}/${topic}/groups/${group}/park/replace`, {
          ...keyed(row),
          payload,
          payload_encoding: "string",
        }),
      done: () => {
        found.reload();
        return "Replaced";
      },
    });
  return html`<${Card} title="Parked keys" note="A message that failed too often stops its own key and no other."><${Waiting} of=${found}>${(
    rows,
  ) =>
    rows.length
      ? html`<p class="note">${plural(rows.length, "key")}</p><${Table} label="Parked keys" rows=${rows} columns=${[
          { id: "key", label: "Key", cell: (row) => html`<bdi>${plain(row.key)}</bdi>` },
          { id: "pid", label: "Partition", num: true, cell: (row) => count(row.pid) },
          { id: "messages", label: "Messages", num: true, cell: (row) => count(row.messages) },
          { id: "reason", label: "Reason", opt: true, cell: (row) => row.reason ?? "" },
          {
            id: "act",
            label: "",
            cell: (row) =>
              html`<span class="actions"><button type="button" class="small" onClick=${() => resume(row)}>Resume…</button><button type="button" class="small" onClick=${() => retry(row)}>Retry…</button><button type="button" class="small" onClick=${() => replace(row)}>Replace…</button><button type="button" class="small" onClick=${() => skip(row)}>Skip…</button></span>`,
          },
        ]} />`
      : html`<${Empty}>No key is parked.<//>`}<//><//>`;
}
