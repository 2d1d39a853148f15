// Attention maps to keep: all heads of a model, or one head with its words, as a picture and as numbers.

import { element } from "./dom.js";
import { downloads } from "./download.js";
import { atlas } from "./maps.js";
import { palette } from "./palette.js";
import { Scene } from "./scene.js";
import { tokenLabel, visible } from "./token_reads.js";

const [MAP_SIDE, MAP_EDGE] = [64, 34]; // of a map among many, of the room for names

/** Buttons for maps. shown: () => { maps, view, head: [layer, head] or null, some: a list of such heads and marks, or null }. */
export function mapDownloads(stem, shown) {
  return downloads(stem, {
    scene: () => (shown().some ? someScene : shown().head ? headScene : gridScene)(shown()),
    json: () => ({ model: shown().maps.role, tokens: shown().maps.tokens, columns: PAIR_COLUMNS, pairs: pairs(shown()) }),
    csv: () => [PAIR_COLUMNS, ...pairs(shown())],
  });
}

const PAIR_COLUMNS = ["layer", "head", "query", "key", "weight", "margin"];

/** Every pair with weight, and what its gate says where there are gates. */
function pairs({ maps, head, some }) {
  const found = [];
  const wanted = some?.heads ?? (head ? [head] : null);
  for (let layer = 0; layer < maps.layers; layer++)
    for (let h = 0; h < maps.heads; h++) {
      if (wanted && !wanted.some(([a, b]) => a === layer && b === h)) continue;
      for (let query = 0; query < maps.size; query++)
        for (let key = 0; key <= query; key++) {
          const weight = maps.weight(layer, h, query, key);
          if (weight > 0) found.push([layer, h, query, key, weight, maps.margin(layer, h, query, key)]);
        }
    }
  return found;
}

/** One head out of the picture of all, one pixel per pair. */
function cropped({ maps, view }, layer, head) {
  const canvas = element("canvas", { width: maps.size, height: maps.size });
  canvas.getContext("2d").drawImage(atlas(maps, view), -head * maps.size, -layer * maps.size);
  return canvas;
}

function gridScene(shown) {
  const { layers, heads } = shown.maps;
  const colours = palette();
  const scene = new Scene(MAP_EDGE + heads * MAP_SIDE + 8, layers * MAP_SIDE + MAP_EDGE);
  for (let layer = 0; layer < layers; layer++) {
    const y = (layers - 1 - layer) * MAP_SIDE + 6;
    scene.text(MAP_EDGE - 8, y + MAP_SIDE / 2 + 4, `L${layer}`, { fill: colours.soft, size: 12, anchor: "end" });
    for (let head = 0; head < heads; head++) {
      const x = MAP_EDGE + head * MAP_SIDE;
      scene.path([x, y, x, y + MAP_SIDE - 4, x + MAP_SIDE - 4, y], { fill: colours.well, close: true });
      scene.image(x, y, MAP_SIDE - 4, MAP_SIDE - 4, cropped(shown, layer, head));
    }
  }
  for (let head = 0; head < heads; head++)
    scene.text(MAP_EDGE + (head + 0.5) * MAP_SIDE - 2, layers * MAP_SIDE + 22, `H${head}`, { fill: colours.soft, size: 12, anchor: "middle" });
  return scene;
}

/** Heads beside each other, each with its name and the links that matter marked: marks [{layer, head, query, key}]. */
function someScene(shown) {
  const { maps, some } = shown;
  const colours = palette();
  const [columns, side] = [Math.min(6, some.heads.length), 128];
  const scene = new Scene(columns * (side + 16) + 16, Math.ceil(some.heads.length / columns) * (side + 30) + 12);
  some.heads.forEach(([layer, head], i) => {
    const [x, y] = [16 + (i % columns) * (side + 16), 26 + Math.floor(i / columns) * (side + 30)];
    scene.text(x, y - 7, `L${layer}.H${head}`, { fill: colours.ink, size: 12, weight: 600 });
    scene.path([x, y, x, y + side, x + side, y], { fill: colours.well, close: true });
    scene.image(x, y, side, side, cropped(shown, layer, head));
    const unit = side / maps.size;
    for (const mark of some.marks)
      if (mark.layer === layer && mark.head === head)
        scene.rect(x + mark.key * unit, y + (maps.size - 1 - mark.query) * unit, unit, unit, { stroke: colours.mark, thick: 1.5 });
  });
  return scene;
}

function headScene(shown) {
  const { maps, head } = shown;
  const colours = palette();
  const unit = Math.max(11, Math.min(24, 480 / maps.size));
  const [left, top, side] = [86, 30, unit * maps.size];
  const scene = new Scene(left + side + 16, top + side + 76);
  scene.text(left, 18, `L${head[0]}.H${head[1]}`, { fill: colours.ink, size: 13, weight: 600 });
  scene.path([left, top, left, top + side, left + side, top], { fill: colours.well, close: true });
  scene.image(left, top, side, side, cropped(shown, ...head));
  maps.tokens.forEach((token, i) => {
    const y = top + (maps.size - 0.5 - i) * unit + 4;
    const text = [...(visible(token).trim() || "␣")].slice(0, 10).join("");
    scene.text(left - 6, y, text, { fill: colours.ink, size: 10.5, mono: true, anchor: "end" });
    tokenLabel(scene, left + (i + 0.5) * unit, top + side + 20, token, { fill: colours.ink, upright: false });
  });
  return scene;
}
