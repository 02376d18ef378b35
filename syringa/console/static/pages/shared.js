/** What several pages need: lists of the server, choosing a model, and colors of states. */

import { get, post } from "../api.js";
import { percent, seconds } from "../format.js";
import { useResource } from "../hooks.js";
import { effect, html, signal, useState } from "../lib.js";
import { me, session } from "../state.js";
import { Progress, Select, toast, toastError } from "../ui/index.js";

const PAGE_SIZE = 50;
const LISTED_MS = 1000;

/** @typedef {import("../ui/table.js").Column} Column */
/** @typedef {"neutral" | "good" | "warning" | "bad" | "accent"} Tone */

/**
 * The entries of a list.
 * @param {string} path @param {import("../api.js").RequestOptions["query"]} [query] @param {AbortSignal} [signal]
 * @returns {Promise<any[]>}
 */
export async function list(path, query, signal) {
  return (await get(path, query, { signal })).data;
}

/**
 * The entries of the first `pages` pages of a list, and whether there are more.
 * @param {string} path @param {any} query @param {number} pages @param {AbortSignal} signal
 */
export async function readPages(path, query, pages, signal) {
  /** @type {any[]} */
  const data = [];
  let more = true;
  for (let page = 0; page < pages && more; page += 1) {
    const found = await get(path, { ...query, limit: PAGE_SIZE, after: data.at(-1)?.id }, { signal });
    data.push(...found.data);
    more = found.has_more;
  }
  return { data, more };
}

/** @param {string} id which may contain slashes */
export function modelPath(id) {
  return `/admin/models/${id.split("/").map(encodeURIComponent).join("/")}`;
}

/** Wait until lists show a change of models, nodes or pools, which is made beside the request that asks for it. */
export function listed() {
  return new Promise((resolve) => setTimeout(resolve, LISTED_MS));
}

/** Begin to load a model, and wait until the server lists it as loading. @param {string} id */
export async function loadModel(id) {
  await post(`${modelPath(id)}/load`);
  await listed();
}

/** @type {Record<string, Tone>} */
const TONES = {
  loaded: "good", ready: "good", ok: "good", completed: "good", active: "good",
  loading: "accent", running: "accent", in_progress: "accent", validating: "accent", finalizing: "accent", fetching: "accent",
  queued: "accent", draining: "warning", closing: "warning", cancelling: "warning", incomplete: "warning", degraded: "warning",
  hanging: "bad", failed: "bad", lost: "bad", expired: "bad",
};

/** The color of a state of a model, response, batch, node, pool or replica. @param {string} state */
export function tone(state) {
  return TONES[state] ?? "neutral";
}

const LOADING = /** @type {Record<string, string>} */ ({
  queued: "waiting to start", fetching: "copying its files", starting: "starting its worker", weights: "reading weights", warmup: "warming up",
});

/** The state of a model, and of one that loads how far it is. @param {any} model */
export function stateOf({ status, loading }) {
  return loading?.fraction ? `${status} ${percent(loading.fraction)}` : status;
}

/** How far a model is in being loaded. @param {{model: any, elapsed?: number}} props `elapsed`: seconds for which it is waited for */
export function ModelLoading({ model: { id, loading }, elapsed }) {
  const waited = Math.floor(elapsed ?? loading?.seconds ?? 0);
  const figures = [loading?.fraction && percent(loading.fraction), waited && (waited < 60 ? `${waited} s` : seconds(waited))];
  return html`<div class="model-loading">
    <div class="row between"><span role="status">Loading <strong>${id}</strong>${loading && `: ${LOADING[loading.phase]}`}</span><span class="muted">${figures.filter(Boolean).join(", ")}</span></div>
    <${Progress} value=${loading?.fraction} label=${`Loading ${id}`} />
  </div>`;
}

/** The models that the caller may use. @param {string} [kind] generate, embed or score */
export function useModels(kind) {
  return useResource(async (signal) => (await list("/v1/models", {}, signal)).filter((each) => !kind || each.kind === kind), [kind], { interval: 15000 });
}

/**
 * @param {{models: any[] | undefined, value: string, onChange: (id: string) => void, all?: boolean, label?: string}} props
 *   `all`: also none of them, for filters
 */
export function ModelSelect({ models, value, onChange, all = false, label = "Model" }) {
  const options = (models ?? []).map((each) => ({ value: each.id, label: each.status === "cold" ? `${each.id} (cold)` : each.id }));
  return html`<${Select} label=${label} value=${value} onChange=${onChange} options=${all ? [{ value: "", label: "All models" }, ...options] : options} />`;
}

/** The model that is chosen until the user chooses one: the server's default if it is among them. @param {any[] | undefined} models */
export function defaultModel(models) {
  const preferred = me.value?.details.server?.default_model;
  return (models?.find((each) => each.id === preferred) ?? models?.[0])?.id ?? "";
}

/**
 * The model that the user has chosen; before, and once it is removed, the default one.
 * @param {any[] | undefined} models @returns {[string, (id: string) => void]}
 */
export function useModel(models) {
  const [chosen, choose] = useState("");
  return [models?.some((each) => each.id === chosen) ? chosen : defaultModel(models), choose];
}

/**
 * What was written on a page, also while other pages are shown, until the user signs out.
 * @template T
 * @param {T} initial
 */
export function draft(initial) {
  const kept = signal(initial);
  effect(() => {
    if (session.value === "signed-out") kept.value = initial;
  });
  return kept;
}

/** Do something that a button asks for; say what was done, or why not. @param {() => Promise<any>} action @param {string} [done] */
export async function act(action, done) {
  try {
    await action();
    if (done) toast(done, "good");
    return true;
  } catch (error) {
    toastError(error);
    return false;
  }
}
