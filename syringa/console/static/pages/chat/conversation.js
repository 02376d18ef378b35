/**
 * A conversation: one thread, or two that are compared. A thread is a tree of messages with a chosen branch.
 *
 * What a message contains is a signal, so that a token renders one message and not the page.
 */

import { batch, signal } from "../../lib.js";

/**
 * @typedef {{id: string, name: string, arguments: string}} ToolCall
 * @typedef {{token: string, logprob: number, bytes: number[] | null, top: {token: string, logprob: number, bytes: number[] | null}[]}} TokenInfo
 * @typedef {object} Stats
 * @property {number | null} firstToken seconds to the first token
 * @property {number} [answers] of the request: tokens and cost are those of all of them
 * @property {number | null} inputTokens
 * @property {number | null} cachedTokens
 * @property {number | null} outputTokens
 * @property {number | null} tokensPerSecond after the first
 * @property {number | null} cost
 */

/**
 * @typedef {object} Content
 * @property {string} text
 * @property {string} reasoning
 * @property {string[]} images data: addresses
 * @property {ToolCall[]} toolCalls
 * @property {string} toolCallId of a tool's answer
 * @property {TokenInfo[]} tokens log-probabilities, where they were asked for
 * @property {"done" | "waiting" | "streaming" | "stopped" | "failed"} state
 * @property {string | null} finishReason
 * @property {{message: string, requestId: string | null, param: string | null} | null} error
 * @property {Stats | null} stats
 * @property {string} model that answered
 * @property {string} ignored fields that the server did not act on
 * @property {any} schema that the answer was asked to match; null: none
 */

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent
 * @property {"user" | "assistant" | "tool"} role
 * @property {import("../../vendor/signals.js").Signal<Content>} content
 */

/**
 * @typedef {object} Settings
 * @property {string} model "": the default model
 * @property {string} system
 * @property {Record<string, any>} parameters those that are set
 * @property {string} tools JSON text
 * @property {string} toolChoice
 * @property {"text" | "json_object" | "json_schema"} format
 * @property {string} schema JSON text
 * @property {boolean} strict
 * @property {boolean} logprobs
 */

/** @returns {Settings} */
export function defaultSettings() {
  return { model: "", system: "", parameters: {}, tools: "", toolChoice: "auto", format: "text", schema: "", strict: true, logprobs: false };
}

/** @returns {Content} */
function emptyContent() {
  return {
    text: "",
    reasoning: "",
    images: [],
    toolCalls: [],
    toolCallId: "",
    tokens: [],
    state: "done",
    finishReason: null,
    error: null,
    stats: null,
    model: "",
    ignored: "",
    schema: null,
  };
}

const TOKEN = { token: "", logprob: 0 };
/** What the values of a message have inside. */
const EXAMPLES = {
  images: [""],
  toolCalls: [{ id: "", name: "", arguments: "" }],
  tokens: [{ ...TOKEN, top: [TOKEN] }],
  error: { message: "" },
  stats: (/** @type {any} */ value) => isObject(value) && Object.values(value).every((each) => each === null || typeof each === "number"),
  state: (/** @type {any} */ value) => ["done", "stopped", "failed"].includes(value), // nothing generates it here
};

/**
 * Whether a value has the types of an example: null has any, and a list those of its first element. A function says so
 * itself.
 * @param {any} example @param {any} value @returns {boolean}
 */
function isLike(example, value) {
  if (typeof example === "function") return example(value);
  if (Array.isArray(example)) return Array.isArray(value) && value.every((each) => isLike(example[0], each));
  if (isObject(example)) return isObject(value) && Object.entries(example).every(([name, each]) => isLike(each, value[name]));
  return example === null ? value !== undefined : typeof value === typeof example;
}

/**
 * `initial` with those of the values that have its types, or those of the examples: files may have any.
 * @template {object} T
 * @param {T} initial @param {any} values @param {Record<string, any>} [examples] @returns {T}
 */
function withKnown(initial, values, examples = {}) {
  const fits = Object.entries(initial).filter(([name, value]) => isLike(examples[name] ?? value, values?.[name]));
  return { ...initial, ...Object.fromEntries(fits.map(([name]) => [name, values[name]])) };
}

/** @param {string} prefix */
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return `${prefix}_${[...bytes].map((each) => each.toString(16).padStart(2, "0")).join("")}`;
}

/** A message that no thread has yet. @param {string | null} parent @param {Message["role"]} role @param {Partial<Content>} values @returns {Message} */
export function createMessage(parent, role, values) {
  return { id: newId("msg"), parent, role, content: signal({ ...emptyContent(), ...values }) };
}

const ROOT = "root";

export class Thread {
  constructor(settings = defaultSettings()) {
    this.settings = signal(settings);
    /** @type {Map<string, Message>} */
    this.messages = new Map();
    /** The chosen child of each message. @type {Map<string, string>} */
    this.chosen = new Map();
    /** Counts changes of the tree; read it to be rendered again. */
    this.shape = signal(0);
    /** @type {import("../../vendor/signals.js").Signal<AbortController | null>} */
    this.running = signal(null);
  }

  /** The messages of the chosen branch. @returns {Message[]} */
  path() {
    const path = [];
    for (let id = this.chosen.get(ROOT); id !== undefined; id = this.chosen.get(id)) {
      const message = this.messages.get(id);
      if (!message) break;
      path.push(message);
    }
    return path;
  }

