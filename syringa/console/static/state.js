/** State that all pages share: the session, the route and the theme. */

import { ApiError, get, onUnauthorized, setKey } from "./api.js";
import { computed, signal } from "./lib.js";

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
/** Why a key was refused, for the sign-in form. */
export const signInError = signal("");
/** Whether the caller has a key, and so can sign out. */
export const hasKey = signal(false);

/** @param {string | null | undefined} scope null: anybody @returns {boolean} */
export function may(scope) {
  return !scope || (me.value?.scopes ?? []).includes(scope);
}

/** Ask the server who the caller is, with the key of this browser session if there is one. */
export async function startSession() {
  const stored = readStorage(sessionStorage, KEY);
  setKey(stored);
  hasKey.value = stored !== "";
  await identify();
}

/** Sign in with a key. It is kept until the tab is closed, and only ever sent in a header. @param {string} key */
export async function signIn(key) {
  setKey(key);
  signInError.value = "";
  await identify();
  if (session.value === "signed-in") {
    hasKey.value = true;
    writeStorage(sessionStorage, KEY, key);
  }
}

/** Forget the key, and everything that was shown with it. */
export function signOut() {
  setKey("");
  writeStorage(sessionStorage, KEY, null);
  hasKey.value = false;
  me.value = null;
  session.value = "signed-out";
}

async function identify() {
  try {
    const details = await get("/v1/me");
    me.value = { organization: details.organization ?? null, scopes: details.scopes ?? [], details };
    session.value = "signed-in";
  } catch (error) {
    if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
      if (session.value !== "starting" || hasKey.value) signInError.value = error.message;
      signOut();
    } else if (session.value !== "starting") signInError.value = error instanceof Error ? error.message : String(error);
  }
}

onUnauthorized((error) => {
  if (session.value !== "signed-in") return;
  signInError.value = error.message;
  signOut();
});

/** The part of the address after "#", such as "/chat". */
export const hash = signal(readHash());
/** The path of the current page, such as "/chat", and its query. */
export const route = computed(() => {
  const [path = "", query = ""] = hash.value.split("?");
  return { path: path || "/", query: new URLSearchParams(query) };
});
window.addEventListener("hashchange", () => (hash.value = readHash()));

function readHash() {
  return decodeURI(location.hash.slice(1)) || "/";
}

/** Go to a page. @param {string} path such as "/models" @param {Record<string, string>} [query] */
export function navigate(path, query) {
  const text = query ? `?${new URLSearchParams(query)}` : "";
  location.hash = `#${path}${text}`;
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

/** @param {Storage} storage @param {string} name */
function readStorage(storage, name) {
  try {
    return storage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** @param {Storage} storage @param {string} name @param {string | null} value */
function writeStorage(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
  } catch {
    // Storage is blocked: the value lasts as long as the page.
  }
}
