/** The message that is being written: its text, images that are dropped, pasted or chosen, and where that is done. */

import { html, useRef, useState } from "../../lib.js";
import { Button, GrowingTextArea, IconButton, toast, toastError } from "../../ui/index.js";
import { draft as keptDraft } from "../shared.js";

/** @typedef {{text: string, images: string[]}} Draft `images`: data: addresses */

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_IMAGES = 8;

/** @type {Draft} */
const NO_DRAFT = { text: "", images: [] };
export const draft = keptDraft(NO_DRAFT);

/** Whether there is something to send. @param {Draft} draft */
export function canSend({ text, images }) {
  return text.trim() !== "" || images.length > 0;
}

/** @param {File} file */
function isImage(file) {
  return IMAGE_TYPES.includes(file.type);
}

/** @param {File} file @returns {Promise<string>} its data: address */
function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/**
 * Add the images among files to the draft, and say which files are left out.
 * @param {Iterable<File>} files
 * @param {string} blind name of a model that does not read images; "": there is none
 */
export async function attach(files, blind) {
  const given = [...files];
  const others = given.filter((each) => !isImage(each)).map((each) => each.name);
  if (others.length > 0) toast(`Only PNG, JPEG, WebP and GIF images can be attached, not ${others.join(", ")}.`, "bad");
  if (others.length === given.length) return;
  if (blind) {
    toast(`${blind} does not read images.`, "bad");
    return;
  }
  try {
    const read = await Promise.all(given.filter(isImage).map(readFile));
    const images = [...draft.value.images, ...read];
    if (images.length > MAX_IMAGES) toast(`A message has at most ${MAX_IMAGES} images.`, "bad");
    draft.value = { ...draft.value, images: images.slice(0, MAX_IMAGES) };
  } catch (error) {
    toastError(error);
  }
}

/**
 * Properties of an element that files can be dropped on, and whether some are held over it. Text is left to its inputs.
 * @param {(files: Iterable<File>) => void} onFiles
 */
export function useFileDrop(onFiles) {
  const [dropping, setDropping] = useState(false);
  /** @param {DragEvent} event */
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files") === true;
  const target = {
    /** @param {DragEvent} event */
    onDragOver: (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setDropping(true);
    },
    /** @param {any} event */
    onDragLeave: (event) => {
      if (!event.currentTarget.contains(event.relatedTarget)) setDropping(false);
    },
    /** @param {DragEvent} event */
    onDrop: (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setDropping(false);
      onFiles(event.dataTransfer?.files ?? []);
    },
  };
  return { dropping, target };
}

/**
 * @param {{onFiles: (files: Iterable<File>) => void, onSend: (text: string, images: string[]) => void, onStop: () => void,
 *   busy: boolean, vision: boolean, inputRef: any}} props
 */
export function Composer({ onFiles, onSend, onStop, busy, vision, inputRef }) {
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
