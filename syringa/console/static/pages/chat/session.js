/** The conversation that is open, and what is done with its threads. It goes on while another page is shown. */

import { effect, signal } from "../../lib.js";
import { me, readStorage, session, writeStorage } from "../../state.js";
import { toast } from "../../ui/index.js";
import { Conversation, newId } from "./conversation.js";
import { generate } from "./request.js";
import { deleteConversation, listConversations, readConversation, writeConversation } from "./storage.js";
import { textWith } from "./tokens.js";

/** @typedef {import("./conversation.js").Message} Message */
/** @typedef {import("./conversation.js").Thread} Thread */

const LAST = "syringa.chat";
const TITLE_LENGTH = 60;
const SAVE_MS = 400;

export const current = signal(new Conversation());
/** @type {import("../../vendor/signals.js").Signal<import("./storage.js").Summary[]>} */
export const summaries = signal([]);
/** Entries of /v1/models, which the page keeps current. @type {import("../../vendor/signals.js").Signal<any[]>} */
export const models = signal([]);
/** The last messages that were deleted, until something is asked. */
export const deletion = signal(/** @type {{thread: Thread, count: number, undo: () => void} | null} */ (null));

/** @type {string | null} */
let owner = null;
let timer = 0;
/** @type {Conversation | null} */
let unsaved = null;
/** Conversations that are generated in, also while another one is shown. @type {Set<Conversation>} */
const generating = new Set();
/** Ids of conversations that must not be stored again. @type {Set<string>} */
const removed = new Set();
/** Counts what is shown, so that a slow read does not replace what was chosen after it. */
let shows = 0;
let toldUnstored = false;

/** The organization that conversations belong to. */
function currentOwner() {
  return me.peek()?.organization ?? "";
}

/** The model of threads that name none: one that the key may use, and that generates text. */
export function defaultModel() {
  const { server, models: allowed } = me.value?.details ?? {};
  const usable = models.value.length > 0 ? models.value.map((each) => each.id) : (allowed ?? []);
  const preferred = server?.default_model;
  return String((usable.length === 0 || usable.includes(preferred) ? preferred : usable[0]) ?? "");
}

/** What /v1/models says of the model of a thread. @param {Thread} thread */
export function modelOf(thread) {
  const id = thread.settings.value.model || defaultModel();
  return models.value.find((each) => each.id === id);
}

/** Open the last conversation of the caller, when the page is shown to it first. */
export async function startChat() {
  if (owner === currentOwner()) return;
  owner = currentOwner();
  for (const each of generating) abort(each);
  current.value = owned(new Conversation());
  const turn = ++shows;
  await refreshList();
  const last = readStorage(LAST);
  if (turn === shows && summaries.peek().some((each) => each.id === last)) await openConversation(last);
}

// Signing out ends what runs with the key, and forgets what was shown with it.
effect(() => {
  if (session.value !== "signed-out" || owner === null) return;
  save();
  for (const each of generating) abort(each);
  owner = null;
  shows += 1;
  current.value = new Conversation();
  summaries.value = [];
  models.value = [];
  writeStorage(sessionStorage, LAST, null);
});

/** @param {Conversation} conversation which belongs to the caller from now on */
function owned(conversation) {
  conversation.owner = owner ?? "";
  return conversation;
}

export async function refreshList() {
  const asked = owner;
  if (asked === null) return;
  const found = await listConversations(asked);
  if (asked === owner) summaries.value = found;
}

/** Start a conversation with the settings of the open one. */
export function newConversation() {
  const conversation = new Conversation();
  conversation.first.settings.value = { ...current.peek().first.settings.peek() };
  show(conversation);
}

/** @param {Conversation} conversation */
function show(conversation) {
  shows += 1;
  current.value = owned(conversation);
  remember(conversation);
}

/** @param {Conversation} conversation which is opened again when the page is reloaded */
function remember(conversation) {
  writeStorage(sessionStorage, LAST, conversation.id);
}

/** @param {string} id @param {boolean} [again] also if it is open */
export async function openConversation(id, again = false) {
  const turn = ++shows;
  if (id === current.peek().id && !again) return;
  const running = [...generating].find((each) => each.id === id);
  if (running) {
    show(running);
    return;
  }
  save();
  const data = await readConversation(id);
  if (turn !== shows) return;
  if (data === null) {
    toast("The conversation is no longer in this browser.", "bad");
    await refreshList();
    return;
  }
  show(Conversation.fromJSON(data, id));
}

/** @param {string} id */
export async function removeConversation(id) {
  removed.add(id);
  for (const each of generating) if (each.id === id) abort(each);
  await deleteConversation(id);
  if (id === current.peek().id) newConversation();
  await refreshList();
}

/** @param {any} data of a file */
export async function importConversation(data) {
  const conversation = Conversation.fromJSON(data, newId("chat"));
  show(conversation);
  await store(conversation);
}

