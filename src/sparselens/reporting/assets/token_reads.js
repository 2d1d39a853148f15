// Tokens: point at one to see what it reads (to its left) and who reads it (to its right), layer by layer.

import { element, number } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { fit } from "./scene.js";

/** A token as it stands in the prompt; only line ends, which would show as nothing, get a sign. */
export const visible = (token) => (token === "\n" ? "⏎" : token === "" ? "∅" : token);

/** Whether the words of a picture do not fit beside each other: then all of them are turned. */
export function crowded(tokens, step) {
  return tokens.some((token) => 6.6 * Math.min(9, [...printed(token)].length) + 3 > step);
}

const printed = (token) => visible(token).trim() || "␣";

/** A word under (or, with `above`, over) its place. */
export function tokenLabel(scene, x, y, token, { fill, upright, above = false }) {
  const letters = [...printed(token)];
  const text = letters.length > 9 ? [...letters.slice(0, 8), "…"].join("") : letters.join("");
  if (upright) scene.text(x, y, text, { fill, size: 12, anchor: "middle", mono: true });
  else scene.text(x + 4, above ? y : y - 7, text, { fill, size: 10.5, mono: true, rotate: -65, anchor: above ? "start" : "end" });
}

/** The prompt as buttons. onPoint(token or null) while pointing, onPin(token) on click. */
export function tokenStrip(tokens, onPoint, onPin) {
  const buttons = tokens.map((token, i) =>
    element(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        "data-token": i,
        on: {
          pointerenter: () => onPoint(i),
          pointerleave: () => onPoint(null),
          focus: () => onPoint(i),
          blur: () => onPoint(null),
          click: () => onPin(i),
        },
      },
      element("span", {}, visible(token)),
      element("small", { "aria-hidden": "true" }, i),
    ),
  );
  return {
    list: element(
      "ul",
      { class: "tokens", "aria-label": "Prompt, token by token" },
      buttons.map((button) => element("li", {}, button)),
    ),
    buttons,
  };
}

const LEFT = 26;

/** Layers by tokens around one token: a heat map whose left half is what it reads, whose right half is who reads it. */
export class Lens {
  constructor(role, onPoint, onPin) {
    Object.assign(this, { role, maps: null, token: null });
    this.canvas = element("canvas", { role: "img" });
    this.box = element("div", { class: "plot" }, this.canvas);
    this.redraw = keepDrawn(this.box, (width) => this.draw(width));
    this.canvas.addEventListener("pointermove", (event) => onPoint(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => onPoint(null));
    this.canvas.addEventListener("click", (event) => onPin(this.at(event)));
  }
  at(event) {
    const token = Math.floor((event.clientX - this.canvas.getBoundingClientRect().left - LEFT) / this.column);
    return token >= 0 && token < this.maps.size ? token : null;
  }
  show(maps, token) {
    Object.assign(this, { maps, token });
    this.redraw();
  }
  draw(width) {
    if (!this.maps) return;
    const { layers, size, tokens, role } = this.maps;
    const colours = palette();
    const row = Math.max(4, Math.min(14, 130 / layers));
    const named = size <= 32;
    const base = layers * row + 16;
    this.column = (width - LEFT) / size;
    const context = fit(this.canvas, width, base + (named ? 46 : 4));
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.soft;
    context.textBaseline = "middle";
    const token = this.token ?? size - 1;
    const values = this.maps.around(token);
    const middle = LEFT + (token + 0.5) * this.column;
    this.caption(context, middle, width);
    for (let layer = 0; layer < layers; layer++) {
      const y = 16 + (layers - 1 - layer) * row;
      context.globalAlpha = 1;
      if (row > 10 || layer % 3 === 0) {
        context.fillStyle = colours.soft;
        context.textAlign = "right";
        context.fillText(layer, LEFT - 6, y + row / 2);
      }
      for (let i = 0; i < size; i++) {
        const x = LEFT + i * this.column;
        context.globalAlpha = 1;
        context.fillStyle = colours.well;
        context.fillRect(x, y, this.column - 1, row - 1);
        if (values[layer][i] > 0) {
          context.globalAlpha = Math.min(1, Math.max(0.12, Math.sqrt(values[layer][i])));
          context.fillStyle = colours[role];
          context.fillRect(x, y, this.column - 1, row - 1);
        }
      }
    }
    context.globalAlpha = 1;
    context.strokeStyle = colours.mark;
    context.lineWidth = 1.5;
    context.strokeRect(LEFT + token * this.column - 0.5, 15.5, this.column, layers * row);
    if (named) this.names(context, tokens, base, token, colours);
    this.canvas.setAttribute("aria-label", `${role} model, token ${token}: ${strongest(values, token)}`);
  }
  caption(context, middle, width) {
    context.textAlign = middle > 120 ? "right" : "left";
    if (middle > 60) context.fillText("← reads", Math.max(middle - 10, LEFT + 50), 7);
    context.textAlign = "left";
    if (middle < width - 80) context.fillText("is read by →", middle + 10, 7);
  }
  names(context, tokens, base, chosen, colours) {
    context.font = "11px ui-monospace, Menlo, Consolas, monospace";
    tokens.forEach((token, i) => {
      const text = visible(token).trim() || "␣";
      context.save();
      context.translate(LEFT + (i + 0.5) * this.column, base + 6);
      context.fillStyle = i === chosen ? colours.mark : colours.soft;
      if (text.length > 1) {
        context.rotate(Math.PI / 4);
        context.textAlign = "left";
      } else context.textAlign = "center";
      context.fillText(text.length > 8 ? `${[...text].slice(0, 7).join("")}…` : text, 0, 0);
      context.restore();
    });
  }
}

/** The strongest links of a token in words, for those who do not see the picture. */
function strongest(values, token) {
  const found = values
    .flatMap((row, layer) => [...row].map((value, i) => ({ layer, i, value })))
    .filter(({ value }) => value > 0.01);
  const told = found
    .sort((a, b) => b.value - a.value)
    .slice(0, 4)
    .map(
      ({ layer, i, value }) =>
        `${i <= token ? "reads" : "is read by"} token ${i} in layer ${layer} (mean weight ${number(value, 2)})`,
    );
  return told.join("; ") || "no link above 0.01";
}
