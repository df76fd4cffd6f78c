/**
 * Strip on a node with its notices: warnings on yellow, notes on the colour of the panel. Two lines while it is closed,
 * all of its text while it is open.
 *
 * A DOM widget, attached to a node while there is a notice for it, so that other nodes keep their height.
 */

import { element, h } from "./dom.mjs"
import { translate } from "./i18n.mjs"
import { isLinked, setValue } from "./widgets.mjs"
import { isFar } from "./run_widget.mjs"
import { isOf } from "./store.mjs"

const CLOSED_HEIGHT = 34
const PADDING = 4
const MARGIN = 6
const SEVERITY = ["note", "warning", "wrong"]

/**
 * Notices by the id of their node on the server: those of the nodes, and as notes the changes that the last run at a
 * node made.
 */
export function noticesById(state, workflow) {
  const found = new Map()
  const add = (id, notices) => notices.length && found.set(id, [...(found.get(id) ?? []), ...notices])
  const typed = (entry) => entry.notices.map((notice) => ({ ...notice, type: entry.type }))
  for (const entry of state.notices) if (isOf(entry, workflow)) add(entry.node, typed(entry))
  const last = new Map()
  for (const run of state.runs) if (isOf(run, workflow)) last.set(run.shown_at, run)
  for (const [id, run] of last) add(id, (run.timeline?.changes ?? run.changes ?? []).map((text) => ({ level: "note", text })))
  return found
}

/**
 * Return true unless the notice has the type of another node (an API client's graph may have equal ids), or a widget
 * has another value than the one that the notice is about. A linked widget has none.
 */
export function applies(notice, node) {
  if (notice.type && notice.type !== node.comfyClass) return false
  return Object.entries(notice.values ?? {}).every(([name, value]) => {
    const widget = node.widgets?.find((each) => each.name === name)
    return !widget || isLinked(node, name) || widget.value === value || isListedAs(value, widget, node)
  })
}

/** Return true if a widget has a name that is not in its list: the server then takes the same file as the list names it. */
function isListedAs(value, widget, node) {
  const { values } = widget.options ?? {}
  const listed = typeof values === "function" ? values(widget, node) : values
  return Array.isArray(listed) && listed.includes(value) && !listed.includes(widget.value)
}

/** The notices of a node, the most severe first. */
export const ordered = (notices) =>
  [...notices].sort((one, other) => SEVERITY.indexOf(other.level) - SEVERITY.indexOf(one.level))

/** Exchange the values of two widgets of a node. */
export function exchange(node, names) {
  const [first, second] = names.map((name) => node.widgets.find((widget) => widget.name === name))
  const [one, other] = [first.value, second.value]
  setValue(first, other)
  setValue(second, one)
}

export class NoticeStrip {
  /** `page` provides `zoom()`, `resize(node)`, `shrink(node, height)`, `changed()` and `forward(element)`. */
  constructor(node, page) {
    this.node = node
    this.page = page
    this.open = false
    this.notices = []
    this.body = element(h("div", { class: "wanstream-notices-body" }))
    this.root = element(h("div", { class: "wanstream-notices", role: "status" }))
    this.root.append(this.body)
    this.watch = new ResizeObserver(() => this.open && this.fit())
    this.watch.observe(this.body)
    page.forward(this.root)
  }

  /** Height of the widget in pixels of the canvas. */
  height() {
    return (this.open ? Math.max(CLOSED_HEIGHT, this.body.offsetHeight + 2 * PADDING) : CLOSED_HEIGHT) + 2 * MARGIN
  }

  /** Attach the widget after all others: workflows store the values of widgets by position. */
  attach() {
    this.widget = this.node.addDOMWidget("wanstream_notices", "wanstream_notices", this.root, {
      serialize: false,
      hideOnZoom: false,
      margin: MARGIN,
      getMinHeight: () => this.height(),
      getMaxHeight: () => this.height(),
      getValue: () => "",
      setValue: () => {}
    })
    this.widget.serialize = false
    this.fit()
  }

