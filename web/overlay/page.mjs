/**
 * The overlay on sampler nodes, notices and badges on all nodes, and a table of the last runs, in ComfyUI's page.
 *
 * The only module that uses ComfyUI's `app` and `api`; the others get an interface to them.
 */

import { Badges } from "./badges.mjs"
import { Chip } from "./chip.mjs"
import { mostMemory } from "./figures.mjs"
import { executionIds, figuresAt } from "./graph_ids.mjs"
import { counterpart, exchanged, menuItems } from "./loader_exchange.mjs"
import { NoticeStrips, applies } from "./notices.mjs"
import { givePolicy, hasPolicy, takesPolicy } from "./policy_nodes.mjs"
import { BENCHMARK, Rankings } from "./ranking.mjs"
import { RunWidget, isFar } from "./run_widget.mjs"
import { RunsTable } from "./runs_table.mjs"
import { ENDS, EVENTS, Store, isOf, itemOf, itemPhases, lastItem, lastRanking, lastRun } from "./store.mjs"
import { leavesGap, recordsAt, runningRun, workflowOf } from "./store.mjs"
import { translate, setLanguage } from "./i18n.mjs"

const SHOWN_ON = ["WanStreamSampler", "WanStreamGuider", BENCHMARK, "WanStreamLaneSampler"]
/** The policy that the planner chooses, with the budgets that its node has. */
const AUTOMATIC = { type: "WanStreamAutoOffload", values: {} }
const BADGES_SETTING = "WanStream.Badges"
const STRICT_SETTING = "WanStream.Strict"
const SMALL_SETTING = "WanStream.SmallModels"
const TICK_MS = 500

/** Seconds of the page's clock. */
const clock = () => performance.now() / 1000

/** Register everything with the page. */
export function start(app, api) {
  const store = new Store((draw) => requestAnimationFrame(draw))
  const widgets = new Map()
  const page = pageOf(app, store)
  const badges = new Badges(page)
  const strips = new NoticeStrips(page)
  const rankings = new Rankings(page)
  const table = new RunsTable(page)
  const chip = new Chip(page)
  const refresh = () => {
    const other = setLanguage(app.extensionManager?.setting?.get("Comfy.Locale"))
    if (other) table.relabel()
    for (const node of page.othersShown()) if (!widgets.has(node)) attach(new RunWidget(node, page), widgets)
    for (const widget of widgets.values()) widget.refresh(other)
    strips.refresh(store.state)
    rankings.refresh()
    badges.refresh()
    table.refresh(store.state)
    chip.refresh(runningRun(store.state, page.workflow()))
  }
  const showBadges = (on) => app.canvas && badges.show(on) // without a canvas, `setup` does it

  app.registerExtension({
    name: "WanStream.Overlay",
    settings: [badgesSetting(showBadges), strictSetting, smallSetting],
    bottomPanelTabs: [tableTab(table, store)],
    setup() {
      addStyle()
      listen(api, store)
      api.addEventListener("wanstream.notices", ({ detail }) => toast(app, page, detail))
      followCanvas(app, () => badges.follow(), refresh)
      store.subscribe(refresh)
      showBadges(app.extensionManager?.setting?.get(BADGES_SETTING) ?? true)
      setInterval(() => tick(store.state, widgets, badges, strips, rankings, chip), TICK_MS)
      catchUp(api, store) // the page need not wait for it
    },
    commands: [exchangeCommand(app, page)],
    getNodeMenuItems: (node) => menuItems(node, (nodes) => exchangeAll(app, page, nodes)),
    nodeCreated(node) {
      if (SHOWN_ON.includes(node.comfyClass)) attach(new RunWidget(node, page), widgets)
      if (node.comfyClass === BENCHMARK && !ranks) {
        ranks = true
        findRankings(api, store)
      }
    },
    loadedGraphNode: (node) => widgets.get(node)?.refresh(),
    afterConfigureGraph() {
      dropStrays(widgets, page)
      refresh()
    }
  })
}

/** Update what changes without events: times of a run, and widgets whose values notices and rankings are about. */
function tick(state, widgets, badges, strips, rankings, chip) {
  if (chip.run) chip.refresh(chip.run)
  if (state.items.at(-1)?.running) badges.refresh()
  for (const widget of widgets.values()) widget.tick()
  if (state.notices.length) strips.refresh(state)
  if (state.rankings.length) rankings.refresh()
}

const TOAST_MS = 15_000

