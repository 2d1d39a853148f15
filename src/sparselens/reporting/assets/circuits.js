// Circuits: how much of a task few edges explain, and which edges they are, dense and sparse side by side.

import { element, emptyNotice, heading, how, percent, segments, swatch } from "./dom.js";
import { asked, remember } from "./address.js";
import { ROLE_NAMES } from "./data.js";
import { CurvePanel } from "./curves.js";
import { KeptEdges, walked } from "./size_slider.js";
import { CircuitGraph, GraphView } from "./circuit_graph.js";
import { TokenView } from "./token_edges.js";
import { HeadsTable } from "./heads.js";
import { allOfIt, headsNeeded, sideBySide } from "./reading_tables.js";
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

const says = (text) => element("span", { class: "says" }, text);
const hasCurves = ({ models }) => Object.values(models).every(({ curve }) => curve);

class Circuits {
  constructor(section, rows, density) {
    Object.assign(this, { rows, density, threshold: "0.9", panels: [] });
    // The headline first in every task, so also here.
    const readings = new Map(rows.tasks.flatMap((task) => task.readings.filter(hasCurves).map((r) => [r.name, r])));
    const options = [...readings.values()].map(({ name, short }) => [name, short]);
    const view = asked("circuits");
    this.reading = readings.has(view.reading) ? view.reading : (options[0]?.[0] ?? null);
    if (view.effect) this.threshold = view.effect;
    const part = (name, attributes) => (this[name] = element("div", attributes ?? {}));
    section.append(
      how(
        "An attention edge is one head, one token that reads and one token that is read. An edge between components carries what one part writes (the input, a head, an MLP) to what another part reads. A circuit is a set of edges; a reading says what all other edges do meanwhile. Explained effect is the share of the task's metric that the circuit alone recovers; bands are 95 % intervals over prompts.",
        "Every point is a circuit that was run. The slider goes through them, and the pictures show exactly the edges that were in; the input is below, a dashed line lowers the metric. Attention edges are drawn on the tokens of one prompt: where a reading looks at one prompt at a time, its sizes and effects are that prompt's own, and the curves above are means over all prompts.",
        "Readings answer different questions and their numbers must not be mixed. The table at the end has all of them side by side.",
      ),
      part("all", { "aria-live": "polite" }),
      element(
        "div",
        { class: "controls stack-top" },
        options.length > 1 ? segments("Reading", options, this.reading, (name) => this.read(name)) : "",
        part("thresholds"),
      ),
      (this.question = element("p", { class: "note question", "aria-live": "polite" })),
      part("curves", { class: "panels" }),
      part("body"),
      part("tables"),
    );
    this.read(this.reading);
    const task = rows.tasks.find(({ name }) => name === view.task);
    if (task && this.readingOf(task)) this.choose(task);
    if (Number(view.n) > 0) this.kept?.keep(Number(view.n));
    this.began = true;
  }

  /** Shows another reading: curves, slider and picture together. */
  read(name) {
    this.reading = name;
    const tasks = this.rows.tasks.filter((task) => this.readingOf(task));
    this.panels = tasks.map((task) => {
      const reading = this.readingOf(task);
      const pick = (edges) => {
        this.choose(task);
        this.kept?.keep(edges);
      };
      const multipliers = task.multipliers[name]?.dense ?? {};
      return { task, curves: new CurvePanel(reading, multipliers, () => this.choose(task), pick) };
    });
    this.curves.replaceChildren(...this.panels.map((panel) => panel.curves.card));
    if (tasks.length) this.chooseThreshold(this.readingOf(tasks[0]));
    const task = tasks.includes(this.task) ? this.task : (tasks[0] ?? this.rows.tasks[0]);
    this.task = null;
    this.choose(task);
  }

  readingOf(task) {
    return task.readings.find((reading) => reading.name === this.reading && hasCurves(reading));
  }

