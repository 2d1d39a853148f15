// Numbers of one task without a picture: all of it in a sentence, every reading side by side, and whole heads.

import { element, fewer, number, percent, swatch, table } from "./dom.js";
import { ROLE_NAMES } from "./data.js";

const TABLE_ROLES = ["dense", "control", "sparse"];
const counted = (value) => number(value >= 10 ? Math.round(value) : value, 2);

function card(id, title, note, body) {
  return element(
    "div",
    { class: "card stack-top", id },
    element("div", { class: "card-head" }, element("h3", {}, title), element("span", { class: "note" }, note)),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, body),
  );
}

/** All edges that lead to the answer, in one sentence. */
export function allOfIt({ name, open_edges: row }) {
  if (!row) return "";
  const bold = (text) => element("b", {}, text);
  return element(
    "p",
    { class: "card all-of-it" },
    `On these prompts of ${name} `,
    bold(number(Math.round(row.dense))),
    " edges lead to the answer in the dense model and ",
    bold(number(Math.round(row.sparse))),
    " in the sparse one: ",
    bold(fewer(row, false)),
    ` (${fewer.interval(row)}, n = ${row.n_prompts} prompts; ${number(row.possible_edges)} are possible); no search involved.`,
  );
}

/** Every reading of a task at one threshold, so that nobody mistakes one for another. */
export function sideBySide(task, threshold) {
  const rows = task.readings.map((reading) => {
    const at = (models) => Object.values(models).every((model) => threshold in model.edges_at);
    const t = at(reading.models) ? threshold : "0.9";
    const found = task.multipliers[reading.name] ?? {};
    const ratio = (baseline) => (found[baseline]?.[t] ? fewer(found[baseline][t]) : "–");
    const n = Math.max(...Object.values(reading.models).map((model) => model.n_prompts));
    return [
      [
        element("b", {}, reading.short),
        t === threshold ? "" : ` (at ${percent(Number(t))})`,
        element("small", {}, reading.question),
      ],
      ...TABLE_ROLES.map((role) => counted(reading.models[role]?.edges_at[t])),
      ratio("dense"),
      ratio("control"),
      number(n),
    ];
  });
  const all = task.open_edges;
  if (all)
    rows.unshift([
      [element("b", {}, "All of it"), element("small", {}, "Every edge that leads to the answer; no search.")],
      ...TABLE_ROLES.map((role) => counted(all[role])),
      fewer(all),
      all.against_control ? fewer(all.against_control) : "–",
      number(all.n_prompts),
    ]);
  const models = TABLE_ROLES.map((role) => swatch(role, ROLE_NAMES[role]));
  const heads = ["Reading", ...models, "Sparse against dense", "against control", "n"];
  const note = `${task.name}: edges (or heads) for ${percent(Number(threshold))} of the effect`;
  return card("readings", "All readings side by side", note, element("div", { class: "readings" }, table(heads, rows)));
}

/** Whole heads needed at each threshold. */
export function headsNeeded(task) {
  const readings = task.readings.filter(({ edges }) => edges === "heads");
  if (!readings.length) return "";
  const tables = readings.map((reading) => {
    const thresholds = Object.keys(Object.values(reading.models)[0].edges_at).filter(Number);
    const found = task.multipliers[reading.name]?.dense;
    const line = (name, cell) => [name, ...thresholds.map(cell)];
    const roles = TABLE_ROLES.filter((role) => reading.models[role]);
    const rows = roles.map((role) =>
      line(swatch(role, ROLE_NAMES[role]), (t) => counted(reading.models[role].edges_at[t])),
    );
    if (found) rows.push(line("Times fewer", (t) => (found[t] ? fewer(found[t], false).replace(" fewer", "") : "–")));
    return table(["Heads for", ...thresholds.map((t) => percent(Number(t)))], rows, reading.question);
  });
  const { n_edges: total, n_prompts: n } = Object.values(readings[0].models)[0];
  const note = `of ${number(total)} heads; ${task.name}, n = ${n} prompts`;
  return card("heads-needed", "Whole heads", note, element("div", { class: "pair" }, tables));
}
