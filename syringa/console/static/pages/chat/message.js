/** One message of a thread: text, thoughts, tool calls, tokens and figures. */

import { money, number, seconds } from "../../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../../lib.js";
import { Badge, Button, CopyButton, ErrorNotice, GrowingTextArea, Icon, IconButton, Spinner, TextArea } from "../../ui/index.js";
import { Markdown } from "../../ui/markdown.js";
import { Validator } from "../../vendor/json-schema/index.js";
import { ModelLoading } from "../shared.js";
import { Tokens } from "./tokens.js";

/** @typedef {import("./conversation.js").Message} Message */
/** @typedef {import("./conversation.js").Content} Content */

/**
 * @typedef {object} Actions what the thread can do with a message
 * @property {(message: Message) => void} regenerate
 * @property {(message: Message, text: string, images: string[]) => void} edit
 * @property {(message: Message) => void} choose
 * @property {(message: Message) => void} remove
 * @property {(message: Message, at: number, alternative: any) => void} branch
 * @property {(message: Message, answers: {id: string, text: string}[]) => void} answerCalls
 */

/**
 * @param {{message: Message, siblings: Message[], actions: Actions, busy: boolean, last: boolean, model: any}} props
 */
export function MessageView({ message, siblings, actions, busy, last, model }) {
  const value = message.content.value;
  const [editing, setEditing] = useState(false);
  const streaming = value.state === "streaming" || value.state === "waiting";
  const name = message.role === "user" ? "You" : message.role === "tool" ? "Tool" : value.model || "Assistant";
  return html`<article class=${`message ${message.role}`} aria-label=${name} aria-busy=${streaming ? "true" : undefined}>
    <header class="row">
      <span class=${`avatar ${message.role}`} aria-hidden="true">${message.role === "user" ? "Y" : html`<${Icon} name=${message.role === "tool" ? "tool" : "chat"} size=${13} />`}</span>
      <span class="message-name">${name}</span>
      ${siblings.length > 1 && html`<${Branches} message=${message} siblings=${siblings} onChoose=${actions.choose} disabled=${busy} />`}
    </header>
    <div class="message-body">
      ${editing
        ? html`<${Editor} value=${value} busy=${busy} onCancel=${() => setEditing(false)} onSave=${(text) => {
            setEditing(false);
            actions.edit(message, text, value.images);
          }} />`
        : html`<${Body} message=${message} value=${value} streaming=${streaming} actions=${actions} busy=${busy} last=${last} model=${model} />`}
    </div>
    ${!editing && !streaming && html`<${Footer} message=${message} value=${value} actions=${actions} busy=${busy} onEdit=${() => setEditing(true)} />`}
  </article>`;
}

