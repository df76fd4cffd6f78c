/** ComfyUI's page loads this file, and nothing else of this folder by itself. */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"

const MODULES = [
  "badges.mjs",
  "chart.mjs",
  "chip.mjs",
  "dom.mjs",
  "figures.mjs",
  "graph_ids.mjs",
  "i18n.mjs",
  "loader_exchange.mjs",
  "notices.mjs",
  "page.mjs",
  "policy_nodes.mjs",
  "ranking.mjs",
  "run_widget.mjs",
  "runs_table.mjs",
  "store.mjs",
  "widgets.mjs"
]

// ComfyUI lets browsers keep .mjs files for as long as they like: after an update some would be old and some new.
await Promise.all(MODULES.map((name) => fetch(new URL(`./overlay/${name}`, import.meta.url), { cache: "no-cache" })))
const { start } = await import("./overlay/page.mjs")
start(app, api)
