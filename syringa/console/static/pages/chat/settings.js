/**
 * The settings of a thread: model, system prompt, parameters, tools and output format.
 *
 * The form of parameters is generated from the server's OpenAPI document: one that the server gets or loses appears or
 * disappears here by itself.
 */

import { get } from "../../api.js";
import { number } from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useMemo, useRef, useState } from "../../lib.js";
import { may } from "../../state.js";
import { Badge, Button, ErrorNotice, IconButton, JsonInput, Loaded, NumberInput, Select, Switch, TextArea, TextInput, parseJson } from "../../ui/index.js";
import { Validator } from "../../vendor/json-schema/index.js";
import { ModelLoading, loadModel, stateOf, tone } from "../shared.js";
import { PATH } from "./request.js";

/** @typedef {import("./conversation.js").Settings} Settings */
/** @typedef {{name: string, kind: "number" | "integer" | "boolean" | "enum" | "text" | "list" | "json", schema: any, description: string}} Parameter */

/** Fields that have a place of their own in the page, or that would change what the page receives. */
const ELSEWHERE = new Set(
  ("messages model stream stream_options tools tool_choice response_format logprobs top_logprobs continue_final_message " +
    "return_tokens_as_token_ids request_id prompt_logprobs echo").split(" "),
);
/** Shown first; all others under "All parameters". */
const FIRST = ["temperature", "top_p", "max_completion_tokens", "seed"];
const TOOLS_EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Current weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const TOOL_CHOICES = ["auto", "none", "required"];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, year: { type: "integer" } },
  required: ["name", "year"],
  additionalProperties: false,
};

/** @param {{model: any}} props */
export function ModelStatus({ model }) {
  return html`<${Badge} tone=${tone(model.status)} dot title=${model.status === "cold" ? "It is loaded by the first request" : undefined}>${stateOf(model)}<//>`;
}

/**
 * @param {{label: string, hideLabel?: boolean, value: string, defaultModel: string, models: any[], onChange: (id: string) => void}} props
 */
export function ModelPicker({ label, hideLabel = false, value, defaultModel, models, onChange }) {
  const chosen = value || defaultModel;
  const options = models.map((each) => ({ value: each.id, label: each.status === "loaded" ? each.id : `${each.id} (${stateOf(each)})` }));
  const listed = models.length > 0; // otherwise they are loaded still
  if (chosen && !models.some((each) => each.id === chosen)) options.unshift({ value: chosen, label: listed ? `${chosen} (not there)` : chosen });
  return html`<${Select} label=${label} hideLabel=${hideLabel} value=${chosen} options=${options} onChange=${onChange} />`;
}

/**
 * @param {{settings: Settings, onChange: (settings: Settings) => void, models: import("../../hooks.js").Resource<any[]>, defaultModel: string}} props
 */
export function SettingsPanel({ settings, onChange, models, defaultModel }) {
  const schema = useResource(() => loadRequestSchema(), []);
  /** @param {Partial<Settings>} changes */
  const set = (changes) => onChange({ ...settings, ...changes });
  return html`<div class="settings">
    <${ModelSection} settings=${settings} set=${set} models=${models} defaultModel=${defaultModel} />
    <${TextArea} label="System prompt" rows=${3} placeholder="You are a helpful assistant." value=${settings.system} onInput=${(system) => set({ system })} />
    <${Loaded} of=${schema} label="Loading parameters">
      ${(document) => html`
        <${Section} title="Parameters"><${ParameterForm} document=${document} values=${settings.parameters} onChange=${(values) => set({ parameters: values })} /><//>
        <${Section} title="Tools"><${ToolsSection} document=${document} settings=${settings} set=${set} /><//>
        <${Section} title="Output"><${OutputSection} settings=${settings} set=${set} /><//>
      `}
    <//>
  </div>`;
}

/** @param {{title: string, children?: any}} props */
function Section({ title, children }) {
  return html`<section class="settings-section"><h3>${title}</h3>${children}</section>`;
}

