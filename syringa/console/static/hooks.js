/** Hooks that pages share. */

import { isAbort, reconnects } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./lib.js";

/**
 * @template T
 * @typedef {object} Resource
 * @property {T | undefined} data the last that was loaded, also while it is loaded again
 * @property {Error | null} error of the last try
 * @property {boolean} loading
 * @property {() => void} reload
 */

/**
 * Load something from the server: at once, when `inputs` change, every `interval` milliseconds while the page is
 * visible, and when the server comes back. `interval` may depend on what was loaded last.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {unknown[]} inputs
 * @param {{interval?: number | ((data: T | undefined) => number)}} [options]
 * @returns {Resource<T>}
 */
export function useResource(load, inputs, { interval = 0 } = {}) {
  const [state, setState] = useState(
    /** @type {{data: T | undefined, error: Error | null, loading: boolean}} */ ({ data: undefined, error: null, loading: true }),
  );
  const [turn, setTurn] = useState(0);
  const reload = useCallback(() => setTurn((value) => value + 1), []);
  const returned = reconnects.value;
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    /** @type {T | undefined} */
    let data;
    const run = async (first = false) => {
      if (first || document.visibilityState === "visible") {
        try {
          data = await load(controller.signal);
          if (controller.signal.aborted) return;
          setState({ data, error: null, loading: false });
        } catch (error) {
          if (controller.signal.aborted || isAbort(error)) return;
          const failure = error instanceof Error ? error : new Error(String(error));
          setState((previous) => ({ data: previous.data, error: failure, loading: false }));
        }
      }
      const wait = typeof interval === "function" ? interval(data) : interval;
      if (wait > 0 && !controller.signal.aborted) timer = setTimeout(run, wait);
    };
    setState((previous) => ({ ...previous, loading: true }));
    void run(true);
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [...inputs, typeof interval === "function" ? 0 : interval, turn, returned]);
  return { ...state, reload };
}

/**
 * Run something that the user asked for, once at a time.
 * @template {unknown[]} A
 * @param {(...values: A) => Promise<void>} action its errors go to `error`
 */
export function useAction(action) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const running = useRef(false);
  /** @param {A} values */
  const run = async (...values) => {
    if (running.current) return;
    running.current = true;
    setBusy(true);
    setError(null);
    try {
      await action(...values);
    } catch (failure) {
      if (!isAbort(failure)) setError(failure instanceof Error ? failure : new Error(String(failure)));
    } finally {
      running.current = false;
      setBusy(false);
    }
  };
  return { run, busy, error };
}

/**
 * A value of this browser, kept in local storage under `name`.
 * @template T
 * @param {string} name @param {T} initial
 * @returns {[T, (value: T) => void]}
 */
export function useStored(name, initial) {
  const [value, setValue] = useState(() => {
    try {
      const text = localStorage.getItem(`syringa.${name}`);
      return text === null ? initial : /** @type {T} */ (JSON.parse(text));
    } catch {
      return initial;
    }
  });
  /** @param {T} next */
  const store = (next) => {
    setValue(next);
    try {
      localStorage.setItem(`syringa.${name}`, JSON.stringify(next));
    } catch {
      // Blocked or full: it lasts as long as the page.
    }
  };
  return [value, store];
}

/** Whether a media query holds, also when that changes. @param {string} query */
export function useMedia(query) {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const update = () => setMatches(list.matches);
    update();
    list.addEventListener("change", update);
    return () => list.removeEventListener("change", update);
  }, [query]);
  return matches;
}
