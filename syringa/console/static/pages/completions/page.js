/** Completions: text that a model continues, with the probability of every token, and text that it fills in. */

import { isAbort, stream } from "../../api.js";
import * as format from "../../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../../lib.js";
import { Button, Card, EmptyState, ErrorNotice, Field, Loaded, Notice, NumberInput, Page, Switch, Tabs } from "../../ui/index.js";
import { ModelSelect, draft, useModel, useModels } from "../shared.js";

const SHOW_MS = 60; // a long answer has more chunks than can be drawn
const LEVELS = [0.9, 0.7, 0.5, 0.3, 0.1]; // the least probability of each color but the last
const TABS = [{ id: "text", label: "Text" }, { id: "middle", label: "Fill in the middle" }];

/** The texts of the two tabs, and where the cursor is in them. */
const DRAFTS = {
  text: draft({ text: "The lilac is a shrub that", at: 0 }),
  middle: draft({ text: "def add(a, b):\n    return \n\nprint(add(2, 3))\n", at: 26 }),
};

/** @typedef {{text: string, logprob: number | null, top: Record<string, number> | null}} Token */

export default function CompletionsPage() {
  const models = useModels("generate");
  const [tab, setTab] = useState("text");
  return html`<${Page} title="Completions" lead="Text without a chat template: what the model makes of it, token by token.">
    <${Loaded} of=${models}>
      ${(all) =>
        all.length === 0
          ? html`<${EmptyState} icon="models" title="No model that writes text">Add one on the <a href="#/models">models page</a>.<//>`
          : html`<${Tabs} label="Kind of completion" tabs=${TABS} value=${tab} onChange=${setTab}>
              ${(id) => html`<${Playground} key=${id} models=${all} middle=${id === "middle"} />`}
            <//>`}
    <//>
  <//>`;
}

