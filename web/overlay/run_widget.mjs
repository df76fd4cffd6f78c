/**
 * Overlay on one node: a line that opens and closes it, a moving preview, the chart of the node's last run, and the
 * numbers of one step.
 *
 * A DOM widget, so it is the same on the classic canvas and in Nodes 2.0. It keeps nothing of the run: it is drawn from
 * the store whenever that or its own size changes, and not at all while it is closed or out of sight.
 */

import { chart, columnAt, columnsOf, frameOf } from "./chart.mjs"
import { element, h } from "./dom.mjs"
import { phasesText, recordsOf, runParts, shareOfStep, sizeText, stepText } from "./figures.mjs"
import { isBest, verdictText, waitOf } from "./figures.mjs"
import { translate } from "./i18n.mjs"

const CLOSED_HEIGHT = 26
const OPEN_HEIGHT = 205
const PREVIEW_HEIGHT = 170
const MARGIN = 6
const NEAR_FONT = 11
const FAR_FONT = 19
const PROPERTY = "wanstream_overlay"
/** Property of the node, saved and copied with it: its heights before and after the chart made it taller. */
const HEIGHTS = "wanstream_heights_of_chart"
const SEPARATOR = " · "
/** Modes of muted and bypassed nodes, which Nodes 2.0 dims itself. */
const OFF_MODES = [2, 4]

/** Return true if the canvas is zoomed out so far that text must be larger. */
export const isFar = (zoom) => zoom < 0.75

const fontAt = (zoom) => (isFar(zoom) ? FAR_FONT : NEAR_FONT)

let made = 0

export class RunWidget {
  /**
   * `page` provides `runOf(node)`, `phasesOf(run)`, `knowsRuns()`, `canAutomate(node)`, `automate(node)`, `now()`, `zoom()`,
   * `resize(node, shrink)`, `shrink(node, height)` and `forward(element)`.
   */
  constructor(node, page) {
    this.node = node
    this.page = page
    this.id = `wanstream-${(made += 1)}`
    this.run = null
    this.zoom = 1
    this.chosen = null
    this.build()
    this.watch = new ResizeObserver(() => this.draw())
    this.watch.observe(this.plot)
    page.forward(this.root)
  }

  get open() {
    return this.node.properties?.[PROPERTY] !== "closed"
  }

  /** Minimum height of the widget in pixels of the canvas. */
  height() {
    const open = OPEN_HEIGHT + (this.run?.preview ? PREVIEW_HEIGHT : 0)
    return (this.open && this.run ? open : CLOSED_HEIGHT) + 2 * MARGIN
  }

  /** Attach the widget after all others: workflows store the values of widgets by position. */
  attach() {
    const widget = this.node.addDOMWidget("wanstream_run", "wanstream_run", this.root, {
      serialize: false,
      hideOnZoom: false,
      margin: MARGIN,
      getMinHeight: () => this.height(),
      getMaxHeight: () => (this.open && this.run ? undefined : this.height()),
      getValue: () => "",
      setValue: () => {}
    })
    widget.serialize = false
    return widget
  }

  detach() {
    this.watch.disconnect()
  }

  build() {
    const toggle = () => this.toggle()
    // ComfyUI must not handle these keys too.
    const keep = (event) => ["Enter", " "].includes(event.key) && event.stopPropagation()
    this.line = element(h("span", { class: "wanstream-line-text" }))
    this.button = element(h("button", { type: "button", class: "wanstream-line", click: toggle, keydown: keep }))
    const room = element(h("span", { class: "wanstream-line-room" }))
    room.append(this.line)
    this.share = element(h("span", { class: "wanstream-share", "aria-hidden": "true" }))
    this.button.append(element(h("span", { class: "wanstream-arrow", "aria-hidden": "true" })), room, this.share)
    // Not by `h`, which makes no element that requests an address; the store admits only pictures within the event.
    this.preview = Object.assign(new Image(), { className: "wanstream-preview", draggable: false, hidden: true })
    const listeners = {
      keydown: (event) => this.onKey(event),
      pointermove: (event) => this.onPointer(event),
      pointerleave: () => this.choose(null),
      blur: () => this.choose(null)
    }
    this.plot = element(h("div", { class: "wanstream-plot", tabindex: 0, role: "group", ...listeners }))
    this.sentence = element(h("span", { class: "wanstream-verdict-text" }))
    const automate = () => this.page.automate(this.node)
    this.remedy = element(h("button", { type: "button", class: "wanstream-button", click: automate, keydown: keep }))
    this.verdict = element(h("div", { class: "wanstream-verdict" }))
    this.verdict.append(this.sentence, this.remedy)
    this.numbers = element(h("div", { class: "wanstream-numbers", role: "status", "aria-live": "polite" }))
    this.root = element(h("div", { class: "wanstream-run" }))
    this.root.append(this.button, this.preview, this.plot, this.verdict, this.numbers)
  }

