// A circuit as a graph: a row of heads and an MLP per layer, the input below, as in figure 3. Drawn on a canvas, fast.

import { element, number, partName } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { fit, paint, Scene, weakLines } from "./scene.js";

/** "a3.h1" -> {kind: "a", layer: 3, head: 1}; order: who comes before whom. */
export function parseNode(name, layers) {
  if (name === "input") return { kind: "input", layer: -1, order: -1 };
  if (name === "logits") return { kind: "logits", layer: layers, order: 2 * layers };
  const [, kind, layer, head] = /^([am])(\d+)(?:\.h(\d+))?$/.exec(name);
  return {
    kind,
    layer: Number(layer),
    head: head === undefined ? null : Number(head),
    order: 2 * Number(layer) + (kind === "m" ? 1 : 0),
  };
}

/** The graph of one model: columns of edges, best first, and which of a prefix lie on a path from input to logits. */
export class CircuitGraph {
  constructor({ edges, prefix, n_layers: layers, n_heads: heads }) {
    Object.assign(this, {
      layers,
      heads,
      prefix,
      names: edges.nodes,
      from: edges.from,
      to: edges.to,
      through: edges.through,
      score: edges.score,
    });
    this.nodes = this.names.map((name) => parseNode(name, layers));
    const byOrder = (side) =>
      Uint32Array.from(side.keys()).sort((a, b) => this.nodes[side[a]].order - this.nodes[side[b]].order);
    [this.forward, this.backward] = [byOrder(this.from), byOrder(this.to).reverse()];
    [this.input, this.output] = [this.names.indexOf("input"), this.names.indexOf("logits")];
  }
  /** The measured circuit at an index on the curve: its live edges, or, where they are too many, the strongest. */
  circuitAt(at) {
    const prefix = at === null ? 0 : this.prefix[at];
    const whole = prefix !== null && prefix !== undefined;
    return { live: this.live(whole ? prefix : this.from.length), whole };
  }
  /** Indices of the live edges among the first `count`; dead ends removed. */
  live(count) {
    const fed = this.spread(this.forward, this.from, this.to, this.input, (i) => i < count);
    const used = this.spread(this.backward, this.to, this.from, this.output, (i) => i < count);
    const found = [];
    for (let i = 0; i < count; i++) if (fed[this.from[i]] && used[this.to[i]]) found.push(i);
    return found;
  }
  /** Which nodes can be reached from one node along edges that `allowed` lets through. */
  spread(order, near, far, start, allowed) {
    const reached = new Uint8Array(this.names.length);
    reached[start] = 1;
    for (const i of order) if (reached[near[i]] && allowed(i)) reached[far[i]] = 1;
    return reached;
  }
  /** The edges of all paths through a node. */
  pathsThrough(node, live) {
    const inside = new Set(live);
    const after = this.spread(this.forward, this.from, this.to, node, (i) => inside.has(i));
    const before = this.spread(this.backward, this.to, this.from, node, (i) => inside.has(i));
    return live.filter(
      (i) => (after[this.from[i]] && after[this.to[i]]) || (before[this.from[i]] && before[this.to[i]]),
    );
  }
  edgeName(i) {
    const letter = this.through[i];
    return `${this.names[this.from[i]]}->${this.names[this.to[i]]}${letter === "-" ? "" : `<${letter}>`}`;
  }
}

const PAD = 26;

