// The edges of a prompt that can be touched: tokens across, input below, one line per edge; a click closes its gate.

import { element, number, svgElement } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { Scene, toSvg } from "./scene.js";
import { wordAt } from "./studio_state.js";
import { crowded, tokenLabel } from "./token_reads.js";

const DRAWN = 160;

export class EdgeField {
  /** onTouch([layer, head, query, key]) */
  constructor(onTouch) {
    this.onTouch = onTouch;
    this.plot = element("div", { class: "plot edge-field" });
    const name = { tabindex: "0", role: "region", "aria-label": "Picture of the edges" };
    this.box = element("div", { class: "scroll", ...name }, this.plot); // a long prompt on a phone
    this.redraw = keepDrawn(this.plot, (width) => this.draw(width));
  }
  /** edges: [layer, head, query, key, effect], largest effect first; lit: generated token to light up, or null. */
  show(maps, edges, state, lit = null) {
    Object.assign(this, { maps, edges: edges.slice(0, DRAWN), state, lit });
    this.plot.style.minWidth = `${Math.min(900, 60 + 14 * maps.size)}px`;
    this.redraw();
  }
  draw(width) {
    if (!this.maps) return;
    const label = `The ${this.edges.length} edges of the ${this.maps.role} model that matter most to the answer. The table below has the same edges as buttons.`;
    const root = toSvg(this.scene(width), label);
    for (const { place, x1, y1, x2, y2, title } of this.lines)
      root.append(
        svgElement(
          "line",
          {
            ...{ x1, y1, x2, y2 },
            class: "touch",
            stroke: "transparent",
            "stroke-width": 12,
            "data-edge": place.join("."),
            on: { click: () => this.onTouch(place) },
          },
          svgElement("title", {}, title),
        ),
      );
    this.plot.replaceChildren(root);
  }
  /** As it is shown, and as it is saved. */
  scene(width) {
    const { layers, size, tokens, role } = this.maps;
    const colours = palette();
    const rise = Math.max(9, Math.min(90, 300 / layers));
    const left = 34;
    const step = (width - left - 24) / Math.max(size - 1, 1);
    const upright = !crowded(tokens, step);
    const below = upright ? 32 : 68;
    const scene = new Scene(width, layers * rise + below + 22);
    const x = (position) => left + position * step;
    const y = (level) => scene.height - below - level * rise;
    const closed = new Set(this.state.closed.map(String));
    const silenced = new Set(this.state.silenced.map(String));
    for (let level = 0; level <= layers; level++)
      for (let i = 0; i < size; i++) scene.circle(x(i), y(level), 1.6, { fill: colours.line });
    const largest = Math.abs(this.edges[0]?.[4] ?? 1) || 1;
    this.lines = [];
    for (const [layer, head, query, key, effect] of [...this.edges].reverse()) {
      const place = [layer, head, query, key];
      const off = closed.has(String(place)) || silenced.has(String([layer, head]));
      const lit = this.lit !== null && query === this.lit;
      const share = Math.abs(effect) / largest;
      const line = { x1: x(key), y1: y(layer), x2: x(query), y2: y(layer + 1) };
      scene.line(line.x1, line.y1, line.x2, line.y2, {
        stroke: off ? colours.mark : lit ? colours.accent : colours[role],
        thick: 1 + 4 * share,
        opacity: off || lit ? 1 : 0.25 + 0.75 * share,
        dash: off ? [3, 4] : null,
      });
      const title = `L${layer}.H${head}: ${wordAt(tokens, query)} reads ${wordAt(tokens, key)}, weight ${number(this.maps.weight(...place))}. Closing it should change the log-odds by ${number(effect)}.`;
      this.lines.push({ place, ...line, title });
    }
    for (let level = 1; level <= layers; level += layers > 14 ? 5 : 1)
      scene.text(left - 10, y(level - 0.5) + 4, `L${level - 1}`, { fill: colours.soft, size: 10, anchor: "end" });
    tokens.forEach((token, i) => tokenLabel(scene, x(i), y(0) + 20, token, { upright, fill: colours.ink }));
    return scene;
  }
}
