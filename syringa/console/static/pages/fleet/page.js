/** Fleet: the nodes of a cluster, their pools and when these are open, and the replicas on them. */

import { post } from "../../api.js";
import * as format from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { Badge, Button, Card, Dialog, EmptyState, ErrorNotice, Loaded, Menu, NumberInput, Page, Table } from "../../ui/index.js";
import { act, list, listed, tone } from "../shared.js";
import { Timeline } from "./timeline.js";

/** @typedef {{kind: "node" | "replica", name: string}} Drained */

export default function FleetPage() {
  const [drained, setDrained] = useState(/** @type {Drained | null} */ (null));
  const fleet = useResource(async (signal) => {
    const [nodes, pools, replicas, moves] = await Promise.all(["nodes", "pools", "replicas", "moves"].map((each) => list(`/admin/${each}`, {}, signal)));
    return { nodes, pools, replicas, moves };
  }, [], { interval: 3000 });
  return html`<${Page} title="Fleet" lead="The machines of the cluster, and what runs on them.">
    <${Loaded} of=${fleet}>
      ${(/** @type {Record<string, any[]>} */ { nodes = [], pools = [], replicas = [], moves = [] }) => html`
        <${Pools} pools=${pools} reload=${fleet.reload} />
        <${Nodes} nodes=${nodes} onDrain=${setDrained} />
        <${Replicas} replicas=${replicas} onDrain=${setDrained} />
        <${Moves} moves=${moves} />`}
    <//>
    ${drained && html`<${DrainDialog} drained=${drained} onClose=${() => setDrained(null)} onDone=${fleet.reload} />`}
  <//>`;
}

/** @param {{pools: any[], reload: () => void}} props */
function Pools({ pools, reload }) {
  /** @param {string} name @param {"open" | "close" | "reset"} action */
  const change = (name, action) => act(async () => {
    await post(`/admin/pools/${encodeURIComponent(name)}/${action}`);
    await listed();
  }).then(reload);
  /** @param {any} row */
  const menu = (row) => [
    ...(row.override !== "open" ? [{ label: "Open", icon: "play", onClick: () => change(row.name, "open") }] : []),
    ...(row.override !== "closed" ? [{ label: "Close", icon: "stop", onClick: () => change(row.name, "close") }] : []),
    ...(row.override ? [{ label: "Follow the schedule", icon: "refresh", onClick: () => change(row.name, "reset") }] : []),
  ];
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "name", label: "Pool", sort: (row) => row.name, render: (row) => html`<strong>${row.name}</strong>` },
    { key: "state", label: "State", sort: (row) => row.state, render: (row) => html`<${Badge} tone=${tone(row.state)} dot>${row.state}<//>${row.reason && html`<div class="muted small">${row.reason}</div>`}` },
    { key: "mode", label: "Schedule", render: (row) => html`${row.override ? `${row.override} by an operator` : row.mode}${row.changes_at && html`<div class="muted small nowrap">until ${format.time(row.changes_at)}</div>`}` },
    { key: "nodes", label: "Nodes", numeric: true, render: (row) => html`<span class="nowrap">${row.offered} of ${row.nodes}</span>` },
    { key: "gpus", label: "GPUs", numeric: true, render: (row) => html`<span class="nowrap">${row.gpus_used} of ${row.gpus}</span>` },
    { key: "cpus", label: "CPU threads", numeric: true, render: (row) => html`<span class="nowrap">${row.cpus_used} of ${row.cpus}</span>` },
    { key: "replicas", label: "Replicas", numeric: true },
    { key: "actions", label: html`<span class="visually-hidden">Actions</span>`, render: (row) => html`<${Menu} label=${`Actions of pool ${row.name}`} items=${menu(row)} />` },
  ];
  return html`<${Card} class="flush" title="Pools">
    <${Table} caption="Pools" columns=${columns} rows=${pools} rowKey=${(row) => row.name} empty=${html`<${EmptyState} icon="fleet" title="No pools">Nodes join one with syringa cluster join ADDRESS --pool NAME.<//>`} />
    ${pools.length > 0 && html`<${Timeline} pools=${pools} />`}
  <//>`;
}

