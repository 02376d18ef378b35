/** One stored response: its state, its items, and its text while it runs in the background. */

import { del, get, isAbort, post, stream } from "../../api.js";
import * as format from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useEffect, useState } from "../../lib.js";
import { Badge, Button, Card, CodeBlock, ErrorNotice, Loaded, Notice, Progress, Stat, Stats, confirm } from "../../ui/index.js";
import { act, readPages, tone } from "../shared.js";

const ACTIVE = ["queued", "in_progress"];

/** @param {{id: string, onGone: () => void, onChange: () => void}} props */
export function ResponseDetail({ id, onGone, onChange }) {
  const found = useResource((signal) => get(`/v1/responses/${id}`, {}, { signal }), [id], { interval: (read) => (ACTIVE.includes(read?.status) ? 3000 : 0) });
  const response = found.data;
  const active = ACTIVE.includes(response?.status);
  const changed = () => {
    found.reload();
    onChange();
  };
  const cancel = useAction(async () => {
    await post(`/v1/responses/${id}/cancel`);
    changed();
  });
  const remove = async () => {
    if (!(await confirm({ title: "Delete this response?", text: "Those that continue it can no longer be continued.", action: "Delete" }))) return;
    if (await act(() => del(`/v1/responses/${id}`), "The response was deleted")) onGone();
  };
  const actions = response && html`${active && response.background && html`<${Button} size="small" icon="stop" busy=${cancel.busy} onClick=${() => cancel.run()}>Cancel<//>`}
    <${Button} size="small" variant="danger" icon="trash" onClick=${remove}>Delete<//>`;
  return html`<${Card} title="Response" actions=${actions}>
    <${Loaded} of=${found}>
      ${() => html`<div class="stack">
        <div class="row wrap"><${Badge} tone=${tone(response.status)} dot>${response.status}<//>${response.background && html`<${Badge}>background<//>`}<code class="response-id">${id}</code></div>
        <${ErrorNotice} error=${cancel.error} />
        ${response.error && html`<${Notice} tone="bad" title=${response.error.code}>${response.error.message}<//>`}
        ${response.incomplete_details && html`<${Notice} tone="warning">It is incomplete: ${response.incomplete_details.reason}.<//>`}
        <${Stats}>
          <${Stat} label="Input" value=${format.number(response.usage?.input_tokens)} detail=${`${format.number(response.usage?.input_tokens_details?.cached_tokens)} cached`} />
          <${Stat} label="Output" value=${format.number(response.usage?.output_tokens)} detail="tokens" />
          <${Stat} label="Created" value=${html`<span class="response-time">${format.time(response.created_at)}</span>`} detail=${response.model} />
        <//>
        ${response.previous_response_id && html`<p class="small">Continues <a class="mono" href=${`#/responses/responses/${response.previous_response_id}`}>${response.previous_response_id}</a></p>`}
        ${response.conversation && html`<p class="small">In <a class="mono" href=${`#/responses/conversations/${response.conversation.id}`}>${response.conversation.id}</a></p>`}
        <h3>Input</h3><${Items} path=${`/v1/responses/${id}/input_items`} />
        <h3>Output</h3>
        ${active && response.background ? html`<${Live} id=${id} onEnd=${changed} />` : html`<${ItemList} items=${response.output} />`}
        <details><summary>JSON</summary><${CodeBlock} label="response" code=${JSON.stringify(response, null, 2)} /></details>
      </div>`}
    <//>
  <//>`;
}

/** @typedef {{type: string, index: number, written: string}} LiveItem an item of the output, with its text so far */

/** What a background response has written so far, as it grows. @param {{id: string, onEnd: () => void}} props */
function Live({ id, onEnd }) {
  const [items, setItems] = useState(/** @type {LiveItem[]} */ ([]));
  const [pieces, setPieces] = useState(0);
  const [error, setError] = useState(/** @type {any} */ (null));
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    const follow = async () => {
      /** @type {LiveItem[]} */
      let written = [];
      let count = 0;
      try {
        for await (const data of stream("GET", `/v1/responses/${id}`, { query: { stream: true }, signal: controller.signal })) {
          if (data.type === "response.output_item.added") written = [...written, { ...data.item, index: data.output_index, written: "" }];
          if (!String(data.type).endsWith(".delta")) continue;
          written = written.map((each) => (each.index === data.output_index ? { ...each, written: each.written + data.delta } : each));
          count += 1;
          setItems(written);
          setPieces(count);
        }
        onEnd();
      } catch (failure) {
        if (!isAbort(failure)) setError(failure);
      }
    };
    void follow();
    return () => controller.abort();
  }, [id, turn]);
  const again = () => {
    setError(null);
    setTurn(turn + 1);
  };
  return html`<${Progress} label="The response is running" />
    ${error ? html`<${ErrorNotice} error=${error} onRetry=${again} />` : html`<p class="muted small" role="status">${pieces === 0 ? "Waiting for the first token" : `${format.number(pieces)} pieces of text so far`}</p>`}
    ${items.length > 0 && html`<${ItemList} items=${items.map(asItem)} />`}`;
}

/** An item as far as it is written. @param {LiveItem} live */
function asItem({ index: _, written, ...item }) {
  return item.type.endsWith("_call") ? { ...item, arguments: written } : { ...item, content: written };
}

/**
 * The items of a response's input or of a conversation.
 * @param {{path: string, interval?: number}} props `interval`: how often to look for more (ms)
 */
export function Items({ path, interval = 0 }) {
  const [pages, setPages] = useState(1);
  const found = useResource((signal) => readPages(path, { order: "asc" }, pages, signal), [path, pages], { interval });
  return html`<${Loaded} of=${found}>
    ${(/** @type {{data: any[], more: boolean}} */ { data, more }) => html`<${ItemList} items=${data} />${more && html`<${Button} size="small" busy=${found.loading} onClick=${() => setPages(pages + 1)}>Show more<//>`}`}
  <//>`;
}

/** @param {{items: any[]}} props */
function ItemList({ items }) {
  if (items.length === 0) return html`<p class="muted">None.</p>`;
  return html`<ul class="items">${items.map((each, index) => html`<li key=${each.id ?? index} class="item"><div class="item-name">${each.role ?? each.type.replaceAll("_", " ")}${each.name && html` <code>${each.name}</code>`}</div><${ItemBody} item=${each} /></li>`)}</ul>`;
}

/** @param {{item: any}} props */
function ItemBody({ item }) {
  const parts = typeof item.content === "string" ? [{ text: item.content }] : (item.content ?? []);
  const body = item.arguments ?? item.input ?? item.output;
  if (parts.length === 0) return html`<div class="item-text mono">${typeof body === "string" ? body : JSON.stringify(body ?? item, null, 2)}</div>`;
  return parts.map((/** @type {any} */ part, /** @type {number} */ index) => {
    const image = part.image_url?.url ?? part.image_url;
    if (typeof image === "string" && image.startsWith("data:image/")) return html`<img key=${index} class="item-image" src=${image} alt="Image of the input" />`;
    return html`<div key=${index} class="item-text">${part.text ?? part.refusal ?? JSON.stringify(part)}</div>`;
  });
}
