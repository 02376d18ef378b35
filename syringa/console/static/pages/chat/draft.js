/** The message that is being written: its text, and images from files that are dropped, pasted or chosen. */

import { useState } from "../../lib.js";
import { toast, toastError } from "../../ui/index.js";

/** @typedef {{text: string, images: string[]}} Draft `images`: data: addresses */
/** @typedef {import("../../vendor/signals.js").Signal<Draft>} DraftSignal */

export const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_IMAGES = 8;

/** @type {Draft} */
export const NO_DRAFT = { text: "", images: [] };

/** Whether there is something to send. @param {Draft} draft */
export function canSend({ text, images }) {
  return text.trim() !== "" || images.length > 0;
}

/** @param {File} file */
export function isImage(file) {
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
 * Add the images among files to a draft, and say which files are left out.
 * @param {DraftSignal} draft @param {Iterable<File>} files
 * @param {string} blind name of a model that does not read images; "": there is none
 */
export async function attach(draft, files, blind) {
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