  /** The messages before one. @param {Message} message @returns {Message[]} */
  before(message) {
    const path = [];
    for (let id = message.parent; id !== null; ) {
      const parent = this.messages.get(id);
      if (!parent) break;
      path.unshift(parent);
      id = parent.parent;
    }
    return path;
  }

  /** @param {string | null} parent @returns {Message[]} */
  children(parent) {
    return [...this.messages.values()].filter((each) => each.parent === parent);
  }

  /** Add a message and choose it. @param {string | null} parent @param {Message["role"]} role @param {Partial<Content>} values */
  add(parent, role, values) {
    const message = createMessage(parent, role, values);
    this.messages.set(message.id, message);
    this.choose(message);
    return message;
  }

  /** Choose the branch of a message. @param {Message} message */
  choose(message) {
    this.chosen.set(message.parent ?? ROOT, message.id);
    this.shape.value += 1;
  }

  /** Remove a message and everything after it. @param {Message} message @returns {() => void} what brings them back */
  remove(message) {
    const [messages, chosen] = [new Map(this.messages), new Map(this.chosen)];
    const siblings = this.children(message.parent).filter((each) => each !== message);
    const gone = [message.id];
    for (let at = 0; at < gone.length; at += 1) {
      const id = /** @type {string} */ (gone[at]);
      gone.push(...this.children(id).map((each) => each.id));
      this.messages.delete(id);
      this.chosen.delete(id);
    }
    const key = message.parent ?? ROOT;
    const last = siblings[siblings.length - 1];
    if (last) this.chosen.set(key, last.id);
    else this.chosen.delete(key);
    this.shape.value += 1;
    return () => {
      this.messages = new Map([...messages, ...this.messages]);
      this.chosen = new Map([...this.chosen, ...chosen]);
      this.shape.value += 1;
    };
  }

  toJSON() {
    return {
      settings: this.settings.peek(),
      messages: [...this.messages.values()].map((each) => {
        const value = each.content.peek();
        const state = value.state === "streaming" || value.state === "waiting" ? "stopped" : value.state;
        return { id: each.id, parent: each.parent, role: each.role, ...value, state };
      }),
      chosen: Object.fromEntries(this.chosen),
    };
  }

  /** @param {any} data of toJSON, or of a file: raises Error if it is not one */
  static fromJSON(data) {
    const thread = new Thread(withKnown(defaultSettings(), data.settings));
    if (!Array.isArray(data.messages)) throw new Error("The file has no list of messages.");
    for (const each of data.messages) {
      if (!isObject(each) || typeof each.id !== "string" || thread.messages.has(each.id) || !["user", "assistant", "tool"].includes(each.role)) {
        throw new Error("The file has a message without role, or without an id of its own.");
      }
      const { id, parent = null, role } = each;
      if (parent !== null && !thread.messages.has(parent)) throw new Error("The file has a message before the one that it follows.");
      thread.messages.set(id, { id, parent, role, content: signal(withKnown(emptyContent(), each, EXAMPLES)) });
    }
    for (const [key, value] of Object.entries(isObject(data.chosen) ? data.chosen : {})) {
      const parent = thread.messages.get(String(value))?.parent;
      if (parent !== undefined && (parent ?? ROOT) === key) thread.chosen.set(key, String(value));
    }
    return thread;
  }
}

/** @param {any} value @returns {boolean} */
function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export class Conversation {
  constructor(id = newId("chat")) {
    this.id = id;
    /** The organization of the key that it was made with; "" without keys. */
    this.owner = "";
    this.title = signal("");
    this.threads = [new Thread()];
    this.comparing = signal(false);
    this.updatedAt = Date.now();
    /** What `updatedAt` was when it was read or written here: another stored value is another tab's. @type {Set<number>} */
    this.versions = new Set();
  }

  /** The threads that are shown. */
  shown() {
    return this.comparing.value ? this.threads : this.threads.slice(0, 1);
  }

  get first() {
    return /** @type {Thread} */ (this.threads[0]);
  }

  /** Compare with a copy of the first thread, or with the second one where it has messages of its own; or stop comparing. */
  toggleCompare() {
    batch(() => {
      const second = this.threads[1];
      const own = second && [...second.messages.keys()].some((each) => !this.first.messages.has(each));
      if (!this.comparing.peek() && !own) {
        const copy = Thread.fromJSON(structuredClone(this.first.toJSON()));
        if (second) copy.settings = second.settings;
        this.threads = [this.first, copy];
      }
      this.comparing.value = !this.comparing.peek();
    });
  }

  isEmpty() {
    return this.threads.every((each) => each.messages.size === 0);
  }

  toJSON() {
    return {
      format: "syringa-conversation-1",
      id: this.id,
      title: this.title.peek(),
      comparing: this.comparing.peek(),
      updatedAt: this.updatedAt,
      threads: this.threads.map((each) => each.toJSON()),
    };
  }

  /** @param {any} data @param {string} [id] */
  static fromJSON(data, id) {
    if (!isObject(data) || data.format !== "syringa-conversation-1" || !Array.isArray(data.threads) || data.threads.length === 0) {
      throw new Error("This is not a conversation that the console has exported.");
    }
    const conversation = new Conversation(id ?? String(data.id));
    conversation.title.value = String(data.title ?? "");
    conversation.threads = data.threads.slice(0, 2).map(Thread.fromJSON);
    conversation.comparing.value = data.comparing === true && conversation.threads.length === 2;
    conversation.updatedAt = Number(data.updatedAt) || Date.now();
    conversation.versions.add(conversation.updatedAt);
    return conversation;
  }
}
