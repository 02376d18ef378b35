/** Stored responses as chains: a response below the one that it continues. */

/**
 * @typedef {object} Node
 * @property {any} response a summary of `GET /v1/responses`
 * @property {number} depth from 0
 * @property {boolean} orphan it continues a response that is not in the list
 */

/**
 * Responses in the order of a tree: the newest chain first, and in a chain what continues a response after it, older
 * continuations first. Only the beginning of a chain and its branches are indented, so that long ones stay readable.
 * @param {any[]} responses newest first
 */
export function toTree(responses) {
  const known = new Set(responses.map((each) => each.id));
  /** @type {Map<string, any[]>} */
  const children = new Map();
  const roots = [];
  for (const each of responses) {
    const parent = each.previous_response_id;
    if (!parent || !known.has(parent)) roots.push(each);
    else children.set(parent, [each, ...(children.get(parent) ?? [])]);
  }
  /** @type {Node[]} */
  const nodes = [];
  /** @type {{response: any, depth: number, alone: boolean}[]} */
  const stack = roots.reverse().map((response) => ({ response, depth: 0, alone: false }));
  for (let next = stack.pop(); next; next = stack.pop()) {
    const { response, depth, alone } = next;
    nodes.push({ response, depth, orphan: depth === 0 && Boolean(response.previous_response_id) });
    const below = children.get(response.id) ?? [];
    const step = alone && below.length === 1 ? 0 : 1;
    stack.push(...[...below].reverse().map((each) => ({ response: each, depth: depth + step, alone: below.length === 1 })));
  }
  return nodes;
}
