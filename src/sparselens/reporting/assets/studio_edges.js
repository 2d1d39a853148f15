// The edges of a prompt that can be touched: tokens across, input below, one line per edge; a click closes its gate.

import { element, number, svgElement } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { crowded, visible } from "./token_reads.js";

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
    const { layers, size, tokens, role } = this.maps;
    const colours = palette();
    const rise = Math.max(9, Math.min(90, 300 / layers));
    const height = layers * rise + 74;
    const left = 34;
    const step = (width - left - 24) / Math.max(size - 1, 1);
    const x = (position) => left + position * step;
    const y = (level) => height - 52 - level * rise;
    const closed = new Set(this.state.closed.map(String));
    const silenced = new Set(this.state.silenced.map(String));
    const root = svgElement("svg", {
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "img",
      "aria-label": `The ${this.edges.length} edges of the ${role} model that matter most to the answer. The table below has the same edges as buttons.`,
    });
    for (let level = 0; level <= layers; level++)
      for (let i = 0; i < size; i++)
        root.append(svgElement("circle", { cx: x(i), cy: y(level), r: 1.6, fill: colours.line }));
    const largest = Math.abs(this.edges[0]?.[4] ?? 1) || 1;
    for (const [layer, head, query, key, effect] of [...this.edges].reverse()) {
      const place = [layer, head, query, key];
      const off = closed.has(String(place)) || silenced.has(String([layer, head]));
      const lit = this.lit !== null && query === this.lit;
      const share = Math.abs(effect) / largest;
      const line = { x1: x(key), y1: y(layer), x2: x(query), y2: y(layer + 1) };
      const title = `L${layer}.H${head}: “${tokens[query]}” reads “${tokens[key]}”, weight ${number(this.maps.weight(layer, head, query, key))}. Closing it should change the log-odds by ${number(effect)}.`;
      root.append(
        svgElement("line", {
          ...line,
          stroke: off ? colours.mark : lit ? colours.accent : colours[role],
          "stroke-width": 1 + 4 * share,
          "stroke-opacity": off || lit ? 1 : 0.25 + 0.75 * share,
          "stroke-dasharray": off ? "3 4" : null,
          "stroke-linecap": "round",
        }),
        svgElement(
          "line",
          {
            ...line,
            class: "touch",
            stroke: "transparent",
            "stroke-width": 12,
            "data-edge": place.join("."),
            on: { click: () => this.onTouch(place) },
          },
          svgElement("title", {}, title),
        ),
      );
    }
    for (let level = 1; level <= layers; level += layers > 14 ? 5 : 1)
      root.append(
        svgElement(
          "text",
          { x: left - 10, y: y(level - 0.5) + 4, fill: colours.soft, "font-size": 10, "text-anchor": "end" },
          `L${level - 1}`,
        ),
      );
    const tilted = crowded(tokens, step);
    tokens.forEach((token, i) => {
      const text = visible(token).trim() || "␣";
      root.append(
        svgElement(
          "text",
          {
            x: x(i),
            y: y(0) + 16,
            fill: colours.ink,
            "font-size": 11,
            "text-anchor": tilted ? "end" : "middle",
            transform: tilted ? `rotate(-65 ${x(i)} ${y(0) + 16})` : null,
          },
          text.length > 12 ? `${text.slice(0, 11)}…` : text,
        ),
      );
    });
    this.plot.replaceChildren(root);
  }
}
