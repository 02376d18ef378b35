/** The conversations of this browser: open, delete, export and import. */

import { saveFile } from "../../api.js";
import { ago } from "../../format.js";
import { html, useRef } from "../../lib.js";
import { Button, IconButton, confirm, toast, toastError } from "../../ui/index.js";
import { current, importConversation, newConversation, openConversation, removeConversation, summaries } from "./session.js";

/** @param {{onChosen?: () => void}} props */
export function ConversationList({ onChosen }) {
  const picker = useRef(/** @type {HTMLInputElement | null} */ (null));
  const exportCurrent = () => {
    const { value } = current;
    const name = (value.title.peek() || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    saveFile(JSON.stringify(value.toJSON(), null, 2), `${name}.json`, "application/json");
  };
  /** @param {any} event */
  const importFile = async (event) => {
    const file = event.target.files[0];
    event.target.value = "";
    if (!file) return;
    try {
      await importConversation(JSON.parse(await file.text()));
      toast("The conversation was imported.", "good");
      onChosen?.();
    } catch (error) {
      toastError(error);
    }
  };
  return html`<div class="conversations">
    <${Button} icon="plus" onClick=${() => {
      newConversation();
      onChosen?.();
    }}>New chat<//>
    <ul class="conversation-list">
      ${summaries.value.map(
        (each) => html`<li key=${each.id} class=${each.id === current.value.id ? "active" : ""}>
          <button type="button" class="conversation" aria-current=${each.id === current.value.id ? "true" : undefined} onClick=${() => {
            void openConversation(each.id);
            onChosen?.();
          }}><span>${each.title || "Untitled"}</span><small>${ago(each.updatedAt / 1000)}</small></button>
          <${IconButton} icon="trash" size=${14} label=${`Delete ${each.title || "conversation"}`} onClick=${async () => {
            if (await confirm({ title: "Delete this conversation?", text: `“${each.title || "Untitled"}” is only in this browser.`, action: "Delete" })) void removeConversation(each.id);
          }} />
        </li>`,
      )}
    </ul>
    ${summaries.value.length === 0 && html`<p class="muted small conversations-empty">Conversations are kept in this browser and appear here.</p>`}
    <div class="conversation-files">
      <${Button} size="small" variant="ghost" icon="download" disabled=${current.value.isEmpty()} onClick=${exportCurrent}>Export<//>
      <${Button} size="small" variant="ghost" icon="upload" onClick=${() => picker.current?.click()}>Import<//>
      <input ref=${picker} class="visually-hidden" type="file" accept="application/json,.json" tabindex="-1" aria-label="Import a conversation" onChange=${importFile} />
    </div>
  </div>`;
}
