/**
 * Under which ids the server knows a node of the canvas: "7" in the root graph, "129:86" inside the subgraph node 129.
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

/**
 * The figures of a node of this type: its own, or those of all nodes inside it; null where nothing is known.
 *
 * Another type under the same id belongs to another graph.
 */
export function figuresAt(figures, ids, type) {
  const belongs = (id, key, each) => (key === id ? each.class_type === type : key.startsWith(`${id}:`))
  const inside = Object.entries(figures).filter(([key, each]) => ids.some((id) => belongs(id, key, each)))
  if (!inside.length) return null
  const found = inside.map(([, each]) => each)
  const most = (name) => found.reduce((peak, each) => Math.max(peak, each[name] ?? 0), 0) || null
  return {
    seconds: found.reduce((total, each) => total + each.seconds, 0),
    running: found.some((each) => each.running),
    ran: found.some((each) => each.ran),
    cached: found.every((each) => each.cached ?? false),
    partly: found.some((each) => each.partly ?? false),
    device_used_peak: most("device_used_peak"),
    torch_allocated_peak: most("torch_allocated_peak"),
    rss_peak: most("rss_peak")
  }
}
