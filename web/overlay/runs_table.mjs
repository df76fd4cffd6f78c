/**
 * Table of the last runs for the bottom panel: a row per run, a comparison of ticked runs above, and export.
 *
 * The layout is pure (`tableOf`, `comparisonOf`, `fastestText`, `csvOf`, `jsonOf`); the class puts it on the page.
 */

import { element, h } from "./dom.mjs"
import { figuresOf, mostMemory, perStepText, recordsOf, secondsPerStep, settingsOf, stateText } from "./figures.mjs"
import { translate } from "./i18n.mjs"

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString()

/** Name of a run: the title of its node if the workflow has one. */
const name = (run) => (typeof run.title === "string" && run.title) || translate("nodeOf", run.shown_at)

/** A figure with its ratio to the one of the first run, unless they are equal or one of them is unknown. */
function comparedText({ value, text }, first) {
  const comparable = value !== null && first.value && text !== first.text
  return comparable ? `${text} (${(value / first.value).toFixed(2)} x)` : text
}

/** Rates have columns in the comparison and in files. The long table has no room for them. */
const LEFT_OUT = ["moved at", "read at"]

/** Figures that any of the runs has: on a CPU there is no VRAM, and not every machine was measured. */
function knownFigures(runs) {
  const known = runs.map(figuresOf)
  return (known[0] ?? []).filter((_, index) => known.some((figures) => figures[index].value !== null))
}

/** Settings that any of the runs has. */
function knownSettings(runs) {
  const known = runs.map(settingsOf)
  return (known[0] ?? []).filter((_, index) => known.some((settings) => settings[index].text))
}

/** Text of a cell of the long table; the whole text is its title. */
function shortText(name, text) {
  const count = name === "lora" ? text.split(", ").length : 1
  return count > 1 ? translate("loras", count) : text
}

