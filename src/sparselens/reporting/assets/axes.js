// Scales and axes, linear and logarithmic.

import { number } from "./dom.js";

/** A scale from values to pixels: {at, back, ticks, log}. */
export function scale(from, to, start, end, log = false) {
  const map = log ? Math.log10 : (x) => x;
  const [low, high] = [map(from), map(to)];
  const span = high - low || 1;
  return {
    log,
    from,
    to,
    at: (value) => start + ((map(value) - low) / span) * (end - start),
    back: (pixel) => {
      const value = low + ((pixel - start) / (end - start)) * span;
      return log ? 10 ** value : value;
    },
    ticks: (count = 5) => (log ? logTicks(from, to, count) : linearTicks(from, to, count)),
  };
}

function linearTicks(from, to, count) {
  const raw = (to - from) / Math.max(count, 1);
  if (!(raw > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const ticks = [];
  for (let value = Math.ceil(from / step) * step; value <= to + step * 1e-9; value += step)
    ticks.push(Number(value.toPrecision(12)));
  return ticks;
}

function logTicks(from, to, count) {
  const [low, high] = [Math.ceil(Math.log10(from) - 1e-9), Math.floor(Math.log10(to) + 1e-9)];
  if (high - low < 1) {
    const fine = [];
    for (let power = low - 1; power <= high; power++) for (const f of [1, 2, 5]) fine.push(f * 10 ** power);
    return fine.filter((value) => value >= from * 0.999 && value <= to * 1.001);
  }
  const step = Math.max(1, Math.ceil((high - low + 1) / (count + 1)));
  const ticks = [];
  for (let power = low; power <= high; power += step) ticks.push(10 ** power);
  return ticks;
}

export function tickLabel(value, log) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (log && (size >= 1e6 || size < 1e-3)) {
    const power = String(Math.round(Math.log10(size)));
    return `10${[...power].map((c) => ({ "-": "⁻" })[c] ?? "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join("")}`;
  }
  if (size >= 10_000) return `${number(value / 1000)}k`;
  return number(value);
}

/** Grid lines, tick labels and axis titles into a scene. box: {left, top, right, bottom} */
export function drawAxes(scene, box, x, y, colours, { xTitle, yTitle, yFormat, xTicks = 6, yTicks = 4 } = {}) {
  const label = { fill: colours.soft, size: 11 };
  for (const value of y.ticks(yTicks)) {
    const py = y.at(value);
    scene.line(box.left, py, box.right, py, { stroke: colours.grid });
    scene.text(box.left - 7, py + 3.5, yFormat ? yFormat(value) : tickLabel(value, y.log), { ...label, anchor: "end" });
  }
  scene.line(box.left, box.bottom, box.right, box.bottom, { stroke: colours.soft, opacity: 0.5 });
  for (const value of x.ticks(xTicks)) {
    const px = x.at(value);
    scene.line(px, box.bottom, px, box.bottom + 4, { stroke: colours.soft, opacity: 0.5 });
    scene.text(px, box.bottom + 16, tickLabel(value, x.log), { ...label, anchor: "middle" });
  }
  if (xTitle) scene.text((box.left + box.right) / 2, box.bottom + 33, xTitle, { ...label, anchor: "middle" });
  if (yTitle) scene.text(12, (box.top + box.bottom) / 2, yTitle, { ...label, anchor: "middle", rotate: -90 });
}
