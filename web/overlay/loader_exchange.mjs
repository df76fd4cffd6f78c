/**
 * Exchange of ComfyUI's loaders for the streaming ones, and back, in the graph of the canvas.
 *
 * The new node takes over id, links, values, title, place, mode and colours, so that groups, subgraphs and the API
 * graph still refer to the same node.
 */

import { translate } from "./i18n.mjs"
import { setValue } from "./widgets.mjs"

/** Streaming loaders by the loaders whose inputs and outputs they have. */
const STREAMED = new Map([
  ["UNETLoader", "WanStreamLoadDiffusionModel"],
  ["UnetLoaderGGUF", "WanStreamLoadDiffusionModel"],
  ["CheckpointLoaderSimple", "WanStreamLoadCheckpoint"],
  ["CLIPLoader", "WanStreamLoadCLIP"],
  ["DualCLIPLoader", "WanStreamDualCLIP"],
  ["TripleCLIPLoader", "WanStreamTripleCLIP"],
  ["QuadrupleCLIPLoader", "WanStreamQuadrupleCLIP"]
])

/** Property of a streaming loader, saved with it: the type that it replaced. */
const REPLACED = "wanstream_replaced"

/** Properties that name a node's own type and pack. */
const IDENTITY = ["Node name for S&R", "cnr_id", "aux_id", "ver", REPLACED]

/** Return true if a link starts at an input of its subgraph: the id of that node is a text in newer frontends. */
const isFromOutside = (link) => Number(link.origin_id) === -10

const originalOf = (node) =>
  node.properties?.[REPLACED] ?? [...STREAMED].find(([, streaming]) => streaming === node.type)?.[0]

/** Type to exchange a node for; null for other nodes, and for types that this server does not have. */
export function counterpart(node) {
  const type = STREAMED.get(node.type) ?? originalOf(node)
  return type && type in window.LiteGraph.registered_node_types ? type : null
}

/** Items of the context menu of a node; `exchangeAll` exchanges a list of nodes. */
export function menuItems(node, exchangeAll) {
  if (!counterpart(node)) return []
  const content = translate(STREAMED.has(node.type) ? "streamModel" : "stopStreaming")
  return [{ content, callback: () => exchangeAll([node]) }]
}

/** Exchange a node of an open graph for its counterpart, and return the new one. */
export function exchanged(node) {
  const { graph } = node
  const made = window.LiteGraph.createNode(counterpart(node))
  copyLook(node, made)
  const links = takeLinks(node, made)
  const values = new Map((node.widgets ?? []).map((widget) => [widget.name, widget.value]))
  passOptions(node, made)
  const outside = valuesOutside(node, links)
  graph.remove(node)
  made.id = node.id // free by now
  graph.add(made)
  for (const widget of made.widgets ?? []) if (values.has(widget.name)) setValue(widget, values.get(widget.name))
  giveLinks(made, links)
  for (const [host, name, value] of outside) setValue(host.widgets?.find((widget) => widget.name === name), value)
  graph.updateExecutionOrder()
  return made
}

/**
 * Give the old widgets the options of the new ones.
 *
 * ComfyUI keeps the options of a widget by the id of its node and its name, also for the next widget there.
 */
function passOptions(node, made) {
  for (const { name, options } of made.widgets ?? []) {
    const before = node.widgets?.find((widget) => widget.name === name)?.options
    if (!before) continue
    for (const key of Object.keys(before)) delete before[key]
    Object.assign(before, options)
  }
}

function copyLook(node, made) {
  const kept = Object.entries(node.properties ?? {}).filter(([name]) => !IDENTITY.includes(name))
  Object.assign(made.properties, Object.fromEntries(kept))
  if (STREAMED.has(node.type)) made.properties[REPLACED] = node.type
  if (node.title !== node.constructor.title) made.title = node.title
  for (const name of ["mode", "color", "bgcolor", "boxcolor", "shape"]) if (node[name] !== undefined) made[name] = node[name]
  Object.assign(made.flags, node.flags)
  made.pos = [...node.pos]
  const least = made.computeSize()
  made.setSize([Math.max(node.size[0], least[0]), Math.max(node.size[1], least[1])])
}

/**
 * Take the links off a node that the new one has slots for. The others go with the node.
 *
 * Links stay in the graph, with the reroutes on their way.
 */
function takeLinks(node, made) {
  const inputs = []
  for (const input of node.inputs ?? []) {
    const slot = made.inputs?.findIndex((each) => each.name === input.name) ?? -1
    const link = input.link == null ? null : node.graph.getLink(input.link)
    if (slot < 0 || !link) continue
    inputs.push({ slot, link })
    input.link = null
  }
  const outputs = []
  for (const [slot, output] of (node.outputs ?? []).entries()) {
    if (made.outputs?.[slot]?.type !== output.type) continue
    outputs.push({ slot, links: output.links })
    output.links = []
  }
  return { inputs, outputs }
}

function giveLinks(made, { inputs, outputs }) {
  for (const { slot, links } of outputs) made.outputs[slot].links = links
  for (const { slot, link } of inputs) {
    const input = made.inputs[slot]
    link.target_slot = slot
    input.link = link.id
    // A subgraph also refers to the widget, which a new link exchanges.
    if (isFromOutside(link)) startOf(made.graph, link).connect(input, made, link.parentId)
    else made.onConnectionsChange?.(window.LiteGraph.INPUT, slot, true, link, input)
  }
}

const startOf = (graph, link) => graph.inputNode.slots[link.origin_slot]

/** Values of the widgets that subgraph nodes show for linked widgets of a node inside: node, name and value. */
function valuesOutside(node, { inputs }) {
  const names = inputs.map(({ link }) => link).filter(isFromOutside).map((link) => startOf(node.graph, link).name)
  if (!names.length) return []
  const root = node.graph.rootGraph
  const hosts = [root, ...root.subgraphs.values()].flatMap((graph) => graph.nodes).filter((each) => each.subgraph === node.graph)
  const widgets = hosts.flatMap((host) => (host.widgets ?? []).map((widget) => [host, widget.name, widget.value]))
  return widgets.filter(([, name]) => names.includes(name))
}
