// Circuits: how much of a task few edges explain, and which edges they are, dense and sparse side by side.

import { element, emptyNotice, freshId, heading, how, number, percent, segments, swatch } from "./dom.js";
import { ROLE_NAMES } from "./data.js";
import { CurvePanel, measuredAt } from "./curves.js";
import { CircuitGraph, GraphView } from "./graph.js";
import { HeadsTable } from "./heads.js";
import { downloads } from "./download.js";

export function showCircuits(section, run) {
  const rows = run.circuits;
  const title = heading("circuits", "Circuits", "Which parts of the model do a task, and how few of them are enough.");
  if (!rows || !rows.tasks.length) {
    const why = rows?.problems.length
      ? `No circuit was found: ${rows.problems.join("; ")}. Try another task:`
      : "No circuit has been looked for. This finds the circuits of a task in the dense, control and sparse model:";
    section.replaceChildren(...title, emptyNotice(why, run.commands.circuits));
    return;
  }
  section.replaceChildren(...title);
  new Circuits(section, rows, run.overview.per_head);
}

class Circuits {
  constructor(section, rows, density) {
    Object.assign(this, { rows, density, threshold: "0.9", kept: null, tableRole: null });
    const onPick = (task, edges) => {
      this.choose(task);
      this.keep(edges);
    };
    this.panels = rows.tasks.flatMap((task) => [
      new CurvePanel(task, (chosen) => this.choose(chosen), onPick),
      ...(task.attention ? [this.attentionPanel(task)] : []),
    ]);
    this.body = element("div", {});
    section.append(
      how(
        "An edge carries what one part writes (the input, a head, an MLP) to what another part reads. A circuit is a set of edges; all others carry what they would on a corrupted prompt. Explained effect is the share of the task's metric the circuit alone recovers; bands are 95 % intervals over prompts.",
        "Every point is a circuit that was run. The slider goes through them, and the graphs show exactly the edges that were in: a circle is a head, a square an MLP, layers go downward, a dashed line lowers the metric. Point at a node for its edges, click it to keep only the paths through it.",
      ),
      element(
        "div",
        { class: "controls" },
        segments(
          "Effect to reach",
          ["0.8", "0.9", "0.95"].map((t) => [t, percent(Number(t))]),
          this.threshold,
          (t) => {
            this.threshold = t;
            this.kept = null;
            this.refresh();
          },
        ),
      ),
      element(
        "div",
        { class: "panels" },
        this.panels.map((panel) => panel.card),
      ),
      this.body,
    );
    this.choose(rows.tasks[0]);
  }

  /** The same task counted in single attention edges; a curve alone, its circuits are not drawn. */
  attentionPanel(task) {
    const shown = {
      ...task.attention,
      name: `${task.name}: attention edges`,
      unit: "attention edges (head, query, key) kept",
    };
    return new CurvePanel(
      shown,
      () => this.choose(task),
      () => this.choose(task),
    );
  }

  choose(task) {
    if (this.task === task) return;
    Object.assign(this, { task, kept: null, roles: Object.keys(task.models) });
    this.shown = new Set(this.roles.filter((role) => role !== "control"));
    this.graphs = Object.fromEntries(this.roles.map((role) => [role, new CircuitGraph(task.models[role])]));
    this.tableRole = this.roles.includes("sparse") ? "sparse" : this.roles[0];
    this.stops = [...new Set(this.roles.flatMap((role) => task.models[role].curve.edges))]
      .filter((n) => n > 0)
      .sort((a, b) => a - b);
    this.build();
    this.refresh();
  }

  build() {
    const id = freshId("edges");
    this.slider = element("input", {
      type: "range",
      id,
      min: 0,
      max: this.stops.length - 1,
      step: 1,
      on: { input: () => this.keep(this.stops[this.slider.value]) },
    });
    this.output = element("output", { for: id });
    this.views = {};
    this.texts = {};
    this.words = {};
    const cards = this.roles.map((role) => this.graphCard(role));
    this.table = new HeadsTable((name) => this.isolateHead(name));
    this.body.replaceChildren(
      element(
        "div",
        { class: "card stack-top" },
        element(
          "div",
          { class: "controls" },
          this.toggles(),
          element("span", { class: "note" }, `Circuits of ${this.task.name}`),
        ),
        element("div", { class: "slider" }, element("label", { for: id }, "Edges kept"), this.slider, this.output),
      ),
      element("div", { class: "graphs" }, cards),
      element(
        "div",
        { class: "controls stack-top" },
        segments(
          "Heads of",
          this.roles.map((role) => [role, ROLE_NAMES[role]]),
          this.tableRole,
          (role) => {
            this.tableRole = role;
            this.refresh();
          },
        ),
      ),
      this.table.card,
    );
  }

  toggles() {
    return element(
      "div",
      { role: "group", "aria-label": "Models shown", class: "downloads" },
      this.roles.map((role) => {
        const button = element(
          "button",
          {
            class: "plain",
            type: "button",
            "aria-pressed": String(this.shown.has(role)),
            "data-toggle": role,
            on: {
              click: () => {
                if (this.shown.has(role)) this.shown.delete(role);
                else this.shown.add(role);
                button.setAttribute("aria-pressed", String(this.shown.has(role)));
                this.refresh();
              },
            },
          },
          swatch(role, ROLE_NAMES[role]),
        );
        return button;
      }),
    );
  }