  toggle() {
    this.node.properties[PROPERTY] = this.open ? "closed" : "open"
    this.show(this.run)
    this.page.resize(this.node, true)
  }

  /** Look up the run of this node and draw the changes; `all` draws everything. */
  refresh(all = false) {
    const run = this.page.runOf(this.node)
    const zoom = this.page.zoom()
    const drawn = !all && run === this.run && isFar(zoom) === isFar(this.zoom) && this.root.dataset.open !== undefined
    this.zoom = zoom
    if (!drawn) this.show(run)
    else if (run) {
      if (!run.ended) this.updateLine()
      this.updateNumbers() // with the end of the queue item too
    }
    if (!run && this.page.knowsRuns()) this.returnRoom()
  }

  /** Make the node as tall as its chart. */
  takeRoom() {
    const before = this.unsettled ?? this.node.size[1]
    this.page.resize(this.node, false)
    this.noteRoom(before)
    this.unsettled = this.node.size[1]
    // Nodes 2.0 makes the node taller still when it lays it out: in the next frame, and draws it in the one after.
    requestAnimationFrame(() => requestAnimationFrame(() => this.settle()))
  }

  settle() {
    if (this.unsettled === undefined) return
    this.noteRoom(this.unsettled)
    this.unsettled = undefined
  }

  /** Note the height that the node has gained for its chart. */
  noteRoom(before) {
    const gained = this.node.size[1] - before
    if (!this.run || gained <= 0) return
    const [first, last] = this.node.properties[HEIGHTS] ?? [before, before]
    this.node.properties[HEIGHTS] = [first, last + gained]
  }

  /** Take back the height that a chart had: a copy of the node has no run, nor has a graph that is opened later. */
  returnRoom() {
    const heights = this.node.properties?.[HEIGHTS]
    if (heights === undefined) return
    this.unsettled = undefined
    delete this.node.properties[HEIGHTS]
    this.page.shrink(this.node, heights[1] - heights[0])
  }

  show(run) {
    const appears = Boolean(run) !== Boolean(this.run) || Boolean(run?.preview) > Boolean(this.run?.preview)
    if (run?.run !== this.run?.run) this.chosen = null
    this.run = run
    const open = this.open && Boolean(run)
    this.root.dataset.open = open
    this.root.dataset.far = isFar(this.zoom)
    this.root.dataset.run = run?.run ?? ""
    this.root.dataset.ended = run?.ended ?? ""
    this.root.style.minHeight = `${this.height() - 2 * MARGIN}px`
    this.button.setAttribute("aria-expanded", open)
    this.button.disabled = !run
    this.updateLine()
    this.updatePreview()
    this.plot.setAttribute("aria-label", translate("plot"))
    this.draw()
    if (appears) this.takeRoom()
  }

  /** Update what changes without an event of the run: its times, and whether the node takes part in the next one. */
  tick() {
    if (this.run && !this.run.ended) this.updateLine()
    this.root.dataset.off = !window.LiteGraph?.vueNodesMode && OFF_MODES.includes(this.node.mode)
  }

