// A circuit of single attention edges on the tokens of an example prompt: positions across, the input below, as in
// figure 3. Heads that connect the same two tokens in the same layer are one line.

import { element, headName, number } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { fit, paint, Scene, weakLines } from "./scene.js";
import { visible } from "./token_reads.js";

const EDGE_LEFT = 40;
const EDGE_COLUMNS = ["layer", "head", "query", "key", "score", "weight"];

export class TokenView {
  constructor(role, model, tell) {
    Object.assign(this, { role, model, tell, count: 0, lines: [], hover: null });
    [this.edges, this.tokens] = [model.edges, model.tokens];
    this.columns = [...EDGE_COLUMNS, "query_token", "key_token"];
    this.canvas = element("canvas", { class: "focusable", tabindex: "0", role: "application" });
    this.box = element("div", { class: "plot" }, this.canvas);
    this.redraw = keepDrawn(this.box, (width) => this.draw(width));
    this.canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("click", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** at: the measured circuit, as an index on the curve. Its edges are the best so many. */
  show(at) {
    const { curve, n_alive: alive } = this.model;
    const size = at === null ? 0 : curve.edges[at];
    const listed = this.edges.score.length;
    this.count = Math.min(size, listed);
    this.lines = this.merged();
    this.hover = null;
    this.canvas.setAttribute(
      "aria-label",
      `Attention edges of the ${this.role} model on its tokens: ${this.count} edges. Arrow keys go from the strongest to the weakest.`,
    );
    this.tell(null);
    this.redraw();
    if (size <= listed) return "";
    return listed >= alive
      ? `Only the ${number(alive)} drawn carry anything.`
      : `The ${number(listed)} strongest are drawn.`;
  }

  /** One line per layer and pair of tokens, the strongest first. */
  merged() {
    const { layer, query, key, score } = this.edges;
    const found = new Map();
    for (let i = 0; i < this.count; i++) {
      const name = `${layer[i]} ${query[i]} ${key[i]}`;
      if (!found.has(name))
        found.set(name, { layer: layer[i], query: query[i], key: key[i], sum: 0, size: 0, edges: [] });
      const line = found.get(name);
      line.sum += score[i];
      line.size += Math.abs(score[i]);
      line.edges.push(i);
    }
    return [...found.values()].sort((a, b) => b.size - a.size);
  }

  circuit() {
    const token = (position) => this.tokens[position];
    return Array.from({ length: this.count }, (_, i) => [
      ...EDGE_COLUMNS.map((name) => this.edges[name]?.[i] ?? null),
      token(this.edges.query[i]),
      token(this.edges.key[i]),
    ]);
  }

  point(line) {
    if (line === this.hover) return;
    this.hover = line;
    this.tell(line);
    this.redraw();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.point(null);
    else if (step && this.lines.length) {
      const at = this.hover === null ? (step > 0 ? -1 : 0) : this.lines.indexOf(this.hover);
      this.point(this.lines[(at + step + this.lines.length) % this.lines.length]);
    } else return;
    event.preventDefault();
  }

  /** The line nearest to the pointer, within a few pixels. */
  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - bounds.left, event.clientY - bounds.top];
    let [best, least] = [null, 81];
    for (const line of this.lines) {
      const [x1, y1, x2, y2] = this.ends(line);
      const [dx, dy] = [x2 - x1, y2 - y1];
      const t = Math.min(1, Math.max(0, ((px - x1) * dx + (py - y1) * dy) / (dx * dx + dy * dy)));
      const distance = (x1 + t * dx - px) ** 2 + (y1 + t * dy - py) ** 2;
      if (distance < least) [best, least] = [line, distance];
    }
    return best;
  }

  ends({ layer, query, key }) {
    return [this.x(key), this.y(layer), this.x(query), this.y(layer + 1)];
  }

  draw(width) {
    const scene = this.scene(width);
    paint(scene, fit(this.canvas, scene.width, scene.height));
  }

