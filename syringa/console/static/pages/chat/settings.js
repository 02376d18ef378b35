/** The settings of a thread: model, system prompt, parameters, tools and output format. */

import { number } from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useMemo } from "../../lib.js";
import { may } from "../../state.js";
import { Badge, Button, ErrorNotice, JsonInput, Loaded, Select, Switch, TextArea, parseJson } from "../../ui/index.js";
import { Validator } from "../../vendor/json-schema/index.js";
import { loadModel, tone } from "../shared.js";
import { ParameterForm, loadRequestSchema, readParameters } from "./parameters.js";

/** @typedef {import("./conversation.js").Settings} Settings */

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
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, year: { type: "integer" } },
  required: ["name", "year"],
  additionalProperties: false,
};

/** @param {{status: string}} props */
export function ModelStatus({ status }) {
  return html`<${Badge} tone=${tone(status)} dot title=${status === "cold" ? "It is loaded by the first request" : undefined}>${status}<//>`;
}

/**
 * @param {{label: string, hideLabel?: boolean, value: string, defaultModel: string, models: any[], onChange: (id: string) => void}} props
 */
export function ModelPicker({ label, hideLabel = false, value, defaultModel, models, onChange }) {
  const chosen = value || defaultModel;
  const options = models.map((each) => ({ value: each.id, label: each.status === "loaded" ? each.id : `${each.id} (${each.status})` }));
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
        <${Section} title="Parameters"><${Parameters} document=${document} settings=${settings} set=${set} /><//>
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
  return html`<section class="settings-section first">
    <${ModelPicker} label="Model" value=${settings.model} defaultModel=${defaultModel} models=${all} onChange=${(id) => set({ model: id })} />
    ${model &&
    html`<div class="row wrap small muted">
      <${ModelStatus} status=${model.status} />
      ${model.context_length && html`<span>${number(model.context_length)} tokens of context</span>`}
      ${model.status === "cold" && may("admin") && html`<${Button} size="small" busy=${load.busy} onClick=${load.run}>Load now<//>`}
    </div>`}
    <${ErrorNotice} error=${load.error ?? (models.data ? null : models.error)} />
  </section>`;
}

/** @param {{document: any, settings: Settings, set: (changes: Partial<Settings>) => void}} props */
function Parameters({ document, settings, set }) {
  const parameters = useMemo(() => readParameters(document), [document]);
  return html`<${ParameterForm} parameters=${parameters} values=${settings.parameters} onChange=${(values) => set({ parameters: values })} />`;
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
  const { value } = parseJson(settings.tools);
  const names = Array.isArray(value) ? value.map((each) => each?.function?.name).filter((each) => typeof each === "string") : [];
  return html`<div class="stack-small">
    <${JsonInput} label="Functions" rows=${settings.tools ? 9 : 2} text=${settings.tools} check=${check} hint="Calls are answered by hand, below the message."
      end=${!settings.tools && html`<button type="button" class="link-button" onClick=${() => set({ tools: JSON.stringify(TOOLS_EXAMPLE, null, 2) })}>Example</button>`}
      onChange=${(tools) => set({ tools })} />
    ${names.length > 0 && html`<${Select} label="Tool choice" value=${settings.toolChoice} options=${["auto", "none", "required", ...names]} onChange=${(toolChoice) => set({ toolChoice })} />`}
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
  return html`<div class="stack-small">
    <${Select} label="Format" value=${settings.format} options=${formats} onChange=${(format) =>
      set({ format, schema: format === "json_schema" && !settings.schema ? JSON.stringify(SCHEMA_EXAMPLE, null, 2) : settings.schema })} />
    ${settings.format === "json_schema" &&
    html`<${JsonInput} label="Schema" rows=${9} text=${settings.schema} check=${check} onChange=${(schema) => set({ schema })} />
      <${Switch} label="Strict" checked=${settings.strict} onChange=${(strict) => set({ strict })} hint="Refuse schemas with keywords that cannot be enforced." />`}
    <${Switch} label="Log-probabilities" checked=${settings.logprobs} onChange=${(logprobs) => set({ logprobs })} hint="Color answers by token, show alternatives and branch from them." />
  </div>`;
}