/** @param {{settings: Settings, set: (changes: Partial<Settings>) => void, models: import("../../hooks.js").Resource<any[]>, defaultModel: string}} props */
function ModelSection({ settings, set, models, defaultModel }) {
  const all = models.data ?? [];
  const model = all.find((each) => each.id === (settings.model || defaultModel));
  const load = useAction(async () => {
    await loadModel(model.id);
    models.reload();
  });
  return html`<section class="settings-section">
    <${ModelPicker} label="Model" value=${settings.model} defaultModel=${defaultModel} models=${all} onChange=${(id) => set({ model: id })} />
    ${model &&
    html`<div class="row wrap small muted">
      <${ModelStatus} model=${model} />
      ${model.context_length && html`<span>${number(model.context_length)} tokens of context</span>`}
      ${model.status === "cold" && may("admin") && html`<${Button} size="small" busy=${load.busy} onClick=${load.run}>Load now<//>`}
    </div>`}
    ${model?.status === "loading" && html`<${ModelLoading} model=${model} />`}
    <${ErrorNotice} error=${load.error ?? (models.data ? null : models.error)} />
  </section>`;
}

/** The names of a list of tools. @param {any} tools */
function toolNames(tools) {
  return Array.isArray(tools) ? tools.map((each) => each?.function?.name).filter((each) => typeof each === "string") : [];
}

/** @param {{document: any, settings: Settings, set: (changes: Partial<Settings>) => void}} props */
function ToolsSection({ document, settings, set }) {
  const validator = useMemo(() => new Validator({ ...document.properties.tools, components: document.components }, "2020-12", false), [document]);
  /** @param {any} value */
  const check = (value) => {
    if (!Array.isArray(value)) return "Tools are a list: [{\"type\": \"function\", \"function\": {…}}]";
    const { valid, errors } = validator.validate(value);
    const worst = errors[errors.length - 1];
    return valid ? null : `${worst?.instanceLocation ?? ""}: ${worst?.error ?? "not valid"}`;
  };
  const names = toolNames(parseJson(settings.tools).value);
  /** @param {string} tools @param {any} value of it */
  const setTools = (tools, value) => {
    const [chosen, next] = [settings.toolChoice, toolNames(value)];
    const known = !Array.isArray(value) || [...TOOL_CHOICES, ...next].includes(chosen);
    // A tool that is renamed stays chosen.
    set({ tools, toolChoice: known ? chosen : (next[names.indexOf(chosen)] ?? "auto") });
  };
  return html`<div class="stack">
    <${JsonInput} label="Functions" rows=${settings.tools ? 9 : 2} text=${settings.tools} check=${check} hint="Calls are answered by hand, below the message."
      end=${!settings.tools && html`<button type="button" class="link-button" onClick=${() => setTools(JSON.stringify(TOOLS_EXAMPLE, null, 2), TOOLS_EXAMPLE)}>Example</button>`}
      onChange=${setTools} />
    ${names.length > 0 && html`<${Select} label="Tool choice" value=${settings.toolChoice} options=${[...TOOL_CHOICES, ...names]} onChange=${(toolChoice) => set({ toolChoice })} />`}
  </div>`;
}

/** @param {{settings: Settings, set: (changes: Partial<Settings>) => void}} props */
function OutputSection({ settings, set }) {
  const formats = [
    { value: "text", label: "Text" },
    { value: "json_object", label: "JSON" },
    { value: "json_schema", label: "JSON that matches a schema" },
  ];
  /** @param {any} value */
  const check = (value) => (typeof value === "object" && value !== null && !Array.isArray(value) ? null : "A schema is a JSON object.");
  return html`<div class="stack">
    <${Select} label="Format" value=${settings.format} options=${formats} onChange=${(format) =>
      set({ format, schema: format === "json_schema" && !settings.schema ? JSON.stringify(SCHEMA_EXAMPLE, null, 2) : settings.schema })} />
    ${settings.format === "json_schema" &&
    html`<${JsonInput} label="Schema" rows=${9} text=${settings.schema} check=${check} onChange=${(schema) => set({ schema })} />
      <${Switch} label="Strict" checked=${settings.strict} onChange=${(strict) => set({ strict })} hint="Refuse schemas with keywords that cannot be enforced." />`}
    <${Switch} label="Log-probabilities" checked=${settings.logprobs} onChange=${(logprobs) => set({ logprobs })} hint="Color answers by token, show alternatives and branch from them." />
  </div>`;
}

