/** Line and bar charts over time on uPlot, in the theme's colors, with a summary for screen readers. */

import { NONE, time, utcDay } from "../format.js";
import { html, useEffect, useLayoutEffect, useRef } from "../lib.js";
import { themeChanges } from "../state.js";
import uPlot from "../vendor/uplot.js";

const DAY = 86400;
// Between the lines of the grid: 1, 2 or 5 times a power of ten. Multiples of 2.5 would need more digits than are shown.
const STEPS = Array.from({ length: 66 }, (_, index) => Number(`${[1, 2, 5][index % 3]}e${Math.floor(index / 3) - 9}`));
const dayFormat = new Intl.DateTimeFormat("en-US", { month: "short", day: "numeric" });
const utcDayFormat = new Intl.DateTimeFormat("en-US", { month: "short", day: "numeric", timeZone: "UTC" });
const minuteFormat = new Intl.DateTimeFormat("en-US", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const secondFormat = new Intl.DateTimeFormat("en-US", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/**
 * @typedef {object} Series
 * @property {string} label
 * @property {(number | null)[]} values one for each time
 * @property {number} [color] 1 to 6, of the tokens --chart-1 …; the series' place without it
 * @property {boolean} [fill]
 */

/**
 * @param {{label: string, times: number[], series: Series[], height?: number, bars?: boolean, stacked?: boolean,
 *   format?: (value: number) => string, minimum?: number, whole?: boolean, daily?: boolean}} props `times` in Unix
 *   seconds, ascending; `format`: the text of a value; `minimum`: the least upper end of the scale; `whole`: values are
 *   whole numbers; `daily`: times are days of UTC, as the server counts them
 */
export function Chart({ label, times, series, height = 180, bars = false, stacked = false, format = String, minimum = 0, whole = false, daily = false }) {
  const root = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const changes = themeChanges.value;
  const shape = JSON.stringify([series.map((each) => [each.label, each.color, each.fill]), height, bars, stacked, minimum, whole, changes]);
  const latest = useRef({ times, series, format });
  latest.current = { times, series, format }; // for what is called after the plot was made
  useLayoutEffect(() => {
    const element = root.current;
    if (!element) return undefined;
    const color = (/** @type {string} */ name) => resolveColor(element, name);
    const axis = { stroke: color("--text-muted"), grid: { stroke: color("--border"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(element.clientWidth, 120),
      height,
      legend: { live: true },
      tzDate: daily ? (/** @type {number} */ at) => uPlot.tzDate(new Date(at * 1000), "UTC") : undefined,
      cursor: { points: { size: 7 }, drag: { x: false, y: false } },
      scales: {
        x: { range: (/** @type {any} */ plotted, /** @type {number} */ low, /** @type {number} */ high) => margins(plotted.data[0], low, high, bars) },
        y: { range: (/** @type {any} */ _, /** @type {any} */ _low, /** @type {number | null} */ high) => [0, Math.max(minimum, (high ?? 0) * 1.08) || 1] },
      },
      axes: [
        { ...axis, size: 28, space: 70, values: daily ? dayTicks : timeTicks },
        { ...axis, size: 56, space: 20, incrs: STEPS.filter((each) => !whole || each >= 1), values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((each) => latest.current.format(each)) },
      ],
      hooks: { setCursor: [showLast], ready: [showLast], setData: [showLast] },
      series: [
        { label: "", value: (/** @type {any} */ _, /** @type {number | null} */ at) => (at === null ? "" : daily ? utcDay(at) : timeText(at, latest.current.times)) },
        ...series.map((each, index) => {
          const stroke = color(`--chart-${each.color ?? (index % 6) + 1}`);
          return {
            label: each.label,
            stroke,
            width: bars ? 0 : 1.75,
            points: bars ? { show: false } : { show: true, size: 5, fill: stroke, width: 0, filter: isolated },
            fill: bars ? stroke : each.fill || stacked ? withAlpha(stroke, stacked ? 0.35 : 0.14) : undefined,
            paths: bars ? /** @type {any} */ (uPlot.paths).bars({ size: [0.72, 48] }) : undefined,
            spanGaps: false,
            value: (/** @type {any} */ _, /** @type {number | null} */ value, /** @type {number} */ at, /** @type {number | null} */ place) => {
              const own = stacked && place !== null ? latest.current.series[at - 1]?.values[place] : value;
              return own === null || own === undefined ? NONE : latest.current.format(own);
            },
          };
        }),
      ],
    };
    plot.current = new uPlot(/** @type {any} */ (options), /** @type {any} */ (toData(times, series, stacked)), element);
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: Math.max(element.clientWidth, 120), height }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    plot.current?.setData(toData(times, series, stacked));
  }, [times, series]);
  return html`<figure class="chart" aria-label=${label}>
    <div ref=${root} class="chart-canvas" aria-hidden="true"></div>
    <figcaption class="visually-hidden">${label}. ${series.map((each) => `${each.label}: ${summary(each.values, format)}`).join("; ")}</figcaption>
  </figure>`;
}

/** The ends of the time axis: half a step more for bars. @param {number[]} times @param {number} low @param {number} high @param {boolean} bars */
function margins(times, low, high, bars) {
  const half = bars ? ((times[1] ?? 0) - (times[0] ?? 0)) / 2 : 0;
  return [low - half, high + half];
}

/** Values without neighbors, which no line shows. @param {any} plot @param {number} at */
function isolated(plot, at) {
  const values = /** @type {(number | null | undefined)[]} */ (plot.data[at]);
  const known = (/** @type {number} */ index) => values[index] !== null && values[index] !== undefined;
  return [...values.keys()].filter((index) => known(index) && !known(index - 1) && !known(index + 1));
}

/** The legend has the last values while the pointer is elsewhere. @param {any} plot */
function showLast(plot) {
  if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
}

/** A time of the legend, as exact as the chart is. @param {number} at @param {number[]} times */
function timeText(at, times) {
  return (times.at(-1) ?? 0) - (times[0] ?? 0) >= DAY ? time(at) : secondFormat.format(at * 1000);
}

/** @param {any} _ @param {number[]} ticks */
function dayTicks(_, ticks) {
  return ticks.map((each) => (each % DAY === 0 ? utcDayFormat.format(each * 1000) : ""));
}

/** @param {any} _ @param {number[]} ticks @param {number} _axis @param {number} _space @param {number} step */
function timeTicks(_, ticks, _axis, _space, step) {
  const text = step >= DAY ? dayFormat : step >= 60 ? minuteFormat : secondFormat;
  return ticks.map((each) => text.format(each * 1000));
}

/** @param {(number | null)[]} values @param {(value: number) => string} format */
function summary(values, format) {
  const known = values.filter((each) => each !== null && each !== undefined);
  if (known.length === 0) return "no values";
  return `last ${format(known[known.length - 1] ?? 0)}, highest ${format(Math.max(.../** @type {number[]} */ (known)))}`;
}

/**
 * Series in the order that they are drawn: stacked ones from the highest sum to the lowest.
 * @param {number[]} times @param {Series[]} series @param {boolean} stacked
 */
function toData(times, series, stacked) {
  if (!stacked) return [times, ...series.map((each) => each.values)];
  /** @type {number[][]} */
  const sums = [];
  for (let index = series.length - 1; index >= 0; index -= 1) {
    const above = sums[0];
    sums.unshift((series[index]?.values ?? []).map((value, place) => (value ?? 0) + (above?.[place] ?? 0)));
  }
  return [times, ...sums];
}

/** The value of a color token here: a canvas cannot use variables. @param {HTMLElement} element @param {string} name */
function resolveColor(element, name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

/** @param {string} color rgb(…) @param {number} alpha */
function withAlpha(color, alpha) {
  const parts = color.match(/[\d.]+/g);
  return parts ? `rgba(${parts.slice(0, 3).join(", ")}, ${alpha})` : color;
}
