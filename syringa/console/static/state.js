/** State that all pages share: the session, the route and the theme. */

import { ApiError, get, onUnauthorized, setKey } from "./api.js";
import { signal } from "./lib.js";

const KEY = "syringa.key";
const THEME = "syringa.theme";

/**
 * @typedef {object} Me what `GET /v1/me` says of the caller
 * @property {string | null} organization
 * @property {string[]} scopes
 * @property {Record<string, any>} details the whole answer
 */

/** "starting" until the server has said who the caller is. */
export const session = signal(/** @type {"starting" | "signed-in" | "signed-out"} */ ("starting"));
/** @type {import("./vendor/signals.js").Signal<Me | null>} */
export const me = signal(null);
/** Why the server did not say who the caller is: a key that was refused, or a failure. */
export const signInError = signal(/** @type {Error | null} */ (null));
/** Whether the caller has a key, and so can sign out. */
export const hasKey = signal(false);

/** @param {string | null | undefined} scope null: anybody */
export function may(scope) {
  return !scope || (me.value?.scopes ?? []).includes(scope);
}

/** Ask the server who the caller is, with the key of this browser session if there is one. */
export async function startSession() {
  const stored = readStorage(KEY);
  signInError.value = null;
  setKey(stored);
  hasKey.value = stored !== "";
  await identify();
}

/** Sign in with a key. It is kept until the tab is closed, and only ever sent in a header. @param {string} key */
export async function signIn(key) {
  if (!/^[\x21-\x7e]+$/.test(key)) {
    signInError.value = new Error("A key has no spaces, and no characters beyond ASCII.");
    return;
  }
  setKey(key);
  signInError.value = null;
  await identify();
  if (session.value === "signed-in") {
    hasKey.value = true;
    writeStorage(sessionStorage, KEY, key);
  }
}

/** Forget the key, and everything that was shown with it. */
export function signOut() {
  asked += 1;
  setKey("");
  writeStorage(sessionStorage, KEY, null);
  hasKey.value = false;
  me.value = null;
  session.value = "signed-out";
}

/** Counts questions to the server, so that a late answer to an earlier one changes nothing. */
let asked = 0;

/** Ask the server who the caller is. While signed in, only a refused key changes the session. */
export async function identify() {
  const turn = ++asked;
  try {
    const details = await get("/v1/me");
    if (turn !== asked) return;
    me.value = { organization: details.organization ?? null, scopes: details.scopes ?? [], details };
    session.value = "signed-in";
  } catch (error) {
    if (turn !== asked) return;
    if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
      if (session.value !== "starting" || hasKey.value) signInError.value = error;
      signOut();
    } else if (session.value !== "signed-in") signInError.value = error instanceof Error ? error : new Error(String(error));
  }
}

onUnauthorized((error) => {
  if (session.value !== "signed-in") return;
  signInError.value = error;
  signOut();
});

/** The path of the current page, such as "/chat": the part of the address after "#". */
export const route = signal(readHash());
window.addEventListener("hashchange", () => (route.value = readHash()));

function readHash() {
  const path = location.hash.slice(1).split("?")[0] || "/";
  try {
    return decodeURI(path);
  } catch {
    return path;
  }
}

/** Go to a page. @param {string} path such as "/models" */
export function navigate(path) {
  location.hash = `#${path}`;
}

/** "light", "dark" or "system". */
export const theme = signal(document.documentElement.dataset.theme ?? "system");
/** How often the colors have changed: what draws on a canvas reads it. */
export const themeChanges = signal(0);

/** @param {"light" | "dark" | "system"} value */
export function setTheme(value) {
  theme.value = value;
  document.documentElement.dataset.theme = value;
  writeStorage(localStorage, THEME, value);
  themeChanges.value += 1;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (themeChanges.value += 1));

/** What is stored in this tab, or "". @param {string} name */
export function readStorage(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** @param {Storage} storage @param {string} name @param {string | null} value null: remove it */
export function writeStorage(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
  } catch {
    // Storage is blocked: the value lasts as long as the page.
  }
}