/** Messages of the last run of each node, as JSON. */
const toasted = new Map()

/**
 * Show a message for each notice of something that makes the video wrong, if its node is in the open graph. A queue of
 * runs with the same notices shows it once: the strip on the node stays.
 */
function toast(app, page, { node: id, workflow, type, notices }) {
  const node = isOf({ workflow }, page.workflow()) && page.nodes().find(([, ids]) => ids.includes(id))?.[0]
  if (!node) return
  const wrong = notices.filter((notice) => notice.level === "wrong" && applies({ ...notice, type }, node))
  const place = JSON.stringify([workflow, id])
  const shown = toasted.get(place)
  toasted.set(place, JSON.stringify(wrong))
  if (shown === toasted.get(place)) return
  for (const notice of wrong)
    app.extensionManager?.toast?.add({ severity: "warn", summary: `${node.title}`, detail: `${notice.text}`, life: TOAST_MS })
}

/** Remove widgets of missing nodes: ComfyUI sends no removal events for nodes inside subgraphs on loading a graph. */
function dropStrays(widgets, page) {
  for (const [node, widget] of widgets) {
    if (page.isHere(node)) continue
    widgets.delete(node)
    widget.detach()
  }
}

/** Interface of the page for the widget, the badges and the table. */
function pageOf(app, store) {
  const root = () => app.rootGraph ?? app.graph
  let ids = null
  // A graph is walked once for all nodes that are drawn together.
  const idsOf = (node) => {
    if (!ids) queueMicrotask(() => (ids = null))
    ids ??= executionIds(root())
    return ids.get(node) ?? []
  }
  return {
    get canvas() {
      return app.canvas
    },
    now: clock,
    /** True once the server has sent the runs of earlier pages. */
    knowsRuns: () => store.state.complete,
    zoom: () => app.canvas?.ds.scale ?? 1,
    workflow: () => root().id,
    /** Pairs of each node of the open graph, with those of its subgraphs, and the ids on the server. */
    nodes: () => [...executionIds(root())],
    isHere: (node) => idsOf(node).length > 0,
    /** Nodes of others at which a run is shown: any sampler can run a streamed model. */
    othersShown() {
      const runs = store.state.runs.filter((run) => isOf(run, root().id))
      if (!runs.length) return []
      const isShown = ([node, ids]) => !SHOWN_ON.includes(node.comfyClass) && runs.some((run) => ids.includes(run.shown_at))
      return [...executionIds(root())].filter(isShown).map(([node]) => node)
    },
    /** Element of ComfyUI's top bar for the buttons of others. */
    bar: () => app.menu?.settingsGroup?.element,
    /** Node of the open graph at which a run is shown. */
    nodeOf(run) {
      const isShown = ([, ids]) => ids.includes(`${run.shown_at}`)
      return isOf(run, root().id) ? [...executionIds(root())].find(isShown)?.[0] : undefined
    },
    jumpTo(node) {
      if (app.canvas.graph !== node.graph) app.canvas.setGraph(node.graph)
      app.canvas.centerOnNode(node)
      app.canvas.selectNode(node)
    },
    runOf(node) {
      const last = (shown) => lastRun(store.state, root().id, idsOf(shown))
      const runs = [node, measuredBy(node)].filter(Boolean).map(last).filter(Boolean)
      return runs.sort((one, other) => other.at - one.at)[0] ?? null
    },
    rankingAt: (ids) => lastRanking(store.state, root().id, ids),
    samplerTakes: (node) => takesPolicy(measuredBy(node)),
    policyIs: (node, policy) => hasPolicy(measuredBy(node), policy),
    usePolicy(node, policy) {
      asOneChange(app, () => givePolicy(measuredBy(node), policy))
      this.changed()
    },
    canAutomate: (node) => takesPolicy(node) && !hasPolicy(node, AUTOMATIC),
    automate(node) {
      asOneChange(app, () => givePolicy(node, AUTOMATIC))
      this.changed()
    },
    phasesOf: (run) => itemPhases(store.state, run.prompt_id),
    figuresOf(node) {
      const item = lastItem(store.state, root().id)
      const figures = item && figuresAt(item, idsOf(node), node.type, clock())
      return figures && { ...figures, memory: mostMemory(recordsAt(store.state, item.prompt_id, idsOf(node))) }
    },
    badgesWidth: (node) => badgesWidth(app, node),
    resize,
    // Undo replaces every node by another object. With Nodes 2.0 both have one size, and each step would shrink it.
    shrink: (node, height) => idsOf(node).length && shrink(node, height),
    /** Redraw after a value of a node was changed here, and let ComfyUI notice the change. */
    changed() {
      const tracker = trackerOf(app)
      if (tracker?.captureCanvasState) tracker.captureCanvasState()
      else tracker?.checkState?.() // before 1.44 of the frontend
      app.canvas?.setDirty(true, true)
      store.take("redraw")
    },
    forward: (element) => forward(app, element, isForCanvas),
    forwardAll: (element) => forward(app, element, null),
    save
  }
}

