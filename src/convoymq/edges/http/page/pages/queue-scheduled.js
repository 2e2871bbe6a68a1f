// Delayed messages of a queue, in the order in which they are due.
import { at, del } from "../core/api.js";
import { bytes, count, when } from "../core/format.js";
import { confirm } from "../core/forms.js";
import { useGet } from "../core/store.js";
import { Table } from "../core/table.js";
import { Card, Name, Tag, Waiting, html } from "../core/ui.js";

export function Scheduled({ row }) {
  const found = useGet(at`convoy/queues/${row.vhost}/${row.name}/scheduled`, { every: 5000 });
  const cancel = (id) =>
    confirm({
      title: "Drop this message?",
      text: "It will not be delivered, now or later.",
      action: "Drop",
      act: () => del(at`convoy/queues/${row.vhost}/${row.name}/scheduled/${id}`),
      done: () => {
        found.reload();
        return "The message is dropped";
      },
    });
  const columns = [
    { id: "due", label: "Due", cell: (each) => when(each.deliver_at) },
    { id: "why", label: "Why", cell: (each) => html`<${Tag}>${each.reason}<//>` },
    { id: "key", label: "Routing key", cell: (each) => html`<${Name} of=${each.routing_key} />` },
    { id: "size", label: "Size", num: true, cell: (each) => bytes(each.payload_bytes) },
    { id: "tries", label: "Deliveries", num: true, opt: true, cell: (each) => count(each.acquired_count) },
    {
      id: "act",
      label: "",
      cell: (each) =>
        html`<button type="button" class="small" onClick=${() => cancel(each.id)}>Drop…</button>`,
    },
  ];
  return html`<${Card} title="Scheduled messages" note="The next 100."><${Waiting} of=${found}>${({ messages }) => html`<${Table} label="Scheduled messages" columns=${columns} rows=${messages} keyOf=${(each) => each.id} empty="No message waits for its time." />`}<//><//>`;
}