/** The picture of a graph, with hover, isolation and keys. tell(node or null): what is pointed at or isolated. */
export class GraphView {
  constructor(role, graph, tell) {
    Object.assign(this, { role, graph, tell, live: [], isolated: null, hover: null, columns: ["edge", "score"] });
    this.canvas = element("canvas", { class: "focusable", tabindex: "0", role: "application" });
    this.box = element("div", { class: "plot" }, this.canvas);
    this.redraw = keepDrawn(this.box, (width) => this.draw(width));
    this.canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => this.isolate(this.at(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }
  show(at) {
    const { live, whole } = this.graph.circuitAt(at);
    this.live = live;
    this.active = new Set(live.flatMap((i) => [this.graph.from[i], this.graph.to[i]]));
    if (this.isolated !== null && !this.active.has(this.isolated)) this.isolated = null;
    this.canvas.setAttribute(
      "aria-label",
      `Circuit of the ${this.role} model: ${live.length} edges. Arrow keys go from node to node, Enter isolates its paths, Escape shows all.`,
    );
    this.tell(this.isolated);
    this.redraw();
    return whole ? "" : `The ${number(live.length)} strongest are drawn.`;
  }
  circuit() {
    return this.live.map((i) => [this.graph.edgeName(i), this.graph.score[i]]);
  }
  point(node) {
    if (node === this.hover) return;
    this.hover = node;
    this.tell(node ?? this.isolated);
    this.redraw();
  }
  isolate(node) {
    this.isolated = node === this.isolated ? null : node;
    this.tell(this.isolated);
    this.redraw();
  }
  key(event) {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    if (event.key === "Escape") {
      this.hover = null;
      this.isolate(null);
    } else if (event.key === "Enter" || event.key === " ") this.isolate(this.hover);
    else if (steps[event.key]) {
      const order = [...this.active].sort((a, b) => this.graph.nodes[a].order - this.graph.nodes[b].order || a - b);
      if (!order.length) return;
      const next =
        this.hover === null ? 0 : (order.indexOf(this.hover) + steps[event.key] + order.length) % order.length;
      this.point(order[next]);
    } else return;
    event.preventDefault();
  }
  layout(width) {
    const { layers, heads } = this.graph;
    const columns = heads + 1.4;
    this.unit = Math.min((width - 2 * PAD) / columns, 64);
    this.rise = Math.max(13, Math.min(52, 620 / (layers + 2)));
    this.radius = Math.max(2.6, Math.min(8, this.unit * 0.26, this.rise * 0.3));
    const left = (width - this.unit * columns) / 2 + this.unit / 2;
    const height = 50 + (layers + 1.2) * this.rise;
    const below = (level) => height - 24 - level * this.rise;
    this.places = this.graph.nodes.map(({ kind, layer, head }) => {
      if (kind === "input") return [left + ((heads - 1) / 2) * this.unit, below(0)];
      if (kind === "logits") return [left + ((heads - 1) / 2) * this.unit, below(layers + 1.2)];
      return kind === "a"
        ? [left + head * this.unit, below(layer + 1)]
        : [left + (heads + 0.2) * this.unit, below(layer + 1.35)];
    });
    return height;
  }
  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    let best = null,
      least = Math.max(this.radius * 2, 12) ** 2;
    this.places?.forEach(([px, py], i) => {
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (this.active?.has(i) && distance < least) [best, least] = [i, distance];
    });
    return best;
  }
  draw(width) {
    const scene = this.scene(width);
    paint(scene, fit(this.canvas, scene.width, scene.height));
  }
  /** Edges of q, k and v are one line; strong ones dark, negative ones dashed. */
  lines() {
    const { from, to, score } = this.graph;
    let lit = null;
    if (this.isolated !== null) lit = new Set(this.graph.pathsThrough(this.isolated, this.live));
    if (this.hover !== null) lit = new Set(this.live.filter((i) => from[i] === this.hover || to[i] === this.hover));
    const merged = new Map();
    const top = Math.max(...this.live.map((i) => Math.abs(score[i])), 1e-12);
    for (const i of this.live) {
      const key = from[i] * 65536 + to[i];
      const line = merged.get(key) ?? { from: from[i], to: to[i], size: 0, sum: 0, lit: lit === null };
      line.size += Math.abs(score[i]) / top;
      line.sum += score[i];
      line.lit ||= lit?.has(i);
      merged.set(key, line);
    }
    return [...merged.values()].sort((a, b) => a.lit - b.lit || a.size - b.size);
  }
  scene(width) {
    const colours = palette();
    const height = this.layout(width);
    const scene = new Scene(width, height);
    const lines = this.lines();
    const faint = Math.min(1, Math.sqrt(60 / Math.max(lines.length, 1)));
    const weak = weakLines();
    for (const line of lines) {
      const strength = Math.sqrt(Math.min(1, line.size));
      const strong = this.hover !== null && line.lit;
      const opacity = line.lit
        ? Math.min(1, Math.max(0.13, (0.25 + 0.75 * strength) * Math.max(strong ? 0.8 : faint, strength)))
        : 0.04;
      const style = {
        stroke: colours[this.role],
        thick: (0.5 + 2.2 * strength) * (strong ? 1 : Math.max(faint, 0.4)),
        opacity,
        dash: line.sum < 0 ? [4, 3] : null,
      };
      if (lines.length > 300 && opacity < 0.5 && !this.bows(line))
        weak.add(...this.places[line.from], ...this.places[line.to], style);
      else this.line(scene, line, style);
    }
    scene.shapes.unshift(...weak.shapes());
    this.nodeShapes(scene, colours, lines);
    return scene;
  }
  /** Nodes in one column would hide a straight line between them. */
  bows({ from, to }) {
    const [[x1, y1], [x2, y2]] = [this.places[from], this.places[to]];
    return Math.abs(x1 - x2) <= 1 && y1 - y2 >= this.rise * 1.2;
  }
  line(scene, { from, to }, style) {
    const [[x1, y1], [x2, y2]] = [this.places[from], this.places[to]];
    if (!this.bows({ from, to })) scene.line(x1, y1, x2, y2, style);
    else
      scene.curve(x1, y1, x1 + 2 * (0.22 * this.unit * ((y1 - y2) / this.rise) ** 0.7), (y1 + y2) / 2, x2, y2, style);
  }
  nodeShapes(scene, colours, lines) {
    const lit = new Set(lines.filter((line) => line.lit).flatMap((line) => [line.from, line.to]));
    this.graph.nodes.forEach(({ kind }, i) => {
      const [x, y] = this.places[i];
      const on = this.active?.has(i) && lit.has(i);
      const special = i === this.isolated || i === this.hover;
      const style = {
        fill: on ? colours.card : colours.line,
        stroke: special ? colours.mark : on ? colours.ink : colours.line,
        thick: special ? 2.4 : 1.1,
      };
      if (kind === "a") scene.circle(x, y, this.radius, style);
      else scene.rect(x - this.radius, y - this.radius, 2 * this.radius, 2 * this.radius, { ...style, radius: 1.5 });
    });
    const label = { fill: colours.soft, size: 11, anchor: "middle" };
    const [input, output] = [this.places[this.graph.input], this.places[this.graph.output]];
    scene.text(input[0], input[1] + this.radius + 13, "input", label);
    scene.text(output[0], output[1] - this.radius - 6, "logits", label);
    const mlp = this.places[this.graph.names.indexOf("m0")];
    if (mlp) scene.text(mlp[0], mlp[1] + this.radius + 13, "MLP", label);
    const every = Math.ceil(13 / this.rise);
    for (let layer = 0; layer < this.graph.layers; layer += every)
      scene.text(PAD - 4, scene.height - 24 - (layer + 1) * this.rise + 4, `L${layer}`, { ...label, anchor: "end" });
  }
  /** A node in words: its strongest edges in this circuit. */
  words(node) {
    if (node === null) return ["Point at a node for its edges; click to isolate its paths."];
    const { from, to, names, score, through } = this.graph;
    const tell = (i, other) =>
      `${partName(names[other[i]])}${through[i] === "-" ? "" : ` (${through[i]})`} ${score[i] > 0 ? "+" : ""}${number(score[i], 2)}`;
    const side = (mine, other) => {
      const found = this.live.filter((i) => mine[i] === node).sort((a, b) => Math.abs(score[b]) - Math.abs(score[a]));
      return found.length
        ? `${found
            .slice(0, 4)
            .map((i) => tell(i, other))
            .join(", ")}${found.length > 4 ? ` and ${found.length - 4} more` : ""}`
        : "nothing";
    };
    return [element("b", {}, partName(names[node])), ` reads ${side(to, from)}; is read by ${side(from, to)}.`];
  }
}
