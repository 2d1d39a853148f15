// Attention of one model on one prompt, and the grid of all its heads.

import { element, headName } from "./dom.js";
import { decode } from "./data.js";
import { keepDrawn, palette, rgb } from "./palette.js";
import { fit } from "./scene.js";

const OUTSIDE = -32768;

/** weight and margin of (layer, head, query, key); pairs with key > query do not exist. */
export class Maps {
  constructor(role, { n_layers: layers, n_heads: heads }, tokens, weights, margins) {
    Object.assign(this, { role, layers, heads, tokens, weights, margins, size: tokens.length });
    this.pairs = (this.size * (this.size + 1)) / 2;
  }
  place(layer, head, query, key) {
    return (layer * this.heads + head) * this.pairs + (query * (query + 1)) / 2 + key;
  }
  weight(layer, head, query, key) {
    return this.weights.values[this.place(layer, head, query, key)] * this.weights.scale;
  }
  /** G = S + b; null where the model has no gates or the mask no such pair. */
  margin(layer, head, query, key) {
    const raw = this.margins?.values[this.place(layer, head, query, key)];
    return raw === undefined || raw === OUTSIDE ? null : raw * this.margins.scale;
  }
  /** Mean over heads of what a token reads (keys before it, itself included) and who reads it (queries after it), [layers][tokens]. */
  around(token) {
    return Array.from({ length: this.layers }, (_, layer) => {
      const row = new Float64Array(this.size);
      for (let head = 0; head < this.heads; head++) {
        for (let key = 0; key <= token; key++) row[key] += this.weight(layer, head, token, key);
        for (let query = token + 1; query < this.size; query++) row[query] += this.weight(layer, head, query, token);
      }
      return row.map((value) => value / this.heads);
    });
  }
}

export async function loadMaps(shape, prompt, role) {
  const model = prompt.models[role];
  if (!model) return null;
  const [weights, margins] = await Promise.all([decode(model.weights), model.margin ? decode(model.margin) : null]);
  return new Maps(role, shape, prompt.tokens, weights, margins);
}

const pictures = new WeakMap();

/** One pixel per pair, all heads side by side: drawn once per theme, then only scaled. view: "weights" or "margins". */
export function atlas(maps, view) {
  const colours = palette();
  const name = maps.margins ? view : "weights";
  if (pictures.get(maps)?.colours !== colours) pictures.set(maps, { colours });
  const kept = pictures.get(maps);
  return (kept[name] ??= drawAtlas(maps, name));
}

