// The picture of a traced prompt: positions across, layers upward; clusters as boxes, or single features as dots.

import { element, number } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { fit, paint, Scene } from "./scene.js";
import { featureCard, withFaces } from "./features.js";
import { visible } from "./token_reads.js";

const SAY = 84; // room for it
const BESIDE = [0, 1, -1, 2, -2, 3, -3];

/** Calls onPoint(edge or null) and onChoose(edge) in the cluster view; says what a feature is in the other. */
export class TracePicture {
  constructor(trace, onPoint, onChoose) {
    Object.assign(this, { trace, chosen: null, hover: null, node: null });
    this.view = trace.clusters.length ? "clusters" : "features";
    const { role, clusters, edges } = trace;
    this.canvas = element("canvas", {
      class: "focusable",
      tabindex: "0",
      role: "application",
      "aria-label": `Attribution graph of the ${role} model: ${clusters.length} clusters, ${edges.length} edges, which the table lists. Arrow keys go from edge to edge, or from feature to feature; Enter opens an edge.`,
    });
    this.plot = element("div", { class: "plot" }, this.canvas);
    this.plot.style.minWidth = `${Math.min(900, 60 + SAY + 36 * trace.tokens.length)}px`; // narrower, it scrolls
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.box = element("div", {}, element("div", { class: "scroll" }, this.plot), this.readout);
    this.redraw = keepDrawn(this.plot, (width) => {
      const scene = this.scene(width);
      paint(scene, fit(this.canvas, width, scene.height));
    });
    this.canvas.addEventListener("pointermove", (event) => this.point(event, onPoint));
    this.canvas.addEventListener("pointerleave", () => this.point(null, onPoint));
    this.canvas.addEventListener("click", (event) => {
      if (this.view === "features") return this.openNode(this.nodeAt(event));
      const edge = this.edgeAt(event);
      if (edge !== null) onChoose(edge);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event, onPoint, onChoose));
  }

  show(view) {
    this.view = view;
    this.node = null;
    this.readout.replaceChildren(view === "features" ? "Point at a dot for what it is." : "");
    this.redraw();
  }

  point(event, onPoint) {
    if (this.view === "clusters") {
      onPoint(event && this.edgeAt(event));
      return;
    }
    this.pointNode(event && this.nodeAt(event));
  }

