/** Where the next message is written: text, images by paste or choice, send and stop. */

import { html, useRef } from "../../lib.js";
import { Button, GrowingTextArea, IconButton } from "../../ui/index.js";
import { IMAGE_TYPES, NO_DRAFT, canSend, isImage } from "./draft.js";

/**
 * @param {{draft: import("./draft.js").DraftSignal, onFiles: (files: Iterable<File>) => void, onSend: (text: string, images: string[]) => void,
 *   onStop: () => void, busy: boolean, vision: boolean, inputRef: any}} props
 */
export function Composer({ draft, onFiles, onSend, onStop, busy, vision, inputRef }) {
  const picker = useRef(/** @type {HTMLInputElement | null} */ (null));
  const { text, images } = draft.value;
  const ready = !busy && canSend(draft.value);
  const send = () => {
    if (!ready) return;
    onSend(text, images);
    draft.value = NO_DRAFT;
  };
  return html`<form class="composer"
    onSubmit=${(event) => {
      event.preventDefault();
      send();
    }}>
    ${images.length > 0 &&
    html`<div class="thumbnails">${images.map(
      (url, index) => html`<span key=${index} class="thumbnail"><img src=${url} alt=${`Image ${index + 1}`} /><${IconButton} icon="close" size=${12} label=${`Remove image ${index + 1}`}
        onClick=${() => (draft.value = { text, images: images.filter((_, at) => at !== index) })} /></span>`,
    )}</div>`}
    <${GrowingTextArea} inputRef=${inputRef} class="composer-input" name="message" aria-label="Message" placeholder="Write a message" value=${text}
      onInput=${(event) => (draft.value = { ...draft.value, text: event.target.value })}
      onPaste=${(event) => {
        const files = [...(event.clipboardData?.files ?? [])];
        // Copied text may come with files of other types, which are another form of it.
        if (files.some(isImage) || (files.length > 0 && !event.clipboardData.types.includes("text/plain"))) {
          event.preventDefault();
          onFiles(files);
        }
      }}
      onKeyDown=${(event) => {
        // Safari ends a composition before its Enter, which then has the code of one.
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
          event.preventDefault();
          send();
        }
      }} />
    <div class="composer-actions">
      ${vision && html`<input ref=${picker} class="visually-hidden" type="file" accept=${IMAGE_TYPES.join(",")} multiple tabindex="-1" aria-hidden="true" onChange=${(event) => {
        onFiles([...event.target.files]);
        event.target.value = "";
      }} />
      <${IconButton} icon="image" label="Attach images" onClick=${() => picker.current?.click()} />`}
      <span class="composer-hint">Enter sends, Shift+Enter breaks the line</span>
      ${busy
        ? html`<${Button} class="send" icon="stop" onClick=${onStop}>Stop<//>`
        : html`<${Button} class="send" variant="primary" icon="send" type="submit" disabled=${!ready}>Send<//>`}
    </div>
  </form>`;
}
