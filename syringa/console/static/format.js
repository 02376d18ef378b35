/** Numbers, sizes, times and prices as text. */

const integer = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const cents = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 4 });
const significant = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 2 });
const dateTime = new Intl.DateTimeFormat("en-US", { dateStyle: "medium", timeStyle: "short" });
const day = new Intl.DateTimeFormat("en-US", { dateStyle: "medium" });
const utcDays = new Intl.DateTimeFormat("en-US", { dateStyle: "medium", timeZone: "UTC" });

export const NONE = "–";

/** @param {number | null | undefined} value @param {number} [digits] after the point */
export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  return digits === 0
    ? integer.format(value)
    : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** 12,345 as 12.3K. @param {number | null | undefined} value */
export function short(value) {
  return value === null || value === undefined ? NONE : compact.format(value);
}

/** @param {number | null | undefined} value in bytes */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let rest = value;
  while (rest >= 1000 && unit < units.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  return `${rest >= 100 || unit === 0 ? Math.round(rest) : rest.toFixed(1)} ${units[unit]}`;
}

/** @param {number | null | undefined} value in seconds */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.00995) return `${Number((value * 1000).toFixed(1))} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** @param {number | null | undefined} value a share from 0 to 1 @param {number} [digits] */
export function percent(value, digits = 0) {
  return value === null || value === undefined ? NONE : `${(value * 100).toFixed(digits)}%`;
}

/** @param {number | null | undefined} value in the currency of the configured prices */
export function money(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "$0";
  return `$${value < 0.01 ? significant.format(value) : value < 1 ? cents.format(value) : number(value, 2)}`;
}

/** @param {number | string | Date | null | undefined} value Unix seconds, an RFC 3339 text or a Date */
export function toDate(value) {
  if (value === null || value === undefined || value === "") return null;
  return typeof value === "number" ? new Date(value * 1000) : new Date(value);
}

/** @param {number | string | Date | null | undefined} value */
export function time(value) {
  const date = toDate(value);
  return date === null ? NONE : dateTime.format(date);
}

/** @param {number | string | Date | null | undefined} value */
export function date(value) {
  const at = toDate(value);
  return at === null ? NONE : day.format(at);
}

/** A day as the server counts it, in UTC. @param {number} value Unix seconds */
export function utcDay(value) {
  return utcDays.format(value * 1000);
}

/** "3 minutes ago". @param {number | string | Date | null | undefined} value */
export function ago(value) {
  const at = toDate(value);
  if (at === null) return NONE;
  const elapsed = (Date.now() - at.getTime()) / 1000;
  if (elapsed < 45) return "just now";
  const relative = new Intl.RelativeTimeFormat("en-US", { numeric: "always" });
  if (elapsed < 3600) return relative.format(-Math.max(1, Math.round(elapsed / 60)), "minute");
  if (elapsed < 86400) return relative.format(-Math.round(elapsed / 3600), "hour");
  if (elapsed < 30 * 86400) return relative.format(-Math.round(elapsed / 86400), "day");
  return date(at);
}
