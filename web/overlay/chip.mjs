/**
 * The running run in ComfyUI's top bar: policy, memory, seconds per step and time left. A click jumps to its node.
 *
 * It is in the page only while a run is running, so that ComfyUI takes no room for it otherwise.
 */

import { element, h } from "./dom.mjs"
import { chipParts } from "./figures.mjs"
import { translate } from "./i18n.mjs"

export class Chip {
  /** `page` provides `bar()`, `now()`, `nodeOf(run)` and `jumpTo(node)`. */
  constructor(page) {
    this.page = page
    this.root = element(h("button", { type: "button", class: "wanstream-chip", click: () => this.jump() }))
  }

  refresh(run) {
    this.run = run
    const bar = run && this.page.bar()
    if (!bar) return this.root.remove()
    if (this.root.parentNode !== bar) bar.append(this.root)
    const parts = chipParts(run, this.page.now())
    const text = parts.map((part) => part.text).join(" · ")
    const isHere = Boolean(this.node())
    const key = `${text} ${isHere}`
    if (key === this.key) return
    this.key = key
    this.root.disabled = !isHere
    this.root.title = translate(isHere ? "chipJump" : "chipElsewhere", text)
    this.root.replaceChildren(...parts.map(({ name, text }) => element(h("span", { "data-part": name }, text))))
  }

  /** Node of the run, if it is in the open graph. */
  node() {
    return this.run && this.page.nodeOf(this.run)
  }

  jump() {
    const node = this.node()
    if (node) this.page.jumpTo(node)
  }
}
