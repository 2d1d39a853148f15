// Explained effect over the number of edges kept: one panel per task, bands, and how many times fewer edges.

import { element, fewer, number, percent } from "./dom.js";
import { drawAxes, scale } from "./axes.js";
import { keepDrawn, palette } from "./palette.js";
import { Scene, toSvg } from "./scene.js";
import { downloads } from "./download.js";

const ROLES = ["control", "dense", "sparse"];

/** The measured circuit with at most this many edges: its index on the curve, or null. */
export function measuredAt(curve, edges) {
  let found = null;
  curve.edges.forEach((size, i) => {
    if (size <= edges && size > 0) found = i;
  });
  return found;
}

/**
 * One reading's panel. rows: {name, title, edges, models: {role: {curve, n_edges, n_prompts}}}; multipliers: {threshold:
 * row}; state: {threshold, chosen: {role: {edges, effect} of what is drawn below}}; onPick(edges) on a click.
 */
export class CurvePanel {
  constructor(rows, multipliers, onTask, onPick) {
    Object.assign(this, { rows, multipliers });
    this.plot = element("div", { class: "plot" });
    this.note = element("span", { class: "note" });
    this.legend = element("div", { class: "legend" });
    this.card = element(
      "figure",
      { class: "card", "data-task": rows.title },
      element(
        "div",
        { class: "card-head" },
        element(
          "h3",
          {},
          element("button", { class: "title", type: "button", on: { click: onTask } }, rows.title),
        ),
        this.note,
        downloads(`explained-effect-${rows.title}-${rows.name}`, {
          scene: () => this.scene(this.plot.view.width),
          json: () => this.curves(),
          csv: () => this.csv(),
        }),
      ),
      this.plot,
      this.legend,
    );
    this.plot.addEventListener("click", (event) =>
      onPick(Math.round(this.x.back(event.clientX - this.plot.getBoundingClientRect().left))),
    );
    this.redraw = keepDrawn(this.plot, (width) => this.plot.replaceChildren(toSvg(this.scene(width), this.words())));
    for (const role of ROLES)
      if (rows.models[role])
        this.legend.append(
          element(
            "span",
            { class: role },
            element("i", { "aria-hidden": "true" }),
            element("span", { class: "name" }, role),
          ),
        );
    if (this.random())
      this.legend.append(
        element(
          "span",
          { class: "control" },
          element("i", { class: "dotted", "aria-hidden": "true" }),
          element("span", { class: "name" }, "random circuits"),
        ),
      );
    if (rows.picture)
      this.legend.append(
        element("span", { class: "name" }, `● drawn below${rows.scope === "prompt" ? ", one prompt" : ""}`),
      );
  }
  random() {
    return (this.rows.models.sparse ?? Object.values(this.rows.models)[0]).random;
  }
  curves() {
    return Object.fromEntries(Object.entries(this.rows.models).map(([role, model]) => [role, model.curve]));
  }
  csv() {
    return [
      ["model", "edges", "effect", "low", "high"],
      ...Object.entries(this.curves()).flatMap(([role, curve]) =>
        curve.edges.map((edges, i) => [role, edges, curve.effect[i], curve.low[i], curve.high[i]]),
      ),
    ];
  }
  words() {
    const found = this.multipliers[this.state?.threshold];
    return (
      `${this.rows.name === "share" ? "Share of attribution" : "Explained effect"} of ${this.rows.title} over edges kept` +
      (found ? `: ${fewer(found, false)} at ${percent(Number(this.state.threshold))}` : "")
    );
  }
  show(state) {
    this.state = state;
    const found = this.multipliers[state.threshold];
    const dense = Object.values(this.rows.models)[0];
    this.note.textContent = found
      ? `${fewer(found, false)} at ${percent(Number(state.threshold))} (${fewer.interval(found)}, n = ${found.n_prompts})`
      : `n = ${dense.n_prompts} prompts`;
    this.redraw();
  }
  scene(width) {
    const colours = palette();
    const height = width > 700 ? 320 : 270;
    const scene = new Scene(width, height);
    const box = { left: 64, top: 14, right: width - 12, bottom: height - 40 };
    const models = this.rows.models;
    const effects = Object.values(models)
      .flatMap((model) => [...model.curve.low, ...model.curve.high])
      .filter((value) => value !== null);
    const x = (this.x = scale(
      1,
      Math.max(...Object.values(models).map((model) => model.n_edges)) * 1.1,
      box.left,
      box.right,
      true,
    ));
    const y = scale(
      Math.max(Math.min(-0.05, ...effects), -0.6),
      Math.min(Math.max(1, ...effects), 1.6) + 0.18, // room for the multiplier above the curves
      box.bottom,
      box.top,
    );
    drawAxes(scene, box, x, y, colours, {
      xTitle: this.rows.name === "share" ? `${this.rows.edges}, largest first` : `${this.rows.edges} kept`,
      yTitle: this.rows.name === "share" ? "share of attribution" : "explained effect",
      yFormat: (v) => percent(v),
      xTicks: 5,
      yTicks: 5,
    });
    const threshold = Number(this.state?.threshold ?? 0.9);
    scene.line(box.left, y.at(threshold), box.right, y.at(threshold), {
      stroke: colours.ink,
      dash: [5, 4],
      opacity: 0.7,
    });
    const random = this.random();
    if (random) this.curve(scene, random, x, y, colours.control, box, [1, 4], false);
    for (const role of ROLES) if (models[role]) this.curve(scene, models[role].curve, x, y, colours[role], box);
    this.bracket(scene, x, y, threshold, colours);
    for (const role of ROLES) {
      const at = this.state?.chosen?.[role];
      if (!at?.edges || !models[role]) continue;
      const py = Math.min(Math.max(y.at(at.effect), box.top), box.bottom);
      scene.circle(x.at(at.edges), py, 5, {
        fill: colours[role],
        stroke: colours.card,
        thick: 2,
      });
    }
    return scene;
  }
  curve(scene, curve, x, y, colour, box, dash = null, band = true) {
    const line = [],
      upper = [],
      lower = [];
    const clamp = (value) => Math.min(Math.max(y.at(value), box.top - 6), box.bottom + 6);
    curve.edges.forEach((edges, i) => {
      if (edges < 1 || curve.effect[i] === null) return;
      const px = x.at(edges);
      line.push(px, clamp(curve.effect[i]));
      upper.push(px, clamp(curve.high[i] ?? curve.effect[i]));
      lower.unshift(px, clamp(curve.low[i] ?? curve.effect[i]));
    });
    if (band) scene.path([...upper, ...lower], { fill: colour, opacity: 0.16, close: true });
    scene.path(line, { stroke: colour, thick: dash ? 1.4 : 2, dash });
  }
  bracket(scene, x, y, threshold, colours) {
    const found = this.multipliers[this.state?.threshold];
    if (!found) return;
    const [left, right] = [found.sparse_edges, found.dense_edges]
      .map((edges) => x.at(Math.min(Math.max(edges, 1), x.to)))
      .sort((a, b) => a - b);
    const py = y.at(threshold);
    scene.line(left, py, right, py, { stroke: colours.ink, thick: 2 });
    for (const px of [left, right]) scene.line(px, py - 4, px, py + 4, { stroke: colours.ink, thick: 2 });
    // Left of both curves there is room above the line; where one starts there, above both.
    const text = fewer(found, false).replace(" fewer", "");
    const free = left - x.at(x.from) > 8 * text.length + 12;
    const middle = Math.max((left + right) / 2, x.at(x.from) + 4 * text.length);
    scene.text(free ? left - 10 : middle, free ? py - 7 : y.at(y.to) + 12, text, {
      fill: colours.ink,
      size: 13,
      weight: 650,
      anchor: free ? "end" : "middle",
    });
  }
}
