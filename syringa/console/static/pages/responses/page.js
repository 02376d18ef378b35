/** Responses: those that the server has stored, their chains and items, background runs, and conversations. */

import { del, post } from "../../api.js";
import * as format from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { navigate, route } from "../../state.js";
import { Badge, Button, Card, Dialog, EmptyState, ErrorNotice, Loaded, NumberInput, Page, Select, Table, Tabs, TextArea, confirm } from "../../ui/index.js";
import { ModelSelect, act, readPages, tone, useModel, useModels } from "../shared.js";
import { Items, ResponseDetail } from "./detail.js";
import { toTree } from "./tree.js";

const STATUSES = ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"];
const TABS = [{ id: "responses", label: "Responses" }, { id: "conversations", label: "Conversations" }];

export default function ResponsesPage() {
  const [, , tab = "responses", id = ""] = route.value.split("/");
  const [running, setRunning] = useState(false);
  const run = html`<${Button} variant="primary" icon="play" onClick=${() => setRunning(true)}>Run in the background<//>`;
  return html`<${Page} title="Responses" lead="What the server has stored for your organization." actions=${run}>
    <${Tabs} label="Stored objects" tabs=${TABS} value=${tab} onChange=${(next) => navigate(`/responses/${next}`)}>
      ${(shown) => (shown === "conversations" ? html`<${Conversations} id=${id} />` : html`<${Responses} id=${id} run=${run} />`)}
    <//>
    ${running && html`<${RunDialog} onClose=${() => setRunning(false)} />`}
  <//>`;
}

/** @param {{id: string, run: any}} props */
function Responses({ id, run }) {
  const [status, setStatus] = useState("");
  const [model, setModel] = useState("");
  const [pages, setPages] = useState(1);
  const models = useModels();
  const found = useResource((signal) => readPages("/v1/responses", { status, model }, pages, signal), [status, model, pages], { interval: 5000 });
  const gone = () => {
    navigate("/responses/responses");
    found.reload();
  };
  const filtered = status !== "" || model !== "";
  return html`<div class="stack">
    <div class="grid filters">
      <${Select} label="Status" value=${status} onChange=${setStatus} options=${[{ value: "", label: "Any status" }, ...STATUSES]} />
      <${ModelSelect} all models=${models.data} value=${model} onChange=${setModel} />
    </div>
    <div class=${id ? "split" : ""}>
      <${Loaded} of=${found}>
        ${(/** @type {{data: any[], more: boolean}} */ { data, more }) =>
          data.length === 0
            ? html`<${Card}><${EmptyState} icon="responses" title=${filtered ? "None is like that" : "No stored responses"} action=${!filtered && run}>
                ${filtered ? "Choose another status or model." : "What is sent to /v1/responses is stored, unless it says store: false. Run one in the background to try it."}
              <//><//>`
            : html`<${Card} class="flush"><ul class="tree" aria-label="Responses; those that continue another are below it">
                ${toTree(data).map((node) => html`<${Row} key=${node.response.id} node=${node} current=${id} />`)}
              </ul>${more && html`<div class="tree-more"><${Button} size="small" busy=${found.loading} onClick=${() => setPages(pages + 1)}>Show more<//></div>`}<//>`}
      <//>
      ${id && html`<${ResponseDetail} key=${id} id=${id} onGone=${gone} onChange=${found.reload} />`}
    </div>
  </div>`;
}

/** @param {{node: import("./tree.js").Node, current: string}} props */
function Row({ node, current }) {
  const { response, depth, orphan } = node;
  return html`<li class=${`tree-row depth-${Math.min(depth, 4)}`}>
    <a href=${`#/responses/responses/${response.id}`} aria-current=${response.id === current ? "true" : undefined}>
      <span class="tree-text">${depth > 0 && html`<span class="visually-hidden">continues: </span>`}${response.input_preview || response.id}</span>
      <span class="muted tree-text small">${response.output_preview ?? ""}</span>
      <span class="row wrap small muted">
        <${Badge} tone=${tone(response.status)}>${response.status}<//>${response.background && html`<${Badge}>background<//>`}${orphan && html`<${Badge} title="It continues a response that is older than this list or was deleted">continued<//>`}
        <span>${response.model}</span><span>${format.ago(response.created_at)}</span>
      </span>
    </a>
  </li>`;
}

/** @param {{onClose: () => void}} props */
function RunDialog({ onClose }) {
  const models = useModels("generate");
  const [model, setModel] = useModel(models.data);
  const [input, setInput] = useState("");
  const [limit, setLimit] = useState(/** @type {number | undefined} */ (512));
  const start = useAction(async () => {
    const created = await post("/v1/responses", { model, input, max_output_tokens: limit, background: true });
    onClose();
    navigate(`/responses/responses/${created.id}`);
  });
  return html`<${Dialog} open form title="Run in the background" onClose=${onClose}
    actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} variant="primary" icon="play" busy=${start.busy} disabled=${input.trim() === "" || !models.data?.length} onClick=${() => start.run()}>Run<//>`}>
    <${ErrorNotice} error=${start.error ?? models.error} />
    <p class="muted">It goes on when this page is closed, and can be read, followed and cancelled here.</p>
    <${ModelSelect} models=${models.data} value=${model} onChange=${setModel} />
    <${TextArea} label="Input" rows=${5} value=${input} onInput=${setInput} />
    <${NumberInput} label="Maximum output tokens" min=${1} step=${1} value=${limit} onChange=${setLimit} />
  <//>`;
}

/** @param {{id: string}} props */
function Conversations({ id }) {
  const [pages, setPages] = useState(1);
  const found = useResource((signal) => readPages("/v1/conversations", {}, pages, signal), [pages], { interval: 10000 });
  /** @param {any} row */
  const remove = async (row) => {
    if (!(await confirm({ title: "Delete this conversation?", text: "Its items are deleted with it.", action: "Delete" }))) return;
    if (await act(() => del(`/v1/conversations/${row.id}`), "The conversation was deleted")) navigate("/responses/conversations");
    found.reload();
  };
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "id", label: "Conversation", render: (row) => html`<a class="mono" href=${`#/responses/conversations/${row.id}`}>${row.id}</a>` },
    { key: "metadata", label: "Metadata", render: (row) => Object.entries(row.metadata ?? {}).map(([name, value]) => html`<${Badge} key=${name}>${name}: ${value}<//>`) },
    { key: "items", label: "Items", numeric: true },
    { key: "created_at", label: "Created", render: (row) => html`<span class="nowrap">${format.time(row.created_at)}</span>` },
    { key: "delete", label: html`<span class="visually-hidden">Action</span>`, render: (row) => html`<${Button} size="small" variant="danger" aria-label=${`Delete ${row.id}`} onClick=${() => remove(row)}>Delete<//>` },
  ];
  return html`<div class=${id ? "split" : ""}>
    <${Loaded} of=${found}>
      ${(/** @type {{data: any[], more: boolean}} */ { data, more }) => html`<${Card} class="flush">
        <${Table} caption="Conversations" columns=${columns} rows=${data}
          empty=${html`<${EmptyState} icon="responses" title="No conversations">A conversation is created by POST /v1/conversations, and continued by responses that name it.<//>`} />
        ${more && html`<div class="tree-more"><${Button} size="small" onClick=${() => setPages(pages + 1)}>Show more<//></div>`}<//>`}
    <//>
    ${id && html`<${Card} key=${id} title="Items"><${Items} path=${`/v1/conversations/${id}/items`} interval=${5000} /><//>`}
  </div>`;
}
