/** Spinner, progress, badges, notices, empty states and toasts. */

import { html, signal } from "../lib.js";
import { Icon } from "./icons.js";

/** @param {{label?: string, small?: boolean}} props */
export function Spinner({ label = "", small = false }) {
  return html`<span class=${`spinner ${small ? "small" : ""}`} role=${label ? "status" : undefined}>
    <span class="spinner-circle" aria-hidden="true"></span>${label && html`<span>${label}</span>`}
  </span>`;
}

/** @param {{value?: number | null, max?: number, label: string}} props without a value: it is not known how far */
export function Progress({ value, max = 1, label }) {
  return html`<progress class="progress" value=${value ?? undefined} max=${max} aria-label=${label}></progress>`;
}

/** @param {{tone?: "neutral" | "good" | "warning" | "bad" | "accent", dot?: boolean, title?: string, children?: any}} props */
export function Badge({ tone = "neutral", dot = false, title, children }) {
  return html`<span class=${`badge ${tone}`} title=${title}>${dot && html`<span class="dot" aria-hidden="true"></span>`}${children}</span>`;
}

/**
 * A notice in the page.
 * @param {{tone?: "info" | "warning" | "bad", title?: string, action?: any, children?: any}} props
 */
export function Notice({ tone = "info", title, action, children }) {
  return html`<div class=${`notice ${tone}`} role=${tone === "bad" ? "alert" : "status"}>
    <${Icon} name=${tone === "info" ? "info" : "warning"} />
    <div class="notice-text">${title && html`<strong>${title}</strong>`}<div>${children}</div></div>
    ${action}
  </div>`;
}

/**
 * The server's message and request id.
 * @param {{error: any, title?: string, onRetry?: () => void}} props
 */
export function ErrorNotice({ error, title, onRetry }) {
  if (!error) return null;
  const retry = onRetry && html`<button type="button" class="button secondary small" onClick=${onRetry}><span>Try again</span></button>`;
  return html`<${Notice} tone="bad" title=${title} action=${retry}><${ErrorText} error=${error} /><//>`;
}

/** The server's message, field and request id. @param {{error: any}} props */
export function ErrorText({ error }) {
  return html`${error.message ?? String(error)}
    ${error.param && html`<div class="muted">Field: <code>${error.param}</code></div>`}
    ${error.requestId && html`<div class="muted">Request id: <code>${error.requestId}</code></div>`}`;
}

/**
 * What to do next where there is nothing yet.
 * @param {{icon?: string, title: string, action?: any, children?: any}} props
 */
export function EmptyState({ icon = "info", title, action, children }) {
  return html`<div class="empty">
    <span class="empty-icon"><${Icon} name=${icon} size=${24} /></span>
    <h2>${title}</h2>
    <div class="empty-text">${children}</div>
    ${action && html`<div class="empty-action">${action}</div>`}
  </div>`;
}

/**
 * What a page shows of a `useResource`: a spinner at first, the error, then `children(data)`.
 * @param {{of: import("../hooks.js").Resource<any>, label?: string, children: (data: any) => any}} props
 */
export function Loaded({ of: resource, label = "Loading", children }) {
  if (resource.data === undefined) {
    return resource.error
      ? html`<${ErrorNotice} error=${resource.error} onRetry=${resource.reload} />`
      : html`<div class="loading"><${Spinner} label=${label} /></div>`;
  }
  // That the server is away is said at the top of the page.
  const failed = resource.error && /** @type {any} */ (resource.error).status !== 0;
  return html`${failed && html`<${ErrorNotice} error=${resource.error} onRetry=${resource.reload} />`}${children(resource.data)}`;
}

/** @typedef {{id: number, tone: "good" | "bad" | "neutral", text: string, detail: string}} ToastItem */
const toasts = signal(/** @type {ToastItem[]} */ ([]));
/** The ids of open dialogs, the one on top last. */
export const dialogs = signal(/** @type {string[]} */ ([]));
let lastToast = 0;

/** Say something for a few seconds. @param {string} text @param {"good" | "bad" | "neutral"} [tone] @param {string} [detail] */
export function toast(text, tone = "neutral", detail = "") {
  const id = ++lastToast;
  toasts.value = [...toasts.value.slice(-3), { id, tone, text, detail }];
  setTimeout(() => dismiss(id), tone === "bad" ? 8000 : 4000);
}

/** Show the message and request id of a failure as a toast. @param {any} error */
export function toastError(error) {
  toast(error?.message ?? String(error), "bad", error?.requestId ? `Request id: ${error.requestId}` : "");
}

/** @param {number} id */
function dismiss(id) {
  toasts.value = toasts.value.filter((each) => each.id !== id);
}

/**
 * Where toasts are shown: in the page, and in each dialog, since nothing else can be used or is read out while it is
 * open.
 * @param {{dialog?: string}} props
 */
export function Toasts({ dialog }) {
  const shown = dialogs.value.at(-1) === dialog ? toasts.value : [];
  return html`<div class="toasts" role="status" aria-live="polite">
    ${shown.map(
      (each) => html`<div key=${each.id} class=${`toast ${each.tone}`}>
        <span>${each.text}${each.detail && html`<small class="muted">${each.detail}</small>`}</span>
        <button type="button" class="icon-button" aria-label="Dismiss" onClick=${() => dismiss(each.id)}><${Icon} name="close" size=${14} /></button>
      </div>`,
    )}
  </div>`;
}
