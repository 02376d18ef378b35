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

/** Those of an owner, and those that were made without a key. @param {string} owner @returns {Promise<Summary[]>} the newest first */
export async function listConversations(owner) {
  /** @type {Summary[]} */
  let stored = [];
  try {
    stored = (await transact("readonly", (each) => each.objectStore(SUMMARIES).getAll())) ?? [];
  } catch {
    // Those in memory remain.
  }
  const all = [...stored.filter((each) => !memory.has(each.id)), ...[...memory.values()].map((each) => each.summary)];
  return all.filter((each) => each.owner === owner || each.owner === "").sort((first, second) => second.updatedAt - first.updatedAt);
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
 * Write a conversation, unless another tab has written it meanwhile.
 * @param {Summary} summary @param {any} data that structured clone can copy; null: delete the conversation
 * @param {Set<number>} versions values of `updatedAt` that may be replaced
 * @returns {Promise<"stored" | "in memory" | "conflict">}
 */
export async function writeConversation(summary, data, versions) {
  const { id } = summary;
  /** @type {"stored" | "conflict"} */
  let result = "stored";
  try {
    await transact("readwrite", (transaction) => {
      const [summaries, conversations] = [transaction.objectStore(SUMMARIES), transaction.objectStore(CONVERSATIONS)];
      const reading = summaries.get(id);
      reading.onsuccess = () => {
        if (reading.result && !versions.has(reading.result.updatedAt)) result = "conflict";
        else if (data) {
          summaries.put(summary);
          conversations.put({ id, data });
        } else {
          summaries.delete(id);
          conversations.delete(id);
        }
      };
    });
    memory.delete(id);
    return result;
  } catch {
    if (data) memory.set(id, { summary, data });
    else memory.delete(id);
    return "in memory";
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
