/** The tokens of an answer, colored by probability, with the alternatives at each place. */

import { percent } from "../../format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../../lib.js";

/** @typedef {import("./conversation.js").TokenInfo} TokenInfo */

/** Tokens of a block, which ends with a line: the browser lays out the last block only while tokens arrive. */
const BLOCK = 200;
const LEVELS = [0.9, 0.7, 0.5, 0.3, 0.1];

/** 0 (likely) to 5 (unlikely). @param {number} logprob */
function level(logprob) {
  const probability = Math.exp(logprob);
  const at = LEVELS.findIndex((each) => probability >= each);
  return at === -1 ? LEVELS.length : at;
}

/** Spaces and line breaks made visible. @param {string} token */
export function visible(token) {
  return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

/**
 * The text of tokens before a place, and of another token there.
 * @param {TokenInfo[]} tokens @param {number} at @param {{token: string, bytes: number[] | null}} alternative
 * @returns {string | null} null: the bytes there are no whole characters, or the token is a control token
 */
export function textWith(tokens, at, alternative) {
  if (alternative.bytes === null) return null;
  const bytes = [...tokens.slice(0, at), alternative].flatMap((each) => each.bytes ?? []);
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

/**
 * @param {{tokens: TokenInfo[], onBranch?: (at: number, alternative: TokenInfo["top"][number]) => void}} props
 */
export function Tokens({ tokens, onBranch }) {
  const root = useRef(/** @type {HTMLDivElement | null} */ (null));
  const shown = useRef(/** @type {TokenInfo[]} */ ([]));
  const spans = useRef(/** @type {HTMLElement[]} */ ([]));
  const [cursor, setCursor] = useState(/** @type {number | null} */ (null));
  const [pinned, setPinned] = useState(false);
  useLayoutEffect(() => {
    const element = root.current;
    if (!element) return;
    const previous = shown.current;
    // Tokens are appended while they arrive, so those that are there stay.
    const grown = previous.length <= tokens.length && previous.every((each, index) => each === tokens[index]);
    if (!grown) {
      element.replaceChildren();
      spans.current = [];
    }
    let block = element.lastElementChild;
    for (let index = grown ? previous.length : 0; index < tokens.length; index += 1) {
      const token = /** @type {TokenInfo} */ (tokens[index]);
      const span = document.createElement("span");
      span.className = `token ${token.bytes === null ? "control" : ""} level-${level(token.logprob)}`;
      span.dataset.at = String(index);
      span.textContent = token.token.replaceAll("\n", "↵\n");
      if (!block || (block.childElementCount >= BLOCK && tokens[index - 1]?.token.endsWith("\n"))) {
        block = document.createElement("div");
        element.append(block);
      }
      block.append(span);
      spans.current.push(span);
    }
    shown.current = tokens;
  }, [tokens]);
  useEffect(() => {
    const element = root.current;
    element?.querySelector(".current")?.classList.remove("current");
    if (cursor !== null) spans.current[cursor]?.classList.add("current");
  }, [cursor, tokens]);
  useEffect(() => {
    if (!pinned) return undefined;
    /** @param {Event} event */
    const close = (event) => {
      if (!root.current?.parentElement?.contains(/** @type {Node} */ (event.target))) unpin();
    };
    document.addEventListener("pointerdown", close);
    document.addEventListener("scroll", unpin, { capture: true });
    return () => {
      document.removeEventListener("pointerdown", close);
      document.removeEventListener("scroll", unpin, { capture: true });
    };
  }, [pinned]);
  const unpin = () => {
    setPinned(false);
    setCursor(null);
  };
  /** @param {any} event */
  const place = (event) => {
    const at = event.target.closest?.("[data-at]")?.dataset.at;
    return at === undefined ? null : Number(at);
  };
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    const at = cursor ?? -1;
    if (event.key === "ArrowRight") setCursor(Math.min(at + 1, tokens.length - 1));
    else if (event.key === "ArrowLeft") setCursor(Math.max(at - 1, 0));
    else if (event.key === "Enter" || event.key === " ") setPinned(cursor !== null);
    else if (event.key === "Escape") unpin();
    else return;
    event.preventDefault();
  };
  return html`<div class="tokens" onPointerLeave=${() => !pinned && setCursor(null)}>
    <div class="token-text" ref=${root} tabindex="0" role="application" aria-label="Tokens of the answer: arrow keys move, Enter shows the alternatives"
      onPointerOver=${(event) => !pinned && place(event) !== null && setCursor(place(event))}
      onClick=${(event) => {
        const at = place(event);
        if (at === null) return;
        setCursor(at);
        setPinned(true);
      }}
      onKeyDown=${onKey}></div>
    ${cursor !== null && tokens[cursor] && html`<${Alternatives} key=${cursor} anchor=${spans.current[cursor]} token=${tokens[cursor]} pinned=${pinned}
      onChoose=${onBranch && ((/** @type {TokenInfo["top"][number]} */ chosen) => {
        onBranch(cursor, chosen);
        unpin();
      })} />`}
  </div>`;
}

/** @param {{anchor: any, token: TokenInfo, pinned: boolean, onChoose?: (chosen: TokenInfo["top"][number]) => void}} props */
function Alternatives({ anchor, token, pinned, onChoose }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  useLayoutEffect(() => {
    const element = box.current;
    if (!element || !anchor) return;
    // In the top layer: messages clip what is larger than they are.
    if (!element.matches(":popover-open")) element.showPopover();
    const at = anchor.getBoundingClientRect();
    const below = at.bottom + 4 + element.offsetHeight <= innerHeight;
    element.style.left = `${Math.max(8, Math.min(at.left, innerWidth - element.offsetWidth - 8))}px`;
    element.style.top = `${below ? at.bottom + 4 : Math.max(8, at.top - element.offsetHeight - 4)}px`;
  }, [anchor, pinned]);
  const all = token.top.some((each) => each.token === token.token) ? token.top : [token, ...token.top];
  return html`<div class="alternatives" ref=${box} popover="manual" role="group" aria-label="Alternatives" aria-live="polite">
    <ul>
      ${all.map((each) => {
        const chosen = each.token === token.token;
        const inner = html`<code>${visible(each.token) || "end"}</code><span class="bar"><span style=${{ width: percent(Math.exp(each.logprob)) }}></span></span><span class="probability">${percent(Math.exp(each.logprob), 1)}</span>`;
        return html`<li key=${each.token} class=${chosen ? "chosen" : ""}>
          ${pinned && onChoose && !chosen && each.bytes !== null
            ? html`<button type="button" title="Continue with this token" onClick=${() => onChoose(each)}>${inner}</button>`
            : html`<div>${inner}</div>`}
        </li>`;
      })}
    </ul>
    <div class="muted">${onChoose ? (pinned ? "Choose one to branch from it." : "Click to branch from another one.") : `Log-probability ${token.logprob.toFixed(3)}`}</div>
  </div>`;
}
