/** Where the next message is written: text, images by drop, paste or choice, send and stop. */

import { html, useRef, useState } from "../../lib.js";
import { Button, GrowingTextArea, IconButton, toast, toastError } from "../../ui/index.js";

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_IMAGES = 8;

/** @param {Iterable<File>} files @returns {Promise<string[]>} data: addresses of the images among them */
async function readImages(files) {
  const images = [...files].filter((each) => IMAGE_TYPES.includes(each.type));
  return Promise.all(
    images.map(
      (file) =>
        new Promise((/** @type {(value: string) => void} */ resolve, reject) => {
          const reader = new FileReader();
          reader.onload = () => resolve(String(reader.result));
          reader.onerror = () => reject(reader.error);
          reader.readAsDataURL(file);
        }),
    ),
  );
}

/**
 * @param {{text: string, onText: (text: string) => void, onSend: (text: string, images: string[]) => void, onStop: () => void,
 *   busy: boolean, vision: boolean, modelName: string, inputRef: any}} props
 */
export function Composer({ text, onText, onSend, onStop, busy, vision, modelName, inputRef }) {
  const [images, setImages] = useState(/** @type {string[]} */ ([]));
  const [dropping, setDropping] = useState(false);
  const picker = useRef(/** @type {HTMLInputElement | null} */ (null));
  const ready = !busy && (text.trim() !== "" || images.length > 0);
  const send = () => {
    if (!ready) return;
    onSend(text, images);
    onText("");
    setImages([]);
  };
  /** @param {Iterable<File>} files */
  const attach = async (files) => {
    try {
      const read = await readImages(files);
      if (read.length === 0) return;
      if (!vision) toast(`${modelName} does not read images.`, "bad");
      else setImages((previous) => [...previous, ...read].slice(0, MAX_IMAGES));
    } catch (error) {
      toastError(error);
    }
  };
  return html`<form class=${`composer ${dropping ? "dropping" : ""}`}
    onSubmit=${(event) => {
      event.preventDefault();
      send();
    }}
    onDragOver=${(event) => {
      event.preventDefault();
      setDropping(true);
    }}
    onDragLeave=${() => setDropping(false)}
    onDrop=${(event) => {
      event.preventDefault();
      setDropping(false);
      void attach(event.dataTransfer?.files ?? []);
    }}>
    ${images.length > 0 &&
    html`<div class="thumbnails">${images.map(
      (url, index) => html`<span key=${index} class="thumbnail"><img src=${url} alt=${`Image ${index + 1}`} /><${IconButton} icon="close" size=${12} label=${`Remove image ${index + 1}`} onClick=${() => setImages(images.filter((_, at) => at !== index))} /></span>`,
    )}</div>`}
    <${GrowingTextArea} inputRef=${inputRef} class="composer-input" name="message" aria-label="Message" placeholder="Write a message" value=${text}
      onInput=${(event) => onText(event.target.value)}
      onPaste=${(event) => {
        const files = [...(event.clipboardData?.files ?? [])];
        if (files.some((each) => IMAGE_TYPES.includes(each.type))) {
          event.preventDefault();
          void attach(files);
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
        void attach(event.target.files);
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
