/** Status: speed, load, latencies, cache and errors over time, and what the public sees of it. */

import { get, serverAddress } from "../../api.js";
import * as format from "../../format.js";
import { useResource } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { may } from "../../state.js";
import { Badge, Card, CopyButton, EmptyState, Loaded, Notice, Page, Stat, Stats, Table, Tabs } from "../../ui/index.js";
import { Chart } from "../../ui/chart.js";
import { ModelSelect, useModels } from "../shared.js";

/** Ranges, how often to look (ms), and the window of /status that comes closest. */
const RANGES = [
  { id: "5m", label: "5 minutes", interval: 5000, window: "5m" },
  { id: "1h", label: "1 hour", interval: 10000, window: "1h" },
  { id: "6h", label: "6 hours", interval: 30000, window: "1h" },
  { id: "24h", label: "24 hours", interval: 60000, window: "24h" },
  { id: "7d", label: "7 days", interval: 60000, window: "24h" },
  { id: "30d", label: "30 days", interval: 60000, window: "30d" },
];
const NOW = "5m"; // the range of the figures that are of this moment
const PERCENTILES = ["p50", "p90", "p99"];
/** @type {Record<string, string>} */
const ERRORS = {
  rate_limited: "Rate limited", unauthorized: "Unauthorized", forbidden: "Forbidden", not_found: "Not found", too_large: "Too large",
  invalid_request: "Invalid request", overloaded: "Overloaded", timeout: "Timeout", server_error: "Server error",
  failed_dependency: "Failed dependency", cancelled: "Cancelled",
};

export default function StatusPage() {
  const admin = may("admin");
  const [rangeId, setRange] = useState("5m");
  const range = RANGES.find((each) => each.id === rangeId) ?? RANGES[0];
  const shown = admin ? RANGES : RANGES.filter((each) => each.id === each.window);
  return html`<${Page} title="Status" lead="How fast the server is, how busy, and what goes wrong.">
    <${Tabs} label="Time range" tabs=${shown} value=${rangeId} onChange=${setRange}>
      ${() => html`<div class="stack">
        ${admin && html`<${Figures} range=${range} />`}
        <${PublicStatus} window=${range?.window} />
      </div>`}
    <//>
  <//>`;
}

/** @param {{range: {id: string, label: string, interval: number}}} props */
function Figures({ range }) {
  const [model, setModel] = useState("");
  const models = useModels();
  const series = useResource((signal) => get("/admin/series", { range: range.id, model }, { signal }), [range.id, model], { interval: range.interval });
  const now = useResource(async (signal) => (range.id === NOW ? null : get("/admin/series", { range: NOW, model }, { signal })), [range.id, model], { interval: 5000 });
  return html`${(models.data?.length ?? 0) > 1 && html`<div class="grid filters"><${ModelSelect} all models=${models.data} value=${model} onChange=${setModel} /></div>`}
    <${Loaded} of=${series} label="Loading figures">
      ${(data) => html`<${Overview} data=${data} now=${range.id === NOW ? data : now.data} /><${Charts} data=${data} />`}
    <//>`;
}

/** The last value of a series that is known. @param {(number | null)[]} values */
function last(values) {
  return values.findLast((each) => each !== null && each !== undefined) ?? null;
}

/** @param {{data: any, now: any}} props `now`: the shortest range, in which the last value is of some seconds */
function Overview({ data, now }) {
  const all = data.all;
  /** @param {string} name */
  const current = (name) => (now ? last(now.all[name]) : null);
  const totals = all.totals;
  const ended = totals.ok + totals.failed;
  return html`<${Card} class="status-overview"><${Stats}>
    <${Stat} label="Generated now" value=${format.number(current("tokens_per_second"), 1)} detail="tokens/s" />
    <${Stat} label="Running" value=${short(current("running"))} detail=${`${short(current("waiting"))} waiting`} />
    <${Stat} label="First token" value=${format.seconds(totals.ttft_p50)} detail=${`p99 ${format.seconds(totals.ttft_p99)}`} />
    <${Stat} label="Per token" value=${format.seconds(totals.tpot_p50)} detail=${`p99 ${format.seconds(totals.tpot_p99)}`} />
    <${Stat} label="KV cache in use" value=${format.percent(current("kv_usage"))} />
    <${Stat} label="Prefix-cache hits" value=${format.percent(totals.cache_hit_share)} detail="of prompt tokens" />
    <${Stat} label="Requests" value=${format.short(totals.requests)} detail=${`${format.short(totals.output_tokens)} tokens out`} />
    <${Stat} label="Failed" value=${ended > 0 ? format.percent(totals.failed / ended, 1) : format.NONE} detail=${`${format.number(totals.failed)} requests`} />
  <//><//>`;
}

