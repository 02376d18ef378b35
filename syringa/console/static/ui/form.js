/** Fields of forms. Every input has a label; a hint and an error are tied to it. */

import { html, useEffect, useId, useRef, useState } from "../lib.js";
import { Icon } from "./icons.js";

/**
 * A label, an input, a hint and an error. `children` gets the attributes of the input.
 * @param {{label: any, hint?: any, error?: any, hideLabel?: boolean, class?: string, end?: any,
 *   children: (attributes: {id: string, "aria-describedby"?: string, "aria-invalid"?: string}) => any}} props
 */
export function Field({ label, hint, error, hideLabel = false, class: name = "", end, children }) {
  const id = useId();
  const note = hint || error ? `${id}-note` : undefined;
  return html`<div class=${`field ${name}`}>
    <div class=${hideLabel ? "visually-hidden" : "field-label"}><label for=${id}>${label}</label>${end}</div>
    ${children({ id, "aria-describedby": note, "aria-invalid": error ? "true" : undefined })}
    ${note && html`<div class=${error ? "field-error" : "field-hint"} id=${note}>${error || hint}</div>`}
  </div>`;
}

/**
 * @typedef {object} InputProps
 * @property {any} label
 * @property {string | number | null | undefined} value
 * @property {(value: string) => void} onInput
 * @property {any} [hint]
 * @property {any} [error]
 * @property {boolean} [hideLabel]
 * @property {any} [end] beside the label
 */

/** One line of text; further properties go to the input. @param {InputProps & {[name: string]: any}} props */
export function TextInput({ label, value, onInput, hint, error, hideLabel, end, ...rest }) {
  return html`<${Field} label=${label} hint=${hint} error=${error} hideLabel=${hideLabel} end=${end}>
    ${(attributes) =>
      html`<input class="input" type="text" autocomplete="off" ...${attributes} ...${rest} value=${value ?? ""} onInput=${(event) => onInput(event.target.value)} />`}
  <//>`;
}

/** Several lines of text. @param {InputProps & {rows?: number, mono?: boolean, [name: string]: any}} props */
export function TextArea({ label, value, onInput, hint, error, hideLabel, end, rows = 4, mono = false, ...rest }) {
  return html`<${Field} label=${label} hint=${hint} error=${error} hideLabel=${hideLabel} end=${end}>
    ${(attributes) =>
      html`<textarea class=${`input ${mono ? "mono" : ""}`} rows=${rows} spellcheck=${mono ? "false" : undefined} ...${attributes} ...${rest} value=${value ?? ""} onInput=${(event) => onInput(event.target.value)}></textarea>`}
  <//>`;
}

/**
 * A number, or undefined while it is empty.
 * @param {{label: any, value: number | undefined, onChange: (value: number | undefined) => void, min?: number,
 *   max?: number, step?: number | "any", slider?: boolean, hint?: any, error?: string | null, placeholder?: string,
 *   end?: any, [name: string]: any}} props `slider`: a range beside the number, which needs `min` and `max`
 */
export function NumberInput({ label, value, onChange, min, max, step = "any", slider = false, hint, error, end, placeholder, ...rest }) {
  const [typed, setTyped] = useState("");
  /** @param {any} event */
  const read = (event) => {
    const text = event.target.value;
    setTyped(text);
    onChange(text === "" ? undefined : Number(text));
  };
  // "0.0" on the way to "0.05" is the number 0, and stays as it is.
  const shown = typed !== "" && Number(typed) === value ? typed : (value ?? "");
  const name = rest["aria-label"] ?? (typeof label === "string" ? label : undefined);
  return html`<${Field} label=${label} hint=${hint} error=${error} end=${end}>
    ${(attributes) => html`<div class="number">
      ${slider &&
      html`<input class="range" type="range" min=${min} max=${max} step=${step} value=${value ?? Number(placeholder ?? min)} aria-label=${name && `${name}, slider`} onInput=${read} />`}
      <input class="input" type="number" inputmode="decimal" min=${min} max=${max} step=${step} placeholder=${placeholder} ...${attributes} ...${rest} value=${String(shown)} onInput=${read} />
    </div>`}
  <//>`;
}

/**
 * @param {{label: any, value: string, onChange: (value: string) => void,
 *   options: (string | {value: string, label: string})[], hint?: any, error?: string | null,
 *   hideLabel?: boolean, end?: any, [name: string]: any}} props
 */
export function Select({ label, value, onChange, options, hint, error, hideLabel, end, ...rest }) {
  return html`<${Field} label=${label} hint=${hint} error=${error} hideLabel=${hideLabel} end=${end}>
    ${(attributes) => html`<div class="select">
      <select class="input" ...${attributes} ...${rest} value=${value} onChange=${(event) => onChange(event.target.value)}>
        ${options.map((each) => {
          const option = typeof each === "string" ? { value: each, label: each } : each;
          return html`<option key=${option.value} value=${option.value} selected=${option.value === value}>${option.label}</option>`;
        })}
      </select>
      <${Icon} name="down" size=${14} />
    </div>`}
  <//>`;
}

/** On or off. @param {{label: any, checked: boolean, onChange: (value: boolean) => void, hint?: any, disabled?: boolean}} props */
export function Switch({ label, checked, onChange, hint, disabled = false }) {
  const id = useId();
  return html`<div class="switch-field">
    <label class="switch" for=${id}>
      <input id=${id} type="checkbox" role="switch" checked=${checked} disabled=${disabled} aria-describedby=${hint ? `${id}-note` : undefined} onChange=${(event) => onChange(event.target.checked)} />
      <span class="switch-track" aria-hidden="true"></span><span>${label}</span>
    </label>
    ${hint && html`<div class="field-hint" id=${`${id}-note`}>${hint}</div>`}
  </div>`;
}

/**
 * JSON text with the place of its first error. `onChange` gets the text, and the value where it is JSON.
 * @param {{label: any, text: string, onChange: (text: string, value: any) => void, check?: (value: any) => string | null,
 *   rows?: number, hint?: any, hideLabel?: boolean, end?: any}} props `check`: what is wrong with the value, or null
 */
export function JsonInput({ label, text, onChange, check, rows = 8, hint, hideLabel, end }) {
  const result = parseJson(text);
  const error = text.trim() === "" ? null : (result.error ?? check?.(result.value) ?? null);
  return html`<${TextArea} label=${label} value=${text} rows=${rows} mono hint=${hint} error=${error} hideLabel=${hideLabel} end=${end}
    onInput=${(value) => onChange(value, parseJson(value).value)} />`;
}

/** @param {string} text */
export function parseJson(text) {
  try {
    return { value: text.trim() === "" ? undefined : JSON.parse(text), error: null };
  } catch (error) {
    return { value: undefined, error: error instanceof Error ? error.message : String(error) };
  }
}

/** A text area that grows with its text, up to its CSS max-height. @param {{[name: string]: any}} props */
export function GrowingTextArea({ value, inputRef, ...rest }) {
  const own = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const ref = inputRef ?? own;
  const [, setWidth] = useState(0);
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    element.style.height = "auto";
    element.style.height = `${element.scrollHeight + 2}px`;
  });
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(entry?.contentRect.width ?? 0));
    if (ref.current) observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return html`<textarea rows="1" ...${rest} ref=${ref} value=${value}></textarea>`;
}