/** ComfyUI's undo for the open graph. */
const trackerOf = (app) => app.extensionManager?.workflow?.activeWorkflow?.changeTracker

/** Exchange loaders as one change for undo, and select the new ones if the old were. */
function exchangeAll(app, page, nodes) {
  asOneChange(app, () => {
    for (const node of nodes) {
      const wasSelected = node.id in app.canvas.selected_nodes
      const made = exchanged(node)
      if (wasSelected) app.canvas.selectNode(made, true)
    }
  })
  page.changed()
}

/** Change the graph in one step of undo. */
function asOneChange(app, change) {
  const tracker = trackerOf(app)
  tracker?.beforeChange()
  try {
    change()
  } finally {
    tracker?.afterChange()
  }
}

const exchangeCommand = (app, page) => ({
  id: "WanStream.ExchangeLoaders",
  label: "Stream the selected loaders, or stop streaming them",
  function() {
    exchangeAll(app, page, Object.values(app.canvas.selected_nodes).filter(counterpart))
  }
})

/**
 * Width of ComfyUI's own badges at the right end of a node on the classic canvas.
 *
 * Measured by letting the node draw them on nothing: where it keeps them differs between versions of the frontend.
 */
function badgesWidth(app, node) {
  // At a low zoom ComfyUI draws none.
  if (window.LiteGraph?.vueNodesMode || app.canvas.low_quality || !node.drawBadges) return 0
  let left = Infinity
  const record = (x) => (left = Math.min(left, x))
  const drawn = new Proxy(app.canvas.ctx, {
    get(pen, name) {
      if (name === "measureText") return (text) => pen.measureText(text)
      if (name === "roundRect" || name === "rect") return record
      return typeof pen[name] === "function" ? () => {} : pen[name]
    },
    set: (pen, name, value) => (name === "font" ? Reflect.set(pen, name, value) : true)
  })
  node.drawBadges(drawn)
  return left === Infinity ? 0 : node.width - left
}

/** Sampler of a benchmark node: without repetitions the benchmark shows the run of that sampler. */
function measuredBy(node) {
  if (node.comfyClass !== BENCHMARK) return null
  const slot = node.inputs.findIndex((input) => input.name === "run")
  return slot < 0 ? null : node.getInputNode(slot)
}

/** Give a node the height of its widgets; `shrink` also reduces it. */
function resize(node, shrink) {
  const least = node.computeSize()[1]
  if (shrink || node.size[1] < least) node.setSize([node.size[0], least])
  node.graph?.setDirtyCanvas(true, true)
}

/** Take height from a node, as far as its widgets leave it. */
function shrink(node, height) {
  node.setSize([node.size[0], Math.max(node.computeSize()[1], node.size[1] - height)])
  node.graph?.setDirtyCanvas(true, true)
}

/** Turning the wheel, and the middle button. */
const isForCanvas = (event) => event.type === "wheel" || event.button === 1 || (event.buttons & 4) === 4

const CANVAS_EVENTS = {
  wheel: "processMouseWheel",
  pointerdown: "processMouseDown",
  pointermove: "processMouseMove",
  pointerup: "processMouseUp"
}

/**
 * Pass on events from an element over the canvas, which would swallow them.
 *
 * `wanted(event)` selects events; inside a node only the classic canvas needs them. null: all events, always.
 */
function forward(app, element, wanted) {
  for (const [name, handler] of Object.entries(CANVAS_EVENTS)) {
    element.addEventListener(name, (event) => {
      if (!wanted || (!window.LiteGraph?.vueNodesMode && wanted(event))) app.canvas[handler](event)
    })
  }
}

function save(name, type, text) {
  const link = document.createElement("a")
  link.href = URL.createObjectURL(new Blob([text], { type }))
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href))
}

