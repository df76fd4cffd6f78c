/** Policy of a sampler in the graph of the canvas: the node at its `policy` input. */

const INPUT = "policy"

const slotOf = (sampler) => sampler?.inputs?.findIndex((input) => input.name === INPUT) ?? -1

/** Node whose policy a sampler has; null without one. */
const sourceOf = (sampler) => (slotOf(sampler) < 0 ? null : sampler.getInputNode(slotOf(sampler)))

/** Return true if a sampler has the policy `type` with these values of its widgets. */
export function hasPolicy(sampler, { type, values }) {
  const source = sourceOf(sampler)
  const valueOf = (name) => source?.widgets?.find((widget) => widget.name === name)?.value
  return source?.type === type && Object.entries(values).every(([name, value]) => valueOf(name) === value)
}

/** Return true if a sampler has an input for a policy. */
export const takesPolicy = (sampler) => slotOf(sampler) >= 0

/**
 * Give a sampler a policy.
 *
 * Values go to the node that is there if its type is the same and no other node uses it. Otherwise a new one takes its
 * place, and an unused one leaves the graph.
 */
export function givePolicy(sampler, { type, values }) {
  const source = sourceOf(sampler)
  const shared = linksOf(source) > 1
  const node = source?.type === type && !shared ? source : placed(sampler, source, type, shared)
  for (const [name, value] of Object.entries(values)) {
    const widget = node.widgets?.find((each) => each.name === name)
    if (!widget) continue
    widget.value = value
    widget.callback?.(value)
  }
  if (node === source) return
  node.connect(0, sampler, slotOf(sampler))
  if (source && !linksOf(source)) source.graph.remove(source)
}

const linksOf = (node) => node?.outputs?.[0]?.links?.length ?? 0

/** A new node in place of `source`, below it if it stays, or left of the sampler. */
function placed(sampler, source, type, stays) {
  const node = window.LiteGraph.createNode(type)
  const [x, y] = source?.pos ?? [sampler.pos[0] - node.size[0] - 40, sampler.pos[1]]
  node.pos = [x, stays ? y + source.size[1] + 40 : y]
  sampler.graph.add(node)
  return node
}
