/**
 * Ids of a node of the canvas on the server: "7" in the root graph, "129:86" inside the subgraph node 129.
 *
 * Pure over anything that has `nodes`, whose subgraph nodes have a `subgraph`; instances of one subgraph share its
 * nodes, so that a node may have several ids.
 */

const nodesOf = (graph) => graph.nodes ?? graph._nodes ?? []

/** All ids of every node below the root graph: node -> ids. */
export function executionIds(root) {
  const ids = new Map()
  for (const [node, id] of walk(root, "")) ids.set(node, [...(ids.get(node) ?? []), id])
  return ids
}

/** Pairs of node and id of the whole graph, in depth. */
function* walk(graph, prefix) {
  for (const node of nodesOf(graph)) {
    const id = `${prefix}${node.id}`
    yield [node, id]
    if (node.subgraph) yield* walk(node.subgraph, `${id}:`)
  }
}

/** Return true if the node with the id `inner` is the one with the id `outer`, or inside it. */
export const isWithin = (inner, outer) => inner === outer || inner.startsWith(`${outer}:`)

/**
 * Seconds and state of a node of this type in a queue item, at `now`: its own, or those of all nodes inside it; null
 * if unknown.
 *
 * Another type under the same id belongs to another graph.
 */
export function figuresAt(item, ids, type, now) {
  const belongs = (key) => ids.some((id) => (key === id ? item.classes[key] === type : isWithin(key, id)))
  // Before the end of an item, a node without a time may still run.
  const isKnown = (key) => key in item.times || item.cached.includes(key) || !item.running
  const inside = Object.keys(item.classes).filter((key) => belongs(key) && isKnown(key))
  if (!inside.length) return null
  const times = inside.map((key) => item.times[key]).filter(Boolean)
  return {
    seconds: times.reduce((total, { seconds, since }) => total + seconds + (since === null ? 0 : now - since), 0),
    running: times.some(({ since }) => since !== null),
    ran: times.length > 0,
    cached: inside.every((key) => item.cached.includes(key))
  }
}
