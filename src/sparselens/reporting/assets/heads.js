// The heads of a circuit as a table one can sort; a click on a name isolates the head in the graph.

import { element, number, partName, percent, table } from "./dom.js";
import { downloads } from "./download.js";

/** rows: one per head with a place in the circuit. */
function headRows(graph, live, density) {
  const rows = new Map();
  const row = (name) => {
    if (!rows.has(name)) {
      const { layer, head } = graph.nodes[graph.names.indexOf(name)];
      rows.set(name, {
        name,
        layer,
        head,
        reads: 0,
        writes: 0,
        score: 0,
        density: density?.[layer]?.[head] ?? null,
      });
    }
    return rows.get(name);
  };
  for (const i of live) {
    const [from, to] = [graph.names[graph.from[i]], graph.names[graph.to[i]]];
    if (from.startsWith("a")) {
      row(from).writes += 1;
      row(from).score += graph.score[i];
    }
    if (to.startsWith("a")) row(to).reads += 1;
  }
  return [...rows.values()];
}

const COLUMNS = [
  ["name", "Head", (row) => partName(row.name)],
  ["score", "Score written", (row) => number(row.score)],
  ["reads", "Edges in", (row) => number(row.reads)],
  ["writes", "Edges out", (row) => number(row.writes)],
  ["density", "Density", (row) => percent(row.density)],
];

export class HeadsTable {
  constructor(onHead) {
    Object.assign(this, {
      onHead,
      sort: "score",
      down: false,
      box: element("div", {
        class: "scroll tall",
        tabindex: "0",
        role: "region",
        "aria-label": "Heads of the circuit",
      }),
    });
    this.note = element("span", { class: "note" });
    this.card = element(
      "div",
      { class: "card", id: "heads" },
      element(
        "div",
        { class: "card-head" },
        element("h3", {}, "Heads"),
        this.note,
        downloads("heads", {
          json: () => this.rows,
          csv: () => [COLUMNS.map(([key]) => key), ...this.rows.map((row) => COLUMNS.map(([key]) => row[key]))],
        }),
      ),
      this.box,
    );
  }
  show(role, graph, live, density) {
    this.rows = headRows(graph, live, role === "sparse" ? density : null);
    this.note.textContent = `${role} model: ${number(this.rows.length)} heads in this circuit`;
    this.draw();
  }
  sortable(key, title) {
    const sort = () => {
      this.down = key === this.sort && !this.down;
      this.sort = key;
      this.draw();
      this.box.querySelector(`[data-sort="${key}"]`).focus();
    };
    const chosen = key === this.sort;
    return element(
      "th",
      { scope: "col", "aria-sort": chosen ? (this.down ? "descending" : "ascending") : null },
      element(
        "button",
        { type: "button", "data-sort": key, on: { click: sort } },
        title,
        chosen ? (this.down ? " ↓" : " ↑") : "",
      ),
    );
  }
  draw() {
    const value = (row) =>
      this.sort === "name"
        ? row.layer * 1000 + row.head
        : this.sort === "score"
          ? -Math.abs(row.score)
          : row[this.sort];
    const sorted = [...this.rows].sort(
      (a, b) =>
        ((value(a) ?? Infinity) - (value(b) ?? Infinity)) * (this.down ? -1 : 1) ||
        a.layer - b.layer ||
        a.head - b.head,
    );
    this.box.replaceChildren(
      table(
        COLUMNS.map(([key, title]) => this.sortable(key, title)),
        sorted
          .slice(0, 200)
          .map((row) => [
            element("button", { class: "says", type: "button", on: { click: () => this.onHead(row.name) } }, partName(row.name)),
            ...COLUMNS.slice(1).map(([, , show]) => show(row)),
          ]),
      ),
      sorted.length > 200
        ? element("p", { class: "note" }, `200 of ${sorted.length} heads; the download has all.`)
        : "",
    );
  }
}
