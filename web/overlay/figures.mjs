/**
 * Figures of steps and runs, and their texts. Pure; numbers are rounded as in `schema/text_format.py`.
 *
 * A record is a `StepRecord` as JSON, a run is an entry of `store.mjs`.
 */

import { translate } from "./i18n.mjs"

const UNITS = ["B", "KB", "MB", "GB", "TB"]

/** 702800000 -> "703 MB". */
export function sizeText(bytes) {
  let size = bytes
  let unit = 0
  while (size >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000
    unit += 1
  }
  const digits = unit === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2
  return `${size.toFixed(digits)} ${UNITS[unit]}`
}

export const rateText = (bytesPerSecond) => `${sizeText(bytesPerSecond)}/s`

/** 0.125 -> "12.5 %". */
export const shareText = (share) => `${(100 * share).toFixed(1)} %`

/** Seconds with as many digits as suit the value. */
export function secondsText(value) {
  const size = Math.abs(value)
  const digits = size >= 100 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4
  return `${value.toFixed(digits)} s`
}

/** Three digits of the seconds of a step. */
export function perStepText(value) {
  const digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : value >= 0.9995 ? 2 : 3
  return translate("perStep", `${value.toFixed(digits)} s`)
}

/** 156 -> "2:36", 3756 -> "1:02:36". */
export function clockText(seconds) {
  const whole = Math.round(seconds)
  const two = (value) => String(value).padStart(2, "0")
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60]
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`
}

/** "1.12 of 17.2 GB": with one unit if both have the same. */
export function partText(key, bytes, total) {
  const [part, whole] = [sizeText(bytes), sizeText(total)]
  const [number, unit] = part.split(" ")
  return translate(key, whole.endsWith(` ${unit}`) ? number : part, whole)
}

/** Seconds for a badge: one digit is enough there. */
export const shortSeconds = (value) => (value >= 99.95 ? `${value.toFixed(0)} s` : `${value.toFixed(1)} s`)

const orDash = (value, text) => (value === null || value === undefined ? "-" : text(value))

/** Time of a step outside its blocks: embedders, solver, and decoding on a CPU. */
export const outsideSeconds = (record) => Math.max(0, record.wall_s - record.compute_s - record.stall_s)

/** Known steps of a run. */
export const recordsOf = (run) => (run.timeline ? run.timeline.steps : run.records)

/** Memory to show: that of the device, or on a CPU the RAM of the process. */
export function memoryOf(record) {
  const known = (bytes) => bytes !== null && bytes !== undefined
  if (known(record.device_bytes)) return { kind: "VRAM", bytes: record.device_bytes }
  return known(record.rss_bytes) ? { kind: "RAM", bytes: record.rss_bytes } : null
}

const sum = (records, field) => records.reduce((total, record) => total + (record[field] ?? 0), 0)
const rate = (bytes, seconds) => (seconds > 0 ? bytes / seconds : null)

function most(records, field) {
  const known = records.map((record) => record[field]).filter((value) => value !== null && value !== undefined)
  return known.length ? Math.max(...known) : null
}

/** Share of the transfer time that was hidden by computing; null if nothing was transferred. */
function overlap(spent) {
  const transfer = Math.max(spent.copy_s ?? 0, spent.read_s ?? 0)
  return transfer > 0 ? 1 - Math.min(1, spent.stall_s / transfer) : null
}

/** Share of the compute time that products and attention would take alone; null if unknown. See `limit_share` in schema/timeline.py. */
export function limitShare(run) {
  const limits = new Map((run.predicted?.steps ?? []).map((step) => [step.index, step.limit_s]))
  const known = recordsOf(run).filter(
    (step) => !step.skipped_lanes && step.compute_s > 0 && typeof limits.get(step.index) === "number"
  )
  const limit = known.reduce((total, step) => total + limits.get(step.index), 0)
  return known.length ? limit / sum(known, "compute_s") : null
}

const ADDED = ["wall_s", "compute_s", "stall_s", "bytes_moved", "read_bytes", "copy_s", "read_s", "stall_on_read_s"]

/** Sums, peaks and rates of some steps, by the names of `Timeline`. */
export function totals(records) {
  const all = Object.fromEntries(ADDED.map((field) => [field, sum(records, field)]))
  return {
    ...all,
    steps: records.length,
    copy_bytes_per_s: rate(all.bytes_moved, all.copy_s),
    read_bytes_per_s: rate(all.read_bytes, all.read_s),
    overlap: overlap(all),
    device_bytes: most(records, "device_bytes"),
    device_used_bytes: most(records, "device_used_bytes"),
    rss_bytes: most(records, "rss_bytes")
  }
}

/** Peak memory of some steps, as `memoryOf`; null if unknown. */
export function mostMemory(records) {
  const known = records.map(memoryOf).filter(Boolean)
  return known.length ? { kind: known[0].kind, bytes: Math.max(...known.map((memory) => memory.bytes)) } : null
}

/** Peak memory of some steps as text: "VRAM peak 6.93 GB"; empty if unknown. */
export const peakText = (records) => mostText(records, "peak")

function mostText(records, prefix) {
  const most = mostMemory(records)
  return most ? translate(`${prefix}${most.kind}`, sizeText(most.bytes)) : ""
}

/** All figures of one step in one line. */
export function stepText(record, predicted) {
  const parts = [
    translate("step", record.index, expertText(record.expert)),
    translate(record.stall_on_read_s ? "partsWithFiles" : "parts", ...secondsOf(record).map(secondsText)),
    routeText("moved", record.bytes_moved, record.copy_s),
    routeText("read", record.read_bytes, record.read_s)
  ]
  parts.push(mostText([record], ""))
  if (record.skipped_visits) parts.push(translate("leftOut", record.skipped_visits))
  if (record.device_used_bytes) parts.push(translate("device", sizeText(record.device_used_bytes)))
  if (predicted) parts.push(translate("predicted", secondsText(predicted.wall_s)))
  return parts.filter(Boolean).join(" · ")
}

/** Name of an expert; unknown experts keep the name of the record. */
export const expertText = (expert) => (["high", "low"].includes(expert) ? translate(expert) : expert)

const secondsOf = (record) => [
  record.wall_s,
  record.compute_s,
  record.stall_s,
  outsideSeconds(record),
  record.stall_on_read_s ?? 0
]

function routeText(key, bytes, seconds) {
  const achieved = rate(bytes, seconds)
  return achieved === null ? translate(key, sizeText(bytes)) : translate(`${key}At`, sizeText(bytes), rateText(achieved))
}

/** Error of a run that was lost when its server ended. */
export const RESTARTED = "the server was restarted"

const RECENT_STEPS = 5

/** Mean seconds per step: of the last steps of a running run, of all steps of an ended one; null before the first. */
export function secondsPerStep(run) {
  const records = run.ended ? recordsOf(run) : recentOf(run)
  return records.length ? sum(records, "wall_s") / records.length : null
}

/** The last known steps; without the first one, which reads the weights, unless it is the only one. */
function recentOf(run) {
  const records = recordsOf(run)
  return records.slice(Math.max(Math.min(1, records.length - 1), records.length - RECENT_STEPS))
}

/**
 * Seconds until a run ends, `since` seconds after its last step; null if unknown.
 *
 * The remaining steps of a predicted run take the predicted time, scaled by the measured time of the last ones.
 */
export function secondsLeft(run, since = 0) {
  const done = recordsOf(run).length
  const rest = run.steps - done
  if (run.ended || rest <= 0) return null
  const recent = recentOf(run)
  const predicted = run.predicted?.steps ?? []
  let left = null
  if (predicted.length === run.steps) {
    const before = sum(predicted.slice(done - recent.length, done), "wall_s")
    left = sum(predicted.slice(done), "wall_s") * (before > 0 ? sum(recent, "wall_s") / before : 1)
  } else if (recent.length) left = rest * secondsPerStep(run)
  return left === null ? null : Math.max(0, left - since)
}

/** Progress of a run, or its end. */
export function stateText(run) {
  const records = recordsOf(run)
  if (run.error) return translate("failed", records.length, run.steps, run.error === RESTARTED ? translate("restarted") : run.error)
  return run.ended ? translate("ended", records.length) : translate("running", records.length, run.steps)
}

const LEAST_STALL_SHARE = 0.005

/** The run in a few words each, at `now` of the page's clock. */
export function runParts(run, now) {
  const records = recordsOf(run)
  const all = totals(records)
  const perStep = secondsPerStep(run)
  const left = secondsLeft(run, now - run.stepAt)
  const parts = [headText(run, lengthText(all.wall_s))]
  if (perStep !== null) parts.push(perStepText(perStep))
  if (left !== null) parts.push(translate("left", clockText(left)))
  if (!run.ended) parts.push(translate("elapsed", clockText(Math.max(0, now - run.since))))
  if (!run.ended && !records.length) parts.push(translate("firstStep"))
  if (all.stall_s > LEAST_STALL_SHARE * all.wall_s) parts.push(translate("stall", secondsText(all.stall_s)))
  const share = limitShare(run)
  if (share !== null) parts.push(translate("ofLimit", shareText(share)))
  parts.push(mostOfAll(run))
  return parts.filter(Boolean)
}

/** A running run in four short texts or fewer, with their names. */
export function chipParts(run, now) {
  const perStep = secondsPerStep(run)
  const left = secondsLeft(run, now - run.stepAt)
  const parts = {
    policy: run.settings?.policy,
    memory: mostOfAll(run),
    pace: perStep === null ? headText(run, "") : perStepText(perStep),
    left: left === null ? "" : translate("left", clockText(left))
  }
  return Object.entries(parts).flatMap(([name, text]) => (text ? [{ name, text }] : []))
}

/** What a run has done so far: in its first step, the blocks. */
function headText(run, length) {
  const records = recordsOf(run)
  if (run.ended && !run.error && records.length) return translate("endedIn", records.length, length)
  return !run.ended && !records.length && run.visits ? translate("block", run.visits.done, run.visits.total) : stateText(run)
}

const LEAST_WAIT = 0.05

/**
 * Share of the steps' time that waits, and for what; null before the second step.
 *
 * The first step reads the weights for the first time, and does not count.
 */
export function waitOf(run) {
  const { wall_s: wall, stall_s: stall, stall_on_read_s: reading } = totals(recordsOf(run).slice(1))
  if (!wall) return null
  const isDisk = reading > stall / 2
  const limit = stall < LEAST_WAIT * wall ? "Compute" : isDisk ? "Disk" : "Bus"
  return { limit, share: (limit === "Disk" ? reading : stall) / wall }
}

const LEAST_GAIN = 1.05

/** Whether the planner has no better policy than the run's. */
export const isBest = (advice) => Boolean(advice) && advice.gain < LEAST_GAIN

/** A sentence on what limits a run, and the remedy with its simulated gain, else with the most possible gain. */
export function verdictText({ limit, share }, advice) {
  if (limit === "Compute") return translate("verdictCompute", shareText(share))
  const waits = `${(100 * share).toFixed(0)} %`
  if (isBest(advice)) return translate(`verdict${limit}Best`, waits)
  if (advice) return translate(`verdict${limit}Gain`, waits, advice.gain.toFixed(1))
  const gain = 1 / (1 - Math.min(share, 0.99))
  return translate(`verdict${limit}`, waits, gain.toFixed(1))
}

/** Phases of the queue item of a run; see `itemPhases`. */
export const phasesText = ({ total, before, steps, after }) =>
  translate("queueToFile", lengthText(total), secondsText(before), secondsText(steps), secondsText(after))

/** The run in one line; see `runParts`. */
export const runText = (run, now) => runParts(run, now).join(" · ")

/** Share of the running step that is done: 0 to 1, or null. */
export const shareOfStep = (run) => (run.ended || !run.visits ? null : run.visits.done / run.visits.total)

/** The time of a whole run: seconds below a minute. */
const lengthText = (seconds) => (seconds < 60 ? secondsText(seconds) : clockText(seconds))

/** Peak memory of a run, out of the total of the machine if that is known. */
function mostOfAll(run) {
  const most = mostMemory(recordsOf(run))
  if (!most) return ""
  const total = most.kind === "VRAM" ? run.settings?.device_total : run.settings?.ram_total
  return total ? partText(`of${most.kind}`, most.bytes, total) : translate(most.kind, sizeText(most.bytes))
}

const SETTINGS = ["size", "dtype", "policy", "lora", "workers"]

/** Settings that distinguish a run from others: names (of columns in files), heads and texts. */
export const settingsOf = (run) =>
  SETTINGS.map((name) => ({ name, head: translate(`head ${name}`), text: String(run.settings?.[name] ?? "") }))

/** One row of the table of runs: names (of columns in files), heads, texts and plain values; unknown before a step. */
export function figuresOf(run) {
  const records = recordsOf(run)
  const all = records.length ? totals(records) : {}
  const predicted = run.predicted ? totals(run.predicted.steps) : null
  const figure = (name, value, text) => ({
    name,
    head: translate(`head ${name}`),
    value: value ?? null,
    text: orDash(value, text)
  })
  return [
    figure("steps", all.steps, String),
    figure("wall", all.wall_s, secondsText),
    figure("per step", all.steps ? all.wall_s / all.steps : null, secondsText),
    figure("predicted", predicted?.wall_s, secondsText),
    figure("compute", all.compute_s, secondsText),
    figure("of limit", limitShare(run), shareText),
    figure("stall", all.stall_s, secondsText),
    figure("overlap", all.overlap, shareText),
    figure("moved", all.bytes_moved, sizeText),
    figure("moved at", all.copy_bytes_per_s, rateText),
    figure("read", all.read_bytes, sizeText),
    figure("read at", all.read_bytes_per_s, rateText),
    figure("VRAM peak", all.device_bytes, sizeText),
    figure("device peak", all.device_used_bytes, sizeText),
    figure("RAM", all.rss_bytes, sizeText)
  ]
}
