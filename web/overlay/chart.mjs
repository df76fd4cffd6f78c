/**
 * The chart of one run as a description of an SVG. Pure: values in, description out (see `dom.mjs`).
 *
 * A bar per step, from below: compute in the colour of its expert, the rest of the step, stall. The outline is the
 * prediction, the line is memory with its peak, the thin line its samples; the dashed vertical line is the switch; a
 * mark under a bar means that a cache skipped blocks. If there are too many steps for the width, a bar is the mean of
 * several.
 */

import { h } from "./dom.mjs"
import { expertText, memoryOf, outsideSeconds, peakText, recordsOf, secondsText } from "./figures.mjs"

const LEAST_BAR = 3
const LINE_HEIGHT = 1.35
const MEMORY_HEADROOM = 1.15
const MEMORY_TEXT = "wanstream-text wanstream-memory-text"

const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length

/** Bars of a run: their steps, measurement (null: not yet) and prediction. */
export function columnsOf(run, width) {
  const records = recordsOf(run)
  const count = Math.max(run.steps, records.length)
  const each = Math.max(1, Math.ceil(count / Math.max(1, Math.floor(width / LEAST_BAR))))
  const columns = []
  for (let first = 0; first < count; first += each) {
    const measured = records.slice(first, first + each)
    const predicted = (run.predicted?.steps ?? []).slice(first, first + each)
    columns.push({
      first,
      last: Math.min(count, first + each) - 1,
      expert: measured[0]?.expert ?? run.experts[first] ?? "low",
      measured: measured.length ? meanOf(measured) : null,
      predicted: predicted.length ? mean(predicted.map((record) => record.wall_s)) : null
    })
  }
  return columns
}

function meanOf(records) {
  const memories = records.map(memoryOf).filter(Boolean)
  return {
    compute: mean(records.map((record) => record.compute_s)),
    rest: mean(records.map(outsideSeconds)),
    stall: mean(records.map((record) => record.stall_s)),
    wall: mean(records.map((record) => record.wall_s)),
    memory: memories.length ? Math.max(...memories.map((memory) => memory.bytes)) : null,
    leftOut: records.reduce((total, record) => total + (record.skipped_visits ?? 0), 0)
  }
}

/** Layout in pixels: the plot between its text lines, and the width of one column. */
export function frameOf(width, height, font, count) {
  const line = font * LINE_HEIGHT
  const step = (width - 4) / Math.max(1, count)
  return { left: 2, right: width - 2, top: line, bottom: Math.max(line + 1, height - line), step }
}

/** Index of the column at this x. */
export const columnAt = (x, frame, count) => Math.min(count - 1, Math.max(0, Math.floor((x - frame.left) / frame.step)))

/** Index of the column with this step. */
export const columnOf = (columns, step) => columns.findIndex((column) => column.first <= step && step <= column.last)

/**
 * The whole chart.
 *
 * `chosen` is the step whose numbers are shown, or null; `font` the size of letters in pixels; `id` one that no other
 * element of the page has; `label` the chart in words.
 */
export function chart({ run, width, height, font, chosen, id, label }) {
  const columns = columnsOf(run, width)
  const frame = frameOf(width, height, font, columns.length)
  const longest = Math.max(...columns.flatMap((column) => [column.measured?.wall ?? 0, column.predicted ?? 0]))
  const scale = longest > 0 ? (frame.bottom - frame.top) / longest : 0
  const whole = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }
  return h(
    "svg",
    { class: "wanstream-svg", ...whole },
    hatch(id),
    highlight(columns, frame, chosen),
    ...columns.map((column, index) => bar(column, index, frame, scale, id)),
    ...columns.map((column, index) => outline(column, index, frame, scale)),
    ...columns.map((column, index) => cachedMark(column, index, frame)),
    memoryLine(run, columns, frame, font),
    switchLine(run, columns, frame, font),
    ...expertNames(columns, frame, font),
    longest > 0 ? text(frame.left, frame.top - font * 0.35, font, "start", secondsText(longest)) : h("g", {})
  )
}

