/**
 * Badges above the right end of every node with its seconds in the last queue item and the peak memory of its run;
 * below a selected node, above which ComfyUI shows its toolbox.
 *
 * One layer of elements over the canvas serves both renderers: it follows the canvas. While badges are off, there is no
 * layer, and drawing the canvas does no extra work.
 */

import { element, h } from "./dom.mjs"
import { shortSeconds, sizeText } from "./figures.mjs"
import { translate } from "./i18n.mjs"

const TITLE_HEIGHT = 30
const LEAST_ZOOM = 0.35
const NEAR_FONT = 12
const LEAST_SCREEN_FONT = 10
const LARGEST_FONT = 18 // the shipped workflows have room for it between a node and what is above it
const LEAST_SECONDS = 0.1

/** Text of a badge; `figures` are those of `figuresAt`, with the `memory` of the node's runs or null. */
export function badgeText(figures) {
  if (!figures.ran) return translate(figures.cached ? "cached" : "notRun")
  const seconds = figures.seconds < LEAST_SECONDS ? `< ${LEAST_SECONDS} s` : shortSeconds(figures.seconds)
  return figures.memory ? translate(`badge${figures.memory.kind}`, seconds, sizeText(figures.memory.bytes)) : seconds
}

/** Tooltip of a badge. */
export function badgeTitle(figures) {
  if (!figures.ran) return translate(figures.cached ? "cachedWhy" : "notRunWhy")
  const took = translate(figures.running ? "runningFor" : "took", shortSeconds(figures.seconds))
  return figures.memory ? `${took}; ${translate(`peak${figures.memory.kind}`, sizeText(figures.memory.bytes))}` : took
}

const widthOf = (node) => (node.flags?.collapsed && node._collapsed_width) || node.size[0]

const bodyHeight = (node) => (node.flags?.collapsed ? 0 : node.size[1])

const isIn = (graph, node) => graph.getNodeById(node.id) === node

/** Readable font size at this zoom, in pixels of the graph. */
export const badgeFont = (zoom) => Math.min(LARGEST_FONT, Math.max(NEAR_FONT, LEAST_SCREEN_FONT / zoom))

export class Badges {
  /**
   * `page` gives `figuresOf(node)` (null: no badge), the `canvas` of litegraph, `badgesWidth(node)` and
   * `forwardAll(element)`.
   */
  constructor(page) {
    this.page = page
    this.layer = null
    this.chips = new Map()
  }

  get shown() {
    return this.layer !== null
  }

  /** Show or remove the layer. */
  show(on) {
    if (on === this.shown) return
    if (on) {
      this.inner = element(h("div", { class: "wanstream-badges-inner" }))
      this.layer = element(h("div", { class: "wanstream-badges" }))
      this.layer.append(this.inner)
      this.page.forwardAll(this.layer)
      this.page.canvas.canvas.parentElement.append(this.layer)
      this.refresh()
    } else {
      this.layer.remove()
      this.layer = null
      this.chips.clear()
    }
  }

  /** Update the badges of all nodes of the open graph. */
  refresh() {
    if (!this.layer) return
    const graph = this.page.canvas.graph
    const current = new Map()
    for (const node of graph?.nodes ?? graph?._nodes ?? []) {
      const figures = this.page.figuresOf(node)
      if (figures) current.set(node, figures)
    }
    for (const [node, chip] of this.chips) {
      if (current.has(node)) continue
      chip.remove()
      this.chips.delete(node)
    }
    for (const [node, figures] of current) this.update(node, figures)
    this.graph = graph
    this.follow()
  }

  update(node, figures) {
    let chip = this.chips.get(node)
    if (!chip) {
      chip = element(h("div", { class: "wanstream-badge", "data-node": node.id }))
      this.chips.set(node, chip)
      this.inner.append(chip)
    }
    chip.textContent = badgeText(figures)
    chip.title = badgeTitle(figures)
    chip.dataset.running = figures.running
  }

  /** Move to the position of the canvas; called whenever it is drawn. */
  follow() {
    if (!this.layer) return
    const { canvas } = this.page
    // ComfyUI sends no removal events when a whole graph is cleared.
    if (canvas.graph !== this.graph || [...this.chips.keys()].some((node) => !isIn(this.graph, node))) {
      this.refresh()
      return
    }
    const { scale, offset } = canvas.ds
    this.layer.hidden = scale < LEAST_ZOOM
    this.inner.style.transform = `scale(${scale}) translate(${offset[0]}px, ${offset[1]}px)`
    this.inner.style.fontSize = `${badgeFont(scale)}px`
    for (const [node, chip] of this.chips) {
      // A collapsed node may be narrower than its badge, which must not lie to the left of it.
      const least = node.flags?.collapsed ? node.pos[0] + chip.offsetWidth : -Infinity
      chip.style.left = `${Math.max(least, node.pos[0] + widthOf(node) - this.page.badgesWidth(node))}px`
      const below = Boolean(canvas.selected_nodes?.[node.id])
      chip.dataset.below = below
      chip.style.top = `${node.pos[1] + (below ? bodyHeight(node) : -TITLE_HEIGHT)}px`
    }
  }
}
