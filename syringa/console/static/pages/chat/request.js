/** The body of a chat request from a thread, and the run of its stream into messages. */

import { ApiError, isAbort, stream } from "../../api.js";
import { parseJson } from "../../ui/index.js";

export const PATH = "/v1/chat/completions";
const TOP_LOGPROBS = 5;
const LEAST_SECONDS = 0.02; // of a stream whose speed means something

/** @typedef {import("./conversation.js").Content} Content */
/** @typedef {import("./conversation.js").Message} Message */
/** @typedef {import("./conversation.js").Settings} Settings */
/** @typedef {import("./conversation.js").Thread} Thread */

/**
 * The messages of a request.
 * @param {string} system @param {Message[]} path
 * @returns {any[]}
 */
export function toMessages(system, path) {
  const messages = path.map((each) => toMessage(each.role, each.content.peek())).filter((each) => each !== null);
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

/** @param {Message["role"]} role @param {Content} value @returns {any} null: an answer without anything */
function toMessage(role, value) {
  if (role === "tool") return { role, tool_call_id: value.toolCallId, content: value.text };
  if (role === "user") {
    if (value.images.length === 0) return { role, content: value.text };
    const images = value.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: [...(value.text ? [{ type: "text", text: value.text }] : []), ...images] };
  }
  if (!value.text && value.toolCalls.length === 0 && !value.reasoning) return null;
  return {
    role,
    content: value.text || (value.toolCalls.length > 0 ? null : ""),
    ...(value.reasoning ? { reasoning: value.reasoning } : {}),
    ...(value.toolCalls.length > 0
      ? { tool_calls: value.toolCalls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) }
      : {}),
  };
}

/**
 * The body of a request. Raises Error where the settings have JSON that cannot be read.
 * @param {Settings} settings @param {Message[]} path
 * @param {{model: string}} options `model`: the one that is used if the settings name none
 * @returns {Record<string, any>}
 */
