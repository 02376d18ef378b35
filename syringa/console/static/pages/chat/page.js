/** The Chat page: conversations, threads, composer and settings. */

import { get } from "../../api.js";
import { useMedia, useResource, useStored } from "../../hooks.js";
import { html, signal, useEffect, useRef, useState } from "../../lib.js";
import { me } from "../../state.js";
import { Dialog, EmptyState, IconButton, Tabs } from "../../ui/index.js";
import { CodeDialog } from "./code.js";
import { Composer } from "./composer.js";
import { NO_DRAFT, attach, useFileDrop } from "./draft.js";
import { ConversationList } from "./list.js";
import { changed, current, defaultModel, models, newConversation, send, startChat, stop } from "./session.js";
import { ModelPicker, ModelStatus, SettingsPanel } from "./settings.js";
import { ThreadView } from "./thread.js";

const EXAMPLES = ["Explain what a prefix cache is, in three sentences.", "Write a haiku about a lilac in the rain.", "List five uses of a paper clip as a table."];
const WIDE = { list: "(min-width: 1400px)", settings: "(min-width: 1180px)" };

/** @returns {Promise<any[]>} models that generate text */
async function loadModels(/** @type {AbortSignal} */ signal) {
  const list = await get("/v1/models", {}, { signal });
  return list.data.filter((/** @type {any} */ each) => (each.kind ?? "generate") === "generate");
}

export default function ChatPage() {
  const conversation = current.value;
  const comparing = conversation.comparing.value;
  const threads = conversation.shown();
  const busy = threads.some((each) => each.running.value !== null);
  const resource = useResource(loadModels, [], { interval: busy ? 1000 : 5000 });
  const [listWanted, setListWanted] = useStored("chat.list", true);
  const [settingsWanted, setSettingsWanted] = useStored("chat.settings", true);
  const wide = { list: useMedia(WIDE.list), settings: useMedia(WIDE.settings) };
  // Beside the threads where there is room, otherwise in a dialog.
  const listOpen = wide.list && listWanted;
  const settingsOpen = wide.settings && settingsWanted;
  const [dialog, setDialog] = useState(/** @type {"" | "list" | "settings" | "code"} */ (""));
  const [settingsOf, setSettingsOf] = useState(0);
  const [draft] = useState(() => signal(NO_DRAFT));
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
  const firstSettings = first.settings.value;
  const modelOf = (/** @type {import("./conversation.js").Thread} */ thread) => models.value.find((each) => each.id === (thread.settings.value.model || defaultModel()));
  const model = modelOf(first);
  /** @param {any} next @param {import("./conversation.js").Thread} [thread] */
  const setSettings = (next, thread = chosen) => {
    thread.settings.value = next;
    changed();
  };
  const blind = threads.map((thread) => modelOf(thread) ?? { id: "The model", capabilities: [] }).find((each) => !each.capabilities.includes("vision"));
  const onFiles = (/** @type {Iterable<File>} */ files) => void attach(draft, files, blind?.id ?? "");
  const { dropping, target } = useFileDrop(onFiles);
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
        ${!comparing &&
        html`<div class="chat-model"><${ModelPicker} label="Model" hideLabel value=${firstSettings.model} defaultModel=${defaultModel()} models=${models.value} onChange=${(id) => setSettings({ ...firstSettings, model: id }, first)} />
          ${model && html`<${ModelStatus} status=${model.status} />`}</div>`}
        <span class="grow"></span>
        <${IconButton} icon="plus" class="new-chat" label="New chat" onClick=${newConversation} />
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
      <div class="composer-box"><${Composer} inputRef=${input} draft=${draft} onFiles=${onFiles} onSend=${send} onStop=${stop} busy=${busy} vision=${!blind} /></div>
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