  /** Remove the widget from its node, and the room that it took. */
  detach() {
    this.watch.disconnect()
    const height = this.height()
    this.node.removeWidget(this.widget)
    this.root.remove()
    this.page.shrink(this.node, height)
  }

  show(notices) {
    const far = isFar(this.page.zoom())
    const key = JSON.stringify([notices, far, this.open, translate("exchange")])
    if (key === this.key) return
    this.key = key
    this.notices = notices
    this.root.dataset.far = far
    this.root.dataset.open = this.open
    this.root.dataset.level = notices[0].level
    const shown = this.open ? notices : notices.slice(0, 1)
    this.body.replaceChildren(...shown.map((notice, place) => element(this.line(notice, place))))
    this.fit()
  }

  /** One notice; the first one opens and closes the strip. */
  line({ level, text, exchange: names }, place) {
    const keep = (event) => ["Enter", " "].includes(event.key) && event.stopPropagation()
    const mark = h("span", { class: "wanstream-notice-mark", "aria-hidden": "true" })
    const words = h("span", { class: "wanstream-notice-text" }, text)
    const more = this.notices.length - 1
    const rest = !this.open && place === 0 && more ? [h("span", { class: "wanstream-notice-more" }, `+${more}`)] : []
    const listeners = { click: () => this.toggle(), keydown: keep, "aria-expanded": `${this.open}`, title: text }
    const head = place === 0 ? ["button", { type: "button", ...listeners }] : ["div", {}]
    const line = h(head[0], { ...head[1], class: "wanstream-notice-line" }, mark, words, ...rest)
    const swap = () => {
      exchange(this.node, names)
      this.page.changed()
    }
    const button = { type: "button", class: "wanstream-button", click: swap, keydown: keep }
    const buttons = names && this.canExchange(names) ? [h("button", button, translate("exchange"))] : []
    return h("div", { class: "wanstream-notice", "data-level": level }, line, ...buttons)
  }

  canExchange(names) {
    return names.every((name) => this.node.widgets.some((widget) => widget.name === name))
  }

  toggle() {
    const before = this.height()
    this.open = !this.open
    this.show(this.notices)
    if (!this.open) this.page.shrink(this.node, before - this.height())
  }

  fit() {
    this.root.style.minHeight = `${this.height() - 2 * MARGIN}px`
    if (this.widget) this.page.resize(this.node)
  }
}

/** The strips of a page: one on each node of the open graph that has notices. */
export class NoticeStrips {
  /** `page` is that of `NoticeStrip`, and provides `nodes()`, pairs of node and ids, and `workflow()`. */
  constructor(page) {
    this.page = page
    this.strips = new Map()
    this.opened = new Set() // ids of nodes whose strip was open: undo replaces the node
  }

  /** Attach, update and remove strips. */
  refresh(state) {
    const current = this.current(state)
    for (const [node, strip] of this.strips) {
      if (current.has(node)) continue
      this.strips.delete(node)
      if (strip.open) this.opened.add(node.id)
      strip.detach()
    }
    for (const [node, notices] of current) {
      let strip = this.strips.get(node)
      if (!strip) {
        strip = new NoticeStrip(node, this.page)
        strip.open = this.opened.delete(node.id)
        this.strips.set(node, strip)
        strip.show(notices)
        strip.attach()
      } else strip.show(notices)
    }
  }

  /** Nodes of the open graph with the notices that apply to them. */
  current(state) {
    const byId = noticesById(state, this.page.workflow())
    const current = new Map()
    if (!byId.size) return current
    for (const [node, ids] of this.page.nodes()) {
      const notices = ids.flatMap((id) => byId.get(id) ?? []).filter((notice) => applies(notice, node))
      if (notices.length) current.set(node, ordered(notices))
    }
    return current
  }
}
