/**
 * Elements made from descriptions: `h(tag, {attribute: value}, ...children)`, where a child is a description or text.
 *
 * Titles, names and messages come from prompts that anyone may post. Only `h` makes descriptions, and JSON cannot: an
 * array in data is shown as text and never becomes an element.
 */

const SVG = "http://www.w3.org/2000/svg"
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "polyline", "circle", "text", "defs", "pattern"])
const HTML_TAGS = new Set(["button", "div", "input", "p", "span", "table", "tbody", "td", "th", "thead", "tr"])

const descriptions = new WeakSet()

/** The description of one element. */
export function h(tag, attributes, ...children) {
  const description = [tag, attributes, ...children]
  descriptions.add(description)
  return description
}

/** A value of any JSON type as text. */
const plain = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value))

/**
 * Return a new element, or a text node for a value that is not a description. Attributes that are null or false are
 * omitted; functions become listeners of the event of their name.
 *
 * Throws a TypeError for tags that the overlay does not use, and for handlers of events as text.
 */
export function element(description) {
  if (!descriptions.has(description)) return document.createTextNode(plain(description))
  const [tag, attributes, ...children] = description
  const made = empty(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue
    if (typeof value === "function") made.addEventListener(name, value)
    else if (/^on/i.test(name)) throw new TypeError(`the attribute ${name} would run its value as a script`)
    else made.setAttribute(name, value === true ? "" : plain(value))
  }
  made.append(...children.map(element))
  return made
}

function empty(tag) {
  if (SVG_TAGS.has(tag)) return document.createElementNS(SVG, tag)
  if (HTML_TAGS.has(tag)) return document.createElement(tag)
  throw new TypeError(`the overlay makes no element ${plain(tag)}`)
}