function drawAtlas(maps, view) {
  const { layers, heads, size } = maps;
  const image = new ImageData(heads * size, layers * size);
  const colours = palette();
  const [open, closed] = [rgb(colours[maps.role]), rgb(colours.soft)];
  const margins = view === "margins" && maps.margins;
  for (let layer = 0; layer < layers; layer++)
    for (let head = 0; head < heads; head++) {
      let place = maps.place(layer, head, 0, 0);
      for (let query = 0; query < size; query++) {
        const rowStart = ((layer * size + (size - 1 - query)) * heads * size + head * size) * 4;
        for (let key = 0; key <= query; key++, place++) {
          let alpha,
            colour = open;
          if (margins) {
            const raw = margins.values[place];
            if (raw === OUTSIDE) continue;
            const value = raw * margins.scale;
            colour = raw > 0 ? open : closed;
            alpha = raw > 0 ? 0.45 + 0.55 * Math.min(1, value / 6) : 0.5 * Math.exp(value / 4);
          } else {
            const weight = maps.weights.values[place] * maps.weights.scale;
            alpha = weight > 0 ? Math.max(Math.sqrt(weight), maps.margins ? 0.3 : 0) : 0;
          }
          const at = rowStart + key * 4;
          image.data[at] = colour[0];
          image.data[at + 1] = colour[1];
          image.data[at + 2] = colour[2];
          image.data[at + 3] = 255 * Math.min(1, alpha);
        }
      }
    }
  const canvas = element("canvas", { width: image.width, height: image.height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

const LABEL = 26;

/** All heads of one model as small maps; layer 0 at the bottom. Calls onChoose(layer, head) on click or Enter. */
export class HeadGrid {
  constructor(role, onChoose) {
    this.role = role;
    this.onChoose = onChoose;
    this.canvas = element("canvas", { class: "focusable", tabindex: "0", role: "application" });
    this.box = element("div", { class: "plot" }, this.canvas);
    this.redraw = keepDrawn(this.box, (width) => this.draw(width));
    this.chosen = [0, 0];
    this.canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("pointermove", (event) => {
      this.hover = this.at(event);
      this.overlay();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.hover = null;
      this.overlay();
    });
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[event.key];
      if (!step || !this.maps) return;
      event.preventDefault();
      const [layer, head] = [this.chosen[0] + step[0], this.chosen[1] + step[1]];
      if (layer >= 0 && layer < this.maps.layers && head >= 0 && head < this.maps.heads) this.choose([layer, head]);
    });
  }
  choose(at) {
    if (at) this.onChoose(...at);
  }
  show(maps, view, chosen, token) {
    Object.assign(this, { maps, view, token });
    this.mark(chosen, false);
    this.redraw();
  }
  /** Another head is chosen: only the frame around it moves. */
  mark(chosen, drawn = true) {
    const { layers, heads } = this.maps;
    this.chosen = chosen;
    this.canvas.setAttribute(
      "aria-label",
      `Attention maps of ${layers} layers of ${heads} heads, ${this.role} model; ${headName(...chosen)} is chosen. Arrow keys choose another.`,
    );
    if (drawn) this.overlay();
  }
  at(event) {
    if (!this.cell) return null;
    const bounds = this.canvas.getBoundingClientRect();
    const head = Math.floor((event.clientX - bounds.left - LABEL) / this.cell);
    const layer = this.maps.layers - 1 - Math.floor((event.clientY - bounds.top) / this.cell);
    return head >= 0 && head < this.maps.heads && layer >= 0 && layer < this.maps.layers ? [layer, head] : null;
  }
  draw(width) {
    if (!this.maps) return;
    const { layers, heads, size } = this.maps;
    this.theme = palette();
    const picture = atlas(this.maps, this.view);
    this.cell = Math.min((width - LABEL) / heads, 96, Math.max(24, 900 / layers)); // the head below stays near
    const [w, h] = [LABEL + this.cell * heads, this.cell * layers + 20];
    const context = fit(this.canvas, w, h);
    context.imageSmoothingEnabled = this.cell < size;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let layer = 0; layer < layers; layer++) {
      const y = (layers - 1 - layer) * this.cell;
      context.fillStyle = this.theme.soft;
      context.textAlign = "right";
      if (this.cell > 11 || layer % 2 === 0) context.fillText(`L${layer}`, LABEL - 6, y + this.cell / 2);
      for (let head = 0; head < heads; head++) {
        const x = LABEL + head * this.cell;
        context.fillStyle = this.theme.well;
        context.beginPath(); // the pairs that exist
        context.moveTo(x + 1, y + this.cell - 1);
        context.lineTo(x + 1, y + 1);
        context.lineTo(x + this.cell - 1, y + 1);
        context.fill();
        context.drawImage(picture, head * size, layer * size, size, size, x + 1, y + 1, this.cell - 2, this.cell - 2);
      }
    }
    context.fillStyle = this.theme.soft;
    context.textAlign = "center";
    for (let head = 0; head < heads; head++)
      context.fillText(this.cell > 22 ? `H${head}` : head, LABEL + (head + 0.5) * this.cell, this.cell * layers + 11);
    this.clean = null;
    this.overlay();
  }
  /** Chosen head, hovered head and the token's row and column, over a copy of the finished grid. */
  overlay() {
    if (!this.maps || !this.cell) return;
    const context = this.canvas.getContext("2d");
    const ratio = this.canvas.width / (LABEL + this.cell * this.maps.heads);
    if (!this.clean) {
      this.clean = element("canvas", { width: this.canvas.width, height: this.canvas.height });
      this.clean.getContext("2d").drawImage(this.canvas, 0, 0);
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.clean, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const { layers, heads, size } = this.maps;
    if (this.token !== null && this.token !== undefined) {
      const unit = (this.cell - 2) / size;
      context.fillStyle = this.theme.mark;
      context.globalAlpha = 0.28;
      for (let layer = 0; layer < layers; layer++)
        for (let head = 0; head < heads; head++) {
          const [x, y] = [LABEL + head * this.cell + 1, layer * this.cell + 1];
          context.fillRect(x, y + (size - 1 - this.token) * unit, unit * (this.token + 1), Math.max(unit, 1));
          context.fillRect(x + this.token * unit, y, Math.max(unit, 1), unit * (size - 1 - this.token));
        }
      context.globalAlpha = 1;
    }
    for (const [at, colour, thick] of [
      [this.hover, this.theme.soft, 1],
      [this.chosen, this.theme.ink, 2],
    ]) {
      if (!at) continue;
      context.strokeStyle = colour;
      context.lineWidth = thick;
      context.strokeRect(
        LABEL + at[1] * this.cell + 0.5,
        (layers - 1 - at[0]) * this.cell + 0.5,
        this.cell - 1,
        this.cell - 1,
      );
    }
  }
}