  key(event, onPoint, onChoose) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const clusters = this.view === "clusters";
    const count = (clusters ? this.curves : this.places)?.length;
    const now = clusters ? this.hover : this.node;
    if (step && count) {
      const next = now === null ? 0 : (now + step + count) % count;
      if (clusters) onPoint(next);
      else this.pointNode(next);
    } else if (event.key === "Enter" && now !== null) clusters ? onChoose(now) : this.openNode(now);
    else return;
    event.preventDefault();
  }

  /** The card of a feature, where it has one. */
  openNode(node) {
    const { graph } = this.trace;
    if (node !== null && graph.kinds[graph.kind[node]] === "feature") featureCard(`${graph.layer[node]}/${graph.index[node]}`, this.trace);
  }

  pointNode(node) {
    if (node === this.node) return;
    this.node = node;
    if (node !== null) this.readout.replaceChildren(...this.describe(node));
    this.redraw();
  }

  scene(width) {
    const { trace } = this;
    const height = Math.max(260, Math.min(560, (trace.n_layers + 2) * 30)) + 64;
    // What says the answer stands beside the last token, not on it.
    const beside = this.view === "clusters" && trace.clusters.some(({ kind }) => kind === "say") ? SAY : 0;
    const [left, right, top, bottom] = [44, width - 16 - beside, 26, height - 48];
    const colours = palette();
    const scene = new Scene(width, height);
    const column = (right - left) / trace.tokens.length;
    const x = (position) => left + (position + 0.5) * column;
    const y = (layer) => bottom - ((layer + 1) / (trace.n_layers + 1)) * (bottom - top);
    for (let layer = 0; layer <= trace.n_layers; layer += Math.ceil(trace.n_layers / 12)) {
      scene.line(left, y(layer), right, y(layer), { stroke: colours.grid });
      const name = layer === trace.n_layers ? "out" : layer;
      scene.text(left - 8, y(layer) + 4, name, { fill: colours.soft, size: 11, anchor: "end" });
    }
    trace.tokens.forEach((token, i) => {
      const text = clipped(visible(token).trim() || "␣", Math.max(1, Math.floor(column / 7)));
      scene.text(x(i), bottom + 20, text, { fill: colours.ink, size: 12, mono: true, anchor: "middle" });
      scene.text(x(i), bottom + 34, i, { fill: colours.soft, size: 10, anchor: "middle" });
    });
    if (this.view === "features" && trace.graph) this.featureShapes(scene, colours, x, y);
    else this.clusterShapes(scene, colours, x, y, column);
    return scene;
  }

  clusterShapes(scene, colours, x, y, column) {
    const { edges, role } = this.trace;
    const boxes = this.trace.clusters.map((cluster) => this.clusterBox(cluster, x, y, column));
    fitBoxes(boxes, column, scene.width - 4);
    this.curves = edges.map(({ source, target }) => curveBetween(boxes[source], boxes[target]));
    const most = Math.max(...edges.map((edge) => edge.flow), 1e-12);
    const active = this.hover ?? this.chosen;
    for (let i = edges.length - 1; i >= 0; i--) {
      const strength = edges[i].flow / most;
      const look = i === active ? { stroke: colours.mark } : { stroke: colours[role], opacity: 0.18 + 0.6 * strength };
      scene.curve(...this.curves[i], { ...look, thick: 0.8 + 6 * strength, dash: edges[i].weight < 0 ? [6, 4] : null });
    }
    for (const { cx, width, top, bottom, name, label } of boxes) {
      const style = { fill: colours.card, stroke: colours.ink, thick: 1.2, radius: 7 };
      scene.rect(cx - width / 2, top, width, bottom - top, style);
      const text = clipped(name, Math.max(2, Math.floor((width - 6) / 6.4)));
      const told = label && bottom - top > 30 && width > 70;
      const middle = (top + bottom) / 2 + (told ? -3 : 4);
      scene.text(cx, middle, text, { fill: colours.ink, size: 12, weight: 600, anchor: "middle" });
      if (!told) continue;
      const under = clipped(label, Math.max(2, Math.floor((width - 6) / 5.2)));
      scene.text(cx, middle + 13, under, { fill: colours.soft, size: 10, anchor: "middle" });
    }
  }

  /** A box over the cluster's positions and layers, wide enough for its name. */
  clusterBox({ name, kind, positions, layers, label }, x, y, column) {
    const last = this.trace.tokens.length - 1;
    const at = positions.filter((position) => position >= 0 && position <= last);
    const [low, high] = at.length ? [Math.min(...at), Math.max(...at)] : [last, last];
    const wanted = Math.max((high - low + 1) * column - 8, 7 * name.length + 12, label ? 5.2 * label.length + 8 : 0);
    return {
      name,
      kind,
      label,
      cx: (x(low) + x(high)) / 2,
      width: Math.max(Math.min(wanted, 150), 26),
      top: y(Math.min(layers[1], this.trace.n_layers)) - 11,
      bottom: y(Math.max(layers[0], -1)) + 11,
    };
  }

  featureShapes(scene, colours, x, y) {
    const { graph, role } = this.trace;
    this.curves = [];
    this.places = this.featurePlaces(x, y);
    const most = Math.max(...graph.weight.map(Math.abs), 1e-12);
    for (let i = graph.weight.length - 1; i >= 0; i--) {
      const strength = Math.abs(graph.weight[i]) / most;
      const [a, b] = [this.places[graph.from[i]], this.places[graph.to[i]]];
      const lit = this.node === null || graph.from[i] === this.node || graph.to[i] === this.node;
      const opacity = Math.min(0.9, 0.08 + Math.sqrt(strength)) * (lit ? 1 : 0.1);
      const dash = graph.weight[i] < 0 ? [4, 3] : null;
      scene.line(...a, ...b, { stroke: colours[role], thick: 0.5 + 3 * strength, opacity, dash });
    }
    this.places.forEach(([px, py], i) => {
      const kind = graph.kinds[graph.kind[i]];
      const filled = kind === "feature";
      const style = { fill: filled ? colours[role] : colours.card, stroke: filled ? colours.card : colours.ink };
      if (i === this.node) style.stroke = colours.mark;
      if (kind === "error") scene.rect(px - 3, py - 3, 6, 6, style);
      else scene.circle(px, py, kind === "logit" ? 5 : 3.4, style);
    });
  }

  /** Nodes of one layer and position stand beside each other, seven to a row. */
  featurePlaces(x, y) {
    const { graph, n_layers: layers, tokens } = this.trace;
    const seen = new Map();
    return graph.kind.map((_, i) => {
      const level = Math.min(graph.layer[i], layers);
      const position = graph.position[i] < 0 ? tokens.length - 1 : graph.position[i];
      const n = seen.get(`${level} ${position}`) ?? 0;
      seen.set(`${level} ${position}`, n + 1);
      return [x(position) + BESIDE[n % 7] * 6, y(level) - Math.floor(n / 7) * 6];
    });
  }

  describe(node) {
    const { graph, tokens } = this.trace;
    const kind = graph.kinds[graph.kind[node]];
    const where = graph.position[node] >= 0 ? ` at ${graph.position[node]} ${tokens[graph.position[node]] ?? ""}` : "";
    const name = kind === "feature" ? withFaces(`feature ${graph.index[node]} of layer ${graph.layer[node]}`, this.trace) : kind;
    const count = (side) => side.filter((end) => end === node).length;
    const facts = `: value ${number(graph.value[node])}, influence ${number(graph.influence[node])}, `;
    return [element("b", {}, name, where), facts, `${count(graph.to)} edges in, ${count(graph.from)} out.`];
  }

  nodeAt(event) {
    const [px, py] = this.pixel(event);
    let [best, least] = [null, 64];
    this.places?.forEach(([x, y], i) => {
      const distance = (x - px) ** 2 + (y - py) ** 2;
      if (distance < least) [best, least] = [i, distance];
    });
    return best;
  }

  /** The edge under the pointer: the nearest curve within a few pixels. */
  edgeAt(event) {
    const [px, py] = this.pixel(event);
    let [best, least] = [null, 100];
    this.curves?.forEach(([x1, y1, cx, cy, x2, y2], i) => {
      for (let t = 0; t <= 1; t += 0.05) {
        const s = 1 - t;
        const [x, y] = [s * s * x1 + 2 * s * t * cx + t * t * x2, s * s * y1 + 2 * s * t * cy + t * t * y2];
        const distance = (x - px) ** 2 + (y - py) ** 2;
        if (distance < least) [best, least] = [i, distance];
      }
    });
    return best;
  }

  pixel(event) {
    const bounds = this.canvas.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top];
  }
}