/** Store the conversation soon. @param {Conversation} [conversation] */
export function changed(conversation = current.peek()) {
  if (unsaved !== conversation) save();
  clearTimeout(timer);
  unsaved = conversation;
  timer = setTimeout(save, SAVE_MS);
}

/** Store at once what waits for it. */
function save() {
  clearTimeout(timer);
  const conversation = unsaved;
  unsaved = null;
  if (conversation) void store(conversation);
}
window.addEventListener("pagehide", () => {
  save();
  for (const each of generating) void store(each);
});

// What another tab has stored is shown when this one is seen again.
document.addEventListener("visibilitychange", async () => {
  if (document.visibilityState !== "visible") return;
  await refreshList();
  const { id, versions } = current.peek();
  const stored = summaries.peek().find((each) => each.id === id);
  if (stored && !versions.has(stored.updatedAt) && !unsaved && !isGenerating(current.peek())) await openConversation(id, true);
});

/** @param {Conversation} conversation */
async function store(conversation) {
  const empty = conversation.isEmpty();
  if (removed.has(conversation.id) || (empty && conversation.versions.size === 0)) return;
  if (conversation === current.peek()) remember(conversation);
  conversation.updatedAt = Date.now() + Math.random(); // which no other tab has, too
  conversation.versions.add(conversation.updatedAt);
  if (empty || !conversation.title.peek()) {
    const first = conversation.first.path().find((each) => each.role === "user");
    conversation.title.value = (first?.content.peek().text ?? "").trim().replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
  }
  const summary = { id: conversation.id, owner: conversation.owner, title: conversation.title.peek(), updatedAt: conversation.updatedAt };
  const result = await writeConversation(summary, empty ? null : conversation.toJSON(), conversation.versions);
  if (result === "conflict") {
    if (conversation.id === summary.id) { // otherwise an earlier write has met it, too
      conversation.id = newId("chat");
      if (!empty) toast("Another tab has changed this conversation too: what is here goes on as a copy.");
    }
    await store(conversation);
    return;
  }
  if (result === "in memory" && !toldUnstored) {
    toldUnstored = true;
    toast("This browser does not store conversations now: they last until the page is closed.", "bad");
  }
  await refreshList();
}

/** @param {Thread} thread @param {Message[]} path @param {any} [prefix] */
async function answer(thread, path, prefix) {
  const conversation = current.peek();
  generating.add(conversation);
  deletion.value = null;
  changed(conversation);
  await generate({ thread, path, model: modelOf(thread), defaultModel: defaultModel(), prefix });
  if (!isGenerating(conversation)) generating.delete(conversation);
  await store(conversation);
}

/** @param {Conversation} conversation */
function isGenerating(conversation) {
  return conversation.threads.some((each) => each.running.peek() !== null);
}

/** @param {Conversation} conversation */
function abort(conversation) {
  for (const thread of conversation.threads) thread.running.peek()?.abort();
}

/** Send a message to the threads that are shown. @param {string} text @param {string[]} images */
export function send(text, images) {
  shows += 1;
  for (const thread of current.peek().shown()) {
    const path = thread.path();
    const message = thread.add(path[path.length - 1]?.id ?? null, "user", { text, images });
    void answer(thread, [...path, message]);
  }
}

export function stop() {
  abort(current.peek());
}

/** @param {Thread} thread @returns {import("./message.js").Actions} */
export function actionsOf(thread) {
  return {
    regenerate: (message) => void answer(thread, thread.before(message)),
    edit: (message, text, images) => {
      const before = thread.before(message);
      const { model, reasoning } = message.content.peek();
      const edited = thread.add(message.parent, message.role, { text, images, model, reasoning });
      if (message.role === "user") void answer(thread, [...before, edited]);
      else changed();
    },
    choose: (message) => {
      thread.choose(message);
      changed();
    },
    remove: (message) => {
      const before = thread.messages.size;
      const restore = thread.remove(message);
      const undo = () => {
        deletion.value = null;
        restore();
        changed();
      };
      deletion.value = { thread, count: before - thread.messages.size, undo };
      changed();
    },
    branch: (message, at, alternative) => {
      const { tokens, reasoning } = message.content.peek();
      const text = textWith(tokens, at, alternative);
      if (text === null) {
        toast("This token is a part of a character: there is no text to go on from.", "bad");
        return;
      }
      const taken = { ...alternative, top: tokens[at]?.top ?? [] };
      void answer(thread, thread.before(message), { text, reasoning, tokens: [...tokens.slice(0, at), taken] });
    },
    answerCalls: (message, answers) => {
      const path = [...thread.before(message), message];
      for (const { id, text } of answers) path.push(thread.add(path[path.length - 1]?.id ?? null, "tool", { text, toolCallId: id }));
      void answer(thread, path);
    },
  };
}
