// Circuits: how much of a task few edges explain, and which edges they are, dense and sparse side by side.

import { element, emptyNotice, heading, how, percent, segments, swatch } from "./dom.js";
import { ROLE_NAMES } from "./data.js";
import { CurvePanel } from "./curves.js";
import { KeptEdges } from "./size_slider.js";
import { CircuitGraph, GraphView } from "./circuit_graph.js";
import { TokenView } from "./token_edges.js";
import { HeadsTable } from "./heads.js";
import { section } from "./sections.js";

/** How the circuits of a reading are drawn; a reading without a picture has its curve alone. */
const PICTURES = {
  graph: { label: "Edges kept", view: (role, model, tell) => new GraphView(role, model, tell) },
  tokens: { label: "Attention edges kept", view: (role, model, tell) => new TokenView(role, model, tell) },
};

section("circuits", (place, run) => {
  const rows = run.circuits;
  const title = heading("circuits", "Circuits", "Which parts of the model do a task, and how few of them are enough.");
  if (!rows || !rows.tasks.length) {
    const why = rows?.problems.length
      ? `No circuit was found: ${rows.problems.join("; ")}. Try another task:`
      : "No circuit has been looked for. This finds the circuits of a task in the dense, control and sparse model:";
    place.replaceChildren(...title, emptyNotice(why, run.commands.circuits));
    return;
  }
  place.replaceChildren(...title);
  new Circuits(place, rows, run.summary.per_head);
});

class Circuits {
  constructor(section, rows, density) {
    Object.assign(this, { rows, density, threshold: "0.9", tableRole: null });
    this.panels = rows.tasks.flatMap((task) =>
      task.readings.map((reading) => {
        const pick = (edges) => {
          this.choose(task);
          this.kept[reading.name]?.keep(edges);
        };
        const multipliers = task.multipliers[reading.name]?.dense ?? {};
        return { task, reading, curves: new CurvePanel(reading, multipliers, () => this.choose(task), pick) };
      }),
    );
    const thresholds = Object.keys(Object.values(rows.tasks[0].readings[0].models)[0].edges_at);
    this.body = element("div", {});
    section.append(
      how(
        "An edge carries what one part writes (the input, a head, an MLP) to what another part reads. A circuit is a set of edges; all others carry what they would on a corrupted prompt. Explained effect is the share of the task's metric the circuit alone recovers; bands are 95 % intervals over prompts.",
        "Every point is a circuit that was run. The slider goes through them, and the graphs show exactly the edges that were in: a circle is a head, a square an MLP, layers go downward, a dashed line lowers the metric. Point at a node for its edges, click it to keep only the paths through it.",
        "Attention edges are finer: one head, one token that reads, one that is read. They are drawn on the tokens of one of the prompts, layers upward; scores and weights are means over all prompts.",
      ),
      element(
        "div",
        { class: "controls" },
        segments(
          "Effect to reach",
          thresholds.map((t) => [t, percent(Number(t))]),
          this.threshold,
          (t) => {
            this.threshold = t;
            for (const kept of Object.values(this.kept)) kept.kept = null;
            this.refresh();
          },
        ),
      ),
      element(
        "div",
        { class: "panels" },
        this.panels.map((panel) => panel.curves.card),
      ),
      this.body,
    );
    this.choose(rows.tasks[0]);
  }

  choose(task) {
    if (this.task === task) return;
    Object.assign(this, { task, roles: Object.keys(task.models) });
    this.shown = new Set(this.roles.filter((role) => role !== "control"));
    this.tableRole = this.roles.includes("sparse") ? "sparse" : this.roles[0];
    const common = { task: task.name, nameOf: (role) => this.nameOf(role) };
    const [graph] = task.readings; // the component graph comes first
    this.models = Object.fromEntries(this.roles.map((role) => [role, new CircuitGraph(graph.models[role])]));
    this.kept = {};
    for (const { name, picture, models } of task.readings.filter((reading) => PICTURES[reading.picture])) {
      const { label, view } = PICTURES[picture];
      const drawn = picture === "graph" ? this.models : models;
      this.kept[name] = new KeptEdges({
        ...common,
        kind: picture,
        label,
        models,
        view: (role, tell) => view(role, drawn[role], tell),
        onKeep: () => this.refresh([name]),
      });
    }
    this.graphs = this.kept[graph.name];
    this.build();
    this.refresh();
  }

  build() {
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
        this.graphs.bar,
      ),
      this.graphs.graphs,
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
      ...this.task.readings
        .filter(({ picture }) => picture === "tokens")
        .flatMap((reading) => [this.tokenBar(reading), this.kept[reading.name].graphs]),
    );
  }

  tokenBar(reading) {
    const { example, n_prompts: n } = Object.values(reading.models)[0];
    return element(
      "div",
      { class: "card stack-top" },
      element(
        "div",
        { class: "card-head" },
        element("h3", {}, "Attention edges, token by token"),
        element("span", { class: "note" }, `n = ${n} prompts, such as `, element("span", { class: "says" }, example)),
      ),
      this.kept[reading.name].bar,
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

  nameOf(role) {
    const name = this.rows.names[role];
    return name && name !== role ? name : ROLE_NAMES[role];
  }

  refresh(names = new Set(this.panels.map(({ reading }) => reading.name))) {
    for (const name of names) {
      const chosen = this.kept[name]?.show(this.shown, this.threshold);
      for (const { task, curves } of this.panels.filter((panel) => panel.reading.name === name)) {
        curves.card.classList.toggle("chosen", task === this.task && this.rows.tasks.length > 1);
        curves.show({ threshold: this.threshold, chosen: task === this.task ? chosen : {} });
      }
    }
    clearTimeout(this.tableTimer); // the graphs first; the table follows when the slider rests
    this.tableTimer = setTimeout(() => this.showTable(), 60);
  }

  showTable() {
    const role = this.tableRole;
    const { live } = this.models[role].circuitAt(this.graphs.chosen(role));
    this.table.show(role, this.task.models[role], this.models[role], live, this.density);
  }

  isolateHead(name) {
    for (const role of this.shown) {
      const view = this.graphs.views[role];
      const node = this.models[role].names.indexOf(name);
      view.isolate(view.active.has(node) ? node : null);
    }
  }
}
