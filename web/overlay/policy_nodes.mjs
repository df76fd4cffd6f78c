/** Policy of a sampler in the graph of the canvas: the node at its `policy` input. */

import { isLinked, setValue } from "./widgets.mjs"

const INPUT = "policy"
const POLICIES = ["WanStreamLayerwise", "WanStreamBlockSwap", "WanStreamAutoOffload"]
/** LiteGraph's mode of a node that runs. */
const ALWAYS = 0

const slotOf = (sampler) => sampler?.inputs?.findIndex((input) => input.name === INPUT) ?? -1

/**
 * The policy node at a sampler: null if nothing is linked, undefined if a link comes from elsewhere, such as the input
 * of a subgraph or a reroute node.
 */
function sourceOf(sampler) {
  const slot = slotOf(sampler)
  if (sampler.inputs[slot].link == null) return null
  const node = sampler.getInputNode(slot)
  return node && POLICIES.includes(node.type) ? node : undefined
}

/** Return true if a sampler has an input for a policy whose node may be changed or exchanged. */
export const takesPolicy = (sampler) => slotOf(sampler) >= 0 && sourceOf(sampler) !== undefined

/** Return true if a sampler runs with the policy `type` and these values of its widgets. */
export function hasPolicy(sampler, { type, values }) {
  const source = sourceOf(sampler)
  const has = ([name, value]) => !isLinked(source, name) && widgetOf(source, name)?.value === value
  return source?.type === type && source.mode === ALWAYS && Object.entries(values).every(has)
}

const widgetOf = (node, name) => node.widgets?.find((widget) => widget.name === name)

/**
 * Give a sampler a policy.
 *
 * Values go to the node that is there, if it has this type, runs, and no other node or link uses it. Otherwise a new
 * node takes its place, and a policy node without links leaves the graph.
 */
export function givePolicy(sampler, { type, values }) {
  const source = sourceOf(sampler)
  const isShared = source && source.outputs[0].links.length > 1
  const isFixed = source && (source.mode !== ALWAYS || Object.keys(values).some((name) => isLinked(source, name)))
  const keeps = source?.type === type && !isShared && !isFixed
  const node = keeps ? source : placed(sampler, source, type, isShared)
  for (const [name, value] of Object.entries(values)) setValue(widgetOf(node, name), value)
  if (keeps) return
  node.connect(0, sampler, slotOf(sampler))
  if (source && !isShared) source.graph.remove(source)
}

/** A new node in place of `source`, below it if it stays, or left of the sampler. */
function placed(sampler, source, type, stays) {
  const node = window.LiteGraph.createNode(type)
  const [x, y] = source?.pos ?? [sampler.pos[0] - node.size[0] - 40, sampler.pos[1]]
  node.pos = [x, stays ? y + source.size[1] + 40 : y]
  sampler.graph.add(node)
  return node
}
