/**
 * Everything that one page knows of runs and queue items. The only state: elements are drawn from it.
 *
 * `state` is a value: each event gives a new one, by a pure function. A page that comes later starts from a snapshot.
 */

import { RESTARTED, recordsOf } from "./figures.mjs"
import { isWithin } from "./graph_ids.mjs"

const KEPT_RUNS = 50
const NO_WORKFLOW = "00000000-0000-0000-0000-000000000000"

export const EMPTY = { runs: [], items: [] }

const begin = (state, payload) => ({
  ...state,
  runs: [...state.runs.filter((run) => run.run !== payload.run), fresh(payload)].slice(-KEPT_RUNS)
})

const fresh = (payload) => ({ ...payload, records: [], ended: false, timeline: null, error: null })

const change = (state, id, changed) => ({
  ...state,
  runs: state.runs.map((run) => (run.run === id ? { ...run, ...changed(run) } : run))
})

/** A step that is known already, or that comes after a gap, changes nothing: the next snapshot or the end tells all. */
const step = (state, payload) =>
  change(state, payload.run, (run) =>
    payload.done === run.records.length + 1
      ? { records: [...run.records, payload.record], steps: Math.max(run.steps, payload.total) }
      : {}
  )

const end = (state, payload) =>
  change(state, payload.run, (run) => ({
    ended: true,
    timeline: payload.timeline,
    predicted: payload.predicted ?? run.predicted,
    error: payload.error
  }))

/**
 * A queue item, timed from its first event to its last. ComfyUI sends these events to the page that queued the item: a
 * page that was loaded later has no `execution_start` of it, and says nothing of its nodes.
 */
const start = (state, { prompt_id }) => ({
  ...state,
  items: [...state.items, { prompt_id, workflow: null, classes: null, cached: [], times: {}, running: true }].slice(-KEPT_RUNS)
})

const changeItem = (state, id, changed) => ({
  ...state,
  items: state.items.map((item) => (item.prompt_id === id ? { ...item, ...changed(item) } : item))
})

/** The parts of a node that has expanded into others have its display id: it runs while any of them does. */
function progress(state, { prompt_id, nodes }, now) {
  const item = state.items.find((known) => known.prompt_id === prompt_id)
  if (!item) return state
  const parts = Object.values(nodes).filter((part) => part.state === "running")
  const running = new Set(parts.map((part) => part.display_node_id))
  const isOn = (id) => (item.times[id]?.since ?? null) !== null
  const begun = [...running].filter((id) => !isOn(id))
  const ended = Object.keys(item.times).filter((id) => isOn(id) && !running.has(id))
  if (!begun.length && !ended.length) return state // most events only move a progress bar
  const times = { ...item.times }
  for (const id of begun) times[id] = { seconds: times[id]?.seconds ?? 0, since: now }
  for (const id of ended) times[id] = { seconds: times[id].seconds + now - times[id].since, since: null }
  return changeItem(state, prompt_id, () => ({ times, running: true })) // a blocked node's error ends no item
}

const finish = (state, { prompt_id }, now) =>
  changeItem(progress(state, { prompt_id, nodes: {} }, now), prompt_id, () => ({ running: false }))

/**
 * What the server knows of all runs: it wins wherever it knows more than this page.
 *
 * `told.known` are the runs that the page knew when it asked: of those alone it may be said that the server has
 * forgotten them, because others may have begun since it answered.
 */
function snapshot(state, told) {
  const here = new Map(state.runs.map((run) => [run.run, run]))
  const runs = told.runs.map((theirs) => {
    const ours = here.get(theirs.run)
    return ours && (ours.ended || (!theirs.ended && ours.records.length > theirs.records.length)) ? ours : theirs
  })
  const there = new Set(runs.map((run) => run.run))
  // A run that goes on here and is unknown there began before the server was started again.
  const unknown = state.runs.filter((run) => !there.has(run.run))
  const lost = unknown
    .filter((run) => told.known.includes(run.run))
    .map((run) => (run.ended ? run : { ...run, ended: true, error: RESTARTED }))
  const later = unknown.filter((run) => !told.known.includes(run.run))
  return { ...state, runs: [...lost, ...runs, ...later].slice(-KEPT_RUNS) }
}

const HEARD = {
  "wanstream.begin": begin,
  "wanstream.step": step,
  "wanstream.end": end,
  execution_start: start,
  execution_cached: (state, { prompt_id, nodes }) => changeItem(state, prompt_id, () => ({ cached: nodes })),
  progress_state: progress,
  execution_success: finish,
  execution_error: finish,
  execution_interrupted: finish,
  // The events of a connection that was lost are lost: nobody measured the nodes that ran meanwhile.
  reconnecting: (state) => ({ ...state, items: state.items.filter((item) => !item.running) })
}

const ANSWERS = {
  snapshot,
  /** `workflow` is the id of an item's graph, `classes` has the class of each of its nodes. */
  graph: (state, { prompt_id, ...graph }) => changeItem(state, prompt_id, () => graph)
}

export const EVENTS = Object.keys(HEARD)

/** The state after an event, or after an answer of the server, that came at `now` seconds of the page's clock. */
export const after = (state, event, payload, now) => ({ ...HEARD, ...ANSWERS })[event](state, payload, now)

/** Whether a step comes after others that this page never saw: then it needs a snapshot. */
export function leavesGap(state, payload) {
  const run = state.runs.find((known) => known.run === payload.run)
  return !run || payload.done > run.records.length + 1
}

/** Whether something belongs to the graph of this id; what came without a canvas may belong to any. */
export const isOf = (told, workflow) =>
  !told.workflow || told.workflow === NO_WORKFLOW || told.workflow === workflow

/** The last run that is shown at one of these nodes, or null. */
export function lastRun(state, workflow, nodeIds) {
  const shown = state.runs.filter(
    (run) => isOf(run, workflow) && (nodeIds.includes(run.shown_at) || nodeIds.includes(run.node))
  )
  return shown.at(-1) ?? null
}

/** The last queue item that is known to be of this graph, or null. */
export const lastItem = (state, workflow) =>
  state.items.filter((item) => item.classes && isOf(item, workflow)).at(-1) ?? null

/** The steps of a queue item that were made by one of these nodes, or inside it. */
export const recordsAt = (state, promptId, nodeIds) =>
  state.runs
    .filter((run) => run.prompt_id === promptId && nodeIds.some((id) => isWithin(`${run.node}`, id)))
    .flatMap(recordsOf)

/** Holds the state of the page and tells those who asked when it has changed, at most once per frame. */
export class Store {
  constructor(nextFrame) {
    this.state = EMPTY
    this.nextFrame = nextFrame
    this.readers = new Set()
    this.waiting = false
  }

  take(event, payload, now) {
    const before = this.state
    this.state = after(before, event, payload, now)
    if (this.waiting || this.state === before) return
    this.waiting = true
    this.nextFrame(() => {
      this.waiting = false
      for (const reader of [...this.readers]) reader(this.state)
    })
  }

  /** Call `reader` with the state after every change; the answer ends that. */
  subscribe(reader) {
    this.readers.add(reader)
    return () => this.readers.delete(reader)
  }
}
