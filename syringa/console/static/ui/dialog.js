/** Dialogs on the browser's own <dialog>, which keeps the focus inside. */

import { html, signal, useEffect, useId, useRef, useState } from "../lib.js";
import { Button, IconButton } from "./button.js";
import { Toasts, dialogs } from "./feedback.js";

/**
 * @param {{open: boolean, title: string, onClose?: () => void, wide?: boolean, form?: boolean, actions?: any, children?: any}} props
 *   `onClose`: without it, only `actions` close the dialog; `form`: so it is once something was typed, which Esc and a
 *   click beside it would lose; `actions`: buttons at the end
 */
export function Dialog({ open, title, onClose, wide = false, form = false, actions, children }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const id = useId();
  const [changed, setChanged] = useState(false);
  const held = !onClose || (form && changed);
  useEffect(() => {
    const element = ref.current;
    if (!open || !element) return undefined;
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    element.showModal();
    dialogs.value = [...dialogs.value, id];
    return () => {
      dialogs.value = dialogs.value.filter((each) => each !== id);
      element.close();
      focused?.focus(); // an element that is already removed does not give the focus back
    };
  }, [open]);
  if (!open) return null;
  /** Esc, or a click beside the dialog. @param {Event} event */
  const leave = (event) => {
    if (event.target !== ref.current) return; // a file picker inside that was dismissed is a "cancel", too
    event.preventDefault();
    if (!held) onClose();
  };
  // Some browsers let no script prevent a second Esc, but all of those know `closedby`.
  return html`<dialog ref=${ref} class=${`dialog ${wide ? "wide" : ""}`} aria-labelledby=${id} closedby=${held ? "none" : "closerequest"}
    onCancel=${leave} onMouseDown=${leave} onInput=${() => setChanged(true)}>
    <div class="dialog-box">
      <header class="dialog-header"><h2 id=${id}>${title}</h2>${onClose && html`<${IconButton} icon="close" label="Close" onClick=${onClose} />`}</header>
      <div class="dialog-body">${children}</div>
      ${actions && html`<footer class="dialog-actions">${actions}</footer>`}
    </div>
    <${Toasts} dialog=${id} />
  </dialog>`;
}

/** @typedef {{title: string, text: any, action: string}} Question `action`: the text of the button */
const question = signal(/** @type {(Question & {resolve: (value: boolean) => void}) | null} */ (null));

/** @param {boolean} value */
function answer(value) {
  const asked = question.peek();
  question.value = null;
  asked?.resolve(value);
}

/** Ask before something that cannot be undone. @param {Question} asked */
export function confirm(asked) {
  answer(false);
  return new Promise((resolve) => (question.value = { ...asked, resolve }));
}

/** Where `confirm` shows its dialog. Signing out answers it. */
export function Confirmations() {
  useEffect(() => () => answer(false), []);
  const asked = question.value;
  if (!asked) return null;
  return html`<${Dialog}
    open
    title=${asked.title}
    onClose=${() => answer(false)}
    actions=${html`<${Button} onClick=${() => answer(false)}>Cancel<//>
      <${Button} variant="danger" onClick=${() => answer(true)}>${asked.action}<//>`}
  >
    ${asked.text}
  <//>`;
}

/**
 * A button with a menu of actions.
 * @param {{label: string, icon?: string, items: {label: string, icon?: string, danger?: boolean, onClick: () => void}[]}} props
 */
export function Menu({ label, icon = "more", items }) {
  const [open, setOpen] = useState(false);
  const root = useRef(/** @type {HTMLDivElement | null} */ (null));
  const close = () => {
    setOpen(false);
    root.current?.querySelector("button")?.focus();
  };
  useEffect(() => {
    if (!open) return undefined;
    // Fixed, so that a table that scrolls does not cut it off.
    const list = /** @type {HTMLElement | null | undefined} */ (root.current?.querySelector('[role="menu"]'));
    const box = root.current?.getBoundingClientRect();
    if (list && box) {
      const below = box.bottom + list.offsetHeight + 8 < window.innerHeight;
      list.style.top = `${below ? box.bottom + 4 : Math.max(8, box.top - list.offsetHeight - 4)}px`;
      list.style.left = `${Math.max(8, box.right - list.offsetWidth)}px`;
    }
    const buttons = () => /** @type {HTMLElement[]} */ ([...(list?.children ?? [])]);
    buttons()[0]?.focus();
    /** @param {KeyboardEvent} event */
    const onKey = (event) => {
      const all = buttons();
      const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement));
      if (event.key === "Escape") {
        close();
      } else if (event.key === "ArrowDown") all[(at + 1) % all.length]?.focus();
      else if (event.key === "ArrowUp") all[(at - 1 + all.length) % all.length]?.focus();
      else return;
      event.preventDefault();
    };
    /** @param {Event} event */
    const onPointer = (event) => {
      if (!root.current?.contains(/** @type {Node} */ (event.target))) setOpen(false);
    };
    document.addEventListener("keydown", onKey);
    document.addEventListener("pointerdown", onPointer);
    const onScroll = () => setOpen(false);
    document.addEventListener("scroll", onScroll, true);
    return () => {
      document.removeEventListener("keydown", onKey);
      document.removeEventListener("pointerdown", onPointer);
      document.removeEventListener("scroll", onScroll, true);
    };
  }, [open]);
  return html`<div class="menu" ref=${root}>
    <${IconButton} icon=${icon} label=${label} aria-haspopup="menu" aria-expanded=${String(open)} onClick=${() => setOpen(!open)} />
    ${open &&
    html`<div class="menu-list" role="menu" aria-label=${label}>
      ${items.map(
        (each) => html`<${Button} key=${each.label} variant=${each.danger ? "danger" : "ghost"} icon=${each.icon} role="menuitem" onClick=${() => {
          close();
          each.onClick();
        }}>${each.label}<//>`,
      )}
    </div>`}
  </div>`;
}
