/** Batches: files of requests that run when the server has nothing else to do. */

import { call, del, download, post } from "../../api.js";
import * as format from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { Badge, Button, Card, Dialog, EmptyState, ErrorNotice, Field, Loaded, Menu, Notice, Page, Progress, Select, Table, Tabs, TextArea, confirm } from "../../ui/index.js";
import { ModelSelect, act, list, readPages, tone, useModel, useModels } from "../shared.js";

const ACTIVE = ["validating", "in_progress", "finalizing", "cancelling"];
const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"];
const WINDOWS = [{ value: "1h", label: "1 hour" }, { value: "24h", label: "24 hours" }, { value: "7d", label: "7 days" }, { value: "14d", label: "14 days" }];
const TABS = [{ id: "batches", label: "Batches" }, { id: "files", label: "Files" }];

export default function BatchesPage() {
  const [tab, setTab] = useState("batches");
  const [creating, setCreating] = useState(false);
  const [pages, setPages] = useState(1);
  const batches = useResource((signal) => readPages("/v1/batches", {}, pages, signal), [pages], {
    interval: (found) => (found?.data.some((each) => ACTIVE.includes(each.status)) ? 1500 : 10000),
  });
  const create = html`<${Button} variant="primary" icon="plus" onClick=${() => setCreating(true)}>Create batch<//>`;
  const created = () => {
    setCreating(false);
    batches.reload();
  };
  return html`<${Page} title="Batches" lead="Many requests that run in the gaps, at a lower price." actions=${create}>
    <${Tabs} label="Batches and files" tabs=${TABS} value=${tab} onChange=${setTab}>
      ${(id) => (id === "files" ? html`<${Files} />` : html`<${Batches} batches=${batches} create=${create} onMore=${() => setPages(pages + 1)} />`)}
    <//>
    ${creating && html`<${CreateBatch} onClose=${() => setCreating(false)} onCreated=${created} />`}
  <//>`;
}

/** @param {{batches: import("../../hooks.js").Resource<{data: any[], more: boolean}>, create: any, onMore: () => void}} props */
function Batches({ batches, create, onMore }) {
  /** @param {any} row */
  const cancel = async (row) => {
    if (!(await confirm({ title: "Cancel this batch?", text: "What is done remains in its output file.", action: "Cancel batch" }))) return;
    await act(() => post(`/v1/batches/${row.id}/cancel`));
    batches.reload();
  };
  /** @param {any} row */
  const menu = (row) => [
    ...(row.output_file_id ? [{ label: "Output", icon: "download", onClick: () => save(row.output_file_id, `${row.id}-output.jsonl`) }] : []),
    ...(row.error_file_id ? [{ label: "Errors", icon: "download", onClick: () => save(row.error_file_id, `${row.id}-errors.jsonl`) }] : []),
    { label: "Input", icon: "download", onClick: () => save(row.input_file_id, `${row.id}-input.jsonl`) },
    ...(ACTIVE.includes(row.status) ? [{ label: "Cancel", icon: "stop", danger: true, onClick: () => cancel(row) }] : []),
  ];
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "id", label: "Batch", render: (row) => html`<span class="mono small">${row.id}</span><div class="muted small">${row.endpoint}${row.model ? `, ${row.model}` : ""}</div>` },
    { key: "status", label: "Status", sort: (row) => row.status, render: (row) => html`<${Badge} tone=${tone(row.status)} dot>${row.status}<//>${row.errors?.data.map((/** @type {any} */ each, /** @type {number} */ index) => html`<div key=${index} class="field-error">${each.line ? `Line ${each.line}: ` : ""}${each.message}</div>`)}` },
    {
      key: "progress",
      label: "Requests",
      render: ({ request_counts: counts, id }) => html`<div class="nowrap small">${format.number(counts.completed)} of ${format.number(counts.total)}${counts.failed > 0 ? `, ${format.number(counts.failed)} failed` : ""}</div>
        <${Progress} value=${counts.completed + counts.failed} max=${counts.total || 1} label=${`Progress of ${id}`} />`,
    },
    { key: "tokens", label: "Tokens", numeric: true, sort: (row) => row.usage?.total_tokens, render: (row) => format.short(row.usage?.total_tokens) },
    { key: "created_at", label: "Created", sort: (row) => row.created_at, render: (row) => html`<span class="nowrap">${format.ago(row.created_at)}</span><div class="muted small nowrap">within ${row.completion_window}</div>` },
    { key: "actions", label: html`<span class="visually-hidden">Actions</span>`, render: (row) => html`<${Menu} label=${`Actions of ${row.id}`} items=${menu(row)} />` },
  ];
  return html`<${Loaded} of=${batches} label="Loading batches">
    ${(/** @type {{data: any[], more: boolean}} */ { data, more }) => html`<${Card} class="flush">
      <${Table} caption="Batches" columns=${columns} rows=${data}
        empty=${html`<${EmptyState} icon="batches" title="No batches yet" action=${create}>Upload a file with one request on each line, or write some prompts.<//>`} />
      ${more && html`<div class="row"><${Button} size="small" onClick=${onMore}>Show more<//></div>`}
    <//>`}
  <//>`;
}