  /** Update the line; its times also change during a step. */
  updateLine() {
    const parts = this.run ? runParts(this.run, this.page.now()) : [translate("none")]
    const share = this.run ? shareOfStep(this.run) : null
    this.share.hidden = share === null
    this.share.style.width = `${100 * (share ?? 0)}%`
    const text = parts.join(SEPARATOR)
    if (this.line.textContent === text) return
    this.button.title = text
    const separator = () => h("span", { class: "wanstream-separator" }, SEPARATOR)
    // The separator belongs to the part after it: at the beginning of a line it is out of sight.
    const spans = parts.map((part, place) => h("span", { class: "wanstream-part" }, ...(place ? [separator()] : []), part))
    this.line.replaceChildren(...spans.map(element))
  }

  /** Show the last preview; the page moves it. */
  updatePreview() {
    const shown = this.run?.preview
    this.preview.hidden = !shown
    if (!shown) return this.preview.removeAttribute("src")
    const text = translate("preview", shown.done)
    if (this.preview.alt !== text) this.preview.alt = this.preview.title = text
    // The same picture again would begin from its first frame.
    if (this.preview.getAttribute("src") !== shown.image) this.preview.src = shown.image
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.plot
    if (!this.run || !this.open || width < 20 || height < 20) return
    const { run, chosen, id } = this
    const label = this.button.title
    this.plot.replaceChildren(element(chart({ run, width, height, font: fontAt(this.zoom), chosen, id, label })))
    this.updateNumbers()
  }

  updateNumbers() {
    if (!this.open) return
    this.updateVerdict()
    const record = this.chosen === null ? null : recordsOf(this.run)[this.chosen]
    const text = record ? stepText(record, this.run.predicted?.steps[this.chosen]) : this.summary()
    this.numbers.dataset.chosen = Boolean(record)
    if (this.numbers.textContent !== text) this.numbers.textContent = this.numbers.title = text
  }

  /** Update the verdict. A run that waits has a button for the policy that the planner would choose. */
  updateVerdict() {
    const wait = waitOf(this.run)
    const { advice } = this.run
    const text = wait ? verdictText(wait, advice) : ""
    if (this.sentence.textContent !== text) this.sentence.textContent = this.sentence.title = text
    const waits = wait && wait.limit !== "Compute" && this.run.ended
    const hides = !waits || isBest(advice) || !this.page.canAutomate(this.node)
    if (hides && this.remedy === document.activeElement) this.plot.focus()
    this.remedy.hidden = hides
    if (this.remedy.textContent !== translate("automate")) this.remedy.textContent = translate("automate")
    this.remedy.title = advice ? translate("automateNow", advice.policy) : translate("automateWhy")
  }

  summary() {
    const { predicted, ended } = this.run
    const used = recordsOf(this.run).at(-1)?.device_used_bytes
    const total = this.run.settings?.device_total
    if (!ended && used && total) return translate("memoryNow", sizeText(used), sizeText(total))
    const hint = translate(predicted ? "pointPredicted" : "point")
    const phases = ended && this.page.phasesOf(this.run)
    return phases ? [phasesText(phases), hint].join(SEPARATOR) : hint
  }

  choose(step) {
    if (step === this.chosen || !this.run) return
    this.chosen = step
    this.draw()
  }

  onPointer(event) {
    const records = this.run ? recordsOf(this.run) : []
    if (!records.length) return
    const columns = columnsOf(this.run, this.plot.clientWidth)
    const frame = frameOf(this.plot.clientWidth, this.plot.clientHeight, fontAt(this.zoom), columns.length)
    const box = this.plot.getBoundingClientRect()
    // The canvas scales the element; the chart uses unscaled pixels.
    const x = ((event.clientX - box.left) * this.plot.clientWidth) / box.width
    const column = columns[columnAt(x, frame, columns.length)]
    this.choose(column.measured ? column.first : null)
  }

  onKey(event) {
    const count = this.run ? recordsOf(this.run).length : 0
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }
    if (event.key === "Escape") this.choose(null)
    else if (event.key in steps && count) {
      const from = this.chosen ?? (steps[event.key] > 0 ? -1 : count)
      this.choose(Math.min(count - 1, Math.max(0, from + steps[event.key])))
    } else return
    event.preventDefault()
    event.stopPropagation() // else the canvas moves its nodes
  }
}