export function buildBody(settings, path, { model }) {
  /** @type {Record<string, any>} */
  const body = { model: settings.model || model, messages: toMessages(settings.system, path), ...settings.parameters };
  if (settings.tools.trim()) {
    body.tools = readJson(settings.tools, "Tools");
    if (settings.toolChoice !== "auto") {
      body.tool_choice = ["none", "required"].includes(settings.toolChoice)
        ? settings.toolChoice
        : { type: "function", function: { name: settings.toolChoice } };
    }
  }
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = readJson(settings.schema || "{}", "Schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: settings.strict, schema } };
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

/** @param {string} text @param {string} name */
function readJson(text, name) {
  const { value, error } = parseJson(text);
  if (error) throw new Error(`${name}: ${error}`);
  return value;
}

/**
 * Generate the answers after `path`: one message, or one for each of `n` choices. Errors end up in the messages.
 * @param {object} options
 * @param {Thread} options.thread
 * @param {Message[]} options.path
 * @param {any} options.model entry of /v1/models that answers, if it is known
 * @param {string} options.defaultModel
 * @param {{text: string, reasoning: string, tokens: import("./conversation.js").TokenInfo[]}} [options.prefix] that is continued
 */
export async function generate({ thread, path, model, defaultModel, prefix }) {
  const settings = thread.settings.peek();
  const parent = path[path.length - 1]?.id ?? null;
  const controller = new AbortController();
  /** @type {Record<string, any>} */
  let body;
  try {
    body = buildBody(settings, path, { model: defaultModel });
  } catch (error) {
    thread.add(parent, "assistant", { state: "failed", error: describe(error) });
    return;
  }
  if (prefix) {
    const message = { role: "assistant", content: prefix.text, ...(prefix.reasoning ? { reasoning: prefix.reasoning } : {}) };
    Object.assign(body, { messages: [...body.messages, message], continue_final_message: true });
  }
  const schema = settings.format === "json_schema" ? body.response_format.json_schema.schema : null;
  const start = { ...prefix, state: /** @type {const} */ ("waiting"), model: body.model, schema };
  const answers = [new Answer(thread.add(parent, "assistant", start))];
  /** @type {any} of all answers, so far */
  let usage = null;
  /** @param {Content["state"]} state @param {Content["error"]} error */
  const end = (state, error = null) => {
    // The usage is that of all answers, so it is shown with the first one only.
    for (const [index, each] of answers.entries()) each?.end(state, error, each.measure(index === 0 ? usage : null, model?.prices, body.n ?? 1));
  };
  thread.running.value = controller;
  try {
    const events = stream("POST", PATH, {
      body,
      signal: controller.signal,
      onResponse: (response) => {
        const ignored = response.headers.get("x-syringa-ignored") ?? "";
        if (ignored) answers[0]?.set({ ignored });
      },
    });
    for await (const data of events) {
      for (const choice of data.choices ?? []) {
        let answer = answers[choice.index];
        if (!answer) answer = answers[choice.index] = new Answer(thread.add(parent, "assistant", start));
        answer.feed(choice);
      }
      usage = data.usage ?? usage;
    }
    end("done");
  } catch (error) {
    if (isAbort(error)) end("stopped");
    else end("failed", describe(error));
  } finally {
    if (thread.running.peek() === controller) thread.running.value = null;
    const first = answers[0];
    if (answers.length > 1 && first) thread.choose(first.message);
  }
}

/** @param {unknown} error @returns {NonNullable<Content["error"]>} */
function describe(error) {
  const details = error instanceof ApiError ? { requestId: error.requestId, param: error.param } : { requestId: null, param: null };
  return { message: error instanceof Error ? error.message : String(error), ...details };
}

/** A message that is being generated. What arrives is shown once for each frame. */
class Answer {
  /** @param {Message} message */
  constructor(message) {
    this.message = message;
    this.started = performance.now();
    /** @type {number | null} */
    this.first = null;
    this.last = this.started;
    /** @type {Partial<Content>} */
    this.changes = {};
    this.scheduled = false;
    /** All tokens: copied once for each frame, since an answer may have 100,000. */
    this.tokens = [...message.content.peek().tokens];
  }

  /** @param {Partial<Content>} values */
  set(values) {
    Object.assign(this.changes, values);
    if (this.scheduled) return;
    this.scheduled = true;
    const flush = () => this.flush();
    // There are no frames while the page is hidden.
    if (document.visibilityState === "visible") requestAnimationFrame(flush);
    else setTimeout(flush, 200);
  }

  flush() {
    this.scheduled = false;
    const changes = this.changes;
    this.changes = {};
    if (this.tokens.length > this.message.content.peek().tokens.length) changes.tokens = [...this.tokens];
    if (Object.keys(changes).length > 0) this.message.content.value = { ...this.message.content.peek(), ...changes };
  }

  /** @returns {Content} */
  get now() {
    return { ...this.message.content.peek(), ...this.changes };
  }

  /** @param {any} choice of a chunk */
  feed(choice) {
    const delta = choice.delta ?? {};
    const now = this.now;
    /** @type {Partial<Content>} */
    const values = {};
    const reasoning = delta.reasoning ?? delta.reasoning_content;
    if (reasoning) values.reasoning = now.reasoning + reasoning;
    if (delta.content) values.text = now.text + delta.content;
    if (delta.tool_calls) values.toolCalls = mergeCalls(now.toolCalls, delta.tool_calls);
    const logprobs = choice.logprobs?.content;
    for (const each of logprobs ?? []) this.tokens.push(toToken(each));
    if (choice.finish_reason) values.finishReason = choice.finish_reason;
    if (reasoning || delta.content || delta.tool_calls) {
      this.last = performance.now();
      this.first ??= this.last;
      values.state = "streaming";
    }
    this.set(values);
  }

  /**
   * The figures of the answer as it is now.
   * @param {any} usage of the request so far, with details where it is complete; null: it is unknown, or told elsewhere
   * @param {any} prices @param {number} answers of the request
   * @returns {import("./conversation.js").Stats}
   */
  measure(usage, prices, answers) {
    const spent = this.first === null ? 0 : (this.last - this.first) / 1000;
    const input = usage?.prompt_tokens ?? null;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? null;
    const output = usage?.completion_tokens ?? null;
    const charged = prices && cached !== null;
    return {
      firstToken: this.first === null ? null : (this.first - this.started) / 1000,
      answers,
      inputTokens: input,
      cachedTokens: cached,
      outputTokens: output,
      tokensPerSecond: answers === 1 && output > 1 && spent > LEAST_SECONDS ? (output - 1) / spent : null,
      cost: charged ? ((input - cached) * prices.input + cached * prices.cached_input + output * prices.output) / 1e6 : null,
    };
  }

  /** @param {Content["state"]} state @param {Content["error"]} error @param {import("./conversation.js").Stats} stats */
  end(state, error, stats) {
    this.set({ state, error, stats: this.first === null && stats.inputTokens === null ? null : stats });
    this.flush();
  }
}

/** @param {import("./conversation.js").ToolCall[]} calls @param {any[]} deltas */
function mergeCalls(calls, deltas) {
  const merged = [...calls];
  for (const delta of deltas) {
    const at = delta.index ?? merged.length;
    const call = merged[at] ?? { id: "", name: "", arguments: "" };
    merged[at] = {
      id: delta.id ?? call.id,
      name: call.name + (delta.function?.name ?? ""),
      arguments: call.arguments + (delta.function?.arguments ?? ""),
    };
  }
  return merged;
}

/** @param {any} entry of `logprobs.content` @returns {import("./conversation.js").TokenInfo} */
function toToken(entry) {
  return { token: entry.token, logprob: entry.logprob, bytes: entry.bytes, top: entry.top_logprobs ?? [] };
}