/** @param {string} file @param {string} name */
const save = (file, name) => act(() => download(`/v1/files/${file}/content`, name));

function Files() {
  const files = useResource((signal) => list("/v1/files", { limit: 1000 }, signal), [], { interval: 10000 });
  /** @param {any} row */
  const remove = async (row) => {
    if (!(await confirm({ title: `Delete ${row.filename}?`, text: "A batch that has not read it fails.", action: "Delete" }))) return;
    await act(() => del(`/v1/files/${row.id}`), "The file was deleted");
    files.reload();
  };
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "filename", label: "File", sort: (row) => row.filename, render: (row) => html`${row.filename}<div class="muted mono small">${row.id}</div>` },
    { key: "purpose", label: "Purpose" },
    { key: "bytes", label: "Size", numeric: true, sort: (row) => row.bytes, render: (row) => format.bytes(row.bytes) },
    { key: "created_at", label: "Created", sort: (row) => row.created_at, render: (row) => html`<span class="nowrap">${format.time(row.created_at)}</span>` },
    { key: "expires_at", label: "Deleted on", render: (row) => html`<span class="nowrap">${format.date(row.expires_at)}</span>` },
    {
      key: "actions",
      label: html`<span class="visually-hidden">Actions</span>`,
      render: (row) => html`<${Menu} label=${`Actions of ${row.filename}`} items=${[{ label: "Download", icon: "download", onClick: () => save(row.id, row.filename) }, { label: "Delete", icon: "trash", danger: true, onClick: () => remove(row) }]} />`,
    },
  ];
  return html`<${Loaded} of=${files}>
    ${(rows) => html`<${Card} class="flush"><${Table} caption="Files" columns=${columns} rows=${rows}
      empty=${html`<${EmptyState} icon="batches" title="No files">Input, output and error files of batches are listed here.<//>`} /><//>`}
  <//>`;
}

/** A line of a batch for a prompt. @param {string} endpoint @param {string} model @param {string} prompt @param {number} index */
function toLine(endpoint, model, prompt, index) {
  const body = endpoint === "/v1/chat/completions" ? { messages: [{ role: "user", content: prompt }] } : endpoint === "/v1/completions" ? { prompt } : { input: prompt };
  return JSON.stringify({ custom_id: String(index + 1), method: "POST", url: endpoint, body: { model, ...body } });
}

/** @param {{onClose: () => void, onCreated: () => void}} props */
function CreateBatch({ onClose, onCreated }) {
  const [kind, setKind] = useState("prompts");
  const [endpoint, setEndpoint] = useState("/v1/chat/completions");
  const [window, setWindow] = useState("24h");
  const [prompts, setPrompts] = useState("");
  const [file, setFile] = useState(/** @type {File | null} */ (null));
  const models = useModels(endpoint === "/v1/embeddings" ? "embed" : "generate");
  const [model, setModel] = useModel(models.data);
  const lines = prompts.split("\n").filter((each) => each.trim() !== "");
  const create = useAction(async () => {
    const written = lines.map((each, index) => toLine(endpoint, model, each, index)).join("\n");
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", kind === "file" && file ? file : new File([written], "prompts.jsonl"));
    const uploaded = await call("POST", "/v1/files", { body: form });
    await post("/v1/batches", { input_file_id: uploaded.id, endpoint, completion_window: window });
    onCreated();
  });
  const ready = kind === "file" ? file !== null : lines.length > 0 && model !== "";
  return html`<${Dialog} open form title="Create a batch" onClose=${onClose}
    actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} variant="primary" busy=${create.busy} disabled=${!ready} onClick=${() => create.run()}>Create<//>`}>
    <${ErrorNotice} error=${create.error} />
    <${Select} label="Endpoint" value=${endpoint} onChange=${setEndpoint} options=${ENDPOINTS} />
    <${Select} label="Within" value=${window} onChange=${setWindow} options=${WINDOWS} hint="What is not done by then is not run." />
    <${Tabs} label="Requests" tabs=${[{ id: "prompts", label: "Write prompts" }, { id: "file", label: "Upload a file" }]} value=${kind} onChange=${setKind}>
      ${(id) =>
        id === "file"
          ? html`<${Field} label="File of requests" hint=${html`JSON on each line: <code>custom_id</code>, <code>method</code>, <code>url</code> and <code>body</code>.`}>
              ${(attributes) => html`<input class="input" type="file" accept=".jsonl,.ndjson,.txt" ...${attributes} onChange=${(event) => setFile(event.target.files[0] ?? null)} />`}
            <//>`
          : html`<div class="stack">
              ${models.data?.length === 0 ? html`<${Notice} tone="warning">No model is for this endpoint.<//>` : html`<${ModelSelect} models=${models.data} value=${model} onChange=${setModel} />`}
              <${TextArea} label="Prompts, one on each line" rows=${6} value=${prompts} onInput=${setPrompts} hint=${`${format.number(lines.length)} requests`} />
            </div>`}
    <//>
  <//>`;
}
