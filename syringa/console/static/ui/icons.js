/** Icons: strokes on a grid of 20, in the color of the text. */

import { html } from "../lib.js";

/** @type {Record<string, string>} */
const PATHS = {
  chat: "M3.5 4.5h13v9h-7l-4 3v-3h-2z",
  completions: "M4 5h12M4 8.5h8M4 12h5M13 11v6M11.5 11h3M11.5 17h3",
  responses: "M5 3.5v9M5 7.5h6a3 3 0 0 1 3 3v1M5 16.5a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM14 15.5a2 2 0 1 0 0-4 2 2 0 0 0 0 4z",
  models: "M10 2.8l6.5 3.6v7.2L10 17.2l-6.5-3.6V6.4zM3.5 6.4L10 10l6.5-3.6M10 10v7.2",
  status: "M2.5 11h3l2-6 4 10 2.2-6 1.3 2h2.5",
  usage: "M3.5 16.5h13M5.5 16V10M10 16V4M14.5 16V8",
  keys: "M12.5 11.5a4 4 0 1 0-3.7-2.5L3.5 14.3v2.2h2.7v-2h2v-2l1.2-1.3c.9.2 2 .3 3.1.3zM13.5 6.5h.01",
  fleet: "M3.5 4h13v4.5h-13zM3.5 11.5h13V16h-13zM6 6.25h.01M6 13.75h.01",
  batches: "M10 3l7 3.5-7 3.5-7-3.5zM3 10l7 3.5 7-3.5M3 13.5L10 17l7-3.5",
  embeddings: "M5 6.5a1.5 1.5 0 1 0 0-3 1.5 1.5 0 0 0 0 3zM14.5 8a1.5 1.5 0 1 0 0-3 1.5 1.5 0 0 0 0 3zM8 16.5a1.5 1.5 0 1 0 0-3 1.5 1.5 0 0 0 0 3zM6.3 5.3l6.7 1M7.5 13.5L5.5 6.5M9 13.7l4.5-6",
  docs: "M5 2.5h7l3.5 3.5v11.5H5zM12 2.5V6h3.5M7.5 10h5.5M7.5 13h5.5",
  menu: "M3 5.5h14M3 10h14M3 14.5h14",
  history: "M10 17a7 7 0 1 0-6.6-4.7M3.5 16v-3.7h3.7M10 6v4.2l2.8 1.8",
  close: "M5 5l10 10M15 5L5 15",
  plus: "M10 4v12M4 10h12",
  check: "M4 10.5l4 4 8-9",
  copy: "M7 7V3.5h9.5V13H13M3.5 7H13v9.5H3.5z",
  trash: "M3.5 5.5h13M8 5.5v-2h4v2M5.5 5.5l.8 11h7.4l.8-11M8.5 8.5v5M11.5 8.5v5",
  edit: "M3.5 16.5v-3L13 4l3 3-9.5 9.5zM11 6l3 3",
  refresh: "M16.5 10a6.5 6.5 0 1 1-2-4.7L16.5 7M16.5 3v4h-4",
  send: "M10 16.5v-13M4.5 9L10 3.5 15.5 9",
  stop: "M5.5 5.5h9v9h-9z",
  sun: "M10 13.5a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7zM10 1.5v2M10 16.5v2M1.5 10h2M16.5 10h2M4 4l1.4 1.4M14.6 14.6L16 16M16 4l-1.4 1.4M5.4 14.6L4 16",
  moon: "M16.5 12A7 7 0 0 1 8 3.5a7 7 0 1 0 8.5 8.5z",
  system: "M3 4h14v9.5H3zM7 17h6M10 13.5V17",
  left: "M12.5 4.5L7 10l5.5 5.5",
  right: "M7.5 4.5L13 10l-5.5 5.5",
  down: "M4.5 7.5L10 13l5.5-5.5",
  up: "M4.5 12.5L10 7l5.5 5.5",
  download: "M10 3v10M5.5 9L10 13.5 14.5 9M3.5 16.5h13",
  upload: "M10 14V4M5.5 8L10 3.5 14.5 8M3.5 16.5h13",
  image: "M3 4h14v12H3zM3 13l4-4 4 4 2.5-2.5L17 14M13 8h.01",
  code: "M7 5.5L2.5 10 7 14.5M13 5.5l4.5 4.5-4.5 4.5",
  settings: "M3 6h7M14 6h3M12 8a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM3 14h3M10 14h7M8 16a2 2 0 1 0 0-4 2 2 0 0 0 0 4z",
  tool: "M12.5 3.5a4 4 0 0 0-4.2 5.3L3 14.1 5.9 17l5.3-5.3a4 4 0 0 0 5.3-4.2L14 10l-2.5-.5L11 7z",
  compare: "M3 4h6v12H3zM11 4h6v12h-6z",
  tokens: "M3 6h4v3H3zM8.5 6H12v3H8.5zM13.5 6H17v3h-3.5zM3 11.5h6v3H3zM10.5 11.5H17v3h-6.5z",
  brain: "M10 4.5v11M10 5.5a2.5 2.5 0 0 0-4.8.8A3 3 0 0 0 4.5 12a2.8 2.8 0 0 0 5.5 1.5M10 5.5a2.5 2.5 0 0 1 4.8.8 3 3 0 0 1 .7 5.7 2.8 2.8 0 0 1-5.5 1.5",
  warning: "M10 3.5l7.5 13h-15zM10 8.5v3.5M10 14.2h.01",
  info: "M10 17a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM10 9.5V13.5M10 6.8h.01",
  signout: "M8 3.5H4v13h4M8.5 10h8M13 6.5l3.5 3.5-3.5 3.5",
  more: "M4.2 10h.6M9.7 10h.6M15.2 10h.6",
  play: "M6 4l10 6-10 6z",
};

/** @param {{name: string, size?: number}} props */
export function Icon({ name, size = 18 }) {
  return html`<svg class="icon" viewBox="0 0 20 20" width=${size} height=${size} aria-hidden="true" focusable="false">
    <path d=${PATHS[name] ?? ""} />
  </svg>`;
}