/** From the top of one box to another: to its foot where it stands higher, else in a bow over what is between. */
function curveBetween(a, b) {
  if (b.bottom <= a.top - 4) return [a.cx, a.top, a.cx, (a.top + b.bottom) / 2 - 10, b.cx, b.bottom];
  const aside = Math.abs(b.cx - a.cx);
  const higher = b.top < a.top - 24;
  const end = higher
    ? [b.cx + (Math.sign(a.cx - b.cx) * b.width) / 2, Math.max(b.top + 14, a.top - 20 - 0.25 * aside)]
    : [b.cx, b.top];
  return [a.cx, a.top, (a.cx + end[0]) / 2, Math.min(a.top, end[1]) - 14 - 0.12 * aside, ...end];
}

function clipped(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, Math.max(most - 1, 1)).join("")}…` : text;
}

/** Boxes stay above their tokens: those that would overlap become narrower, those of one column share it. */
function fitBoxes(boxes, column, edge) {
  const beside = (a, b) => a.top < b.bottom && b.top < a.bottom;
  for (const box of boxes) box.home = box.cx;
  for (const box of boxes.filter(({ kind }) => kind === "say")) {
    box.width = Math.min(box.width, SAY - 8);
    box.cx = box.home + column / 2 + box.width / 2;
  }
  const settled = [];
  for (const box of boxes.filter(({ kind }) => kind !== "say")) {
    const same = settled.filter((other) => Math.abs(other.home - box.home) < 1 && beside(other, box));
    settled.push(box);
    if (!same.length) continue;
    const shared = [...same, box];
    const width = Math.max(column - 4, 24) / shared.length;
    shared.forEach((one, i) => {
      one.cx = box.home + (i - (shared.length - 1) / 2) * width;
      one.width = Math.min(one.width, width - 2);
    });
  }
  for (const a of boxes) {
    for (const b of boxes) {
      const gap = b.cx - a.cx;
      if (gap < 1 || !beside(a, b) || (a.width + b.width) / 2 + 4 <= gap) continue;
      // What is wider than half the gap gives way first.
      const half = gap / 2 - 2;
      if (Math.min(a.width, b.width) / 2 >= half) a.width = b.width = 2 * half;
      else if (a.width > b.width) a.width = 2 * (gap - 4) - b.width;
      else b.width = 2 * (gap - 4) - a.width;
    }
  }
  for (const box of boxes) box.width = Math.max(Math.min(box.width, 2 * (edge - box.cx), 2 * box.cx), 12);
}
