// Interventions: what was predicted when a source is removed, and what happened in the real model.

import { element, number, table } from "./dom.js";
import { downloads } from "./download.js";
import { keepDrawn, palette } from "./palette.js";
import { Scene, toSvg } from "./scene.js";
import { scale } from "./axes.js";
import { withFaces } from "./features.js";

const known = (value) => value !== null && value !== undefined;

/** Both ways to remove a source: its own edges alone (MLPs held), and everything that follows from it. */
function pointsOf(edges) {
  const points = [];
  for (const edge of edges) {
    if (known(edge.predicted_direct) && known(edge.measured_direct))
      points.push({ x: edge.predicted_direct, y: edge.measured_direct, held: true });
    if (known(edge.predicted) && known(edge.measured))
      points.push({ x: edge.predicted, y: edge.measured, held: false });
  }
  return points;
}

function agreementWords(name, found) {
  const numbers = ["pearson", "spearman"]
    .filter((key) => known(found?.[key]))
    .map((key) => `${key} ${number(found[key], 2)}`);
  return numbers.length ? `${name}: ${numbers.join(", ")}, n = ${found.n}` : null;
}

export function checkPlot(trace) {
  const points = pointsOf(trace.edges);
  if (!points.length) return null;
  const plot = element("div", { class: "plot" });
  const label = `Predicted against measured change, ${points.length} interventions`;
  keepDrawn(plot, (width) => plot.replaceChildren(toSvg(checkScene(points, width), label)));
  const held = points.some((point) => point.held);
  const words = [
    agreementWords("MLPs held", trace.agreement_direct),
    agreementWords(held ? "all effects" : "agreement", trace.agreement),
  ];
  return element(
    "figure",
    { class: "card" },
    element(
      "div",
      { class: "card-head" },
      element("h3", {}, "Predicted against measured"),
      element("span", { class: "note" }, words.filter(Boolean).join("; ")),
      downloads(`interventions-${trace.role}`, {
        scene: () => checkScene(points, 640),
        json: () => points,
        csv: () => [Object.keys(points[0]), ...points.map((point) => Object.values(point))],
      }),
    ),
    plot,
    element(
      "p",
      { class: "note" },
      "A point is an edge: what removing its source should do to its target, and what it did in the real model. On the diagonal the picture is right. Axes in signed square roots.",
      held ? " Filled: only the edge's own path counts (MLPs held). Hollow: everything that follows counts." : "",
    ),
  );
}

/** Values of very different sizes share one picture: signed square roots. */
function checkScene(points, width) {
  const colours = palette();
  const side = Math.min(width, 320);
  const scene = new Scene(side, side);
  const root = (value) => Math.sign(value) * Math.sqrt(Math.abs(value));
  const most = Math.max(...points.flatMap(({ x, y }) => [Math.abs(x), Math.abs(y)]), 1e-12);
  const [left, bottom, right, top] = [52, side - 36, side - 10, 10];
  const [x, y] = [
    scale(-1.08 * root(most), 1.08 * root(most), left, right),
    scale(-1.08 * root(most), 1.08 * root(most), bottom, top),
  ];
  scene.rect(left, top, right - left, bottom - top, { stroke: colours.line });
  scene.line(left, bottom, right, top, { stroke: colours.soft, dash: [4, 4] });
  scene.line(x.at(0), bottom, x.at(0), top, { stroke: colours.grid });
  scene.line(left, y.at(0), right, y.at(0), { stroke: colours.grid });
  for (const point of points) {
    const look = point.held
      ? { fill: colours.accent, stroke: colours.card }
      : { fill: "none", stroke: colours.accent, thick: 1.5 };
    scene.circle(x.at(root(point.x)), y.at(root(point.y)), 4, { ...look, opacity: 0.85 });
  }
  const label = { fill: colours.soft, size: 11, anchor: "middle" };
  scene.text((left + right) / 2, bottom + 30, "predicted change", label);
  scene.text(13, (top + bottom) / 2, "measured change", { ...label, rotate: -90 });
  for (const value of [-most, 0, most]) {
    scene.text(x.at(root(value)), bottom + 15, number(value, 2), label);
    scene.text(left - 6, y.at(root(value)) + 4, number(value, 2), { ...label, anchor: "end" });
  }
  return scene;
}

/** The strongest edges between single nodes, removed one by one. */
export function singlesTable(trace) {
  if (!trace.singles.length) return null;
  const rows = trace.singles.map((row) => [
    [withFaces(row.source, trace), " → ", withFaces(row.target, trace)],
    number(row.weight),
    number(row.predicted_direct ?? row.predicted),
    number(row.measured_direct ?? row.measured),
  ]);
  return element(
    "div",
    { class: "card" },
    element(
      "div",
      { class: "card-head" },
      element("h3", {}, "Single features"),
      element("span", { class: "note" }, "the strongest, removed one by one, MLPs held"),
    ),
    element(
      "div",
      {
        class: "scroll tall wrap",
        tabindex: "0",
        role: "region",
        "aria-label": `Single features, ${trace.role} model`,
      },
      table(["Edge", "Weight", "Predicted", "Measured"], rows),
    ),
  );
}
