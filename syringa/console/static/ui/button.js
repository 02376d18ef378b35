/** Buttons. Further properties (onClick, type, aria-…) go to the element. */

import { html, useEffect, useRef, useState } from "../lib.js";
import { Icon } from "./icons.js";
import { Spinner, toastError } from "./feedback.js";

/**
 * @param {{variant?: "primary" | "secondary" | "ghost" | "danger", size?: "normal" | "small", icon?: string,
 *   busy?: boolean, disabled?: boolean, class?: string, children?: any, [name: string]: any}} props
 */
export function Button({ variant = "secondary", size = "normal", icon, busy = false, disabled = false, children, ...rest }) {
  return html`<button
    type="button"
    ...${rest}
    class=${`button ${variant} ${size} ${rest.class ?? ""}`}
    disabled=${disabled || busy}
    aria-busy=${busy ? "true" : undefined}
  >
    ${busy ? html`<${Spinner} small />` : icon && html`<${Icon} name=${icon} size=${16} />`}
    ${children !== undefined && html`<span>${children}</span>`}
  </button>`;
}

/**
 * A button with an icon alone; `label` is its name and its tooltip.
 * @param {{icon: string, label: string, pressed?: boolean, size?: number, class?: string, [name: string]: any}} props
 */
export function IconButton({ icon, label, pressed, size = 18, ...rest }) {
  return html`<button
    type="button"
    ...${rest}
    class=${`icon-button ${rest.class ?? ""}`}
    aria-label=${label}
    title=${label}
    aria-pressed=${pressed === undefined ? undefined : String(pressed)}
  >
    <${Icon} name=${icon} size=${size} />
  </button>`;
}

/**
 * Copies text; says so for two seconds.
 * @param {{text: string | (() => string), label?: string, withText?: boolean}} props `withText`: show the label
 */
export function CopyButton({ text, label = "Copy", withText = false }) {
  const [copied, setCopied] = useState(false);
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = async () => {
    if (!(await copyText(typeof text === "function" ? text() : text))) return;
    setCopied(true);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setCopied(false), 2000);
  };
  const shown = copied ? "Copied" : label;
  const icon = copied ? "check" : "copy";
  return withText
    ? html`<${Button} size="small" icon=${icon} onClick=${copy}>${shown}<//>`
    : html`<${IconButton} icon=${icon} label=${shown} size=${16} onClick=${copy} />`;
}

/** Copy text and return whether that worked; where it did not, say so. @param {string} text */
export async function copyText(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelection(text);
    return true;
  } catch (error) {
    toastError(error);
    return false;
  }
}

/** The clipboard needs HTTPS or loopback; this works elsewhere too. @param {string} text */
function copySelection(text) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  // What is outside of an open dialog cannot be selected.
  (focused?.closest("dialog") ?? document.body).append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("The browser does not let this page copy. Select the text and copy it yourself.");
}
