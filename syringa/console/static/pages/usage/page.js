/** Usage: requests, tokens and cost by day, model, organization and key. */

import { download } from "../../api.js";
import * as format from "../../format.js";
import { useResource } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { may, me } from "../../state.js";
import { Button, Card, EmptyState, Loaded, Page, Select, Stat, Stats, Table } from "../../ui/index.js";
import { Chart } from "../../ui/chart.js";
import { ModelSelect, act, list, useModels } from "../shared.js";

const DAY = 86400;
const MAX_SERIES = 5; // the others are one
const MAX_ROWS = 100;
const RANGES = [
  { value: "7", label: "Last 7 days" }, { value: "30", label: "Last 30 days" }, { value: "90", label: "Last 90 days" }, { value: "365", label: "Last year" },
];
/** What is counted: its name, its value for a row, and its text. @type {Record<string, {label: string, of: (row: any) => number, format: (value: number) => string}>} */
const MEASURES = {
  requests: { label: "Requests", of: (row) => row.requests, format: format.short },
  tokens: { label: "Tokens", of: (row) => row.input_tokens + row.output_tokens, format: format.short },
  output: { label: "Output tokens", of: (row) => row.output_tokens, format: format.short },
  cost: { label: "Cost", of: (row) => row.cost, format: format.money },
};
const SUMMED = ["requests", "ok", "cancelled", "refused", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost"];

export default function UsagePage() {
  const admin = may("admin");
  const withKeys = me.value?.details.keys_required !== false;
  const [days, setDays] = useState("30");
  const [by, setBy] = useState("model");
  const [measure, setMeasure] = useState("requests");
  const [model, setModel] = useState("");
  const [organization, setOrganization] = useState("");
  const models = useModels();
  const organizations = useResource(async (signal) => (admin && withKeys ? list("/admin/organizations", {}, signal) : []), [admin]);
  const path = admin ? "/admin/usage" : "/v1/usage";
  const since = new Date((Math.floor(Date.now() / 1000 / DAY) - Number(days) + 1) * DAY * 1000).toISOString().slice(0, 10);
  const grouping = `day,${by}${admin && by === "key" ? ",organization" : ""}`;
  const query = { by: grouping, since, model, ...(admin && { organization }) };
  const usage = useResource(async (signal) => ({ rows: await list(path, query, signal), by, days: Number(days) }), [path, by, since, model, organization], { interval: 30000 });
  const groups = ["model", ...(withKeys ? [...(admin ? ["organization"] : []), "key"] : []), "endpoint", "user"];
  const save = () => act(() => download(path, `usage-${since}.csv`, { query: { ...query, format: "csv" } }));
  return html`<${Page} title="Usage" lead=${admin ? "What all organizations have used." : "What your organization has used."} actions=${html`<${Button} icon="download" onClick=${save}>Download CSV<//>`}>
    <div class="grid filters">
      <${Select} label="Time" value=${days} onChange=${setDays} options=${RANGES} />
      <${Select} label="Group by" value=${by} onChange=${setBy} options=${groups.map((each) => ({ value: each, label: capital(each) }))} />
      <${Select} label="Show" value=${measure} onChange=${setMeasure} options=${Object.entries(MEASURES).map(([value, each]) => ({ value, label: each.label }))} />
      <${ModelSelect} all models=${models.data} value=${model} onChange=${setModel} />
      ${(organizations.data?.length ?? 0) > 1 && html`<${Select} label="Organization" value=${organization} onChange=${setOrganization} options=${[{ value: "", label: "All organizations" }, ...(organizations.data ?? []).map((each) => each.id)]} />`}
    </div>
    <${Loaded} of=${usage} label="Loading usage">
      ${(/** @type {{rows: any[], by: string, days: number}} */ report) =>
        report.rows.length === 0
          ? html`<${Card}><${EmptyState} icon="usage" title="Nothing was used in this time">Usage appears here a second after a request has ended. Send one on the <a href="#/chat">chat page</a>, or choose a longer time.<//><//>`
          : html`<${Report} ...${report} measure=${measure} />`}
    <//>
  <//>`;
}

/** A sum of rows, without any yet. @param {string} name @returns {any} */
function group(name) {
  return { name, ...Object.fromEntries(SUMMED.map((each) => [each, 0])) };
}

/** @param {string} word */
function capital(word) {
  return `${word[0]?.toUpperCase()}${word.slice(1)}`;
}

/** What a group of rows is called: keys by their names. @param {any} row one of them @param {string} by */
function nameOf(row, by) {
  if (by === "key" && row.key_name) return row.organization ? `${row.key_name} (${row.organization})` : row.key_name;
  return row[by] || "(unknown)";
}

/** @param {{rows: any[], by: string, days: number, measure: string}} props */
function Report({ rows, by, days, measure }) {
  const shown = /** @type {typeof MEASURES[string]} */ (MEASURES[measure]);
  const total = group("");
  const all = new Map();
  for (const row of rows) {
    const name = row[by] ?? "";
    const own = all.get(name) ?? { ...group(name), label: nameOf(row, by) };
    all.set(name, own);
    for (const each of SUMMED) {
      total[each] += row[each];
      own[each] += row[each];
    }
  }
  const groups = [...all.values()].sort((a, b) => shown.of(b) - shown.of(a));
  const today = Math.floor(Date.now() / 1000 / DAY) * DAY;
  const times = Array.from({ length: days }, (_, index) => today - (days - 1 - index) * DAY);
  const place = new Map(times.map((time, index) => [new Date(time * 1000).toISOString().slice(0, 10), index]));
  const top = groups.slice(0, groups.length > MAX_SERIES + 1 ? MAX_SERIES : MAX_SERIES + 1).map((each) => each.name);
  const series = [...top, ...(groups.length > top.length ? [null] : [])].map((name) => {
    const values = times.map(() => 0);
    for (const row of rows) {
      const index = place.get(row.day);
      const own = row[by] ?? "";
      if (index !== undefined && (name === null ? !top.includes(own) : own === name)) values[index] = (values[index] ?? 0) + shown.of(row);
    }
    return { label: name === null ? "others" : all.get(name).label, values };
  });
  /** @type {(key: string, text: string, value?: (row: any) => any) => import("../shared.js").Column} */
  const figure = (key, text, value) => ({ key, label: text, numeric: true, sort: (row) => row[key], render: value ?? ((row) => format.number(row[key])) });
  const columns = [
    { key: "label", label: capital(by), sort: (/** @type {any} */ row) => row.label },
    figure("requests", "Requests"),
    figure("failed", "Failed"),
    figure("input_tokens", "Input tokens"),
    figure("cached_tokens", "Cached", (row) => format.percent(row.input_tokens ? row.cached_tokens / row.input_tokens : null)),
    figure("output_tokens", "Output tokens"),
    figure("reasoning_tokens", "Reasoning"),
    figure("cost", "Cost", (row) => format.money(row.cost)),
  ];
  return html`<${Card}><${Stats}>
      <${Stat} label="Requests" value=${format.short(total.requests)} detail=${`${format.number(total.failed)} failed, ${format.number(total.refused)} refused`} />
      <${Stat} label="Input tokens" value=${format.short(total.input_tokens)} detail=${`${format.percent(total.input_tokens ? total.cached_tokens / total.input_tokens : 0)} cached`} />
      <${Stat} label="Output tokens" value=${format.short(total.output_tokens)} detail=${`${format.short(total.reasoning_tokens)} of them reasoning`} />
      <${Stat} label="Cost" value=${format.money(total.cost)} detail=${total.cost === 0 ? "no prices are set" : undefined} />
    <//><//>
    <${Card} title=${`${shown.label} by day and ${by}`}><${Chart} label=${`${shown.label} by day and ${by}`} height=${240} bars stacked daily whole=${measure !== "cost"} times=${times} series=${series} format=${shown.format} />
      <${Days} caption=${`${shown.label} by day and ${by}, in figures`} times=${times} series=${series} exact=${measure === "cost" ? format.money : format.number} /><//>
    <${Card} class="flush"><${Table} caption=${`Usage by ${by}`} columns=${columns} rows=${groups} limit=${MAX_ROWS} rowKey=${(row) => row.name} initialSort=${{ key: "requests", descending: true }} />
      ${groups.length > MAX_ROWS && html`<p class="table-note muted small">${format.number(groups.length - MAX_ROWS)} more are in the CSV file.</p>`}<//>`;
}

/**
 * The figures of the chart, for those who do not see it or want them exactly: the days on which something was used.
 * @param {{caption: string, times: number[], series: {label: string, values: number[]}[], exact: (value: number) => string}} props
 */
function Days({ caption, times, series, exact }) {
  const rows = times.map((time, index) => ({ time, index })).filter(({ index }) => series.some((each) => each.values[index]));
  const columns = [
    { key: "time", label: "Day", sort: (/** @type {any} */ row) => row.time, render: (/** @type {any} */ row) => html`<span class="nowrap">${format.utcDay(row.time)}</span>` },
    ...series.map((each, place) => ({
      key: String(place),
      label: each.label,
      numeric: true,
      sort: (/** @type {any} */ row) => each.values[row.index],
      render: (/** @type {any} */ row) => exact(each.values[row.index] ?? 0),
    })),
  ];
  return html`<details class="usage-days"><summary>Figures by day</summary>
    <${Table} caption=${caption} columns=${columns} rows=${rows} rowKey=${(row) => row.time} initialSort=${{ key: "time", descending: true }} />
  </details>`;
}