/** All runs, the last one first. `ticked` holds the ids of chosen runs. */
export function tableOf(runs, { ticked, onTick }) {
  const figures = knownFigures(runs).filter(({ name }) => !LEFT_OUT.includes(name))
  const settings = knownSettings(runs)
  const names = [...settings, ...figures].map((each) => each.name)
  const heads = [...settings, ...figures].map((each) => each.head)
  const allHeads = ["", translate("head time"), translate("head node"), ...heads, translate("head state")]
  const row = (run) => {
    const label = `${clock(run.at)} ${name(run)}`
    const tick = { checked: ticked.has(run.run), change: () => onTick(run.run), "aria-label": translate("compare", label) }
    const cell = (content) => h("td", typeof content === "string" ? { title: content } : {}, content)
    const known = [...settingsOf(run), ...figuresOf(run)].filter((each) => names.includes(each.name))
    const shown = known.map(({ name, text, value }) =>
      h("td", { [value === undefined ? "data-setting" : "data-figure"]: name, title: text }, shortText(name, text))
    )
    const first = [h("input", { type: "checkbox", ...tick }), clock(run.at), name(run)].map(cell)
    return h("tr", { "data-run": run.run }, ...first, ...shown, cell(stateText(run)))
  }
  return h(
    "table",
    { class: "wanstream-table" },
    h("thead", {}, h("tr", {}, ...allHeads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, ...[...runs].reverse().map(row))
  )
}

/** The chosen runs side by side, each figure with its ratio to the first run. */
export function comparisonOf(runs) {
  const names = knownFigures(runs).map((figure) => figure.name)
  const settings = knownSettings(runs).map(({ name, head }) => {
    const cells = runs.map((run) => h("td", {}, settingsOf(run).find((setting) => setting.name === name).text))
    return h("tr", { "data-setting": name }, h("th", { scope: "row" }, head), ...cells)
  })
  const columns = runs.map((run) => figuresOf(run).filter((figure) => names.includes(figure.name)))
  const head = runs.map((run) => h("th", { scope: "col" }, `${clock(run.at)} ${name(run)}`))
  const row = (figure, index) => {
    const cells = columns.map((figures) => h("td", {}, comparedText(figures[index], figure)))
    return h("tr", { "data-figure": figure.name }, h("th", { scope: "row" }, figure.head), ...cells)
  }
  return h(
    "table",
    { class: "wanstream-table wanstream-comparison" },
    h("thead", {}, h("tr", {}, h("th", {}), ...head)),
    h("tbody", {}, ...settings, ...columns[0].map(row))
  )
}

/** A sentence on the fastest of some runs and the next one; empty if fewer than two have steps. */
export function fastestText(runs) {
  const bySpeed = (one, other) => secondsPerStep(one) - secondsPerStep(other)
  const known = runs.filter((run) => secondsPerStep(run)).sort(bySpeed)
  if (known.length < 2) return ""
  const [fastest, next] = known
  const ratio = (one, other) => (one / other).toFixed(2)
  const pace = secondsPerStep(fastest)
  const words = [`${clock(fastest.at)} ${name(fastest)}`, perStepText(pace), ratio(secondsPerStep(next), pace)]
  const [least, most] = [fastest, next].map((run) => mostMemory(recordsOf(run)))
  const isComparable = least && least.kind === most?.kind
  return isComparable
    ? translate("fastestWithMemory", ...words, ratio(most.bytes, least.bytes))
    : translate("fastest", ...words)
}

/** The begin of a formula in a spreadsheet: some ignore spaces, and take full-width signs for plain ones. */
const FORMULA = /^[\s\0\ufeff]*[=+\-@\uff1d\uff0b\uff0d\uff20\u2212\ufe63\ufe62\ufe66\ufe6b]|^[\t\r\n]/

/** A text as a cell of CSV. Spreadsheets compute one that begins like a formula, unless it has an apostrophe in front. */
function quoted(value) {
  const text = String(value)
  const asText = FORMULA.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text
  return `"${asText.replaceAll('"', '""')}"`
}

/** One line per run, figures as plain numbers in seconds and bytes. */
export function csvOf(runs) {
  if (!runs.length) return ""
  const names = [...settingsOf(runs[0]), ...figuresOf(runs[0])].map((each) => each.name)
  const heads = ["run", "prompt_id", "at", "node", ...names, "state"]
  const line = (run) => {
    const figures = figuresOf(run).map((figure) => figure.value ?? "")
    const settings = settingsOf(run).map((setting) => quoted(setting.text))
    const ids = [quoted(run.run), quoted(run.prompt_id ?? ""), run.at, quoted(name(run))]
    return [...ids, ...settings, ...figures, quoted(stateText(run))].join(",")
  }
  return [heads.join(","), ...runs.map(line), ""].join("\n")
}

/** Everything that is known of the runs, timelines as the server wrote them. */
export const jsonOf = (runs) => JSON.stringify({ wanstream_runs: 1, runs }, null, 1)

export class RunsTable {
  /** `page` does `save(fileName, type, text)`. */
  constructor(page) {
    this.page = page
    this.ticked = new Set()
    this.runs = []
    this.tools = element(h("div", { class: "wanstream-tools" }))
    this.words = element(h("p", { class: "wanstream-fastest", role: "status" }))
    this.body = element(h("div", { class: "wanstream-tables" }))
    this.root = element(h("div", { class: "wanstream-panel" }))
    this.root.append(this.tools, this.words, this.body)
  }

  /** Redraw everything after a change of language. */
  relabel() {
    this.tools.replaceChildren()
  }

  drawTools() {
    if (this.tools.firstChild) return
    const button = (label, click) => h("button", { type: "button", class: "wanstream-button", click }, label)
    const tools = [
      button(translate("exportJson"), () => this.export("json", "application/json", jsonOf)),
      button(translate("exportCsv"), () => this.export("csv", "text/csv", csvOf)),
      h("span", { class: "wanstream-hint" }, translate("tick"))
    ]
    this.tools.replaceChildren(...tools.map(element))
  }

  /** Draw the table if it is on the page; otherwise its next `render` draws it. */
  refresh(state) {
    this.runs = state.runs
    if (!this.root.isConnected) return
    this.drawTools()
    const focused = document.activeElement?.closest?.("[data-run]")?.dataset.run
    const onTick = (run) => {
      if (!this.ticked.delete(run)) this.ticked.add(run)
      this.refresh(state)
    }
    const chosen = this.chosen()
    const words = fastestText(chosen)
    if (this.words.textContent !== words) this.words.textContent = words
    const comparison = chosen.length > 1 ? [comparisonOf(chosen)] : []
    const all = this.runs.length
      ? tableOf(this.runs, { ticked: this.ticked, onTick })
      : h("p", { class: "wanstream-hint" }, translate("noRun"))
    this.body.replaceChildren(...[...comparison, all].map(element))
    if (focused) this.body.querySelector(`tr[data-run="${focused}"] input`)?.focus()
  }

  chosen() {
    return this.runs.filter((run) => this.ticked.has(run.run))
  }

  export(ending, type, write) {
    const chosen = this.chosen()
    this.page.save(`wanstream_runs.${ending}`, type, write(chosen.length ? chosen : this.runs))
  }
}
