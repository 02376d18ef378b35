/**
 * What pages need of the vendored libraries, under one import. `html` is JSX as a tagged template:
 * html`<${Button} onClick=${save}>Save<//>`.
 */

import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { Fragment, createContext, h, render } from "./vendor/preact.js";
export {
  useCallback,
  useContext,
  useEffect,
  useErrorBoundary,
  useId,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "./vendor/preact-hooks.js";
export { batch, computed, effect, signal, untracked, useComputed, useSignal, useSignalEffect } from "./vendor/signals.js";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);
