/**
 * Result of a benchmark on its node: a bar for each variant from the fastest step to the slowest, the fastest marked,
 * and a button that gives its policy to the sampler.
 */

import { element, h } from "./dom.mjs"
import { isFar } from "./run_widget.mjs"
import { perStepText, sizeText } from "./figures.mjs"
import { translate } from "./i18n.mjs"

export const BENCHMARK = "WanStreamBenchmark"

const MARGIN = 6
const ROW_HEIGHT = 36
const FAR_ROW_HEIGHT = 54

/** Rows of a ranking: name, share of the longest bar, texts, and the node of the policy. */
export function rowsOf(ranking) {
  const fastest = ranking[0].step_s
  const slowest = Math.max(...ranking.map(({ step_s: seconds }) => seconds ?? 0))
  return ranking.map(({ name, memory, failed, policy, step_s: seconds }, place) => {
    const isRun = seconds !== null
    return {
      name,
      policy,
      isFastest: isRun && place === 0,
      share: isRun && slowest > 0 ? seconds / slowest : 0,
      text: isRun ? measuredText(seconds, fastest, memory) : failed || translate("notRun")
    }
  })
}

function measuredText(seconds, fastest, memory) {
  const parts = [perStepText(seconds)]
  if (seconds > fastest) parts.push(`${(seconds / fastest).toFixed(2)} ×`)
  if (memory) parts.push(translate(memory[0], sizeText(memory[1])))
  return parts.join(" · ")
}

export class Ranking {
  /**
   * `page` provides `samplerTakes(node)`, `policyIs(node, policy)`, `usePolicy(node, policy)`, `zoom()`,
   * `resize(node)`, `shrink(node, height)` and `forward(element)`.
   */
  constructor(node, page) {
    this.node = node
    this.page = page
    this.rows = []
    this.root = element(h("div", { class: "wanstream-ranking", role: "list", tabindex: -1 }))
    page.forward(this.root)
  }

  /** Height of the widget in pixels of the canvas. */
  height() {
    const row = isFar(this.page.zoom()) ? FAR_ROW_HEIGHT : ROW_HEIGHT
    return row * this.rows.length + 2 * MARGIN
  }

  /** Attach the widget after all others: workflows store the values of widgets by position. */
  attach() {
    this.widget = this.node.addDOMWidget("wanstream_ranking", "wanstream_ranking", this.root, {
      serialize: false,
      hideOnZoom: false,
      margin: MARGIN,
      getMinHeight: () => this.height(),
      getMaxHeight: () => this.height(),
      getValue: () => "",
      setValue: () => {}
    })
    this.widget.serialize = false
    this.page.resize(this.node)
  }

  /** Remove the widget from its node, and the room that it took. */
  detach() {
    const height = this.height()
    this.node.removeWidget(this.widget)
    this.root.remove()
    this.page.shrink(this.node, height)
  }

  show(ranking) {
    const rows = rowsOf(ranking)
    const far = isFar(this.page.zoom())
    const canUse = this.page.samplerTakes(this.node)
    const stateOf = (policy) => (this.page.policyIs(this.node, policy) ? "used" : "other")
    const states = rows.map(({ policy }) => policy && canUse && stateOf(policy))
    const key = JSON.stringify([rows, far, states, translate("usePolicy")])
    if (key === this.key) return
    this.key = key
    const before = this.height()
    this.rows = rows
    this.root.dataset.far = far
    const hadFocus = this.root.contains(document.activeElement)
    this.root.replaceChildren(...rows.map((row, place) => element(this.line(row, states[place]))))
    if (hadFocus) this.root.focus() // the button that was pressed is gone
    this.root.style.minHeight = `${this.height() - 2 * MARGIN}px`
    // Another size would be a step of undo.
    if (this.widget && this.height() > before) this.page.resize(this.node)
  }

  line({ name, text, share, policy, isFastest }, state) {
    const style = `width: ${(100 * share).toFixed(1)}%`
    const bar = h("span", { class: "wanstream-rank-bar", style, "aria-hidden": "true" })
    const head = h("span", { class: "wanstream-rank-name" }, `${isFastest ? "✓ " : ""}${name}`)
    const figures = h("span", { class: "wanstream-rank-text" }, text)
    const room = h("div", { class: "wanstream-rank-room", title: `${name}: ${text}` }, bar, head, figures)
    const row = { class: "wanstream-rank", role: "listitem", "data-fastest": `${isFastest}` }
    // The same room for every action, so that the bars compare.
    return h("div", row, room, h("div", { class: "wanstream-rank-action" }, ...this.action(name, policy, state)))
  }

  /** The button of a policy that the sampler does not have, or a word on the one that it has. */
  action(name, policy, state) {
    if (!state) return []
    if (state === "used") return [h("span", {}, translate("usedPolicy"))]
    const keep = (event) => ["Enter", " "].includes(event.key) && event.stopPropagation()
    const use = () => this.page.usePolicy(this.node, policy)
    const label = `${translate("usePolicy")}: ${name}`
    const told = { title: translate("usePolicyWhy"), "aria-label": label }
    const button = { type: "button", class: "wanstream-button", click: use, keydown: keep, ...told }
    return [h("button", button, translate("usePolicy"))]
  }
}

/** The rankings of a page: one on each benchmark of the open graph with two variants or more. */
export class Rankings {
  /** `page` also provides `nodes()`, pairs of node and ids, and `rankingAt(ids)`. */
  constructor(page) {
    this.page = page
    this.shown = new Map()
  }

  /** Attach, update and remove rankings. */
  refresh() {
    const current = this.current()
    for (const [node, ranking] of this.shown) {
      if (current.has(node)) continue
      this.shown.delete(node)
      ranking.detach()
    }
    for (const [node, variants] of current) {
      const known = this.shown.get(node)
      const ranking = known ?? new Ranking(node, this.page)
      this.shown.set(node, ranking)
      ranking.show(variants)
      if (!known) ranking.attach()
    }
  }

  current() {
    const benchmarks = this.page.nodes().filter(([node]) => node.comfyClass === BENCHMARK)
    const found = benchmarks.map(([node, ids]) => [node, this.page.rankingAt(ids)])
    return new Map(found.filter(([, variants]) => variants?.length > 1))
  }
}
