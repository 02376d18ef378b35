/** The messages of a thread. New text keeps the end in view, unless the reader has scrolled away from it. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../lib.js";
import { IconButton } from "../../ui/index.js";
import { MessageView } from "./message.js";
import { actionsOf, changed, defaultModel, modelOf, models } from "./session.js";
import { ModelPicker, ModelStatus } from "./settings.js";

const NEAR_END = 80;

/** The model of a thread, and its state. @param {{thread: import("./conversation.js").Thread, label: string, name?: string}} props */
export function ThreadModel({ thread, label, name }) {
  const settings = thread.settings.value;
  const model = modelOf(thread);
  return html`<header class="chat-model row">
    ${name && html`<span class="avatar thread-name">${name}</span>`}
    <${ModelPicker} label=${label} hideLabel value=${settings.model} defaultModel=${defaultModel()} models=${models.value} onChange=${(id) => {
      thread.settings.value = { ...settings, model: id };
      changed();
    }} />
    ${model && html`<${ModelStatus} model=${model} />`}
  </header>`;
}

/**
 * @param {{thread: import("./conversation.js").Thread, name?: string, empty?: any}} props `name`: of a thread that is compared
 */
export function ThreadView({ thread, name, empty }) {
  const scroller = useRef(/** @type {HTMLDivElement | null} */ (null));
  const inner = useRef(/** @type {HTMLDivElement | null} */ (null));
  const following = useRef(true);
  const top = useRef(0); // where it was scrolled to
  const [away, setAway] = useState(false);
  thread.shape.value; // rendered again when the tree changes
  const busy = thread.running.value !== null;
  const path = thread.path();
  const toEnd = () => {
    const element = scroller.current;
    if (!element) return;
    element.scrollTop = element.scrollHeight;
    top.current = element.scrollTop;
  };
  useLayoutEffect(() => {
    following.current = true;
    toEnd();
  }, [thread, path.length]);
  useEffect(() => {
    const element = inner.current;
    if (!element) return undefined;
    const observer = new ResizeObserver(() => following.current && toEnd());
    observer.observe(element);
    return () => observer.disconnect();
  }, [thread]);
  const onScroll = () => {
    const element = scroller.current;
    if (!element) return;
    const near = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_END;
    // Text that arrived since it was scrolled to the end is no reason to stay behind: only the reader scrolls back.
    if (near || element.scrollTop < top.current) following.current = near;
    top.current = element.scrollTop;
    setAway(!following.current);
  };
  const actions = actionsOf(thread);
  return html`<section class="thread" aria-label=${name ? `Thread ${name}` : "Conversation"}>
    ${name &&
    html`<${ThreadModel} thread=${thread} label=${`Model of thread ${name}`} name=${name} />`}
    <div class="thread-scroller" ref=${scroller} onScroll=${onScroll} tabindex="0" role="log" aria-live="polite" aria-label="Messages">
      <div class="thread-inner" ref=${inner}>
        ${path.length === 0 && empty}
        ${path.map(
          (message, index) => html`<${MessageView} key=${message.id} message=${message} siblings=${thread.children(message.parent)} actions=${actions} busy=${busy}
            last=${index === path.length - 1} model=${modelOf(thread)} />`,
        )}
      </div>
    </div>
    ${away && html`<div class="jump"><${IconButton} icon="down" label="Go to the end" onClick=${() => {
      following.current = true;
      toEnd();
    }} /></div>`}
  </section>`;
}
