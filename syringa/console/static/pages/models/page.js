/** Models: what is loaded and what is not, their memory and traffic; load, unload, pull and remove. */

import { del, get, post } from "../../api.js";
import * as format from "../../format.js";
import { useResource } from "../../hooks.js";
import { html, useRef, useState } from "../../lib.js";
import { may } from "../../state.js";
import { Badge, Button, Card, CodeBlock, Dialog, EmptyState, Loaded, Menu, Notice, Page, Stat, Stats, Switch } from "../../ui/index.js";
import { Chart } from "../../ui/chart.js";
import { ModelLoading, act, list, loadModel, modelPath, tone } from "../shared.js";
import { PullDialog, Pulls, usePulls } from "./pulls.js";

const TRAFFIC_RANGE = "1h";
const STATES = ["loaded", "loading", "hanging", "failed", "cold"];

export default function ModelsPage() {
  const admin = may("admin");
  const [pulling, setPulling] = useState(false);
  const places = useRef(/** @type {Map<string, number>} */ (new Map()));
  const models = useResource(async (signal) => {
    const entries = await list("/v1/models", {}, signal);
    const details = admin ? await list("/admin/models", {}, signal) : [];
    const joined = entries.map((each) => ({ ...details.find((other) => other.id === each.id), ...each }));
    return arrange(joined, places.current);
  }, [admin], { interval: (all) => (all?.some((each) => each.status === "loading") ? 1000 : 4000) });
  const traffic = useResource(async (signal) => (admin ? get("/admin/series", { range: TRAFFIC_RANGE }, { signal }) : null), [admin], { interval: 15000 });
  const pulls = usePulls(admin, models.reload);
  const pull = admin && html`<${Button} variant="primary" icon="download" onClick=${() => setPulling(true)}>Pull a model<//>`;
  return html`<${Page} title="Models" lead="What this server can answer with." actions=${pull}>
    ${admin && html`<${Pulls} of=${pulls} />`}
    <${Loaded} of=${models} label="Loading models">
      ${(/** @type {any[]} */ all) =>
        all.length === 0
          ? html`<${EmptyState} icon="models" title="No models yet" action=${pull}>
              ${admin ? "Pull one, or start the server with the path of a model: syringa serve --model PATH." : "Your key may use none of this server's models. Ask its administrator."}
            <//>`
          : html`<div class="grid">${all.map((each) => html`<${ModelCard} key=${each.id} model=${each} traffic=${traffic.data} admin=${admin} reload=${models.reload} />`)}</div>`}
    <//>
    ${pulling && html`<${PullDialog} known=${pulls.data ?? []} onClose=${() => setPulling(false)} onStarted=${() => { setPulling(false); pulls.reload(); }} />`}
  <//>`;
}

/**
 * Sort models by their states when they are first shown. Later they stay where they are, so that no button moves away
 * from under the pointer; new ones are at the end.
 * @param {any[]} models @param {Map<string, number>} places of those that are shown; updated
 */
function arrange(models, places) {
  /** @param {any} model */
  const place = (model) => places.get(model.id) ?? places.size;
  const sorted = models.sort((a, b) => place(a) - place(b) || STATES.indexOf(a.status) - STATES.indexOf(b.status) || a.id.localeCompare(b.id));
  places.clear();
  sorted.forEach((each, index) => places.set(each.id, index));
  return sorted;
}

