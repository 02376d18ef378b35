/**
 * Markdown of models as sanitized HTML.
 *
 * HTML inside of the Markdown is shown as text, but for a few tags without attributes. DOMPurify is the second line: it
 * allows a list of tags and attributes, links to http, https and mailto, and images of data: addresses.
 *
 * A text that grows is rendered block by block: all blocks but the last are final, so a step parses and replaces only
 * the last one. A block of more than `LIMITS` characters is cut at a line, so that a step stays short whatever a
 * model writes.
 */

import { html, useEffect, useLayoutEffect, useRef } from "../lib.js";
import { Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/purify.js";
import { copyText } from "./button.js";

/** Characters of a block before it is cut, by what it costs to render. @type {Record<string, number>} */
const LIMITS = { code: 40000, paragraph: 3000 };
const LIMIT = 6000;
/** Quotes and lists inside of each other that are rendered as such: deeper ones are text. */
const NESTED = /^(?: {0,3}(?:>|[-*+]) ?){12}/;
const FRAME_MS = 8;
/** Characters of a finished text that are rendered in one go. */
const PIECE = 8000;

const TAGS = (
  "p br hr strong b em i u s del mark small sub sup kbd code pre h1 h2 h3 h4 h5 h6 ul ol li blockquote table thead tbody tr th td " +
  "a img details summary div span button"
).split(" ");
const ATTRIBUTES = ["href", "title", "alt", "src", "start", "align", "class", "type", "data-copy", "aria-label"];
const PLAIN_TAG = /^<\/?(br|sub|sup|kbd|mark|u|s|b|i|em|strong|small|details|summary)\s*\/?>$/i;
const LINK = /^(https?:|mailto:)/i;
const DATA_IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,/i;

const marked = new Marked({
  gfm: true,
  breaks: false,
  tokenizer: {
    blockquote: (source) => (NESTED.test(source) ? undefined : false),
    list: (source) => (NESTED.test(source) ? undefined : false),
  },
  renderer: {
    html({ text }) {
      return text.replace(/<[^<>]*>|[<>&]/g, (part) => (PLAIN_TAG.test(part) ? part : escape(part)));
    },
    code({ text, lang }) {
      const language = (lang ?? "").split(/\s/)[0] ?? "";
      return `<div class="md-code"><div class="md-code-header"><span>${escape(language || "text")}</span><button type="button" class="button ghost small" data-copy="1"><span>Copy</span></button></div><pre><code>${escape(text)}</code></pre></div>\n`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
    table(token) {
      const cells = (/** @type {any[]} */ row, /** @type {string} */ tag) =>
        row.map((cell) => `<${tag}${cell.align ? ` align="${cell.align}"` : ""}>${this.parser.parseInline(cell.tokens)}</${tag}>`).join("");
      const body = token.rows.map((row) => `<tr>${cells(row, "td")}</tr>`).join("");
      return `<div class="md-table"><table><thead><tr>${cells(token.header, "th")}</tr></thead><tbody>${body}</tbody></table></div>\n`;
    },
  },
});

const purifier = DOMPurify(window);
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    const address = node.getAttribute("href") ?? "";
    if (!LINK.test(address)) node.removeAttribute("href");
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
  } else if (node.nodeName === "IMG" && !DATA_IMAGE.test(node.getAttribute("src") ?? "")) {
    // A remote image would tell its host who reads this, so its text is shown instead.
    node.replaceWith(document.createTextNode(`[image: ${node.getAttribute("alt") || "without a description"}]`));
  } else if (node.nodeName === "BUTTON" && !node.hasAttribute("data-copy")) node.remove();
});

