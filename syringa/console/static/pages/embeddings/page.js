/** Embeddings: how similar lines of text are to each other. */

import { post } from "../../api.js";
import * as format from "../../format.js";
import { useAction } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { may } from "../../state.js";
import { Button, Card, CodeBlock, EmptyState, ErrorNotice, Loaded, Page, Stat, Stats, TextArea } from "../../ui/index.js";
import { ModelSelect, draft, useModel, useModels } from "../shared.js";

const MAX_LINES = 40; // more cells could not be read
const EXAMPLE = "Lilacs bloom in May.\nThe shrub flowers in late spring.\nThe train to Basel is late.\nOur departure is delayed.\nShe tuned the piano.";
const written = draft(EXAMPLE);

export default function EmbeddingsPage() {
  const models = useModels("embed");
  return html`<${Page} title="Embeddings" lead="Paste lines of text, and see which of them mean the same.">
    <${Loaded} of=${models}>
      ${(all) =>
        all.length > 0
          ? html`<${Playground} models=${all} />`
          : html`<${Card}><${EmptyState} icon="embeddings" title="No embedding model" action=${may("admin") && html`<a class="button primary" href="#/models">Pull one</a>`}>
              Pull the model <code>embedding</code> on the models page, or start the server with <code>--embedding-model embedding</code>.
            <//><//>`}
    <//>
  <//>`;
}

/** @param {{models: any[]}} props */
function Playground({ models }) {
  const [model, setModel] = useModel(models);
  const text = written.value;
  const [result, setResult] = useState(/** @type {{lines: string[], matrix: number[][], vectors: number[][], tokens: number, seconds: number} | null} */ (null));
  const lines = text.split("\n").map((each) => each.trim()).filter(Boolean);
  const run = useAction(async () => {
    const began = performance.now();
    const answer = await post("/v1/embeddings", { model, input: lines });
    const vectors = /** @type {number[][]} */ (answer.data.map((/** @type {any} */ each) => each.embedding));
    setResult({ lines, vectors, matrix: vectors.map((a) => vectors.map((b) => cosine(a, b))), tokens: answer.usage.prompt_tokens, seconds: (performance.now() - began) / 1000 });
  });
  const problem = lines.length > MAX_LINES ? `At most ${MAX_LINES} lines.` : null;
  return html`<${Card}><div class="stack">
      ${models.length > 1 && html`<${ModelSelect} models=${models} value=${model} onChange=${setModel} />`}
      <${TextArea} label="Texts, one on each line" rows=${7} value=${text} onInput=${(value) => (written.value = value)} error=${problem} hint=${`${lines.length} lines`} />
      <div><${Button} variant="primary" icon="play" busy=${run.busy} disabled=${lines.length === 0 || problem !== null} onClick=${() => run.run()}>Compare<//></div>
      <${ErrorNotice} error=${run.error} />
    </div><//>
    ${result && html`<${Matrix} ...${result} />`}`;
}

/** @param {number[]} a @param {number[]} b */
function cosine(a, b) {
  let [product, first, second] = [0, 0, 0];
  for (let index = 0; index < a.length; index += 1) {
    const [x, y] = [a[index] ?? 0, b[index] ?? 0];
    product += x * y;
    first += x * x;
    second += y * y;
  }
  return product / (Math.sqrt(first * second) || 1);
}

/** @param {{lines: string[], matrix: number[][], vectors: number[][], tokens: number, seconds: number}} props */
function Matrix({ lines, matrix, vectors, tokens, seconds }) {
  const pairs = matrix.flatMap((row, i) => row.slice(i + 1).map((value, j) => ({ value, i, j: i + 1 + j }))).sort((a, b) => b.value - a.value);
  const best = pairs[0];
  return html`<${Card}><${Stats}>
      <${Stat} label="Dimensions" value=${format.number(vectors[0]?.length)} />
      <${Stat} label="Tokens" value=${format.number(tokens)} />
      <${Stat} label="Time" value=${format.seconds(seconds)} />
      ${best && html`<${Stat} label="Most similar" value=${best.value.toFixed(3)} detail=${`lines ${best.i + 1} and ${best.j + 1}`} />`}
    <//><//>
    <${Card} class="flush" title="Cosine similarity">
      <div class="table-box" tabindex="0" role="region" aria-label="Similarity matrix">
        <table class="matrix"><caption class="visually-hidden">Cosine similarity of each line with each other</caption>
          <thead><tr><td></td>${lines.map((line, index) => html`<th key=${index} scope="col" title=${line}><span class="visually-hidden">Line </span>${index + 1}</th>`)}</tr></thead>
          <tbody>${matrix.map((row, i) => html`<tr key=${i}><th scope="row" title=${lines[i]}><span class="matrix-number">${i + 1}</span>${lines[i]}</th>
            ${row.map((value, j) => html`<td key=${j} class=${i === j ? "similar-self" : ""} style=${{ "--similar": Math.max(0, value) }} title=${`${lines[i]} / ${lines[j]}`}>${value.toFixed(2)}</td>`)}</tr>`)}</tbody>
        </table>
      </div>
    <//>
    <details class="small"><summary>Vectors</summary><${CodeBlock} label="vectors" code=${vectors.map((each) => JSON.stringify(each.map((value) => Number(value.toPrecision(6))))).join("\n")} /></details>`;
}
