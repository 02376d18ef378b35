/** The pages in the order of the navigation. A page that the caller's key may not use is not shown. */

import batches from "./batches/index.js";
import chat from "./chat/index.js";
import completions from "./completions/index.js";
import embeddings from "./embeddings/index.js";
import fleet from "./fleet/index.js";
import keys from "./keys/index.js";
import models from "./models/index.js";
import responses from "./responses/index.js";
import status from "./status/index.js";
import usage from "./usage/index.js";

/**
 * @typedef {object} PageEntry
 * @property {string} path such as "/chat"
 * @property {string} title
 * @property {string} icon a name of ui/icons.js
 * @property {"Playground" | "Operate" | "Account"} group
 * @property {string | null} scope that the key must have; null: any
 * @property {any} component
 * @property {string[]} [css] addresses of style sheets
 * @property {(details: Record<string, any>) => boolean} [available] of `GET /v1/me`; hidden where it is false
 */

/** @type {PageEntry[]} */
export const pages = [chat, completions, responses, embeddings, batches, models, status, fleet, usage, keys];
