/** Makes elements of descriptions: `[tag, {attribute: value}, ...children]`, where a child is a description or text. */

const SVG = "http://www.w3.org/2000/svg"
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "polyline", "path", "circle", "text", "defs", "pattern"])

/** A fresh element; what is null or false is left out, and functions listen to the event of their name. */
export function element(description) {
  if (!Array.isArray(description)) return document.createTextNode(String(description))
  const [tag, attributes, ...children] = description
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue
    if (typeof value === "function") made.addEventListener(name, value)
    else made.setAttribute(name, value === true ? "" : value)
  }
  made.append(...children.map(element))
  return made
}
