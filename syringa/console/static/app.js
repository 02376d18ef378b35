/** The shell: sign-in, navigation, the current page, and what is said when the server is away. */

import { connection, reconnects } from "./api.js";
import { useResource } from "./hooks.js";
import { effect, html, render, useEffect, useErrorBoundary, useRef, useState } from "./lib.js";
import { pages } from "./pages/index.js";
import { hasKey, identify, may, me, navigate, route, session, setTheme, signIn, signInError, signOut, startSession, theme } from "./state.js";
import { Button, Confirmations, ErrorNotice, ErrorText, Icon, IconButton, Spinner, TextInput, Toasts } from "./ui/index.js";

const GROUPS = ["Playground", "Operate", "Account"];
const THEMES = /** @type {const} */ (["system", "light", "dark"]);
const THEME_ICONS = { system: "system", light: "sun", dark: "moon" };

function visiblePages() {
  return pages.filter((page) => may(page.scope) && page.available(me.value?.details ?? {}));
}

function App() {
  if (session.value === "starting") {
    if (connection.value === "away") return html`<div class="center"><${AwayMessage} /></div>`;
    const failed = signInError.value;
    return html`<div class="center">${failed ? html`<${ErrorNotice} error=${failed} onRetry=${startSession} />` : html`<${Spinner} label="Connecting" />`}</div>`;
  }
  return html`${session.value === "signed-out" ? html`<${SignIn} />` : html`<${Shell} /><${Confirmations} />`}<${Toasts} />`;
}

function Shell() {
  const [menuOpen, setMenuOpen] = useState(false);
  const path = route.value;
  const shown = visiblePages();
  const page = shown.find((each) => path === each.path || path.startsWith(`${each.path}/`)) ?? (path === "/" ? shown[0] : undefined);
  const main = useRef(/** @type {HTMLElement | null} */ (null));
  const first = useRef(true);
  useEffect(() => {
    document.title = page ? `${page.title} · Syringa` : "Syringa";
    setMenuOpen(false);
    if (!first.current) main.current?.focus({ preventScroll: true });
    first.current = false;
  }, [page?.path]);
  return html`<div class=${`shell ${menuOpen ? "menu-open" : ""}`} onKeyDown=${(event) => event.key === "Escape" && setMenuOpen(false)}>
    <a class="skip-link" href="#main" onClick=${(event) => {
      event.preventDefault();
      main.current?.focus();
    }}>Skip to content</a>
    <header class="topbar">
      <${IconButton} icon=${menuOpen ? "close" : "menu"} label=${menuOpen ? "Close navigation" : "Open navigation"} aria-expanded=${String(menuOpen)} onClick=${() => setMenuOpen(!menuOpen)} />
      <span class="topbar-title">${page?.title ?? "Syringa"}</span>
    </header>
    <${Sidebar} shown=${shown} current=${page} />
    <div class="scrim" onClick=${() => setMenuOpen(false)}></div>
    <main class="main" id="main" tabindex="-1" ref=${main}>
      ${connection.value === "away" && html`<${AwayMessage} />`}
      ${page ? html`<${PageFrame} key=${page.path} page=${page} />` : html`<${NotFound} path=${path} />`}
    </main>
  </div>`;
}

/** @param {{shown: import("./pages/index.js").PageEntry[], current: any}} props */
function Sidebar({ shown, current }) {
  const choice = /** @type {"system" | "light" | "dark"} */ (theme.value);
  const next = THEMES[(THEMES.indexOf(choice) + 1) % THEMES.length] ?? "system";
  return html`<div class="sidebar">
    <a class="brand" href="#/"><img src="console/icon.svg" width="26" height="26" alt="" /><span>Syringa</span></a>
    <nav aria-label="Pages">
      ${GROUPS.map((group) => {
        const inside = shown.filter((page) => page.group === group);
        return (
          inside.length > 0 &&
          html`<div key=${group} class="nav-group"><h2>${group}</h2>
            <ul>${inside.map(
              (page) => html`<li key=${page.path}><a href=${`#${page.path}`} aria-current=${page === current ? "page" : undefined}><${Icon} name=${page.icon} /><span>${page.title}</span></a></li>`,
            )}</ul>
          </div>`
        );
      })}
    </nav>
    <div class="sidebar-end">
      ${me.value?.organization && html`<div class="organization" title=${me.value.organization}>${me.value.organization}</div>`}
      <div class="sidebar-actions">
        <a class="icon-button" href="docs" aria-label="API reference" title="API reference"><${Icon} name="docs" /></a>
        <${IconButton} icon=${THEME_ICONS[choice]} label=${`Theme: ${choice}`} onClick=${() => setTheme(next)} />
        ${hasKey.value && html`<${IconButton} icon="signout" label="Sign out" onClick=${signOut} />`}
      </div>
    </div>
  </div>`;
}

/** @param {{page: import("./pages/index.js").PageEntry}} props */
function PageFrame({ page }) {
  const [error, reset] = useErrorBoundary((failure) => console.error(failure));
  const fetched = useResource(page.fetch, [page]);
  if (error) return html`<div class="page"><${ErrorNotice} title="This page has failed" error=${error} onRetry=${reset} /></div>`;
  const component = page.component ?? fetched.data;
  if (component) return html`<${component} />`;
  // That the server is away is said above; when it is back, the page is fetched again. Some browsers keep a failure.
  if (fetched.error && !fetched.loading && connection.value === "online") {
    return html`<div class="page"><${ErrorNotice} title="This page could not be fetched" error=${fetched.error} onRetry=${() => location.reload()} /></div>`;
  }
  return html`<div class="loading"><${Spinner} label="Loading" /></div>`;
}

/** @param {{path: string}} props */
function NotFound({ path }) {
  return html`<div class="page"><div class="empty"><h1>There is no page ${path}</h1>
    <p class="empty-text">It may need a key with other rights.</p>
    <${Button} variant="primary" onClick=${() => navigate("/")}>Go to the first page<//></div></div>`;
}

function AwayMessage() {
  return html`<div class="away" role="alert"><${Spinner} small /><span><strong>The server is away.</strong> Trying again until it is back; nothing needs to be reloaded.</span></div>`;
}

function SignIn() {
  const [key, setKey] = useState("");
  const [busy, setBusy] = useState(false);
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    await signIn(key.trim());
    setBusy(false);
  };
  return html`<main class="sign-in" id="main">
    ${connection.value === "away" && html`<${AwayMessage} />`}
    <form class="card" onSubmit=${submit}>
      <img src="console/icon.svg" width="44" height="44" alt="" />
      <h1>Sign in to Syringa</h1>
      <p class="muted">This server needs an API key. The console keeps it until this tab is closed.</p>
      <${TextInput} label="API key" type="password" name="key" autocomplete="off" autofocus required value=${key} onInput=${setKey} error=${signInError.value && html`<${ErrorText} error=${signInError.value} />`} />
      <${Button} variant="primary" type="submit" busy=${busy} disabled=${key.trim() === ""}>Sign in<//>
    </form>
  </main>`;
}

const root = document.getElementById("app");
if (root) render(html`<${App} />`, root);
void startSession();
// A server that was away when the page was opened, or that may have come back with another default model.
effect(() => {
  if (reconnects.value === 0) return;
  if (session.peek() === "starting") void startSession();
  else if (session.peek() === "signed-in") void identify();
});