  scene(width) {
    const colours = palette();
    const { n_layers: layers } = this.model;
    const rise = (this.rise = Math.max(16, Math.min(48, 560 / layers)));
    const step = (width - EDGE_LEFT - 24) / Math.max(this.tokens.length - 1, 1);
    const names = this.tokens.map((token) => [...(visible(token).trim() || "␣")]);
    const upright = 7 * Math.max(...names.map((name) => name.length)) + 4 <= step; // all upright or all turned
    const head = upright ? 34 : 76;
    const scene = new Scene(width, layers * rise + head + 14);
    this.x = (position) => EDGE_LEFT + position * step;
    this.y = (level) => 14 + (layers - level) * rise;
    this.tokens.forEach((_, i) =>
      scene.line(this.x(i), this.y(0), this.x(i), this.y(layers), { stroke: colours.line, dash: [1, 3] }),
    );
    for (let layer = 0; layer < layers; layer += Math.ceil(14 / rise))
      scene.text(EDGE_LEFT - 16, this.y(layer + 0.5) + 4, `L${layer}`, { fill: colours.soft, size: 11, anchor: "end" });
    this.lineShapes(scene, colours);
    names.forEach((name, i) => {
      const chosen = this.hover && (this.hover.query === i || this.hover.key === i);
      if (step < 9 && !chosen) return;
      const text = name.length > 11 ? [...name.slice(0, 10), "…"].join("") : name.join("");
      const look = { fill: chosen ? colours.mark : colours.ink, mono: true };
      if (upright) scene.text(this.x(i), this.y(0) + 20, text, { ...look, size: 12, anchor: "middle" });
      else scene.text(this.x(i) + 4, this.y(0) + 13, text, { ...look, size: 10.5, rotate: -65, anchor: "end" });
    });
    return scene;
  }

  lineShapes(scene, colours) {
    // One line in fifty is drawn full: a single one must not make all others invisible.
    const top = Math.max(this.lines[Math.floor(this.lines.length / 50)]?.size ?? 0, 1e-12);
    const faint = Math.min(1, (200 / Math.max(this.lines.length, 1)) ** 0.6);
    const weak = weakLines();
    const dots = new Map();
    for (const line of [...this.lines].reverse()) {
      const strength = Math.sqrt(Math.min(1, line.size / top));
      const lit = this.hover === null || line === this.hover;
      const style = {
        stroke: line === this.hover ? colours.mark : colours[this.role],
        thick: (0.6 + 2.4 * strength) * Math.max(faint, 0.4),
        opacity: (lit ? 1 : 0.35) * Math.max(0.12, (0.3 + 0.7 * strength) * Math.max(faint, strength ** 2)),
        dash: line.sum < 0 ? [4, 3] : null,
      };
      const ends = this.ends(line);
      if (line === this.hover) Object.assign(style, { thick: 2.4, opacity: 1 });
      if (this.lines.length > 300 && style.opacity < 0.5) weak.add(...ends, style);
      else scene.line(...ends, style);
      dots.set(`${line.key} ${line.layer}`, ends.slice(0, 2)).set(`${line.query} ${line.layer + 1}`, ends.slice(2));
    }
    scene.shapes.unshift(...weak.shapes());
    const many = this.lines.length > 300;
    const look = many ? { fill: colours.soft } : { fill: colours.card, stroke: colours.ink };
    const radius = many ? 1.2 : Math.min(2.6, this.rise / 8);
    for (const [x, y] of dots.values()) scene.circle(x, y, radius, look);
  }

  /** A line in words: which token reads which, through which heads. */
  words(line) {
    if (!line) return ["Point at a line for its heads."];
    const { score, weight, head } = this.edges;
    const told = line.edges.slice(0, 4).map((i) => {
      const share = (weight?.[i] ?? null) === null ? "" : `, weight ${number(weight[i], 2)}`;
      return `${headName(line.layer, head[i])} (score ${number(score[i], 2)}${share})`;
    });
    const more = line.edges.length > 4 ? ` and ${line.edges.length - 4} more` : "";
    const token = (at) => [element("b", { class: "says" }, visible(this.tokens[at]).trim() || "␣"), ` (${at})`];
    return [...token(line.query), " reads ", ...token(line.key), ` through ${told.join(", ")}${more}.`];
  }
}