/** @param {{message: Message, value: Content, streaming: boolean, actions: Actions, busy: boolean, last: boolean, model: any}} props */
function Body({ message, value, streaming, actions, busy, last, model }) {
  const [showTokens, setShowTokens] = useState(true);
  if (message.role === "tool") return html`<pre class="tool-answer">${value.text}</pre>`;
  if (message.role === "user") {
    return html`${value.images.map((url, index) => html`<img key=${index} class="attachment" src=${url} alt=${`Image ${index + 1}`} />`)}<div class="user-text">${value.text}</div>`;
  }
  const tokens = value.tokens.length > 0;
  return html`
    ${value.reasoning && html`<${Thoughts} text=${value.reasoning} open=${streaming && !value.text && value.toolCalls.length === 0} />`}
    ${tokens &&
    html`<div class="view-switch" role="group" aria-label="View">
      <button type="button" aria-pressed=${String(!showTokens)} onClick=${() => setShowTokens(false)}>Text</button>
      <button type="button" aria-pressed=${String(showTokens)} onClick=${() => setShowTokens(true)}>Tokens</button>
    </div>`}
    ${tokens && showTokens
      ? html`<${Tokens} tokens=${value.tokens} onBranch=${busy ? undefined : (at, chosen) => actions.branch(message, at, chosen)} />`
      : value.text && html`<${Markdown} text=${value.text} streaming=${streaming} />`}
    ${value.toolCalls.map((call, index) => html`<${ToolCallView} key=${index} call=${call} streaming=${streaming} />`)}
    ${last && !busy && value.toolCalls.length > 0 && value.state === "done" && html`<${CallAnswers} calls=${value.toolCalls} onSend=${(answers) => actions.answerCalls(message, answers)} />`}
    ${value.state === "waiting" && html`<${Waiting} model=${model} />`}
    ${value.state === "streaming" && html`<span class="caret" aria-hidden="true"></span>`}
    ${value.schema !== null && value.state === "done" && value.text && html`<${SchemaCheck} text=${value.text} schema=${value.schema} finishReason=${value.finishReason} />`}
    ${value.error && html`<${ErrorNotice} error=${value.error} onRetry=${busy ? undefined : () => actions.regenerate(message)} />`}
    ${value.state === "stopped" && html`<${Badge}>Stopped<//>`}
    ${value.finishReason === "length" && html`<${Badge} tone="warning" title="The answer reached max_completion_tokens or the end of the context">Cut at the maximum length<//>`}
    ${value.ignored && html`<p class="small muted">The server did not act on: <code>${value.ignored}</code></p>`}
  `;
}

/** What is waited for before the first token: a model that loads, or the queue. @param {{model: any}} props */
function Waiting({ model }) {
  const [elapsed, setElapsed] = useState(0);
  useEffect(() => {
    const started = performance.now();
    const timer = setInterval(() => setElapsed((performance.now() - started) / 1000), 500);
    return () => clearInterval(timer);
  }, []);
  if (model?.status === "cold" || model?.status === "loading") {
    return html`<${ModelLoading} model=${model} elapsed=${elapsed} />`;
  }
  return html`<${Spinner} small label=${elapsed > 2 ? `Waiting for the first token, ${seconds(Math.floor(elapsed))}` : ""} />`;
}

/** @param {{text: string, open: boolean}} props */
function Thoughts({ text, open }) {
  const [chosen, setChosen] = useState(/** @type {boolean | null} */ (null));
  const shown = chosen ?? open;
  return html`<section class="thoughts">
    <button type="button" class="thoughts-toggle" aria-expanded=${String(shown)} onClick=${() => setChosen(!shown)}>
      <${Icon} name="brain" size=${15} /><span>${open ? "Thinking" : "Thoughts"}</span><${Icon} name=${shown ? "up" : "down"} size=${13} />
    </button>
    ${shown && html`<div class="thoughts-text">${text}</div>`}
  </section>`;
}

/** @param {{call: import("./conversation.js").ToolCall, streaming: boolean}} props */
function ToolCallView({ call, streaming }) {
  return html`<section class="tool-call" aria-label=${`Call of ${call.name}`}>
    <header class="row"><${Icon} name="tool" size=${14} /><code>${call.name}</code>${streaming && html`<${Spinner} small />`}</header>
    <pre>${streaming ? call.arguments : pretty(call.arguments)}</pre>
  </section>`;
}

/** @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {{calls: import("./conversation.js").ToolCall[], onSend: (answers: {id: string, text: string}[]) => void}} props */
function CallAnswers({ calls, onSend }) {
  const [texts, setTexts] = useState(() => calls.map(() => ""));
  return html`<form class="call-answers" onSubmit=${(event) => {
    event.preventDefault();
    onSend(calls.map((call, index) => ({ id: call.id, text: texts[index] ?? "" })));
  }}>
    ${calls.map(
      (call, index) => html`<${TextArea} key=${index} label=${html`Result of <code>${call.name}</code>`} rows=${2} mono placeholder='{"temperature": 21}' value=${texts[index]}
        onInput=${(text) => setTexts(texts.map((each, at) => (at === index ? text : each)))} />`,
    )}
    <${Button} variant="primary" size="small" type="submit" disabled=${texts.some((each) => each.trim() === "")}>Send ${calls.length > 1 ? "results" : "result"}<//>
  </form>`;
}

/** @param {{text: string, schema: any, finishReason: string | null}} props */
function SchemaCheck({ text, schema, finishReason }) {
  const result = useMemo(() => validate(text, schema), [text, schema]);
  if (result === null) return html`<${Badge} tone="good" dot>Matches the schema<//>`;
  const cut = finishReason === "length" ? " The answer was cut at its maximum length." : "";
  return html`<div class="schema-check row wrap"><${Badge} tone="bad" dot>Does not match the schema<//><span class="small muted">${result}${cut}</span></div>`;
}

