/** The windows of pools in the next seven days, as a drawing and in words. */

import { html } from "../../lib.js";

const DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const NAMES = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
const DAY_MINUTES = 1440;
const WEEK_MINUTES = 7 * DAY_MINUTES;
const ROW = 26;

/** Minutes of "HH:MM". @param {string} time */
function minutes(time) {
  const [hour = 0, minute = 0] = time.split(":").map(Number);
  return hour * 60 + minute;
}

/**
 * When the windows of a pool are open in a week from Monday on, in minutes of its local time; merged, and cut at the
 * end of Sunday, where a window goes on at the beginning.
 * @param {any} pool @returns {[number, number][]}
 */
export function openTimes(pool) {
  if (pool.mode === "always" || !pool.windows?.length) return [[0, WEEK_MINUTES]];
  /** @type {[number, number][]} */
  const found = [];
  for (const window of pool.windows) {
    for (const day of window.days) {
      const start = DAYS.indexOf(day) * DAY_MINUTES + minutes(window.start);
      const length = minutes(window.end) - minutes(window.start);
      const end = start + (length > 0 ? length : length + DAY_MINUTES);
      found.push([start, Math.min(end, WEEK_MINUTES)]);
      if (end > WEEK_MINUTES) found.push([0, end - WEEK_MINUTES]);
    }
  }
  found.sort((a, b) => a[0] - b[0]);
  /** @type {[number, number][]} */
  const merged = [];
  for (const [start, end] of found) {
    const last = merged.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([start, end]);
  }
  return merged;
}

/** The minute of the week in a time zone. @param {string} zone @param {Date} [now] */
export function minuteOfWeek(zone, now = new Date()) {
  const parts = new Intl.DateTimeFormat("en-US", { timeZone: zone || "UTC", weekday: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" }).formatToParts(now);
  const value = (/** @type {string} */ type) => parts.find((each) => each.type === type)?.value ?? "";
  return NAMES.indexOf(value("weekday")) * DAY_MINUTES + Number(value("hour")) * 60 + Number(value("minute"));
}

/** @param {any} pool */
function inWords(pool) {
  if (pool.mode === "always" || !pool.windows?.length) return pool.mode === "idle" ? "while its owners leave the nodes alone" : "at any time";
  const windows = pool.windows.map((/** @type {any} */ each) => `${each.days.length === 7 ? "daily" : each.days.join(", ")} ${each.start}–${each.end}`).join("; ");
  return `${windows} (${pool.timezone})${pool.mode === "idle" ? ", while its owners leave the nodes alone" : ""}`;
}

/** @param {{pools: any[]}} props */
export function Timeline({ pools }) {
  const height = pools.length * ROW;
  return html`<div class="timeline">
    <div><h3>When pools are open</h3><p class="muted small">In the time zone of each pool; the line is now.</p></div>
    <div class="timeline-grid">
      <ul class="timeline-names">${pools.map((each) => html`<li key=${each.name} title=${inWords(each)}>${each.name}<span class="visually-hidden">: ${inWords(each)}</span></li>`)}</ul>
      <div>
        <svg viewBox=${`0 0 ${WEEK_MINUTES} ${height}`} height=${height} width="100%" preserveAspectRatio="none" aria-hidden="true" class="timeline-drawing">
          ${pools.map((pool, row) => html`<g key=${pool.name}>
            <rect class="timeline-row" x="0" y=${row * ROW + 4} width=${WEEK_MINUTES} height=${ROW - 8} />
            ${openTimes(pool).map(([start, end]) => html`<rect key=${start} class=${`timeline-open ${pool.mode} ${pool.override === "closed" ? "closed" : ""}`} x=${start} y=${row * ROW + 4} width=${end - start} height=${ROW - 8} />`)}
            <line class="timeline-now" x1=${minuteOfWeek(pool.timezone)} x2=${minuteOfWeek(pool.timezone)} y1=${row * ROW} y2=${(row + 1) * ROW} vector-effect="non-scaling-stroke" />
          </g>`)}
          ${NAMES.slice(1).map((name, index) => html`<line key=${name} class="timeline-day" x1=${(index + 1) * DAY_MINUTES} x2=${(index + 1) * DAY_MINUTES} y1="0" y2=${height} vector-effect="non-scaling-stroke" />`)}
        </svg>
        <div class="timeline-days muted small" aria-hidden="true">${NAMES.map((each) => html`<span key=${each}>${each[0]}<span class="timeline-rest">${each.slice(1)}</span></span>`)}</div>
      </div>
    </div>
  </div>`;
}