// Read by the server from its file of settings, as the next one.
const smallSetting = {
  id: SMALL_SETTING,
  category: ["WanStream", "Runs", "SmallModels"],
  name: "Stream small models",
  tooltip:
    "Load Diffusion Model (streamed) and Stream Model also take models with less than 2 GB in blocks, to try them: streaming makes such models slower, not smaller.",
  type: "boolean",
  defaultValue: false
}

const strictSetting = {
  id: STRICT_SETTING,
  category: ["WanStream", "Runs", "Strict"],
  name: "Stop where experts or LoRAs look wrong",
  tooltip:
    "Experts or LoRAs that seem swapped, one file as both experts, a LoRA of another kind of model: an error instead of a warning on the node.",
  type: "boolean",
  defaultValue: false
}

const badgesSetting = (onChange) => ({
  id: BADGES_SETTING,
  category: ["WanStream", "Overlay", "Badges"],
  name: "Badges with seconds above all nodes",
  tooltip: "Seconds of each node in the last run, and for WanStream's samplers the most memory.",
  type: "boolean",
  defaultValue: true,
  onChange
})

const tableTab = (table, store) => ({
  id: "wanstream-runs",
  get title() {
    return translate("tab")
  },
  type: "custom",
  render(container) {
    // Called again whenever the panel is drawn.
    container.style.height = "100%"
    if (container.firstChild !== table.root) container.replaceChildren(table.root)
    table.refresh(store.state)
  }
})

function addStyle() {
  const link = document.createElement("link")
  link.rel = "stylesheet"
  link.href = new URL("./overlay.css", import.meta.url)
  document.head.append(link)
}

/** Attach a widget to its node until the node is removed. */
function attach(widget, widgets) {
  const { node } = widget
  widget.attach()
  widgets.set(node, widget)
  const removed = node.onRemoved
  node.onRemoved = function (...given) {
    widgets.delete(node)
    widget.detach()
    return removed?.apply(this, given)
  }
  requestAnimationFrame(() => widget.refresh()) // by then the node has its id and its place
}

let asking = false
let askAgain = false

/** Request a snapshot from the server; a call during a request repeats it, because its answer may be too old. */
async function catchUp(api, store) {
  askAgain = asking
  if (asking) return
  asking = true
  const known = store.state.runs.map((run) => run.run)
  try {
    const answer = await api.fetchApi("/wanstream/runs")
    if (answer.ok) store.take("snapshot", { ...(await answer.json()), known }, clock())
  } finally {
    asking = false
  }
  if (askAgain) await catchUp(api, store)
}

/** Request the graph of a queue item that has just begun, which its events do not contain. */
async function findGraph(api, store, prompt_id) {
  const json = async (route) => (await api.fetchApi(route)).json()
  const running = (await json("/queue")).queue_running.find((item) => item[1] === prompt_id)
  // A short item may have ended before the answer arrives.
  const found = running ?? (await json(`/history/${prompt_id}`))[prompt_id]?.prompt
  if (!found) return
  store.take("graph", { prompt_id, nodes: found[2], workflow: workflowOf(found) })
}

/** Newest items of the history, whose graphs and outputs are long. */
const HISTORY_ITEMS = 20
const HISTORY_MS = 1000

/** True once a graph with a benchmark has been open. */
let ranks = false

/** Request the rankings of ended items, for a page that has missed their events. */
async function findRankings(api, store) {
  if (!ranks) return
  const answer = await api.fetchApi(`/history?max_items=${HISTORY_ITEMS}`)
  if (answer.ok) store.take("history", await answer.json())
}

function listen(api, store) {
  for (const event of EVENTS) {
    api.addEventListener(event, ({ detail }) => {
      const gap = event === "wanstream.step" && leavesGap(store.state, detail)
      store.take(event, detail, clock())
      if (gap) catchUp(api, store)
      if (event === "execution_start") findGraph(api, store, detail.prompt_id)
      // The history has an item a moment after its last event.
      if (ENDS.includes(event) && !itemOf(store.state, detail)) setTimeout(() => findRankings(api, store), HISTORY_MS)
    })
  }
  api.addEventListener("reconnected", () => {
    catchUp(api, store)
    findRankings(api, store)
  })
}

/** Follow the canvas: its position moves badges, its zoom changes the font size. */
function followCanvas(app, moved, zoomed) {
  const before = app.canvas.onDrawForeground
  let far = null
  app.canvas.onDrawForeground = function (...drawn) {
    before?.apply(this, drawn)
    moved()
    const now = isFar(app.canvas.ds.scale)
    if (now !== far) zoomed()
    far = now
  }
}
