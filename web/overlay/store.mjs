/**
 * Everything that one page knows of runs and nodes. The only state: elements are drawn from it.
 *
 * `state` is a value: each event gives a new one, by a pure function. A page that comes later starts from a snapshot.
 */

import { RESTARTED } from "./figures.mjs"

const KEPT_RUNS = 50
const NO_WORKFLOW = "00000000-0000-0000-0000-000000000000"

export const EMPTY = { runs: [], items: [], memory: null }

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

function nodes(state, payload) {
  const before = state.items.find((item) => item.prompt_id === payload.prompt_id)
  const item = { ...payload, nodes: { ...before?.nodes, ...payload.nodes } }
  return { ...state, items: [...state.items.filter((other) => other !== before), item].slice(-KEPT_RUNS) }
}

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
  const items = told.items.reduce(older, state).items
  return { ...state, runs: [...lost, ...runs, ...later].slice(-KEPT_RUNS), items }
}

/** What a snapshot says of the nodes of a queue item: less than an event that came while it was under way. */
function older(state, item) {
  const ours = state.items.find((known) => known.prompt_id === item.prompt_id)
  if (!ours || ours.at <= item.at) return nodes(state, item)
  return nodes(state, { ...ours, nodes: { ...item.nodes, ...ours.nodes } })
}

const REACTIONS = {
  "wanstream.begin": begin,
  "wanstream.step": step,
  "wanstream.end": end,
  "wanstream.nodes": nodes,
  "wanstream.memory": (state, payload) => ({ ...state, memory: payload }),
  snapshot
}

export const EVENTS = Object.keys(REACTIONS).filter((name) => name.startsWith("wanstream."))

export const after = (state, event, payload) => REACTIONS[event](state, payload)

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

/** What is known of the nodes of this graph from its last queue item, or null. */
export const lastItem = (state, workflow) => state.items.filter((item) => isOf(item, workflow)).at(-1) ?? null

/** Holds the state of the page and tells those who asked when it has changed, at most once per frame. */
export class Store {
  constructor(nextFrame) {
    this.state = EMPTY
    this.nextFrame = nextFrame
    this.readers = new Set()
    this.waiting = false
  }

  take(event, payload) {
    this.state = after(this.state, event, payload)
    if (this.waiting) return
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
