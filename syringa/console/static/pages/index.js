/** The pages in the order of the navigation. A page that the caller's key may not use is not shown. */

import { checkConnection } from "../api.js";

/**
 * Describe a page. Its component is fetched when it is first shown.
 * @param {string} name of its folder, its address, its icon and, with a capital, its title
 * @param {"Playground" | "Operate" | "Account"} group
 * @param {() => Promise<{default: any}>} load
 * @param {{scope?: string, styled?: boolean, available?: (details: Record<string, any>) => boolean}} [options]
 *   `scope`: that the key must have; `styled`: it has a style sheet; `available`: of `GET /v1/me`, hidden where it is false
 */
function page(name, group, load, { scope, styled = false, available = () => true } = {}) {
  const css = styled ? new URL(`./${name}/${name}.css`, import.meta.url).href : null;
  const entry = {
    path: `/${name}`,
    title: `${name[0]?.toUpperCase()}${name.slice(1)}`,
    icon: name,
    group,
    scope,
    available,
    /** Its component, once it has been fetched. @type {any} */
    component: null,
    fetch: async () => (entry.component ??= await fetchPage(load, css)),
  };
  return entry;
}

/**
 * The component of a page, once its style sheet is there too. Nothing is kept of a failure: the next call tries again.
 * @param {() => Promise<{default: any}>} load @param {string | null} css
 */
async function fetchPage(load, css) {
  const files = () => Promise.all([load(), css && linkStyles(css)]);
  const [module] = await files().catch(async (error) => {
    if (!(await checkConnection())) throw error;
    return files(); // the server was away for a moment
  });
  return module.default;
}

/** Link a style sheet unless it is linked, and wait until it is there. @param {string} address */
async function linkStyles(address) {
  if ([...document.styleSheets].some((each) => each.href === address)) return;
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = address;
  try {
    await new Promise((resolve, reject) => {
      link.onload = resolve;
      link.onerror = () => reject(new Error(`${address} could not be fetched.`));
      document.head.append(link);
    });
  } catch (error) {
    link.remove();
    throw error;
  }
}

/** @typedef {ReturnType<typeof page>} PageEntry */

export const pages = [
  page("chat", "Playground", () => import("./chat/page.js"), { styled: true }),
  page("completions", "Playground", () => import("./completions/page.js"), { styled: true }),
  page("responses", "Playground", () => import("./responses/page.js"), { styled: true }),
  page("embeddings", "Playground", () => import("./embeddings/page.js"), { styled: true }),
  page("batches", "Playground", () => import("./batches/page.js")),
  page("models", "Operate", () => import("./models/page.js"), { styled: true }),
  page("status", "Operate", () => import("./status/page.js")),
  page("fleet", "Operate", () => import("./fleet/page.js"), { styled: true, scope: "admin", available: (details) => Boolean(details.server?.cluster) }),
  page("usage", "Account", () => import("./usage/page.js")),
  page("keys", "Account", () => import("./keys/page.js"), { scope: "admin" }),
];
