/** Makes elements of descriptions: `[tag, {attribute: value}, ...children]`, where a child is a description or text. */

const SVG_TAGS = new Set(["svg", "g", "rect", "line", "polyline", "path", "circle", "text", "defs", "pattern"])

/** A fresh element; attributes that are null or false are left out, and functions listen to the event of their name. */
export function element(description) {
  if (!Array.isArray(description)) return document.createTextNode(String(description))
  const [tag, attributes, ...children] = description
  const made = SVG_TAGS.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value)
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value)
  }
  made.append(...children.map(element))
  return made
}
