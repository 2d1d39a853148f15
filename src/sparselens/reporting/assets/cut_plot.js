// Edges cut one by one: what the picture predicted, at the uncut model and along the cut, against what happened.

import { element, number, percent } from "./dom.js";
import { downloads } from "./download.js";
import { keepDrawn, palette } from "./palette.js";
import { Scene, toSvg } from "./scene.js";
import { scale } from "./axes.js";

const AIM = { pearson_path: 0.9, spearman_path: 0.8, sign_agreement: 0.95 };
const root = (value) => Math.sign(value) * Math.sqrt(Math.abs(value));

/** null for a trace made before edges were cut. */
export function cutPlot(trace) {
  const { cut } = trace;
  if (!cut?.n) return null;
  const points = [...cut.cluster_rows, ...cut.feature_rows];
  const plot = element("div", { class: "plot" });
  const label = `Predicted against measured change, ${points.length} edges cut`;
  keepDrawn(plot, (width) => plot.replaceChildren(toSvg(cutScene(points, width), label)));
  const kinds = [
    ["between clusters", cut.clusters],
    ["of single features", cut.features],
    ["within a position", cut.within],
  ].filter(([, found]) => found?.n);
  return element(
    "figure",
    { class: "card" },
    element(
      "div",
      { class: "card-head" },
      element("h3", {}, "Cutting it does what the picture says"),
      element("span", { class: good(cut) === false ? "note missed" : "note" }, MARKS[good(cut)], figures(cut)),
        downloads(`cuts-${trace.role}`, {
          scene: () => cutScene(points, 640),
          json: () => points,
          csv: () => [Object.keys(points[0]), ...points.map((point) => Object.values(point))],
        }),
    ),
    plot,
    element(
      "p",
      { class: "note" },
      "A point is an edge, cut in the real model with its MLPs held. Filled: predicted along the cut, as norms move; hollow: at the uncut model, the edge's weight. On the diagonal the prediction came true. Axes in signed square roots.",
    ),
    element("ul", { class: "note" }, kinds.map(([name, found]) => element("li", {}, `${name}: ${figures(found)}, weights alone ${number(found.pearson_tangent, 2)}`))),
    cut.norms === null
      ? null
      : element("p", { class: "note" }, `What weights miss: norms ${percent(cut.norms, 2)}, attention patterns ${percent(cut.patterns, 2)} of all measured change, sizes added up (above 100 % where weights say more than happens).`),
  );
}

// Whether predictions came true; null where too few edges were cut to say.
const good = (cut) => {
  const known = Object.entries(AIM).filter(([name]) => cut[name] !== null);
  return known.length ? known.every(([name, aim]) => cut[name] >= aim) : null;
};
const MARKS = { true: "✓ ", false: "✕ ", null: "" };

const figures = (found) =>
  `Pearson ${number(found.pearson_path, 2)}, Spearman ${number(found.spearman_path, 2)}, sign right in ${percent(found.sign_agreement, 3)} of ${found.n_signs} large effects, n = ${found.n}`;

function cutScene(points, width) {
  const colours = palette();
  const side = Math.min(width, 320);
  const scene = new Scene(side, side);
  const most = Math.max(...points.flatMap(({ path, measured }) => [Math.abs(path), Math.abs(measured)]), 1e-12);
  const [left, bottom, right, top] = [52, side - 36, side - 10, 10];
  const end = 1.15 * root(most);
  const [x, y] = [scale(-end, end, left, right), scale(-end, end, bottom, top)];
  const inside = (value) => Math.max(-end, Math.min(end, root(value)));
  scene.rect(left, top, right - left, bottom - top, { stroke: colours.line });
  scene.line(left, bottom, right, top, { stroke: colours.soft, dash: [4, 4] });
  scene.line(x.at(0), bottom, x.at(0), top, { stroke: colours.grid });
  scene.line(left, y.at(0), right, y.at(0), { stroke: colours.grid });
  for (const { tangent, measured } of points)
    scene.circle(x.at(inside(tangent)), y.at(root(measured)), 3, { fill: "none", stroke: colours.soft, opacity: 0.6 });
  for (const { path, measured } of points)
    scene.circle(x.at(root(path)), y.at(root(measured)), 3.2, { fill: colours.accent, stroke: colours.card, opacity: 0.9 });
  const label = { fill: colours.soft, size: 11, anchor: "middle" };
  scene.text((left + right) / 2, bottom + 30, "predicted change", label);
  scene.text(13, (top + bottom) / 2, "measured change", { ...label, rotate: -90 });
  for (const value of [-most, 0, most]) {
    scene.text(x.at(root(value)), bottom + 15, number(value, 2), label);
    scene.text(left - 6, y.at(root(value)) + 4, number(value, 2), { ...label, anchor: "end" });
  }
  return scene;
}