/** @type {Promise<any> | null} */
let loading = null;

/** The schema of a chat request, with references resolved against the document. */
async function loadRequestSchema() {
  loading ??= get("/openapi.json").then((document) => {
    const body = document.paths[PATH].post.requestBody.content["application/json"].schema;
    const name = String(body.$ref ?? "").split("/").pop() ?? "";
    return { ...document.components.schemas[name], components: document.components };
  });
  try {
    return await loading;
  } catch (error) {
    loading = null;
    throw error;
  }
}

/** @param {any} schema */
function readParameters(schema) {
  const parameters = [];
  for (const [name, field] of Object.entries(/** @type {Record<string, any>} */ (schema.properties))) {
    const description = String(field.description ?? "");
    if (ELSEWHERE.has(name) || field["x-syringa-ignored"] || field["x-syringa-refused"]) continue;
    if (/^Same as `/.test(description)) continue; // another name of a field that is there
    parameters.push({ name, kind: kindOf(field), schema: field, description });
  }
  const place = (/** @type {Parameter} */ each) => (FIRST.includes(each.name) ? FIRST.indexOf(each.name) : FIRST.length);
  return parameters.sort((first, second) => place(first) - place(second));
}

/** @param {any} field */
function kindOf(field) {
  const types = [field.type ?? []].flat().filter((each) => each !== "null");
  if (types.length === 1 && ["number", "integer", "boolean"].includes(types[0])) return types[0];
  if (types[0] === "string" && types.length === 1) return "text";
  if (types[0] === "array" && field.items?.type === "string") return "list";
  const options = (field.anyOf ?? []).filter((/** @type {any} */ each) => each.type !== "null");
  if (field.enum || (options.length === 1 && options[0].enum)) return "enum";
  if (options.some((/** @type {any} */ each) => each.type === "array" && each.items?.type === "string")) return "list";
  return "json";
}

/**
 * @param {{document: any, values: Record<string, any>, onChange: (values: Record<string, any>) => void}} props
 */
function ParameterForm({ document, values, onChange }) {
  const parameters = useMemo(() => readParameters(document), [document]);
  const [all, setAll] = useState(false);
  const [search, setSearch] = useState("");
  /** @param {string} name @param {any} value undefined: not set */
  const set = (name, value) => {
    const next = { ...values };
    if (value === undefined) delete next[name];
    else next[name] = value;
    onChange(next);
  };
  // A field stays while it is emptied, or has text that is not a value yet.
  const used = useRef(new Set()).current;
  for (const name in values) used.add(name);
  const wanted = search.trim().toLowerCase();
  const shown = parameters.filter((each) => {
    if (FIRST.includes(each.name) && !wanted) return true;
    if (!all) return used.has(each.name);
    return !wanted || each.name.includes(wanted.replaceAll(" ", "_")) || each.description.toLowerCase().includes(wanted);
  });
  return html`<div class="parameters stack">
    ${all && html`<${TextInput} label="Search parameters" type="search" placeholder="Search parameters" hideLabel value=${search} onInput=${setSearch} />`}
    ${shown.map((each) => html`<${ParameterField} key=${each.name} parameter=${each} value=${values[each.name]} onChange=${(value) => set(each.name, value)} />`)}
    ${all && shown.length === 0 && html`<p class="muted small">No parameter matches.</p>`}
    <button type="button" class="link-button" aria-expanded=${String(all)} onClick=${() => {
      setAll(!all);
      setSearch("");
    }}>${all ? "Show fewer parameters" : `All parameters (${parameters.length})`}</button>
  </div>`;
}

/** @param {{parameter: Parameter, value: any, onChange: (value: any) => void}} props */
function ParameterField({ parameter, value, onChange }) {
  const { name, kind, schema, description } = parameter;
  const end =
    value !== undefined &&
    html`<${IconButton} icon="close" size=${13} class="reset" label=${`Reset ${name}`} onClick=${() => onChange(undefined)} />`;
  const common = { label: html`<code>${name}</code>`, hint: plain(description), end };
  const fallback = schema.default === undefined || schema.default === null ? "" : String(schema.default);
  if (kind === "number" || kind === "integer") {
    const min = schema.minimum ?? (schema.exclusiveMinimum !== undefined ? 0 : undefined);
    const bounded = kind === "number" && min !== undefined && schema.maximum !== undefined && schema.maximum - min <= 10;
    return html`<${NumberInput} ...${common} value=${value} onChange=${onChange} min=${min} max=${safe(schema.maximum)} step=${kind === "integer" ? 1 : bounded ? 0.01 : "any"} slider=${bounded} placeholder=${fallback || undefined} aria-label=${name} />`;
  }
  if (kind === "boolean") {
    const text = fallback ? `default (${fallback})` : "default";
    return html`<${Select} ...${common} value=${value === undefined ? "" : String(value)} options=${[{ value: "", label: text }, "true", "false"]} onChange=${(next) => onChange(next === "" ? undefined : next === "true")} />`;
  }
  if (kind === "enum") {
    const options = schema.enum ?? schema.anyOf.find((/** @type {any} */ each) => each.enum).enum;
    return html`<${Select} ...${common} value=${value ?? ""} options=${[{ value: "", label: "default" }, ...options]} onChange=${(next) => onChange(next || undefined)} />`;
  }
  if (kind === "text") return html`<${TextInput} ...${common} value=${value ?? ""} placeholder=${fallback} onInput=${(next) => onChange(next || undefined)} />`;
  if (kind === "list") return html`<${ListField} ...${common} value=${value} onChange=${onChange} />`;
  return html`<${JsonField} ...${common} value=${value} onChange=${onChange} />`;
}

/** @param {{value: any, onChange: (value: any) => void, label: any, hint: string, end: any}} props */
function JsonField({ value, onChange, ...rest }) {
  const [text, setText] = useState(value === undefined ? "" : JSON.stringify(value));
  const shown = value === undefined && parseJson(text).value !== undefined ? "" : text;
  return html`<${JsonInput} ...${rest} rows=${2} text=${shown} onChange=${(next, parsed) => {
    setText(next);
    onChange(parsed);
  }} />`;
}

/** Texts, one on each line. @param {{value: any, onChange: (value: any) => void, label: any, hint: string, end: any}} props */
function ListField({ value, onChange, hint, ...rest }) {
  const [text, setText] = useState(Array.isArray(value) ? value.map((each) => JSON.stringify(each).slice(1, -1)).join("\n") : "");
  return html`<${TextArea} ...${rest} rows=${2} mono hint=${`${hint} One per line; \\n is a line break.`} value=${value === undefined ? "" : text} onInput=${(next) => {
    setText(next);
    onChange(readLines(next));
  }} />`;
}

/** @param {string} text */
function readLines(text) {
  const lines = text.split("\n").filter((line) => line !== "");
  if (lines.length === 0) return undefined;
  return lines.map((line) => {
    try {
      return JSON.parse(`"${line}"`);
    } catch {
      return line;
    }
  });
}

/** Limits beyond what a number input can hold are left to the server. @param {number | undefined} limit */
function safe(limit) {
  return limit === undefined || Math.abs(limit) > Number.MAX_SAFE_INTEGER ? undefined : limit;
}

/** @param {string} description without its marks of code */
function plain(description) {
  return description.replaceAll("`", "");
}
