// The flow of a short prompt: positions across, layers upward, one line per pair that some head connects.

import { element, number } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { fit, paint, Scene } from "./scene.js";
import { downloads } from "./download.js";
import { crowded, tokenLabel } from "./token_reads.js";

export const FLOW_TOKENS = 16;
const FLOW_COLUMNS = ["layer", "query", "key", "weight"]; // of a line

/** Heads of a layer are one line: the strongest of them. */
function links(maps) {
  const found = [];
  for (let layer = 0; layer < maps.layers; layer++)
    for (let query = 0; query < maps.size; query++)
      for (let key = 0; key <= query; key++) {
        let weight = 0;
        for (let head = 0; head < maps.heads; head++) weight = Math.max(weight, maps.weight(layer, head, query, key));
        if (weight > 0) found.push([layer, query, key, weight]);
      }
  return found;
}

export class Flow {
  constructor(role, title, onPoint) {
    Object.assign(this, { role, token: null });
    this.canvas = element("canvas", { role: "img" });
    this.box = element("div", { class: "plot" }, this.canvas);
    this.redraw = keepDrawn(this.box, (width) => paint(this.scene(width), fit(this.canvas, width, this.height)));
    this.note = element("span", { class: "note" });
    this.card = element(
      "figure",
      { class: "card" },
      element(
        "div",
        { class: "card-head" },
        element("h3", {}, title),
        this.note,
        downloads(`flow-${role}`, {
          scene: () => this.scene(this.box.view.width),
          json: () => ({ model: role, tokens: this.maps.tokens, columns: FLOW_COLUMNS, lines: this.links }),
          csv: () => [FLOW_COLUMNS, ...this.links],
        }),
      ),
      this.box,
    );
    this.canvas.addEventListener("pointermove", (event) => {
      const token = Math.round((event.clientX - this.canvas.getBoundingClientRect().left - this.left) / this.step);
      onPoint(token >= 0 && token < this.maps.size ? token : null);
    });
    this.canvas.addEventListener("pointerleave", () => onPoint(null));
  }
  show(maps, answer, open, token) {
    if (this.maps !== maps) this.links = links(maps);
    Object.assign(this, { maps, answer, token });
    this.note.textContent = `${number(open)} edges`;
    this.canvas.setAttribute("aria-label", `Flow of the prompt through the ${this.role} model: ${open} edges`);
    this.redraw();
  }
  scene(width) {
    const colours = palette();
    const { layers, size, tokens } = this.maps ?? { layers: 1, size: 1, tokens: [""] };
    const rise = Math.max(20, Math.min(56, 300 / layers));
    this.left = 58;
    this.step = (width - this.left - 22) / Math.max(size - 1, 1);
    const answers = (this.answer ?? []).filter((token) => token !== null);
    const upright = !crowded([...tokens, ...answers], this.step);
    const room = upright ? 46 : 64; // below and above
    this.height = layers * rise + 2 * room;
    const scene = new Scene(width, this.height);
    const x = (position) => this.left + position * this.step;
    const y = (level) => this.height - room - level * rise;
    for (let position = 0; position < size; position++)
      scene.line(x(position), y(0), x(position), y(layers), { stroke: colours.line, dash: [1, 3] });
    for (const [layer, query, key, weight] of this.links ?? []) {
      const lit = this.token === null || query === this.token || key === this.token;
      scene.line(x(key), y(layer), x(query), y(layer + 1), {
        stroke: colours[this.role],
        thick: 0.6 + 2 * weight,
        opacity: (lit ? 1 : 0.12) * Math.min(1, 0.06 + 0.94 * weight),
      });
    }
    for (let level = 0; level <= layers; level++) {
      for (let position = 0; position < size; position++)
        scene.circle(x(position), y(level), 3, {
          fill: colours.card,
          stroke: position === this.token ? colours.mark : colours.soft,
        });
      if (level)
        scene.text(this.left - 14, y(level) + 4, `layer ${level - 1}`, { fill: colours.soft, size: 11, anchor: "end" });
    }
    tokens.forEach((token, i) =>
      tokenLabel(scene, x(i), y(0) + 20, token, { upright, fill: i === this.token ? colours.mark : colours.ink }),
    );
    this.answer?.forEach(
      (token, i) => token !== null && tokenLabel(scene, x(i), y(layers) - 14, token, { upright: upright || answers.length === 1, above: true, fill: colours.ink }),
    );
    return scene;
  }
}