/** @param {{models: any[], middle: boolean}} props */
function Playground({ models, middle }) {
  const [model, setModel] = useModel(models);
  const written = DRAFTS[middle ? "middle" : "text"];
  const { text } = written.value;
  const [maxTokens, setMaxTokens] = useState(/** @type {number | undefined} */ (48));
  const [temperature, setTemperature] = useState(/** @type {number | undefined} */ (0.7));
  const [seed, setSeed] = useState(/** @type {number | undefined} */ (undefined));
  const [echo, setEcho] = useState(true);
  const [tokens, setTokens] = useState(/** @type {Token[]} */ ([]));
  const [figures, setFigures] = useState("");
  const [note, setNote] = useState("");
  const [error, setError] = useState(/** @type {any} */ (null));
  const [busy, setBusy] = useState(false);
  const controller = useRef(/** @type {AbortController | null} */ (null));
  const area = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => {
    const element = area.current;
    const { at } = written.value;
    element?.setSelectionRange(at, at);
    return () => {
      controller.current?.abort();
      if (element) written.value = { ...written.value, at: element.selectionStart };
    };
  }, []);
  /** @param {string} value */
  const write = (value) => (written.value = { text: value, at: 0 });

  const run = async () => {
    const { signal } = (controller.current = new AbortController());
    setBusy(true);
    setError(null);
    setNote("");
    setFigures("");
    setTokens([]);
    const at = area.current?.selectionStart ?? 0;
    const [before, after] = middle ? [text.slice(0, at), text.slice(at)] : [text, ""];
    const began = performance.now();
    let first = 0;
    let shownAt = 0;
    let answer = "";
    let usage = /** @type {any} */ (null);
    /** @type {Token[]} */
    const found = [];
    const show = () => (middle ? area.current && write(before + cut(answer, after) + after) : setTokens([...found]));
    try {
      const body = {
        model, prompt: before, max_tokens: maxTokens, temperature, seed, stream: true, stream_options: { include_usage: true },
        ...(middle ? { suffix: after } : { logprobs: 5, echo }),
      };
      for await (const data of stream("POST", "/v1/completions", { body, signal })) {
        usage = data.usage ?? usage;
        const choice = data.choices?.[0];
        if (!choice) continue;
        first ||= performance.now();
        answer += choice.text;
        const scores = choice.logprobs;
        scores?.tokens.forEach((/** @type {string} */ each, /** @type {number} */ index) => found.push({ text: each, logprob: scores.token_logprobs[index], top: scores.top_logprobs?.[index] ?? null }));
        if (performance.now() - shownAt < SHOW_MS) continue;
        shownAt = performance.now();
        show();
      }
      show();
      if (middle && after && answer.endsWith(after)) setNote("This model has no fill-in-the-middle tokens: it has not seen the text after the cursor.");
      const seconds = (performance.now() - first) / 1000;
      const count = usage?.completion_tokens ?? 0;
      setFigures(`${format.number(usage?.prompt_tokens)} tokens in, ${format.number(count)} out, first after ${format.seconds((first - began) / 1000)}${count > 1 && seconds > 0 ? `, ${format.number((count - 1) / seconds, 1)} tokens/s` : ""}`);
    } catch (failure) {
      show();
      if (!isAbort(failure)) setError(failure);
    } finally {
      setBusy(false);
    }
    if (!middle) return;
    // Show what was written: select it.
    setTimeout(() => {
      area.current?.focus();
      area.current?.setSelectionRange(at, at + cut(answer, after).length);
    });
  };
  const cold = models.find((each) => each.id === model)?.status === "cold";
  return html`<div class="completions">
    <div class="stack">
      <${Field} label=${middle ? "Text, with the cursor where something is missing" : "Text"} hint="Control and Enter run it.">
        ${(attributes) => html`<textarea ...${attributes} ref=${area} class=${`input ${middle ? "mono" : ""}`} rows=${middle ? 14 : 7} spellcheck=${false} readonly=${busy} value=${text}
          onInput=${(event) => write(event.target.value)}
          onKeyDown=${(event) => {
            if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || busy) return;
            event.preventDefault();
            void run();
          }}></textarea>`}
      <//>
      <div class="row wrap">
        ${busy ? html`<${Button} icon="stop" onClick=${() => controller.current?.abort()}>Stop<//>` : html`<${Button} variant="primary" icon="play" disabled=${text === ""} onClick=${run}>${middle ? "Fill in at the cursor" : "Complete"}<//>`}
        <span class="muted small" role="status">${busy ? (cold && tokens.length === 0 ? "Loading the model" : "Generating") : figures}</span>
      </div>
      <${ErrorNotice} error=${error} />
      ${note && html`<${Notice} tone="warning">${note}<//>`}
      ${tokens.length > 0 && html`<${HeatMap} tokens=${tokens} />`}
    </div>
    <${Card} title="Settings"><div class="stack">
      <${ModelSelect} models=${models} value=${model} onChange=${setModel} />
      <${NumberInput} label="Maximum tokens" min=${0} max=${4096} step=${1} value=${maxTokens} onChange=${setMaxTokens} />
      <${NumberInput} label="Temperature" slider min=${0} max=${2} step=${0.1} value=${temperature} onChange=${setTemperature} />
      <${NumberInput} label="Seed" step=${1} placeholder="random" value=${seed} onChange=${setSeed} />
      ${!middle && html`<${Switch} label="Echo the prompt" checked=${echo} onChange=${setEcho} hint="Shows how likely the model finds each token of the text, too." />`}
    </div><//>
  </div>`;
}

/** What was generated without the suffix that a model without such tokens repeats. @param {string} written @param {string} suffix */
function cut(written, suffix) {
  return suffix && written.endsWith(suffix) ? written.slice(0, -suffix.length) : written;
}

/** The color: 0 (likely) to 5 (unlikely), as in chats. @param {number | null} logprob */
function level(logprob) {
  return LEVELS.filter((each) => logprob !== null && Math.exp(logprob) < each).length;
}

/** @param {{tokens: Token[]}} props */
function HeatMap({ tokens }) {
  const [at, setAt] = useState(-1);
  const token = tokens[at];
  const root = useRef(/** @type {HTMLDivElement | null} */ (null));
  // There may be 100,000: those that are there are not rendered again when one of them is chosen.
  const spans = useMemo(() => tokens.map((each, index) => html`<span key=${index} data-at=${index} class=${`heat heat-${level(each.logprob)}`}>${each.text}</span>`), [tokens]);
  useEffect(() => {
    const chosen = root.current?.children[at];
    chosen?.classList.add("chosen");
    return () => chosen?.classList.remove("chosen");
  }, [at, tokens]);
  const known = tokens.filter((each) => each.logprob !== null);
  const mean = known.length > 0 ? known.reduce((sum, each) => sum + (each.logprob ?? 0), 0) / known.length : null;
  const show = (/** @type {any} */ event) => event.target.dataset?.at !== undefined && setAt(Number(event.target.dataset.at));
  /** @param {KeyboardEvent} event */
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(tokens.length - 1, at + step)));
  };
  return html`<${Card} title="Probabilities">
    <div class="heat-text" ref=${root} tabindex="0" role="group" aria-label="Tokens; arrow keys choose one" onMouseOver=${show} onClick=${show} onKeyDown=${move}>
      ${spans}
    </div>
    <div class="heat-scale small muted" aria-hidden="true">unlikely ${[5, 4, 3, 2, 1, 0].map((each) => html`<span key=${each} class=${`heat heat-${each}`}> </span>`)} likely</div>
    <div class="heat-detail" aria-live="polite">
      ${token
        ? html`<p><code>${JSON.stringify(token.text)}</code> ${token.logprob === null ? "is the first token, and has no probability" : html`has ${format.percent(Math.exp(token.logprob), 1)} (log-probability ${token.logprob.toFixed(3)})`}</p>
            ${token.top && html`<ol class="heat-top">${Object.entries(token.top).sort((a, b) => b[1] - a[1]).map(([text, logprob]) => html`<li key=${text}><code>${JSON.stringify(text)}</code><progress class="progress" aria-hidden="true" max="1" value=${Math.exp(logprob)}></progress><span>${format.percent(Math.exp(logprob), 1)}</span></li>`)}</ol>`}`
        : html`<p class="muted">Point at a token, or choose one with the arrow keys, to see what else was likely.${mean !== null && ` Perplexity of all: ${Math.exp(-mean).toFixed(2)}.`}</p>`}
    </div>
  <//>`;
}
