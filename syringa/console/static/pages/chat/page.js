/** The Chat page: conversations, threads, composer and settings. */

import { saveFile } from "../../api.js";
import { ago } from "../../format.js";
import { useMedia, useResource, useStored } from "../../hooks.js";
import { html, useEffect, useRef, useState } from "../../lib.js";
import { me } from "../../state.js";
import { Button, Dialog, EmptyState, IconButton, Notice, Tabs, confirm, toast, toastError } from "../../ui/index.js";
import { list } from "../shared.js";
import { CodeDialog } from "./code.js";
import { Composer, attach, draft, useFileDrop } from "./composer.js";
import {
  changed, current, defaultModel, deletion, importConversation, modelOf, models, newConversation, openConversation, removeConversation, send, startChat, stop,
  summaries,
} from "./session.js";
import { SettingsPanel } from "./settings.js";
import { ThreadModel, ThreadView } from "./thread.js";

const EXAMPLES = ["Explain what a prefix cache is, in three sentences.", "Write a haiku about a lilac in the rain.", "List five uses of a paper clip as a table."];
const WIDE = { list: "(min-width: 1400px)", settings: "(min-width: 1180px)" };

/** @returns {Promise<any[]>} models that generate text */
async function loadModels(/** @type {AbortSignal} */ signal) {
  return (await list("/v1/models", {}, signal)).filter((each) => (each.kind ?? "generate") === "generate");
}