  graphCard(role) {
    const graph = this.graphs[role];
    this.texts[role] = element("p", { class: "graph-numbers", "aria-live": "polite" });
    this.words[role] = element("p", { class: "readout" });
    this.views[role] = new GraphView(role, graph, (node) => this.tell(role, node));
    this.cards ??= {};
    this.cards[role] = element(
      "figure",
      { class: "card", "data-graph": role },
      element(
        "div",
        { class: "card-head" },
        element("h3", {}, swatch(role, this.nameOf(role))),
        downloads(`circuit-${this.task.name}-${role}`, {
          scene: () => this.views[role].scene(this.views[role].box.view.width),
          json: () => this.circuit(role),
          csv: () => [["edge", "score"], ...this.views[role].live.map((i) => [graph.edgeName(i), graph.score[i]])],
        }),
      ),
      this.texts[role],
      this.views[role].box,
      this.words[role],
    );
    return this.cards[role];
  }

  nameOf(role) {
    const name = this.rows.names[role];
    return name && name !== role ? name : ROLE_NAMES[role];
  }

  keep(edges) {
    this.kept = edges;
    this.refresh();
  }

  /** The measured circuit of a model that is shown now: at the slider, or where it reaches the threshold. */
  chosen(role) {
    const model = this.task.models[role];
    return measuredAt(model.curve, this.kept ?? model.edges_at[this.threshold]);
  }

  circuit(role) {
    const { curve } = this.task.models[role];
    const at = this.chosen(role);
    const graph = this.graphs[role];
    return {
      task: this.task.name,
      model: role,
      edges: curve.edges[at],
      effect: curve.effect[at],
      low: curve.low[at],
      high: curve.high[at],
      circuit: this.views[role].live.map((i) => [graph.edgeName(i), graph.score[i]]),
    };
  }

  refresh() {
    const chosen = {};
    for (const role of this.roles) {
      chosen[role] = this.shown.has(role) ? this.chosen(role) : null;
      this.cards[role].hidden = !this.shown.has(role);
      if (this.shown.has(role)) this.showGraph(role, this.chosen(role));
    }
    this.panels.forEach((panel) => {
      panel.card.classList.toggle("chosen", panel.task === this.task && this.panels.length > 1);
      panel.show({ threshold: this.threshold, chosen: panel.task === this.task ? chosen : {} });
    });
    const main = this.roles.includes("sparse") ? "sparse" : this.roles[0];
    const at = this.kept ?? this.task.models[main].edges_at[this.threshold];
    let stop = 0;
    this.stops.forEach((edges, i) => {
      if (edges <= at) stop = i;
    });
    this.slider.value = stop;
    const text =
      this.kept === null ? `enough for ${percent(Number(this.threshold))}` : `at most ${number(this.stops[stop])}`;
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", this.kept === null ? `edges ${text}` : `${text} edges`);
    clearTimeout(this.tableTimer); // the graphs first; the table follows when the slider rests
    this.tableTimer = setTimeout(() => this.showTable(), 60);
  }

  showTable() {
    const live = this.shown.has(this.tableRole)
      ? this.views[this.tableRole].live
      : this.liveOf(this.tableRole, this.chosen(this.tableRole)).live;
    this.table.show(this.tableRole, this.task.models[this.tableRole], this.graphs[this.tableRole], live, this.density);
  }

  liveOf(role, at) {
    const graph = this.graphs[role];
    const prefix = at === null ? 0 : this.task.models[role].prefix[at];
    const whole = prefix !== null && prefix !== undefined;
    return { live: graph.live(whole ? prefix : graph.from.length), whole };
  }

  showGraph(role, at) {
    const { curve, n_edges: total } = this.task.models[role];
    const { live, whole } = this.liveOf(role, at);
    this.views[role].show(live);
    const size = at === null ? 0 : curve.edges[at];
    this.texts[role].replaceChildren(
      element("b", { "data-edges": size }, number(size)),
      ` of ${number(total)} edges explain `,
      element(
        "b",
        { "data-effect": at === null ? 0 : curve.effect[at] },
        at === null ? "nothing" : percent(curve.effect[at]),
      ),
      at === null
        ? ""
        : element("span", { class: "note" }, ` (${percent(curve.low[at])} to ${percent(curve.high[at])})`),
      whole ? "" : element("span", { class: "note" }, ` The ${number(live.length)} strongest are drawn.`),
    );
    this.tell(role, this.views[role].isolated);
  }

  tell(role, node) {
    if (node === null || node === undefined)
      return this.words[role].replaceChildren("Point at a node for its edges; click to isolate its paths.");
    const { name, reads, writes } = this.views[role].describe(node);
    this.words[role].replaceChildren(element("b", {}, name), ` reads ${reads}; is read by ${writes}.`);
  }

  isolateHead(name) {
    for (const role of this.roles) {
      const node = this.graphs[role].names.indexOf(name);
      const view = this.views[role];
      if (this.shown.has(role)) view.isolate(view.active.has(node) ? node : null);
    }
  }
}