/** @param {{nodes: any[], onDrain: (drained: Drained) => void}} props */
function Nodes({ nodes, onDrain }) {
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "name", label: "Node", sort: (row) => row.name, render: (row) => html`<strong>${row.name}</strong><div class="row wrap">${Object.entries(row.labels).map(([name, value]) => html`<${Badge} key=${name}>${name}=${value}<//>`)}</div>` },
    { key: "state", label: "State", sort: (row) => row.state, render: (row) => html`<${Badge} tone=${tone(row.state)} dot>${row.state}<//>${!row.offered && html`<div class="muted small">${row.reason ?? "not offered"}</div>`}` },
    { key: "pool", label: "Pool", sort: (row) => row.pool, render: (row) => row.pool ?? format.NONE },
    { key: "gpus", label: "GPUs", numeric: true, sort: (row) => row.gpus },
    { key: "cpus", label: "CPU threads", numeric: true, sort: (row) => row.cpus, render: (row) => format.number(row.cpus) },
    { key: "memory", label: "Memory", numeric: true, sort: (row) => row.memory, render: (row) => format.bytes(row.memory) },
    { key: "replicas", label: "Replicas", numeric: true, sort: (row) => row.replicas },
    { key: "drain", label: html`<span class="visually-hidden">Action</span>`, render: (row) => row.state === "ready" && row.name !== "local" && html`<${Button} size="small" aria-label=${`Drain node ${row.name}`} onClick=${() => onDrain({ kind: "node", name: row.name })}>Drain<//>` },
  ];
  return html`<${Card} class="flush" title="Nodes"><${Table} caption="Nodes" columns=${columns} rows=${nodes} rowKey=${(row) => row.name} initialSort=${{ key: "name", descending: false }}
    empty=${html`<${EmptyState} icon="fleet" title="No nodes">Let a machine join with syringa cluster join ADDRESS --token TOKEN.<//>`} /><//>`;
}

/** @param {{replicas: any[], onDrain: (drained: Drained) => void}} props */
function Replicas({ replicas, onDrain }) {
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "id", label: "Replica", sort: (row) => row.id, render: (row) => html`<strong>${row.id}</strong>` },
    { key: "model", label: "Model", sort: (row) => row.model },
    { key: "status", label: "State", sort: (row) => row.status, render: (row) => html`<${Badge} tone=${tone(row.status)} dot>${row.status}<//>${row.reason && html`<div class="muted small">${row.reason}</div>`}` },
    { key: "node", label: "Node", sort: (row) => row.node },
    { key: "fingerprint", label: "Fingerprint", render: (row) => html`<code title=${row.fingerprint}>${row.fingerprint.slice(0, 8) || format.NONE}</code>` },
    { key: "drain", label: html`<span class="visually-hidden">Action</span>`, render: (row) => row.status !== "draining" && html`<${Button} size="small" aria-label=${`Drain replica ${row.id}`} onClick=${() => onDrain({ kind: "replica", name: row.id })}>Drain<//>` },
  ];
  return html`<${Card} class="flush" title="Replicas"><${Table} caption="Replicas" columns=${columns} rows=${replicas}
    empty=${html`<${EmptyState} icon="models" title="No replicas">The first request for a model starts one.<//>`} /><//>`;
}

/** @param {{moves: any[]}} props */
function Moves({ moves }) {
  return html`<${Card} title="Recent moves">
    ${moves.length === 0
      ? html`<p class="muted">Nothing has been started or stopped since the server was started.</p>`
      : html`<ol class="moves" tabindex="0" aria-label="Recent moves">${moves.map((each, index) => html`<li key=${index}>
          <time class="muted small nowrap">${format.time(each.at)}</time>
          <${Badge} tone=${each.action === "start" ? "good" : "warning"}>${each.action}<//>
          <span><strong>${each.replica}</strong>${each.node ? ` on ${each.node}` : ""}<span class="muted">: ${each.reason}</span></span>
        </li>`)}</ol>`}
  <//>`;
}

/** @param {{drained: Drained, onClose: () => void, onDone: () => void}} props */
function DrainDialog({ drained, onClose, onDone }) {
  const [grace, setGrace] = useState(/** @type {number | undefined} */ (undefined));
  const drain = useAction(async () => {
    await post(`/admin/${drained.kind}s/${encodeURIComponent(drained.name)}/drain`, grace === undefined ? {} : { grace });
    await listed();
    onDone();
    onClose();
  });
  return html`<${Dialog} open title=${`Drain ${drained.kind} ${drained.name}?`} onClose=${onClose}
    actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} variant="danger" busy=${drain.busy} onClick=${() => drain.run()}>Drain<//>`}>
    <${ErrorNotice} error=${drain.error} />
    <p>It gets no new requests. Those that it has finish in the given time, or go on elsewhere where they were.</p>
    <${NumberInput} label="Seconds to finish" min=${0} max=${86400} value=${grace} onChange=${setGrace} placeholder="the setting" />
  <//>`;
}