/** @param {string} text */
function escape(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

/** @param {string} source */
function sanitize(source) {
  return /** @type {DocumentFragment} */ (
    /** @type {unknown} */ (
      purifier.sanitize(source, { RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, ADD_DATA_URI_TAGS: ["img"] })
    )
  );
}

/** Renders a text into an element, and what is appended to it without rendering the rest again. */
export class MarkdownRenderer {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.text = "";
    /** Where the text begins that is not final. */
    this.start = 0;
    /** Lines that the rest continues: the fence of a code block or the head of a table that was cut. */
    this.carry = "";
    /** @type {ChildNode[]} */
    this.open = [];
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.text = this.carry = "";
    this.start = 0;
    this.open = [];
  }

  /** @param {string} text which replaces the previous one, or continues it */
  update(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    for (const node of this.open) node.remove();
    this.open = [];
    const tokens = marked.lexer(this.carry + text.slice(this.start));
    let last = tokens.length - 1;
    while (last > 0 && tokens[last]?.type === "space") last -= 1;
    if (last > 0) {
      const final = tokens.slice(0, last);
      this.append(Object.assign(final, { links: tokens.links }));
      this.start += final.reduce((sum, token) => sum + token.raw.length, 0) - this.carry.length;
      this.carry = "";
    }
    const rest = Object.assign(tokens.slice(Math.max(last, 0)), { links: tokens.links });
    this.open = this.append(rest);
    const block = rest[0];
    if (block && block.raw.length > (LIMITS[block.type] ?? LIMIT)) this.cut(block);
  }

  /** Make a long block final up to its last line, or up to its end where it is one line. @param {any} block */
  cut(block) {
    const fence = /^ {0,3}(`{3,}|~{3,})[^\n]*\n/.exec(block.raw)?.[0] ?? "";
    const head = block.type === "table" ? block.raw.split("\n").slice(0, 2).join("\n") + "\n" : "";
    let end = this.text.lastIndexOf("\n");
    // An indented line after the cut would be a block of code.
    while (!fence && end > this.start && /\s/.test(this.text[end + 1] ?? "")) end = this.text.lastIndexOf("\n", end - 1);
    if (end > this.start) this.finish(end + 1, fence || head);
    else this.finish(this.text.length, fence || head);
  }

  /** @param {number} end @param {string} carry */
  finish(end, carry) {
    for (const node of this.open) node.remove();
    this.open = [];
    this.append(marked.lexer(this.carry + this.text.slice(this.start, end)));
    this.start = end;
    this.carry = carry;
    const rest = this.text.slice(end);
    if (rest) this.open = this.append(marked.lexer(carry + rest));
  }

  /** @param {any} tokens */
  append(tokens) {
    const fragment = sanitize(marked.parser(tokens));
    const nodes = [...fragment.childNodes];
    this.root.append(fragment);
    return nodes;
  }
}

/** Renderings that wait, so that opening a long conversation does not block the page: some of each frame is theirs. */
const waiting = /** @type {Set<() => void>} */ (new Set());
let scheduled = false;

/** @param {() => void} job */
function enqueue(job) {
  waiting.add(job);
  if (!scheduled) {
    scheduled = true;
    requestAnimationFrame(work);
  }
}

function work() {
  const end = performance.now() + FRAME_MS;
  // The newest first: a conversation is opened at its end.
  for (const job of [...waiting].reverse()) {
    waiting.delete(job);
    job();
    if (performance.now() > end) break;
  }
  scheduled = waiting.size > 0;
  if (scheduled) requestAnimationFrame(work);
}

/** @param {MouseEvent} event */
async function onClick(event) {
  const button = /** @type {HTMLElement} */ (event.target).closest("[data-copy]");
  if (!button) return;
  const code = button.closest(".md-code")?.querySelector("code")?.textContent ?? "";
  const label = button.firstElementChild;
  if (!(await copyText(code)) || !label) return;
  label.textContent = "Copied";
  setTimeout(() => (label.textContent = "Copy"), 2000);
}

/** @param {{text: string, streaming?: boolean}} props `streaming`: the text grows, and is rendered at once */
export function Markdown({ text, streaming = false }) {
  const root = useRef(/** @type {HTMLDivElement | null} */ (null));
  const renderer = useRef(/** @type {MarkdownRenderer | null} */ (null));
  useLayoutEffect(() => {
    const element = root.current;
    if (!element) return undefined;
    if (renderer.current) {
      // What is left of an unfinished rendering is a part of it.
      renderer.current.update(text);
      return undefined;
    }
    let done = 0;
    const job = () => {
      const own = (renderer.current ??= new MarkdownRenderer(element));
      element.classList.remove("plain");
      done += PIECE;
      own.update(text.slice(0, done));
      if (done < text.length) enqueue(job);
    };
    if (streaming || text.length < 300) job();
    else {
      element.classList.add("plain");
      element.textContent = text;
      enqueue(job);
    }
    return () => waiting.delete(job);
  }, [text]);
  useEffect(() => {
    const element = root.current;
    element?.addEventListener("click", onClick);
    return () => element?.removeEventListener("click", onClick);
  }, []);
  return html`<div class="markdown" ref=${root}></div>`;
}
