/**
 * Runs and queue items of one page. The only state: all elements are drawn from it.
 *
 * `state` is a value: a pure function returns a new one for each event. A page that is opened later starts from a
 * snapshot of the server.
 */

import { RESTARTED, recordsOf } from "./figures.mjs"
import { isWithin } from "./graph_ids.mjs"

const KEPT_RUNS = 50
const KEPT_NOTICES = 200
const NO_WORKFLOW = "00000000-0000-0000-0000-000000000000"

/** `complete`: a snapshot of the server has come. */
export const EMPTY = { runs: [], items: [], notices: [], rankings: [], complete: false }

const begin = (state, payload, now) => ({
  ...state,
  runs: [...state.runs.filter((run) => run.run !== payload.run), fresh(payload, now)].slice(-KEPT_RUNS)
})

/** A run that began at `now`; `stepAt` is the end of its last step. Both are times of the page's clock. */
const fresh = (payload, now) => ({
  ...payload,
  records: [],
  visits: null,
  preview: null,
  ended: false,
  timeline: null,
  advice: null,
  error: null,
  since: now,
  stepAt: now
})

const change = (state, id, changed) => ({
  ...state,
  runs: state.runs.map((run) => (run.run === id ? { ...run, ...changed(run) } : run))
})

/** Ignore a known step, and one after a gap: the next snapshot or the end of the run contains all steps. */
const step = (state, payload, now) =>
  change(state, payload.run, (run) =>
    payload.done === run.records.length + 1
      ? {
          records: [...run.records, payload.record],
          steps: Math.max(run.steps, payload.total),
          changes: payload.changes,
          visits: null,
          stepAt: now
        }
      : {}
  )

/** Progress within the running step; late events of an earlier step are ignored. */
const visits = (state, { run, step, done, total }) =>
  change(state, run, (known) => (step === known.records.length ? { visits: { step, done, total } } : {}))

/** Replace the notices of a node. */
const notices = (state, payload) => ({
  ...state,
  notices: [
    ...state.notices.filter((each) => each.node !== payload.node || each.workflow !== payload.workflow),
    ...(payload.notices.length ? [payload] : [])
  ].slice(-KEPT_NOTICES)
})

const PICTURE = "data:image/webp;base64,"

/** Keep the last preview of a run. Only a picture in the event itself is shown: an address would be requested. */
const preview = (state, { run, image, done }) =>
  `${image}`.startsWith(PICTURE) ? change(state, run, () => ({ preview: { image, done } })) : state

const end = (state, payload) =>
  change(state, payload.run, (run) => ({
    ended: true,
    timeline: payload.timeline,
    predicted: payload.predicted ?? run.predicted,
    advice: payload.advice ?? null,
    error: payload.error
  }))

/**
 * A queue item, timed from its first event to its last. ComfyUI sends these events to the page that queued the item: a
 * page that was loaded later has no `execution_start` of it, and shows no figures of its nodes.
 */
const start = (state, { prompt_id }, now) => ({
  ...state,
  items: [
    ...state.items,
    { prompt_id, workflow: null, classes: null, cached: [], times: {}, running: true, since: now, endedAt: null }
  ].slice(-KEPT_RUNS)
})

const changeItem = (state, id, changed) => ({
  ...state,
  items: state.items.map((item) => (item.prompt_id === id ? { ...item, ...changed(item) } : item))
})

