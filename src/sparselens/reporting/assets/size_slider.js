// Circuits of one kind at a size: a slider through the sizes that were measured, and a card per model with its circuit.

import { element, freshId, number, percent, swatch } from "./dom.js";
import { measuredAt } from "./curves.js";
import { downloads } from "./download.js";

/** A model's row as the slider walks it: over the example's own circuits where they were measured one prompt at a time. */
export function walked(model) {
  const { example_curve: curve, example_at: at } = model;
  return curve ? { ...model, curve, edges_at: at ?? model.edges_at, single: true } : model;
}

/**
 * models: {role: {curve, edges_at, n_edges, single}}; view(role, tell) makes a picture {box, scene(width), show(at) -> a note,
 * columns, circuit() -> rows of what is drawn, words(what) -> nodes}, which calls tell(what) when that is pointed at.
 */
export class KeptEdges {
  constructor({ kind, label, task, reading, models, nameOf, view, onKeep }) {
    Object.assign(this, { task, reading, models, onKeep, roles: Object.keys(models), kept: null, threshold: "0.9" });
    const id = freshId("edges");
    this.stops = [...new Set(this.roles.flatMap((role) => models[role].curve.edges))]
      .filter((n) => n > 0)
      .sort((a, b) => a - b);
    this.slider = element("input", {
      type: "range",
      id,
      min: 0,
      max: this.stops.length - 1,
      step: 1,
      "data-slider": kind,
      on: { input: () => this.keep(this.stops[this.slider.value]) },
    });
    this.output = element("output", { for: id });
    this.bar = element("div", { class: "slider" }, element("label", { for: id }, label), this.slider, this.output);
    [this.views, this.texts, this.words, this.cards] = [{}, {}, {}, {}];
    for (const role of this.roles) {
      this.views[role] = view(role, (what) => this.tell(role, what));
      this.texts[role] = element("p", { class: "graph-numbers", "aria-live": "polite" });
      this.words[role] = element("p", { class: "readout", "aria-live": "polite" });
      this.cards[role] = this.card(role, kind, nameOf(role));
    }
    this.graphs = element("div", { class: "graphs" }, Object.values(this.cards));
  }

  card(role, kind, name) {
    const view = this.views[role];
    return element(
      "figure",
      { class: "card", [`data-${kind}`]: role },
      element(
        "div",
        { class: "card-head" },
        element("h3", {}, swatch(role, name)),
        downloads(`circuit-${this.task}-${this.reading}-${role}`, {
          scene: () => view.scene(view.box.view.width),
          json: () => this.circuit(role),
          csv: () => [view.columns, ...view.circuit()],
        }),
      ),
      this.texts[role],
      view.box,
      this.words[role],
    );
  }

  keep(edges) {
    this.kept = edges;
    this.onKeep();
  }

  /** The measured circuit of a model that is shown now: at the slider, or where it reaches the threshold. */
  chosen(role) {
    const { curve, edges_at: enough } = this.models[role];
    return measuredAt(curve, this.kept ?? enough[this.threshold]);
  }

  measured(role) {
    const { curve } = this.models[role];
    const at = this.chosen(role);
    return at === null
      ? { edges: 0, effect: 0 }
      : { edges: curve.edges[at], effect: curve.effect[at], low: curve.low[at], high: curve.high[at] };
  }

  circuit(role) {
    const { columns } = this.views[role];
    return { task: this.task, reading: this.reading, model: role, ...this.measured(role), columns, circuit: this.views[role].circuit() };
  }

  /** Draws what the slider or the threshold asks for; returns {role: {edges, effect}} of the models shown. */
  show(shown, threshold) {
    this.threshold = threshold;
    const chosen = {};
    for (const role of this.roles) {
      this.cards[role].hidden = !shown.has(role);
      if (!shown.has(role)) continue;
      chosen[role] = this.measured(role);
      this.say(role, this.views[role].show(this.chosen(role)));
    }
    const main = this.models[this.roles.includes("sparse") ? "sparse" : this.roles[0]];
    const at = this.kept ?? main.edges_at[threshold];
    const stop = Math.max(0, this.stops.findLastIndex((edges) => edges <= at));
    this.slider.value = stop;
    const text =
      this.kept === null ? `enough for ${percent(Number(threshold))}` : `at most ${number(this.stops[stop])}`;
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", this.kept === null ? `edges ${text}` : `${text} edges`);
    return chosen;
  }

  say(role, note) {
    const { edges, effect, low, high } = this.measured(role);
    this.texts[role].replaceChildren(
      element("b", { "data-edges": edges }, number(edges)),
      ` of ${number(this.models[role].n_edges)} edges ${this.reading === "share" ? "hold" : "explain"} `,
      element("b", { "data-effect": effect }, edges ? percent(effect) : "nothing"),
      edges && !this.models[role].single
        ? element("span", { class: "note" }, ` (${percent(low)} to ${percent(high)})`)
        : this.models[role].single
          ? " on this prompt."
          : "",
      note ? element("span", { class: "note" }, ` ${note}`) : "",
    );
  }

  tell(role, what) {
    this.words[role].replaceChildren(...this.views[role].words(what));
  }
}
