/** Tables: a caption for screen readers, sorting by columns, and scrolling sideways where the page is narrow. */

import { html, useState } from "../lib.js";
import { Icon } from "./icons.js";

/**
 * @typedef {object} Column
 * @property {string} key the property of a row, and the column's name for sorting
 * @property {any} label
 * @property {(row: any) => any} [render] instead of the row's property
 * @property {(row: any) => number | string | null | undefined} [sort] what to sort by; without it, the column is not sortable
 * @property {boolean} [numeric] to the right, with figures of one width
 */

/**
 * @param {{caption: string, columns: Column[], rows: any[], rowKey?: (row: any) => string, empty?: any,
 *   initialSort?: {key: string, descending: boolean}, limit?: number}} props `limit`: of rows, the first as they are sorted
 */
export function Table({ caption, columns, rows, rowKey = (row) => row.id, empty, initialSort, limit }) {
  const [sort, setSort] = useState(initialSort ?? null);
  if (rows.length === 0 && empty) return empty;
  const column = sort && columns.find((each) => each.key === sort.key);
  const sorted = column?.sort ? [...rows].sort(compareBy(column.sort, sort?.descending ?? false)) : rows;
  /** @param {string} key */
  const choose = (key) => setSort({ key, descending: sort?.key === key ? !sort.descending : false });
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${caption}>
    <table class="table">
      <caption class="visually-hidden">${caption}</caption>
      <thead><tr>
        ${columns.map((each) => {
          const active = sort?.key === each.key;
          const order = active ? (sort?.descending ? "descending" : "ascending") : undefined;
          return html`<th key=${each.key} scope="col" class=${each.numeric ? "numeric" : ""} aria-sort=${order}>
            ${each.sort
              ? html`<button type="button" class="sort" onClick=${() => choose(each.key)}>${each.label}<${Icon} name=${active && sort?.descending ? "down" : "up"} size=${12} /></button>`
              : each.label}
          </th>`;
        })}
      </tr></thead>
      <tbody>
        ${sorted.slice(0, limit).map(
          (row) => html`<tr key=${rowKey(row)}>
            ${columns.map((each) => html`<td key=${each.key} class=${each.numeric ? "numeric" : ""}>${each.render ? each.render(row) : row[each.key]}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** @param {(row: any) => any} value @param {boolean} descending */
function compareBy(value, descending) {
  const sign = descending ? -1 : 1;
  return (/** @type {any} */ first, /** @type {any} */ second) => {
    const [a, b] = [value(first), value(second)];
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return (a < b ? -1 : 1) * sign;
  };
}
