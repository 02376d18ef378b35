/** Downloads of models: which can be pulled, and how far those are that run. */

import { del, post } from "../../api.js";
import * as format from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useRef, useState } from "../../lib.js";
import { Badge, Button, Card, Dialog, ErrorNotice, IconButton, Loaded, Progress, Table, TextInput } from "../../ui/index.js";
import { act, list, tone } from "../shared.js";

/** The downloads of the last day. @param {boolean} admin @param {() => void} onCompleted */
export function usePulls(admin, onCompleted) {
  const before = useRef(0);
  return useResource(async (signal) => {
    const found = admin ? await list("/admin/models/pulls", {}, signal) : [];
    const now = found.filter((each) => each.status === "running").length;
    if (now < before.current) setTimeout(onCompleted, 1200); // it is served within a second
    before.current = now;
    return found;
  }, [admin], { interval: () => (before.current > 0 ? 1000 : 10000) });
}

/** @param {any} pull */
const hasEndedEarly = (pull) => pull.status === "failed" || pull.status === "cancelled";

/**
 * Start a download, and forget those of the same model that have ended early, which it continues.
 * @param {string} model @param {string} id @param {any[]} known the downloads that are listed
 */
async function startPull(model, id, known) {
  const started = await post("/admin/models/pull", { model, ...(id && { id }) });
  const continued = known.filter((each) => hasEndedEarly(each) && each.model === started.model && each.serve_as === started.serve_as);
  await Promise.allSettled(continued.map((each) => del(`/admin/models/pulls/${each.id}`)));
}

/** @param {{of: import("../../hooks.js").Resource<any[]>}} props */
export function Pulls({ of: pulls }) {
  const shown = pulls.data ?? [];
  if (shown.length === 0) return pulls.error && html`<${ErrorNotice} error=${pulls.error} onRetry=${pulls.reload} />`;
  return html`<${Card} title="Downloads"><ul class="pulls" aria-live="polite">${shown.map((each) => html`<${PullRow} key=${each.id} pull=${each} known=${shown} reload=${pulls.reload} />`)}</ul><//>`;
}

/** @param {{pull: any, known: any[], reload: () => void}} props */
function PullRow({ pull, known, reload }) {
  const running = pull.status === "running";
  const { completed_bytes: done, total_bytes: total, bytes_per_second: speed } = pull;
  const isHere = running && total && done >= total; // its checksum is computed, and wheels are unpacked
  const left = running && total && speed ? (total - done) / speed : null;
  const end = () => act(() => del(`/admin/models/pulls/${pull.id}`)).then(reload);
  const again = () => act(() => startPull(pull.model, pull.serve_as, known)).then(reload);
  return html`<li class="pull">
    <div class="pull-line">
      <strong class="model-name">${pull.model}</strong>
      <${Badge} tone=${tone(pull.status)}>${running ? (isHere && pull.stage === "downloading" ? "verifying" : (pull.stage ?? "running")) : pull.status}<//>
      <span class="muted pull-figures">
        ${pull.status === "completed" ? format.bytes(total ?? done) : `${format.bytes(done)}${total ? ` of ${format.bytes(total)}` : ""}`}${speed && running && !isHere ? `, ${format.bytes(speed)}/s` : ""}${left !== null && !isHere ? `, ${format.seconds(left)} left` : ""}
      </span>
      ${hasEndedEarly(pull) && html`<${Button} size="small" icon="refresh" onClick=${again}>Try again<//>`}
      ${running ? html`<${Button} size="small" aria-label=${`Cancel the download of ${pull.model}`} onClick=${end}>Cancel<//>` : html`<${IconButton} icon="close" label=${`Forget the download of ${pull.model}`} onClick=${end} />`}
    </div>
    ${running && html`<${Progress} value=${total ? done : null} max=${total || 1} label=${`Download of ${pull.model}`} />`}
    ${pull.error && html`<div class="field-error">${pull.error}</div>`}
  </li>`;
}

/** @param {{known: any[], onClose: () => void, onStarted: () => void}} props */
export function PullDialog({ known, onClose, onStarted }) {
  const [name, setName] = useState("");
  const [id, setId] = useState("");
  const available = useResource((signal) => list("/admin/models/available", {}, signal), []);
  const pull = useAction(async (/** @type {string} */ model, /** @type {string} */ served) => {
    await startPull(model, served, known);
    onStarted();
  });
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "name", label: "Name", render: (row) => html`<strong>${row.name}</strong><div class="muted">${row.kind === "generate" ? row.license : `${row.kind}, ${row.license}`}</div>` },
    { key: "parameters", label: "Parameters", numeric: true },
    { key: "bytes", label: "Download", numeric: true, sort: (row) => row.bytes, render: (row) => format.bytes(row.bytes) },
    { key: "memory_bytes", label: "Memory", numeric: true, sort: (row) => row.memory_bytes, render: (row) => format.bytes(row.memory_bytes) },
    { key: "context", label: "Context", numeric: true, render: (row) => format.short(row.context) },
    {
      key: "pull",
      label: html`<span class="visually-hidden">Action</span>`,
      render: (row) => html`<${Button} size="small" icon=${row.present ? "plus" : "download"} disabled=${pull.busy} aria-label=${`${row.present ? "Add" : "Pull"} ${row.name}`} onClick=${() => pull.run(row.name, "")}>${row.present ? "Add" : "Pull"}<//>`,
    },
  ];
  return html`<${Dialog} open wide form title="Pull a model" onClose=${onClose}>
    <${ErrorNotice} error=${pull.error} />
    <${Loaded} of=${available}>
      ${(rows) => html`<${Table} caption="Models that can be pulled" columns=${columns} rows=${rows} rowKey=${(row) => row.name} />`}
    <//>
    <form class="pull-form" onSubmit=${(event) => { event.preventDefault(); void pull.run(name.trim(), id.trim()); }}>
      <${TextInput} label="From the Hugging Face Hub" value=${name} onInput=${setName} placeholder="Qwen/Qwen3-0.6B-GGUF:Q8_0" hint="Organization/repository; for GGUF files, :Q4_K_M or another after it." />
      <${TextInput} label="Serve as" value=${id} onInput=${setId} placeholder="the same name" />
      <${Button} type="submit" variant="primary" icon="download" busy=${pull.busy} disabled=${name.trim() === ""}>Pull<//>
    </form>
  <//>`;
}
