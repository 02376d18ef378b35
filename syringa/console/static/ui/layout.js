/** Pages, cards, figures, tabs and code. */

import { html, useId, useRef } from "../lib.js";
import { CopyButton } from "./button.js";

/**
 * The frame of a page that scrolls as a whole.
 * @param {{title: string, lead?: any, actions?: any, children?: any}} props
 */
export function Page({ title, lead, actions, children }) {
  return html`<div class="page">
    <header class="page-header">
      <div><h1>${title}</h1>${lead && html`<p class="lead">${lead}</p>`}</div>
      ${actions && html`<div class="page-actions">${actions}</div>`}
    </header>
    ${children}
  </div>`;
}

/** @param {{title?: any, actions?: any, class?: string, children?: any}} props */
export function Card({ title, actions, class: name = "", children }) {
  return html`<section class=${`card ${name}`}>
    ${(title || actions) && html`<header class="card-header">${title && html`<h2>${title}</h2>`}${actions && html`<div class="card-actions">${actions}</div>`}</header>`}
    ${children}
  </section>`;
}

/** A figure with its name. @param {{label: string, value: any, detail?: any}} props */
export function Stat({ label, value, detail }) {
  return html`<div class="stat"><dt>${label}</dt><dd>${value}${detail && html`<small>${detail}</small>`}</dd></div>`;
}

/** A row of `Stat`s. @param {{children?: any}} props */
export function Stats({ children }) {
  return html`<dl class="stats">${children}</dl>`;
}

/**
 * Tabs; arrow keys move between them. `children(id)` renders the chosen one.
 * @param {{label: string, tabs: {id: string, label: any}[], value: string, onChange: (id: string) => void,
 *   children?: (id: string) => any}} props
 */
export function Tabs({ label, tabs, value, onChange, children }) {
  const id = useId();
  const list = useRef(/** @type {HTMLDivElement | null} */ (null));
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = tabs.findIndex((each) => each.id === value);
    const next = (at + step + tabs.length) % tabs.length;
    const chosen = tabs[next];
    if (chosen) onChange(chosen.id);
    /** @type {HTMLElement | undefined} */ (list.current?.children[next])?.focus();
    event.preventDefault();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${onKey}>
      ${tabs.map(
        (each) => html`<button key=${each.id} type="button" role="tab" id=${`${id}-${each.id}`} class="tab" aria-selected=${String(each.id === value)}
          aria-controls=${children ? `${id}-panel` : undefined} tabindex=${each.id === value ? 0 : -1} onClick=${() => onChange(each.id)}>${each.label}</button>`,
      )}
    </div>
    ${children && html`<div role="tabpanel" id=${`${id}-panel`} aria-labelledby=${`${id}-${value}`} class="tab-panel">${children(value)}</div>`}`;
}

/** Code or JSON, to be copied. @param {{code: string, label: string}} props */
export function CodeBlock({ code, label }) {
  return html`<div class="code-block">
    <${CopyButton} text=${code} label=${`Copy ${label}`} />
    <pre tabindex="0" role="region" aria-label=${label}><code>${code}</code></pre>
  </div>`;
}