const hatch = (id) =>
  h(
    "defs",
    {},
    h(
      "pattern",
      { id: `${id}-stall`, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      h("rect", { class: "wanstream-stall", width: 4, height: 4 }),
      h("line", { class: "wanstream-hatch", x1: 0, y1: 0, x2: 0, y2: 4 })
    )
  )

const text = (x, y, font, anchor, content, kind = "wanstream-text") =>
  h("text", { class: kind, x, y, "font-size": font, "text-anchor": anchor }, content)

function highlight(columns, frame, chosen) {
  const index = chosen === null ? -1 : columnOf(columns, chosen)
  if (index < 0) return h("g", {})
  const [x, y] = [frame.left + index * frame.step, frame.top]
  return h("rect", { class: "wanstream-chosen", x, y, width: frame.step, height: frame.bottom - frame.top })
}

/** The stacked parts of one bar; its numbers are in `data-` attributes as they were measured. */
function bar(column, index, frame, scale, id) {
  const attributes = { class: `wanstream-bar wanstream-${column.expert}`, "data-step": column.first }
  if (!column.measured) return h("g", attributes)
  const gap = frame.step > 6 ? 1 : 0
  const { compute, rest, stall, wall } = column.measured
  const [x, width] = [frame.left + index * frame.step + gap, frame.step - 2 * gap]
  let y = frame.bottom
  const part = (kind, seconds, fill = null) => {
    const height = seconds * scale
    y -= height
    return h("rect", { class: kind, x, y, width, height, fill })
  }
  return h(
    "g",
    { ...attributes, "data-compute": compute, "data-rest": rest, "data-stall": stall, "data-wall": wall },
    part("wanstream-compute", compute),
    part("wanstream-rest", rest),
    part("wanstream-stalled", stall, `url(#${id}-stall)`)
  )
}

/** Mark under the bar of a step in which a cache skipped blocks. */
function cachedMark(column, index, frame) {
  if (!column.measured?.leftOut) return h("g", {})
  const place = { x: frame.left + index * frame.step, y: frame.bottom, width: frame.step, height: 3 }
  return h("rect", { class: "wanstream-cached", "data-left-out": column.measured.leftOut, ...place })
}

function outline(column, index, frame, scale) {
  if (column.predicted === null) return h("g", {})
  const height = column.predicted * scale
  const [x, y] = [frame.left + index * frame.step + 0.5, frame.bottom - height]
  const place = { x, y, width: Math.max(1, frame.step - 1), height }
  return h("rect", { class: "wanstream-predicted", "data-predicted": column.predicted, ...place })
}

function memoryLine(run, columns, frame, font) {
  const known = columns.flatMap((column, index) =>
    column.measured && column.measured.memory !== null ? [[index, column.measured.memory]] : []
  )
  if (!known.length) return h("g", {})
  const peak = Math.max(...known.map(([, bytes]) => bytes))
  const samples = samplesOf(run, columns)
  const most = samples.reduce((most, [, bytes]) => Math.max(most, bytes), peak)
  const at = ([place, bytes]) => [
    frame.left + place * frame.step,
    frame.bottom - (bytes / (most * MEMORY_HEADROOM || 1)) * (frame.bottom - frame.top)
  ]
  const line = (points) => points.map((point) => at(point).map((value) => value.toFixed(1)).join(",")).join(" ")
  const peaks = known.map(([index, bytes]) => [index + 0.5, bytes])
  const [x, y] = at(peaks.find(([, bytes]) => bytes === peak))
  return h(
    "g",
    { class: "wanstream-memory", "data-peak": peak },
    h("polyline", { class: "wanstream-memory-samples", "data-samples": samples.length, points: line(samples) }),
    h("polyline", { class: "wanstream-memory-line", points: line(peaks) }),
    h("circle", { class: "wanstream-memory-peak", cx: x, cy: y, r: font / 4 }),
    text(frame.right, frame.top - font * 0.35, font, "end", peakText(recordsOf(run)), MEMORY_TEXT)
  )
}

/** Memory samples during steps: positions in columns from the left, and bytes of the same kind as the line. */
export function samplesOf(run, columns) {
  const records = recordsOf(run)
  const kind = memoryOf(records[0])?.kind
  const each = columns[0].last - columns[0].first + 1
  const found = []
  let step = 0
  for (const sample of run.timeline?.memory ?? []) {
    while (step < records.length && sample.at_s >= records[step].start_s + records[step].wall_s) step += 1
    const record = records[step]
    const memory = memoryOf(sample)
    // The chart has no place for samples before the first step and after the last one.
    if (memory?.kind !== kind || !record?.wall_s || sample.at_s < (record.start_s ?? Infinity)) continue
    found.push([(step + (sample.at_s - record.start_s) / record.wall_s) / each, memory.bytes])
  }
  return found
}

function switchLine(run, columns, frame, font) {
  const index = run.switch_step === null || run.switch_step === undefined ? -1 : columnOf(columns, run.switch_step)
  if (index < 0) return h("g", {})
  const x = frame.left + index * frame.step
  return h(
    "g",
    { class: "wanstream-switch", "data-switch": run.switch_step },
    h("line", { x1: x, x2: x, y1: frame.top, y2: frame.bottom + font })
  )
}

/** Names of experts under the bars, once per stretch of steps that is wide enough. */
function expertNames(columns, frame, font) {
  const stretches = []
  for (const [index, column] of columns.entries()) {
    const last = stretches.at(-1)
    if (last?.expert === column.expert) last.count += 1
    else stretches.push({ expert: column.expert, from: index, count: 1 })
  }
  return stretches
    .filter((stretch) => stretch.count * frame.step >= font * 2)
    .map(({ expert, from, count }) =>
      text(frame.left + (from + count / 2) * frame.step, frame.bottom + font, font, "middle", expertText(expert))
    )
}

