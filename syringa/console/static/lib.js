/**
 * What pages need of the vendored libraries, under one import. `html` is JSX as a tagged template:
 * html`<${Button} onClick=${save}>Save<//>`.
 */

import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export {
  useCallback,
  useEffect,
  useErrorBoundary,
  useId,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "./vendor/preact-hooks.js";
export { batch, effect, signal } from "./vendor/signals.js";

/** @type {(strings: TemplateStringsArray, ...values: (((...values: any[]) => any) | object | string | number | boolean | null | undefined)[]) => any} */
export const html = htm.bind(h);
