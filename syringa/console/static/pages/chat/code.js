/** The next request as curl, Python and JavaScript, which run as they stand. */

import { serverAddress } from "../../api.js";
import { html, useState } from "../../lib.js";
import { hasKey } from "../../state.js";
import { CodeBlock, Dialog, ErrorNotice, Notice, Tabs } from "../../ui/index.js";
import { createMessage } from "./conversation.js";
import { canSend } from "./composer.js";
import { PATH, buildBody } from "./request.js";

/** @typedef {import("./composer.js").Draft} Draft */

const TABS = [
  { id: "curl", label: "curl" },
  { id: "python", label: "Python" },
  { id: "javascript", label: "JavaScript" },
];
/** Arguments that the openai package has in all its versions; others go to extra_body. */
const PYTHON_ARGUMENTS = [
  "model",
  "messages",
  "temperature",
  "top_p",
  "max_completion_tokens",
  "max_tokens",
  "seed",
  "stop",
  "n",
  "presence_penalty",
  "frequency_penalty",
  "logit_bias",
  "tools",
  "tool_choice",
  "response_format",
  "logprobs",
  "top_logprobs",
  "stream",
  "stream_options",
];

/** @param {Record<string, any>} body @param {string} address @param {boolean} keyed */
export function toCurl(body, address, keyed) {
  const key = keyed ? '  -H "Authorization: Bearer $SYRINGA_API_KEY" \\\n' : "";
  return `curl -N ${address}${PATH} \\\n${key}  -H 'Content-Type: application/json' \\\n  --data-binary @- <<'JSON'\n${JSON.stringify(body, null, 2)}\nJSON\n`;
}

/** @param {Record<string, any>} body @param {string} address @param {boolean} keyed */
export function toPython(body, address, keyed) {
  const known = Object.entries(body).filter(([name]) => PYTHON_ARGUMENTS.includes(name));
  const extra = Object.entries(body).filter(([name]) => !PYTHON_ARGUMENTS.includes(name));
  const lines = known.map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`);
  if (extra.length > 0) lines.push(`    extra_body=${pythonValue(Object.fromEntries(extra), 1)},`);
  const key = keyed ? 'os.environ["SYRINGA_API_KEY"]' : '"none"';
  return `# pip install openai
${keyed ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${address}/v1", api_key=${key})
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
        for call in choice.delta.tool_calls or []:
            print(call.function.name or "", call.function.arguments or "", end="", flush=True)
print()
`;
}

/** @param {Record<string, any>} body @param {string} address @param {boolean} keyed */
export function toJavaScript(body, address, keyed) {
  const key = keyed ? "\n    Authorization: `Bearer ${process.env.SYRINGA_API_KEY}`," : "";
  return `// Node 18 or newer: save as chat.mjs, then: node chat.mjs
const response = await ${"fetch"}("${address}${PATH}", {
  method: "POST",
  headers: {
    "Content-Type": "application/json",${key}
  },
  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),
});
if (!response.ok) throw new Error(await response.text());

let buffer = "";
const decoder = new TextDecoder();
for await (const bytes of response.body) {
  buffer += decoder.decode(bytes, { stream: true });
  const events = buffer.split("\\n\\n");
  buffer = events.pop();
  for (const event of events) {
    const data = event.split("\\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("");
    if (!data || data === "[DONE]") continue;
    for (const choice of JSON.parse(data).choices) {
      process.stdout.write(choice.delta.content ?? "");
      for (const call of choice.delta.tool_calls ?? []) process.stdout.write(\`\${call.function.name ?? ""}\${call.function.arguments ?? ""}\`);
    }
  }
}
console.log();
`;
}

/** JSON as a Python literal. @param {any} value @param {number} depth @returns {string} */
function pythonValue(value, depth) {
  const [inner, outer] = ["    ".repeat(depth + 1), "    ".repeat(depth)];
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value)
    ? value.map((each) => pythonValue(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonValue(each, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  if (items.length === 0) return open + close;
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length <= 80 && !line.includes("\n")) return line;
  return `${open}\n${items.map((each) => `${inner}${each},`).join("\n")}\n${outer}${close}`;
}

/**
 * The messages of the request that Send makes; without anything to send, those of the request for the last answer.
 * @param {import("./conversation.js").Thread} thread @param {Draft} draft
 */
function nextPath(thread, draft) {
  const path = thread.path();
  if (canSend(draft)) return { path: [...path, createMessage(null, "user", draft)], what: "What Send requests now." };
  while (path[path.length - 1]?.role === "assistant") path.pop();
  if (path.length > 0) return { path, what: "There is no new message, so this requests the last answer again." };
  return { path: [createMessage(null, "user", { text: "Hello!" })], what: "There is no message yet, so this has an example." };
}

/**
 * @param {{thread: import("./conversation.js").Thread, defaultModel: string, draft: Draft, onClose: () => void}} props
 */
export function CodeDialog({ thread, defaultModel, draft, onClose }) {
  const [tab, setTab] = useState("curl");
  /** @type {Record<string, any>} */
  let body = {};
  let failure = null;
  const { path, what } = nextPath(thread, draft);
  try {
    body = buildBody(thread.settings.value, path, { model: defaultModel });
  } catch (error) {
    failure = error;
  }
  const keyed = hasKey.value;
  const write = { curl: toCurl, python: toPython, javascript: toJavaScript }[tab] ?? toCurl;
  return html`<${Dialog} open wide title="Show code" onClose=${onClose}>
    ${failure
      ? html`<${ErrorNotice} error=${failure} />`
      : html`<div>
          <${Tabs} label="Language" tabs=${TABS} value=${tab} onChange=${setTab}>
            ${() => html`<div class="stack">
              <p class="small muted">${what}</p>
              ${keyed && html`<${Notice}>The key is read from the variable <code>SYRINGA_API_KEY</code>.<//>`}
              <${CodeBlock} code=${write(body, serverAddress(), keyed)} label=${TABS.find((each) => each.id === tab)?.label ?? ""} />
            </div>`}
          <//>
        </div>`}
  <//>`;
}
