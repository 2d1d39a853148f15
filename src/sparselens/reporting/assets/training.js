// Training: loss against its target, density, lambda, speed; where the open edges are, and how they went.

import { element, emptyNotice, headName, heading, how, number, percent, svgElement } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { LineChart, Timeline } from "./charts.js";
import { Scene, toSvg } from "./scene.js";
import { downloads } from "./download.js";
import { section } from "./sections.js";

section("training", (place, run) => {
  const rows = run.training;
  const lead = `${rows?.lead ?? "What happened while the model learnt."} Hover to read a step, drag to zoom.`;
  const title = heading("training", "Training", lead);
  if (!rows) {
    place.replaceChildren(
      ...title,
      emptyNotice("This Run has no metrics yet. This goes on with it, and training writes them:", run.commands.training),
    );
    return;
  }
  const steps = Object.values(rows.series)[0].step;
  const timeline = new Timeline(Math.min(steps[0], 1), Math.max(steps.at(-1), steps[0] + 1));
  const marks = rows.best_step ? [{ x: rows.best_step, text: "kept" }] : [];
  const charts = rows.charts.map((chart) => new LineChart({ ...chartOptions(chart, rows.series), timeline, marks }));
  const readout = element("p", { class: "readout", id: "training-readout", "aria-live": "polite" });
  timeline.listeners.push(() => sayStep(readout, timeline, charts));
  sayStep(readout, timeline, charts);
  const showAll = { class: "plain", type: "button", id: "zoom-reset", on: { click: () => timeline.reset() } };
  place.replaceChildren(
    ...title,
    how(...rows.how),
    element("div", { class: "controls" }, element("button", showAll, "Show all steps"), readout),
    element(
      "div",
      { class: "charts" },
      charts.map((chart) => chart.card),
    ),
    heatMaps(run, rows),
  );
});

function chartOptions(chart, series) {
  const { title, unit, log, share } = chart;
  const lines = chart.lines.map(({ name, of: [table, column], colour, style }) => {
    return { name, x: series[table].step, y: series[table][column], colour, style };
  });
  return { title, unit, log, lines, stem: title.toLowerCase(), format: share ? (value) => percent(value) : undefined };
}

/** The values of all charts at the step pointed at, or the steps shown. */
function sayStep(readout, timeline, charts) {
  if (timeline.cursor === null) {
    readout.replaceChildren(`Steps ${number(Math.round(timeline.from))} to ${number(Math.round(timeline.to))}.`);
    return;
  }
  const parts = charts.flatMap((chart) =>
    chart.readings().flatMap(([name, value]) => [` · ${chart.title.toLowerCase()} ${name} `, element("b", {}, value)]),
  );
  readout.replaceChildren("Step ", element("b", {}, number(timeline.cursor)), ...parts);
}

function heatMaps(run, rows) {
  const perHead = run.summary.per_head;
  const cards = [];
  if (rows.per_layer) {
    const { title, unit, step, values } = rows.per_layer;
    const name = (layer, i) => `layer ${layer}, step ${number(step[i])}`;
    cards.push(
      heatCard(title, unit, "per-layer", values, name, { xLabels: step.map((s) => number(s)), xTitle: "step" }),
    );
  } else if (perHead) {
    const text =
      "This Run's metrics do not have the density of single layers over time; newer Runs record it at every evaluation.";
    cards.push(element("div", { class: "notice" }, text));
  }
  if (perHead) {
    const unit = "density of every head at the end, log colour";
    const axes = { xLabels: perHead[0].map((_, i) => i), xTitle: "head" };
    cards.push(heatCard("Where the open edges are", unit, "density-per-head", perHead, headName, axes));
  }
  return element("div", { class: "charts stack-top" }, cards);
}

/** rows of densities -> a card with a heat map one can point at. */
function heatCard(title, unit, stem, values, name, { xLabels, xTitle }) {
  const plot = element("div", {
    class: "plot focusable",
    tabindex: "0",
    role: "application",
    "aria-label": `Heat map: ${title}. Arrow keys go from cell to cell.`,
  });
  const readout = element("p", { class: "readout", "aria-live": "polite" }, "Point at a cell to read it.");
  const lowest = Math.min(...values.flat().filter((v) => v > 0), 1);
  const shade = (value) =>
    value > 0 ? 0.12 + 0.88 * (1 - Math.log10(value) / Math.log10(Math.min(lowest, 0.999))) : 0;
  const build = (width) => {
    const colours = palette();
    const [rows, columns] = [values.length, values[0].length];
    const cell = { width: (width - 44 - 8) / columns, height: Math.max(7, Math.min(26, 190 / rows)) };
    const scene = new Scene(width, rows * cell.height + 42);
    values.forEach((row, i) => {
      const every = Math.ceil(rows / 16);
      if (i % every === 0)
        scene.text(36, (rows - 1 - i + 0.5) * cell.height + 4, i, { fill: colours.soft, size: 11, anchor: "end" });
      row.forEach((value, j) =>
        scene.rect(44 + j * cell.width, (rows - 1 - i) * cell.height, Math.max(cell.width - 1, 0.5), cell.height - 1, {
          fill: value > 0 ? colours.sparse : colours.well,
          opacity: value > 0 ? shade(value) : 1,
          radius: 2,
        }),
      );
    });
    const every = Math.ceil(columns / Math.max(2, width / 70));
    xLabels.forEach(
      (text, j) =>
        j % every === 0 &&
        scene.text(44 + (j + 0.5) * cell.width, rows * cell.height + 14, text, {
          fill: colours.soft,
          size: 11,
          anchor: "middle",
        }),
    );
    scene.text(44 + (columns * cell.width) / 2, rows * cell.height + 32, xTitle, {
      fill: colours.soft,
      size: 11,
      anchor: "middle",
    });
    scene.text(10, (rows * cell.height) / 2, "layer", { fill: colours.soft, size: 11, anchor: "middle", rotate: -90 });
    plot.cell = cell;
    return scene;
  };
  let at = null;
  const mark = () => {
    plot.querySelector(".at")?.remove();
    if (!at) return;
    const { width, height } = plot.cell;
    const place = { x: 44 + at[1] * width, y: (values.length - 1 - at[0]) * height, width, height };
    plot.firstChild.append(svgElement("rect", { class: "at", ...place, fill: "none", stroke: palette().ink }));
  };
  const point = (i, j) => {
    if (values[i]?.[j] === undefined) return;
    at = [i, j];
    readout.replaceChildren(name(i, j), ": ", element("b", {}, percent(values[i][j])));
    mark();
  };
  const [least, most] = [Math.min(...values.flat()), Math.max(...values.flat())];
  keepDrawn(plot, (width) => {
    plot.replaceChildren(toSvg(build(width), `${title}: from ${percent(least)} to ${percent(most)}`));
    mark();
  });
  plot.addEventListener("pointermove", (event) => {
    const bounds = plot.getBoundingClientRect();
    const j = Math.floor((event.clientX - bounds.left - 44) / plot.cell.width);
    point(values.length - 1 - Math.floor((event.clientY - bounds.top) / plot.cell.height), j);
  });
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    if (at) point(at[0] + step[0], at[1] + step[1]);
    else point(0, 0);
  });
  return element(
    "figure",
    { class: "card" },
    element(
      "div",
      { class: "card-head" },
      element("h3", {}, title),
      element("span", { class: "note" }, unit),
      downloads(stem, { scene: () => build(plot.view.width), json: () => values }),
    ),
    plot,
    readout,
  );
}