/** @param {string} text @param {any} schema @returns {string | null} what is wrong */
function validate(text, schema) {
  let instance;
  try {
    instance = JSON.parse(text);
  } catch (error) {
    return `Not JSON: ${error instanceof Error ? error.message : error}`;
  }
  try {
    const { valid, errors } = new Validator(schema, "2020-12", false).validate(instance);
    const worst = errors[errors.length - 1];
    return valid ? null : worst ? `${worst.instanceLocation}: ${worst.error}` : "The value is not valid.";
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** @param {{message: Message, siblings: Message[], onChoose: (message: Message) => void, disabled: boolean}} props */
function Branches({ message, siblings, onChoose, disabled }) {
  const at = siblings.indexOf(message);
  /** @param {number} step */
  const go = (step) => {
    const next = siblings[at + step];
    if (next) onChoose(next);
  };
  return html`<span class="branches">
    <${IconButton} icon="left" size=${13} label="Previous branch" disabled=${disabled || at === 0} onClick=${() => go(-1)} />
    <span class="nowrap">${at + 1} / ${siblings.length}</span>
    <${IconButton} icon="right" size=${13} label="Next branch" disabled=${disabled || at === siblings.length - 1} onClick=${() => go(1)} />
  </span>`;
}

/** @param {{value: Content, busy: boolean, onSave: (text: string) => void, onCancel: () => void}} props */
function Editor({ value, busy, onSave, onCancel }) {
  const [text, setText] = useState(value.text);
  const input = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => input.current?.focus(), []);
  return html`<div class="editor">
    <${GrowingTextArea} class="input" inputRef=${input} aria-label="Edit the message" value=${text} onInput=${(event) => setText(event.target.value)}
      onKeyDown=${(event) => {
        if (event.isComposing) return;
        if (event.key === "Escape") onCancel();
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !busy) onSave(text);
      }} />
    <div class="row"><${Button} size="small" variant="primary" disabled=${busy} onClick=${() => onSave(text)}>Save as a new branch<//><${Button} size="small" variant="ghost" onClick=${onCancel}>Cancel<//></div>
  </div>`;
}

/** @param {{message: Message, value: Content, actions: Actions, busy: boolean, onEdit: () => void}} props */
function Footer({ message, value, actions, busy, onEdit }) {
  const stats = value.stats;
  const of = (stats?.answers ?? 1) > 1 ? ` of ${stats?.answers} answers` : "";
  return html`<footer class="message-footer">
    <div class="message-actions">
      ${value.text && html`<${CopyButton} text=${value.text} label="Copy the message" />`}
      ${message.role !== "tool" && html`<${IconButton} icon="edit" size=${16} label="Edit" disabled=${busy} onClick=${onEdit} />`}
      ${message.role === "assistant" && html`<${IconButton} icon="refresh" size=${16} label="Regenerate" disabled=${busy} onClick=${() => actions.regenerate(message)} />`}
      <${IconButton} icon="trash" size=${16} label="Delete this and what follows" disabled=${busy} onClick=${() => actions.remove(message)} />
    </div>
    ${stats &&
    html`<dl class="figures">
      <div title="Time to first token"><dt>First token</dt><dd>${seconds(stats.firstToken)}</dd></div>
      ${stats.tokensPerSecond !== null && html`<div title="Tokens per second after the first"><dt>Speed</dt><dd>${number(stats.tokensPerSecond, 1)} tok/s</dd></div>`}
      ${stats.inputTokens !== null && html`<div title=${stats.cachedTokens ? `${stats.cachedTokens} of them from the prefix cache` : "Tokens of the prompt"}><dt>In</dt><dd>${number(stats.inputTokens)}</dd></div>`}
      ${stats.outputTokens !== null && html`<div title=${value.state === "done" ? "Tokens generated" : "Tokens generated until it ended"}><dt>Out${of}</dt><dd>${number(stats.outputTokens)}</dd></div>`}
      ${stats.cost !== null && html`<div title="Cost by the model's prices"><dt>Cost${of}</dt><dd>${money(stats.cost)}</dd></div>`}
    </dl>`}
  </footer>`;
}