/** @param {{data: any}} props */
function Charts({ data }) {
  const all = data.all;
  if (all.totals.requests === 0 && !all.running.some((/** @type {number | null} */ each) => each)) {
    return html`<${Card}><${EmptyState} icon="status" title="No traffic in this time">Send a request, for example on the <a href="#/chat">chat page</a>, or choose a longer time.<//><//>`;
  }
  const times = data.times;
  /** @param {string} name */
  const percentiles = (name) => PERCENTILES.map((each, index) => ({ label: each, values: all[`${name}_${each}`], color: index + 1 }));
  const errors = Object.entries(all.errors);
  return html`<div class="grid">
    <${Card} title="Tokens per second"><${Chart} label="Tokens per second" times=${times} format=${format.short}
      series=${[{ label: "generated", values: all.tokens_per_second, fill: true }, { label: "prompt", values: all.prompt_tokens_per_second }]} /><//>
    <${Card} title="Requests at a time"><${Chart} label="Requests at a time" times=${times} minimum=${1} format=${short}
      series=${[{ label: "running", values: all.running, fill: true }, { label: "waiting", values: all.waiting, color: 3 }]} /><//>
    <${Card} title="Time to first token"><${Chart} label="Time to first token" times=${times} series=${percentiles("ttft")} format=${format.seconds} /><//>
    <${Card} title="Time per token"><${Chart} label="Time per output token" times=${times} series=${percentiles("tpot")} format=${format.seconds} /><//>
    <${Card} title="Caches"><${Chart} label="KV cache in use and prefix-cache hit share" times=${times} minimum=${1} format=${(value) => format.percent(value)}
      series=${[{ label: "KV cache in use", values: all.kv_usage, fill: true }, { label: "prefix-cache hits", values: all.cache_hit_share, color: 2 }]} /><//>
    <${Card} title="Requests"><${Chart} label="Requests that ended" times=${times} bars stacked whole minimum=${1} format=${short}
      series=${[
        { label: "ok", values: all.ok, color: 4 },
        { label: "cancelled", values: all.cancelled, color: 6 },
        { label: "refused", values: all.refused, color: 3 },
        { label: "failed", values: all.failed, color: 5 },
      ]} /><//>
    <${Card} title="Errors by kind" class="wide">
      ${errors.length === 0
        ? html`<p class="muted">No errors in this time.</p>`
        : html`<${Chart} label="Errors by kind" times=${times} bars stacked whole minimum=${1} format=${short}
              series=${errors.map(([kind, values]) => ({ label: ERRORS[kind] ?? kind, values }))} />
            <div class="row wrap">${errors.map(([kind]) => html`<${Badge} key=${kind} tone=${all.totals.errors[kind] > 0 ? "bad" : "neutral"}>${ERRORS[kind] ?? kind}: ${format.number(all.totals.errors[kind])}<//>`)}</div>`}
    <//>
  </div>`;
}

/** A count, or the average of some. @param {number | null} value */
function short(value) {
  return value === null || Number.isInteger(value) ? format.short(value) : String(Number(value.toFixed(2)));
}

/** @param {{window: string}} props */
function PublicStatus({ window }) {
  const status = useResource((signal) => get("/status", { window }, { signal }), [window], { interval: 10000 });
  const address = `${serverAddress()}/status?window=${window}`;
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "name", label: "Model", sort: (row) => row.name },
    { key: "ready", label: "State", render: (row) => html`<${Badge} tone=${row.ready ? "good" : "bad"} dot>${row.ready ? "ready" : "not ready"}<//>` },
    { key: "tps", label: "Tokens/s", numeric: true, sort: (row) => row.tps, render: (row) => format.number(row.tps, 1) },
    { key: "ttfb_seconds", label: "First token", numeric: true, sort: (row) => row.ttfb_seconds, render: (row) => format.seconds(row.ttfb_seconds) },
    { key: "uptime_pct", label: "Availability", numeric: true, sort: (row) => row.uptime_pct, render: (row) => (row.uptime_pct === null ? format.NONE : `${row.uptime_pct}%`) },
    { key: "replicas", label: "Replicas", render: (row) => Object.entries(row.replicas).map(([state, count]) => `${count} ${state}`).join(", ") || format.NONE },
  ];
  return html`<${Card} class="flush" title="What the public sees" actions=${html`<${CopyButton} text=${address} label="Copy the address" withText />`}>
    <${Loaded} of=${status}>
      ${(data) => html`${data.stale && html`<${Notice} tone="warning">The database does not answer: these figures are old.<//>`}
        <${Table} caption=${`Public status, ${window}`} columns=${columns} rows=${data.models} />
        <p class="table-note muted small">Anybody may read this at <a href=${`status?window=${window}`}>/status</a>, without a key. Last ${window}, updated ${format.time(data.updated_at)}.</p>`}
    <//>
  <//>`;
}