  chooseThreshold(reading) {
    const known = Object.keys(Object.values(reading.models)[0].edges_at).filter(Number);
    if (!known.includes(this.threshold)) this.threshold = known.includes("0.9") ? "0.9" : known[0];
    const options = known.map((t) => [t, percent(Number(t))]);
    this.thresholds.replaceChildren(
      segments("Effect to reach", options, this.threshold, (t) => {
        this.threshold = t;
        if (this.kept) this.kept.kept = null;
        this.refresh();
        this.showTables();
      }),
    );
  }

  choose(task) {
    if (this.task === task) return;
    Object.assign(this, { task, roles: Object.keys(task.models), kept: null, graphs: null });
    this.all.replaceChildren(allOfIt(task));
    const reading = this.readingOf(task);
    if (reading) {
      this.roles = Object.keys(reading.models);
      const n = Math.max(...Object.values(reading.models).map((model) => model.n_prompts));
      this.question.textContent = `${reading.short}: ${reading.question} n\u00a0=\u00a0${n} prompts.`;
    }
    this.shown = new Set(this.roles.filter((role) => role !== "control" || this.roles.length === 1));
    this.tableRole = this.roles.includes("sparse") ? "sparse" : this.roles[0];
    this.build(reading);
    this.refresh();
    this.showTables();
  }

  build(reading) {
    const picture = PICTURES[reading?.picture];
    if (!picture) {
      this.body.replaceChildren();
      return;
    }
    const models = Object.fromEntries(this.roles.map((role) => [role, walked(reading.models[role])]));
    const graph = reading.picture === "graph";
    if (graph) this.graphs = Object.fromEntries(this.roles.map((role) => [role, new CircuitGraph(models[role])]));
    this.kept = new KeptEdges({
      task: this.task.name,
      reading: reading.name,
      nameOf: (role) => this.nameOf(role),
      kind: reading.picture,
      label: picture.label,
      models,
      view: (role, tell) => picture.view(role, (graph ? this.graphs : models)[role], tell),
      onKeep: () => this.refresh(),
    });
    const { example } = models[this.tableRole];
    this.body.replaceChildren(
      element(
        "div",
        { class: "card stack-top" },
        element(
          "div",
          { class: "controls" },
          this.toggles(),
          element(
            "span",
            { class: "note" },
            `Circuits of ${this.task.name}`,
            example ? [reading.scope === "prompt" ? " on " : " on prompts such as ", says(example)] : "",
          ),
        ),
        this.kept.bar,
      ),
      this.kept.graphs,
      ...(graph ? this.headsTable() : []),
    );
  }

  headsTable() {
    this.table = new HeadsTable((name) => this.isolateHead(name));
    const roles = this.roles.map((role) => [role, ROLE_NAMES[role]]);
    const choose = (role) => {
      this.tableRole = role;
      this.refresh();
    };
    return [
      element("div", { class: "controls stack-top" }, segments("Heads of", roles, this.tableRole, choose)),
      this.table.card,
    ];
  }

  showTables() {
    this.tables.replaceChildren(headsNeeded(this.task), sideBySide(this.task, this.threshold));
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

  refresh() {
    const chosen = this.kept?.show(this.shown, this.threshold) ?? {};
    if (this.began) {
      const { threshold: effect, kept, reading } = this;
      remember("circuits", { task: this.task.name, reading, effect, n: kept?.kept });
    }
    for (const { task, curves } of this.panels) {
      curves.card.classList.toggle("chosen", task === this.task && this.rows.tasks.length > 1);
      curves.show({ threshold: this.threshold, chosen: task === this.task ? chosen : {} });
    }
    if (!this.graphs) return;
    clearTimeout(this.tableTimer); // the graphs first; the table follows when the slider rests
    this.tableTimer = setTimeout(() => this.showHeads(), 60);
  }

  showHeads() {
    if (!this.graphs) return; // another reading was chosen meanwhile
    const graph = this.graphs[this.tableRole];
    this.table.show(this.tableRole, graph, graph.circuitAt(this.kept.chosen(this.tableRole)).live, this.density);
  }

  isolateHead(name) {
    for (const role of this.shown) {
      const view = this.kept.views[role];
      const node = this.graphs[role].names.indexOf(name);
      view.isolate(view.active.has(node) ? node : null);
    }
  }
}