export default function ChatPage() {
  const conversation = current.value;
  const comparing = conversation.comparing.value;
  const threads = conversation.shown();
  const busy = threads.some((each) => each.running.value !== null);
  const loading = models.value.some((each) => each.status === "loading");
  const resource = useResource(loadModels, [], { interval: busy || loading ? 1000 : 5000 });
  const [listWanted, setListWanted] = useStored("chat.list", true);
  const [settingsWanted, setSettingsWanted] = useStored("chat.settings", true);
  const wide = { list: useMedia(WIDE.list), settings: useMedia(WIDE.settings) };
  // Beside the threads where there is room, otherwise in a dialog.
  const listOpen = wide.list && listWanted;
  const settingsOpen = wide.settings && settingsWanted;
  const [dialog, setDialog] = useState(/** @type {"" | "list" | "settings" | "code"} */ (""));
  const [settingsOf, setSettingsOf] = useState(0);
  const input = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const organization = me.value?.organization;
  useEffect(() => void startChat(), [organization]);
  useEffect(() => {
    if (resource.data) models.value = resource.data;
  }, [resource.data]);
  useEffect(() => {
    if (wide.settings) input.current?.focus();
  }, [conversation]);

  const first = conversation.first;
  const chosen = (comparing && threads[settingsOf]) || first;
  const settings = chosen.settings.value;
  /** @param {any} next @param {import("./conversation.js").Thread} [thread] */
  const setSettings = (next, thread = chosen) => {
    thread.settings.value = next;
    changed();
  };
  const blind = threads.map((thread) => modelOf(thread) ?? { id: "The model", capabilities: [] }).find((each) => !each.capabilities.includes("vision"));
  const onFiles = (/** @type {Iterable<File>} */ files) => void attach(files, blind?.id ?? "");
  const { dropping, target } = useFileDrop(onFiles);
  const undone = deletion.value && threads.includes(deletion.value.thread) ? deletion.value : null;
  const panel = html`${comparing && html`<${Tabs} label="Settings of" tabs=${[{ id: "0", label: "Thread A" }, { id: "1", label: "Thread B" }]} value=${String(settingsOf)} onChange=${(id) => setSettingsOf(Number(id))} />`}
    <${SettingsPanel} key=${`${conversation.id}-${settingsOf}`} settings=${settings} onChange=${setSettings} models=${resource} defaultModel=${defaultModel()} />`;
  const toggle = (/** @type {"list" | "settings"} */ which) => {
    if (!wide[which]) setDialog(which);
    else if (which === "list") setListWanted(!listOpen);
    else setSettingsWanted(!settingsOpen);
  };
  return html`<div class=${`chat ${listOpen ? "with-list" : ""} ${settingsOpen ? "with-settings" : ""}`} ...${target}>
    <h1 class="visually-hidden">Chat</h1>
    ${listOpen && html`<aside class="chat-list" aria-label="Conversations"><${ConversationList} /></aside>`}
    <div class="chat-main">
      <div class="chat-bar" role="toolbar" aria-label="Conversation">
        <${IconButton} icon="history" label="Conversations" aria-expanded=${String(listOpen)} onClick=${() => toggle("list")} />
        ${!comparing && html`<${ThreadModel} thread=${first} label="Model" />`}
        <span class="grow"></span>
        <${IconButton} icon="plus" label="New chat" onClick=${newConversation} />
        <${IconButton} icon="compare" label="Compare" pressed=${comparing} disabled=${busy} onClick=${() => {
          conversation.toggleCompare();
          setSettingsOf(0);
          changed();
        }} />
        <${IconButton} icon="tokens" label="Tokens" pressed=${threads.every((each) => each.settings.value.logprobs)} onClick=${() => {
          const on = !threads.every((each) => each.settings.peek().logprobs);
          for (const each of threads) setSettings({ ...each.settings.peek(), logprobs: on }, each);
        }} />
        <${IconButton} icon="code" label="Show code" onClick=${() => setDialog("code")} />
        <${IconButton} icon="settings" label="Settings" aria-expanded=${String(settingsOpen)} onClick=${() => toggle("settings")} />
      </div>
      <div class=${`threads ${comparing ? "two" : ""}`}>
        ${threads.map((thread, index) => html`<${ThreadView} key=${`${conversation.id}-${index}`} thread=${thread} name=${comparing ? "AB"[index] : undefined} empty=${html`<${Welcome} comparing=${comparing} onChoose=${(text) => {
          draft.value = { ...draft.value, text };
          input.current?.focus();
        }} />`} />`)}
      </div>
      <div class="composer-box">
        ${undone && html`<${Notice} action=${html`<${Button} size="small" disabled=${busy} onClick=${undone.undo}>Undo<//>`}>${undone.count === 1 ? "A message was" : `${undone.count} messages were`} deleted.<//>`}
        <${Composer} inputRef=${input} onFiles=${onFiles} onSend=${send} onStop=${stop} busy=${busy} vision=${!blind} />
      </div>
      ${dropping && html`<div class="drop-hint">${blind ? `${blind.id} does not read images.` : "Drop images to attach them."}</div>`}
    </div>
    ${settingsOpen && html`<aside class="chat-settings" aria-label="Settings">${panel}</aside>`}
    <${Dialog} open=${dialog === "list"} title="Conversations" onClose=${() => setDialog("")}><${ConversationList} onChosen=${() => setDialog("")} /><//>
    <${Dialog} open=${dialog === "settings"} title="Settings" onClose=${() => setDialog("")}>${panel}<//>
    ${dialog === "code" && html`<${CodeDialog} thread=${chosen} defaultModel=${defaultModel()} draft=${draft.value} onClose=${() => setDialog("")} />`}
  </div>`;
}

/** @param {{comparing: boolean, onChoose: (text: string) => void}} props */
function Welcome({ comparing, onChoose }) {
  return html`<${EmptyState} icon=${comparing ? "compare" : "chat"} title=${comparing ? "Compare two answers" : "What would you like to know?"}
    action=${!comparing && EXAMPLES.map((each) => html`<button key=${each} type="button" class="suggestion" onClick=${() => onChoose(each)}>${each}</button>`)}>
    ${comparing ? "Choose another model or other settings for one thread. The next message goes to both." : "Write a message, or begin with one of these."}
  <//>`;
}

/** The conversations of this browser: open, delete, export and import. @param {{onChosen?: () => void}} props */
function ConversationList({ onChosen }) {
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
    ${summaries.value.length === 0 && html`<p class="muted small">Conversations are kept in this browser and appear here.</p>`}
    <div class="row">
      <${Button} size="small" variant="ghost" icon="download" disabled=${current.value.isEmpty()} onClick=${exportCurrent}>Export<//>
      <${Button} size="small" variant="ghost" icon="upload" onClick=${() => picker.current?.click()}>Import<//>
      <input ref=${picker} class="visually-hidden" type="file" accept="application/json,.json" tabindex="-1" aria-label="Import a conversation" onChange=${importFile} />
    </div>
  </div>`;
}
