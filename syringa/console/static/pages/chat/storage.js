/** Conversations in this browser: IndexedDB, or memory where that is blocked. */

const DATABASE = "syringa";
const SUMMARIES = "summaries";
const CONVERSATIONS = "conversations";

/**
 * @typedef {{id: string, owner: string, title: string, updatedAt: number}} Summary `owner`: the organization of the
 *   key that it was made with, "" without keys
 */

/** @type {Promise<IDBDatabase> | null} */
let opening = null;
/** @type {Map<string, {summary: Summary, data: any}>} */
const memory = new Map();

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(SUMMARIES, { keyPath: "id" });
      request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("The browser's storage is blocked by another tab."));
  });
  return opening;
}

/**
 * @template T
 * @param {IDBTransactionMode} mode @param {(transaction: IDBTransaction) => IDBRequest<T> | void} run
 */
async function transact(mode, run) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([SUMMARIES, CONVERSATIONS], mode);
    const request = run(transaction);
    transaction.oncomplete = () => resolve(request ? request.result : undefined);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error ?? new Error("The browser's storage is full."));
  });
}

/** @param {string} owner @returns {Promise<Summary[]>} the newest first */
export async function listConversations(owner) {
  /** @type {Summary[]} */
  let stored = [];
  try {
    stored = (await transact("readonly", (each) => each.objectStore(SUMMARIES).getAll())) ?? [];
  } catch {
    // Those in memory remain.
  }
  const all = [...stored.filter((each) => !memory.has(each.id)), ...[...memory.values()].map((each) => each.summary)];
  return all.filter((each) => each.owner === owner).sort((first, second) => second.updatedAt - first.updatedAt);
}

/** @param {string} id @returns {Promise<any>} null if there is none */
export async function readConversation(id) {
  if (memory.has(id)) return memory.get(id)?.data;
  try {
    return (await transact("readonly", (each) => each.objectStore(CONVERSATIONS).get(id)))?.data ?? null;
  } catch {
    return null;
  }
}

/**
 * @param {Summary} summary @param {any} data that structured clone can copy
 * @returns {Promise<boolean>} false: it is in memory only
 */
export async function writeConversation(summary, data) {
  try {
    await transact("readwrite", (each) => {
      each.objectStore(SUMMARIES).put(summary);
      each.objectStore(CONVERSATIONS).put({ id: summary.id, data });
    });
    memory.delete(summary.id);
    return true;
  } catch {
    memory.set(summary.id, { summary, data });
    return false;
  }
}

/** @param {string} id */
export async function deleteConversation(id) {
  memory.delete(id);
  try {
    await transact("readwrite", (each) => {
      each.objectStore(SUMMARIES).delete(id);
      each.objectStore(CONVERSATIONS).delete(id);
    });
  } catch {
    // It was in memory only.
  }
}
