// One head, large: what every query reads, with the gate's margin where there are gates.

import { element, headName, number, table } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { atlas } from "./maps.js";
import { fit } from "./scene.js";
import { visible } from "./token_reads.js";

const NAMES = 62;

/** Keys across, queries upward. Pointing or arrow keys choose a pair: onPair(query, key). */
export class HeadMap {
  constructor(role, onPair) {
    Object.assign(this, { role, onPair, pair: null });
    this.canvas = element("canvas", { class: "focusable", tabindex: "0", role: "application" });
    this.box = element("div", { class: "plot" }, this.canvas);
    this.redraw = keepDrawn(this.box, (width) => this.draw(width));
    const point = (event) => {
      const pair = this.at(event);
      if (pair) onPair(...pair);
    };
    this.canvas.addEventListener("pointermove", point);
    this.canvas.addEventListener("click", point);
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[event.key];
      if (!step || !this.maps) return;
      event.preventDefault();
      const [query, key] = this.pair ?? [this.maps.size - 1, 0];
      const next = [Math.min(Math.max(query + step[0], 0), this.maps.size - 1), Math.max(key + step[1], 0)];
      if (next[1] <= next[0]) onPair(...next);
    });
  }
  show(maps, view, layer, head, pair) {
    Object.assign(this, { maps, view, layer, head, pair });
    this.canvas.setAttribute(
      "aria-label",
      `${headName(layer, head)} of the ${this.role} model: keys across, queries upward. Arrow keys move between pairs.`,
    );
    this.redraw();
  }
  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const key = Math.floor((event.clientX - bounds.left - this.left) / this.unit);
    const query = this.maps.size - 1 - Math.floor((event.clientY - bounds.top - 2) / this.unit);
    return query >= 0 && key >= 0 && key <= query && query < this.maps.size ? [query, key] : null;
  }
  draw(width) {
    if (!this.maps) return;
    const { size, tokens } = this.maps;
    const colours = palette();
    const named = size <= 40;
    this.left = named ? NAMES : 8;
    this.unit = Math.min((width - this.left - 34) / size, 380 / size, 30);
    const side = this.unit * size;
    const context = fit(this.canvas, this.left + side + 34, side + (named ? 54 : 8));
    context.fillStyle = colours.well;
    context.beginPath(); // only what a causal model can see: keys up to the query
    context.moveTo(this.left, 2);
    context.lineTo(this.left, 2 + side);
    for (let query = 0; query < size; query++) {
      const [x, y] = [this.left + (query + 1) * this.unit, 2 + (size - query) * this.unit];
      context.lineTo(x, y);
      context.lineTo(x, y - this.unit);
    }
    context.fill();
    context.imageSmoothingEnabled = false;
    context.drawImage(
      atlas(this.maps, this.view),
      this.head * size,
      this.layer * size,
      size,
      size,
      this.left,
      2,
      side,
      side,
    );
    if (this.pair) {
      const [query, key] = this.pair;
      context.strokeStyle = colours.mark;
      context.lineWidth = 2;
      context.strokeRect(this.left + key * this.unit, 2 + (size - 1 - query) * this.unit, this.unit, this.unit);
    }
    if (named) this.names(context, tokens, side, colours);
  }
  names(context, tokens, side, colours) {
    const size = Math.min(11, this.unit * 1.05);
    context.font = `${size}px ui-monospace, Menlo, Consolas, monospace`;
    context.textBaseline = "middle";
    tokens.forEach((token, i) => {
      const text = visible(token).trim() || "␣";
      const short = [...text].length > 8 ? `${[...text].slice(0, 7).join("")}…` : text;
      context.fillStyle = this.pair?.[0] === i ? colours.mark : colours.soft;
      context.textAlign = "right";
      context.fillText(short, this.left - 6, 2 + (this.maps.size - 0.5 - i) * this.unit);
      if (this.unit < 9 && this.pair?.[1] !== i) return; // they would lie on each other; the same words stand on the left
      context.fillStyle = this.pair?.[1] === i ? colours.mark : colours.soft;
      context.save();
      context.translate(this.left + (i + 0.5) * this.unit, side + 10);
      if (short.length > 1) {
        context.rotate(Math.PI / 4);
        context.textAlign = "left";
      } else context.textAlign = "center";
      context.fillText(short, 0, 0);
      context.restore();
    });
  }
}

/** What is known of one pair in every model. */
export function pairFacts(models, layer, head, pair) {
  if (!pair) return element("p", { class: "note" }, "Point at a cell of the map to read it.");
  const [query, key] = pair;
  const tokens = models[0].tokens;
  const facts = [
    [
      "reads",
      [
        element("span", { class: "says" }, visible(tokens[query])),
        ` (${query}) → `,
        element("span", { class: "says" }, visible(tokens[key])),
        ` (${key})`,
      ],
    ],
  ];
  for (const maps of models) {
    facts.push([`${maps.role} weight`, number(maps.weight(layer, head, query, key))]);
    const margin = maps.margin(layer, head, query, key);
    if (margin !== null) facts.push(["gate margin S + b", `${number(margin)}: ${margin > 0 ? "open" : "closed"}`]);
  }
  return element(
    "dl",
    { class: "facts", "aria-live": "polite", id: "pair-facts" },
    facts.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
  );
}

/** The strongest pairs of one head, by the weight in any model. */
export function strongestPairs(models, layer, head, onPair, most = 8) {
  const found = [];
  const { size, tokens } = models[0];
  for (let query = 0; query < size; query++)
    for (let key = 0; key <= query; key++)
      found.push([
        query,
        key,
        Math.max(...models.map((maps) => maps.weight(layer, head, query, key) * (maps.margins ? 4 : 1))),
      ]);
  const rows = found
    .filter(([, , weight]) => weight > 0)
    .sort((a, b) => b[2] - a[2])
    .slice(0, most);
  const gated = models.find((maps) => maps.margins);
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Strongest pairs of this head" },
    table(
      ["Query → key", ...models.map((maps) => maps.role), ...(gated ? ["margin"] : [])],
      rows.map(([query, key]) => [
        element(
          "button",
          {
            class: "says",
            type: "button",
            on: { click: () => onPair(query, key), focus: () => onPair(query, key) },
          },
          `${visible(tokens[query])} ${query} → ${visible(tokens[key])} ${key}`,
        ),
        ...models.map((maps) => number(maps.weight(layer, head, query, key))),
        ...(gated ? [number(gated.margin(layer, head, query, key))] : []),
      ]),
    ),
  );
}