/** Parts of an expanded node have its display id: the node runs while any of them does. */
function progress(state, { prompt_id, nodes }, now) {
  const item = itemOf(state, { prompt_id })
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
  changeItem(progress(state, { prompt_id, nodes: {} }, now), prompt_id, () => ({ running: false, endedAt: now }))

/**
 * Merge the server's list of all runs, which wins if it has more steps of a run than this page.
 *
 * `answer.known` are the runs of the page at the time of the request. Only these can be lost on the server: others may
 * have begun after its answer.
 */
function snapshot(state, answer, now) {
  const here = new Map(state.runs.map((run) => [run.run, run]))
  const runs = answer.runs.map((theirs) => {
    const ours = here.get(theirs.run)
    const isNewer = ours && (ours.ended || (!theirs.ended && ours.records.length > theirs.records.length))
    if (isNewer) return ours
    const since = ours?.since ?? now - theirs.age_s
    // The server keeps no previews, and not the time of the last step.
    return { ...theirs, preview: ours?.preview, since, stepAt: ours?.stepAt ?? now }
  })
  const there = new Set(runs.map((run) => run.run))
  // A run that is running here and unknown there began before the server was restarted.
  const unknown = state.runs.filter((run) => !there.has(run.run))
  const lost = unknown
    .filter((run) => answer.known.includes(run.run))
    .map((run) => (run.ended ? run : { ...run, ended: true, error: RESTARTED }))
  const later = unknown.filter((run) => !answer.known.includes(run.run))
  return {
    ...state,
    runs: [...lost, ...runs, ...later].slice(-KEPT_RUNS),
    notices: answer.notices ?? [],
    complete: true
  }
}

/** Keep the ranking of a benchmark. The workflow of its item may be unknown until an answer has it. */
function executed(state, { prompt_id, node, output }) {
  const ranking = output?.wanstream_ranking
  if (!ranking) return state
  const workflow = itemOf(state, { prompt_id })?.workflow
  return { ...state, rankings: [...state.rankings, { node: `${node}`, prompt_id, workflow, ranking }].slice(-KEPT_RUNS) }
}

/** Take the rankings of ComfyUI's history, before others: only an item that still runs is newer. */
function history(state, entries) {
  const found = Object.entries(entries).flatMap(([prompt_id, entry]) =>
    Object.entries(entry?.outputs ?? {})
      .filter(([, output]) => output?.wanstream_ranking)
      .map(([node, output]) => ({
        node,
        prompt_id,
        workflow: workflowOf(entry.prompt),
        ranking: output.wanstream_ranking
      }))
  )
  const isFound = (each) => found.some((other) => other.prompt_id === each.prompt_id && other.node === each.node)
  return { ...state, rankings: [...found, ...state.rankings.filter((each) => !isFound(each))].slice(-KEPT_RUNS) }
}

/** Id of the graph that a prompt of ComfyUI's queue or history was made from, or null. */
export const workflowOf = (prompt) => prompt?.[3]?.extra_pnginfo?.workflow?.id ?? null

const HANDLERS = {
  "wanstream.begin": begin,
  "wanstream.visits": visits,
  "wanstream.step": step,
  "wanstream.notices": notices,
  "wanstream.preview": preview,
  "wanstream.end": end,
  execution_start: start,
  execution_cached: (state, { prompt_id, nodes }) => changeItem(state, prompt_id, () => ({ cached: nodes })),
  progress_state: progress,
  executed,
  execution_success: finish,
  execution_error: finish,
  execution_interrupted: finish,
  // Events during a lost connection are missing, so the times of the nodes that ran are unknown.
  reconnecting: (state) => ({ ...state, items: state.items.filter((item) => !item.running) })
}

const ANSWERS = {
  snapshot,
  history,
  /** The page itself has changed something that is drawn. */
  redraw: (state) => ({ ...state }),
  /** `workflow` is the id of an item's graph, `nodes` are those of its prompt. */
  graph: (state, { prompt_id, workflow, nodes }) => {
    const classes = Object.fromEntries(Object.entries(nodes).map(([id, node]) => [id, node.class_type]))
    const rankings = state.rankings.map((each) => (each.prompt_id === prompt_id ? { ...each, workflow } : each))
    return changeItem({ ...state, rankings }, prompt_id, () => ({ workflow, classes }))
  }
}

export const EVENTS = Object.keys(HANDLERS)

/** Events that end an item. */
export const ENDS = EVENTS.filter((event) => HANDLERS[event] === finish)

/** The item that an event belongs to, or undefined if this page has not seen it begin. */
export const itemOf = (state, { prompt_id }) => state.items.find((item) => item.prompt_id === prompt_id)

/** Return the state after an event or an answer of the server at `now` seconds of the page's clock. */
export const after = (state, event, payload, now) => ({ ...HANDLERS, ...ANSWERS })[event](state, payload, now)

/** Return true if a step follows steps that are unknown to this page, which then needs a snapshot. */
export function leavesGap(state, payload) {
  const run = state.runs.find((known) => known.run === payload.run)
  return !run || payload.done > run.records.length + 1
}

/** Return true if a run or item belongs to the graph of this id; one that was queued without a canvas may. */
export const isOf = (entry, workflow) =>
  !entry.workflow || entry.workflow === NO_WORKFLOW || entry.workflow === workflow

/** The last run that is shown at one of these nodes, or null. */
export function lastRun(state, workflow, nodeIds) {
  const shown = state.runs.filter(
    (run) => isOf(run, workflow) && (nodeIds.includes(run.shown_at) || nodeIds.includes(run.node))
  )
  return shown.at(-1) ?? null
}

/** The last ranking of one of these benchmark nodes in this graph, or null. */
export const lastRanking = (state, workflow, nodeIds) =>
  state.rankings.findLast((each) => nodeIds.includes(each.node) && each.workflow === workflow)?.ranking ?? null

/** The run that is running now, of the open graph if there is one; null while nothing runs. */
export function runningRun(state, workflow) {
  const running = state.runs.filter((run) => !run.ended)
  return running.findLast((run) => isOf(run, workflow)) ?? running.at(-1) ?? null
}

/** The last queue item that is known to be of this graph, or null. */
export const lastItem = (state, workflow) =>
  state.items.filter((item) => item.classes && isOf(item, workflow)).at(-1) ?? null

/**
 * Seconds of a queue item before its first step, in the steps of its runs, between and after them; null for one that
 * has not ended, and for one whose start or steps this page has not seen.
 */
export function itemPhases(state, promptId) {
  const item = itemOf(state, { prompt_id: promptId })
  const runs = state.runs.filter((run) => run.prompt_id === promptId)
  if (!item?.endedAt || !runs.length || runs.some((run) => run.since < item.since || !run.ended)) return null
  const before = runs[0].since - item.since
  const steps = runs.reduce((total, run) => total + run.stepAt - run.since, 0)
  const total = item.endedAt - item.since
  return { total, before, steps, after: total - before - steps }
}

/** Steps of a queue item from one of these nodes, or from inside it. */
export const recordsAt = (state, promptId, nodeIds) =>
  state.runs
    .filter((run) => run.prompt_id === promptId && nodeIds.some((id) => isWithin(`${run.node}`, id)))
    .flatMap(recordsOf)

/** State of the page; notifies its readers of changes, at most once per frame. */
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

  /** Call `reader` with the state after every change; returns a function that ends it. */
  subscribe(reader) {
    this.readers.add(reader)
    return () => this.readers.delete(reader)
  }
}
