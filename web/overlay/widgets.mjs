/** Widgets of nodes: their values, and links in place of values. */

/** Set the value of a widget as its own control does. */
export function setValue(widget, value) {
  if (!widget || widget.value === value) return
  widget.value = value
  widget.callback?.(value)
}

/** Return true if a node takes this value from a link. */
export const isLinked = (node, name) =>
  Boolean(node.inputs?.some((input) => input.widget?.name === name && input.link != null))