/** @param {{model: any, traffic: any, admin: boolean, reload: () => void}} props */
function ModelCard({ model, traffic, admin, reload }) {
  const [shown, setShown] = useState("");
  const [waiting, setWaiting] = useState(false);
  const figures = /** @type {any} */ (traffic?.models.find((/** @type {any} */ each) => each.id === model.id));
  const stats = model.engine_stats;
  const [tokens, speed, way] = model.capabilities.includes("completion") ? ["output_tokens", "tokens_per_second", "out"] : ["input_tokens", "prompt_tokens_per_second", "in"];
  const isUp = ["loaded", "hanging", "loading"].includes(model.status);
  const status = waiting && !isUp ? "loading" : model.status;
  const change = async () => {
    setWaiting(true);
    await act(() => (isUp ? post(`${modelPath(model.id)}/unload`) : loadModel(model.id)));
    setWaiting(false);
    reload();
  };
  const actions = admin && html`<${Button} size="small" busy=${waiting} icon=${isUp ? "stop" : "play"} disabled=${model.status === "loading"} aria-label=${`${isUp ? "Unload" : "Load"} ${model.id}`}
      onClick=${change}>${isUp ? "Unload" : "Load"}<//>
    <${Menu} label=${`More about ${model.id}`} items=${[
      { label: "Configuration", icon: "code", onClick: () => setShown("configuration") },
      ...(model.removable ? [{ label: "Remove", icon: "trash", danger: true, onClick: () => setShown("remove") }] : []),
    ]} />`;
  const title = html`<span class="model-title"><span class="model-name">${model.id}</span><${Badge} tone=${tone(status)} dot>${status}<//></span>`;
  return html`<${Card} class="model-card" title=${title} actions=${actions}>
    <div class="model-tags">
      ${model.capabilities.map((/** @type {string} */ each) => html`<${Badge} key=${each}>${each}<//>`)}
      ${model.aliases.length > 0 && html`<span class="muted">also ${model.aliases.join(", ")}</span>`}
    </div>
    ${model.error && status !== "loading" && html`<${Notice} tone="bad" title=${status === "hanging" ? "It does not respond" : "It could not be loaded"}>${model.error}<//>`}
    ${status === "loading" && html`<${ModelLoading} model=${model} />`}
    <${Stats}>
      ${admin && html`<${Stat} label="Memory" value=${format.bytes(model.memory_bytes)} detail=${model.files && `${format.bytes(model.files.bytes)} on disk`} />`}
      <${Stat} label="Context" value=${format.number(model.max_model_len)} detail="tokens" />
      ${admin && html`<${Stat} label="Precision" value=${model.loaded?.dtype ?? model.dtype ?? format.NONE} />`}
      ${model.dimensions && html`<${Stat} label="Dimensions" value=${format.number(model.dimensions)} />`}
      ${model.prices && html`<${Stat} label="Price per million" value=${`${format.money(model.prices.input)} / ${format.money(model.prices.output)}`} detail="in / out" />`}
      ${stats && html`<${Stat} label="Running" value=${format.number(stats.running)} detail=${stats.waiting > 0 && `${stats.waiting} waiting`} />`}
      ${stats?.kv_tokens > 0 && html`<${Stat} label="KV cache" value=${format.percent(stats.kv_tokens_used / stats.kv_tokens)} detail=${`of ${format.short(stats.kv_tokens)} tokens`} />`}
      ${admin && html`<${Stat} label="Last hour" value=${format.short(figures?.totals.requests ?? 0)} detail=${`requests, ${format.short(figures?.totals[tokens] ?? 0)} tokens ${way}`} />`}
    <//>
    ${figures && html`<${Chart} label=${`Tokens per second of ${model.id}, last hour`} height=${140} times=${traffic.times} format=${format.short}
      series=${[{ label: "tok/s", values: figures[speed], fill: true }]} />`}
    <${Dialog} open=${shown === "configuration"} wide title=${`Configuration of ${model.id}`} onClose=${() => setShown("")}>
      <${CodeBlock} label="configuration" code=${JSON.stringify(model, null, 2)} />
    <//>
    ${shown === "remove" && html`<${RemoveDialog} model=${model} onClose=${() => setShown("")} onDone=${reload} />`}
  <//>`;
}

/** @param {{model: any, onClose: () => void, onDone: () => void}} props */
function RemoveDialog({ model, onClose, onDone }) {
  const [files, setFiles] = useState(false);
  const remove = async () => {
    onClose();
    await act(() => del(modelPath(model.id), { query: { files: files || null } }), `${model.id} was removed`);
    onDone();
  };
  return html`<${Dialog} open title=${`Remove ${model.id}?`} onClose=${onClose}
    actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} variant="danger" onClick=${remove}>Remove<//>`}>
    <p>Running requests finish; new ones get an error.</p>
    ${model.files?.deletable && html`<${Switch} label=${`Delete its files too (${format.bytes(model.files.bytes)})`} checked=${files} onChange=${setFiles} />`}
  <//>`;
}
