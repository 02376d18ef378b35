/**
 * The form of request parameters, generated from the server's OpenAPI document: a parameter that the server gets or
 * loses appears or disappears here by itself.
 */

import { get } from "../../api.js";
import { html, useState } from "../../lib.js";
import { IconButton, JsonInput, NumberInput, Select, TextArea, TextInput } from "../../ui/index.js";
import { PATH } from "./request.js";

/** Fields that have a place of their own in the page, or that would change what the page receives. */
const ELSEWHERE = new Set(
  ("messages model stream stream_options tools tool_choice response_format logprobs top_logprobs continue_final_message " +
    "return_tokens_as_token_ids request_id prompt_logprobs echo").split(" "),
);
/** Shown first; all others under "All parameters". */
const FIRST = ["temperature", "top_p", "max_completion_tokens", "seed"];

/** @typedef {{name: string, kind: "number" | "integer" | "boolean" | "enum" | "text" | "list" | "json", schema: any, description: string}} Parameter */

/** @type {Promise<any> | null} */
let loading = null;

/** The schema of a chat request, with references resolved against the document. */
export async function loadRequestSchema() {
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
export function readParameters(schema) {
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
 * @param {{parameters: Parameter[], values: Record<string, any>, onChange: (values: Record<string, any>) => void}} props
 */
export function ParameterForm({ parameters, values, onChange }) {
  const [all, setAll] = useState(false);
  const [search, setSearch] = useState("");
  /** @param {string} name @param {any} value undefined: not set */
  const set = (name, value) => {
    const next = { ...values };
    if (value === undefined) delete next[name];
    else next[name] = value;
    onChange(next);
  };
  const wanted = search.trim().toLowerCase();
  const shown = parameters.filter((each) => {
    if (FIRST.includes(each.name) && !wanted) return true;
    if (!all) return each.name in values;
    return !wanted || each.name.includes(wanted.replaceAll(" ", "_")) || each.description.toLowerCase().includes(wanted);
  });
  return html`<div class="parameters">
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
  const shown = value === undefined && text.trim() !== "" && isJson(text) ? "" : text;
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
function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
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
