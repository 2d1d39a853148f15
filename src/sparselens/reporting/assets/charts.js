// Line charts that share one stretch of the x axis and one cursor: hover to read, drag to zoom, keys for both.

import { element, number } from "./dom.js";
import { drawAxes, scale } from "./axes.js";
import { keepDrawn, palette } from "./palette.js";
import { Scene, toSvg } from "./scene.js";
import { downloads } from "./download.js";

/** What charts side by side share: the stretch shown, the step pointed at, and who wants to know. */
export class Timeline {
  constructor(first, last) {
    Object.assign(this, { first, last, from: first, to: last, cursor: null, listeners: [] });
  }
  zoom(from, to) {
    const least = (this.last - this.first) / 200;
    if (to - from < least) return;
    [this.from, this.to] = [Math.max(this.first, from), Math.min(this.last, to)];
    this.tell("zoom");
  }
  reset() {
    this.zoom(this.first, this.last);
  }
  point(step) {
    this.cursor = step === null ? null : Math.min(Math.max(step, this.from), this.to);
    this.tell("cursor");
  }
  tell(what) {
    for (const listener of this.listeners) listener(what);
  }
}

const MARGIN = { left: 52, top: 12, right: 14, bottom: 40 };
const HEIGHT = 210;

/** One chart. lines: [{name, x, y, colour, style: "line" | "points" | "dashed" | "step"}]; marks: [{x, text}] */
export class LineChart {
  constructor({ title, unit, lines, timeline, log = false, marks = [], stem, format }) {
    Object.assign(this, { title, unit, timeline, log, marks, format: format ?? ((v) => number(v, 4)) });
    this.lines = lines.filter((line) => line.y.some((value) => value !== null && value !== undefined));
    this.plot = element("div", {
      class: "plot focusable",
      tabindex: "0",
      role: "application",
      "aria-label": `Chart: ${title}. Left and right move the cursor, plus and minus zoom, 0 shows everything.`,
    });
    this.legend = element(
      "div",
      { class: "legend" },
      this.lines.map((line) =>
        element(
          "span",
          { class: line.colour },
          element("i", { class: { dashed: "dashed", points: "dotted" }[line.style] ?? "", "aria-hidden": "true" }),
          element("span", { class: "name" }, line.name),
        ),
      ),
    );
    this.card = element(
      "figure",
      { class: "card", "data-chart": title },
      element(
        "div",
        { class: "card-head" },
        element("h3", {}, title),
        element("span", { class: "note" }, unit),
        downloads(stem, {
          scene: () => this.scene(this.plot.view.width, false),
          json: () => this.lines.map(({ name, x, y }) => ({ name, x, y })),
        }),
      ),
      this.plot,
      this.legend,
    );
    this.redraw = keepDrawn(this.plot, (width) => this.draw(width));
    timeline.listeners.push((what) => (what === "zoom" ? this.redraw() : this.moveCursor()));
    this.listen();
  }

  /** Lowest and highest value in the stretch shown. */
  range() {
    let [low, high] = [Infinity, -Infinity];
    for (const { x, y } of this.lines)
      for (let i = 0; i < x.length; i++) {
        const value = y[i];
        if (x[i] < this.timeline.from || x[i] > this.timeline.to || value === null || (this.log && value <= 0))
          continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    if (low > high) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return [low / 1.25, high * 1.25];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  scene(width, cursor = true) {
    const colours = palette();
    const scene = new Scene(width, HEIGHT);
    const box = { left: MARGIN.left, top: MARGIN.top, right: width - MARGIN.right, bottom: HEIGHT - MARGIN.bottom };
    const x = (this.x = scale(this.timeline.from, this.timeline.to, box.left, box.right));
    const y = (this.y = scale(...this.range(), box.bottom, box.top, this.log));
    this.box = box;
    drawAxes(scene, box, x, y, colours, { xTitle: "step", xTicks: Math.max(3, width / 110) });
    for (const mark of this.marks) {
      if (mark.x < x.from || mark.x > x.to) continue;
      const near = x.at(mark.x) > box.right - 90;
      scene.line(x.at(mark.x), box.top, x.at(mark.x), box.bottom, { stroke: colours.soft, dash: [2, 4] });
      scene.text(x.at(mark.x) + (near ? -5 : 5), box.top + 9, mark.text, {
        fill: colours.soft,
        size: 11,
        anchor: near ? "end" : "start",
      });
    }
    for (const line of this.lines) this.drawLine(scene, line, colours[line.colour] ?? colours.mark);
    if (cursor && this.timeline.cursor !== null) {
      const px = x.at(this.timeline.cursor);
      scene.line(px, box.top, px, box.bottom, { stroke: colours.ink, opacity: 0.5 });
    }
    return scene;
  }

  drawLine(scene, { x, y, style }, colour) {
    const points = [];
    for (let i = 0; i < x.length; i++) {
      const inside = x[i] >= this.timeline.from && x[i] <= this.timeline.to;
      const usable = y[i] !== null && y[i] !== undefined && (!this.log || y[i] > 0);
      if (inside) points.push(this.x.at(x[i]), usable ? this.y.at(y[i]) : NaN);
    }
    if (style === "points") {
      for (let i = 0; i < points.length; i += 2)
        if (!Number.isNaN(points[i + 1]))
          scene.circle(points[i], points[i + 1], 2.6, { fill: colour, stroke: palette().card });
    } else {
      scene.path(points, {
        stroke: colour,
        thick: style === "faint" ? 1 : 1.8,
        opacity: style === "faint" ? 0.45 : 1,
        dash: style === "dashed" ? [5, 4] : null,
      });
    }
  }

  draw(width) {
    this.plot.replaceChildren(
      toSvg(
        this.scene(width, false),
        `${this.title}, steps ${number(this.timeline.from)} to ${number(this.timeline.to)}`,
      ),
    );
    this.cursorLine = null;
    this.moveCursor();
  }

  /** Only one line moves; the chart itself is not drawn again. */
  moveCursor() {
    const svg = this.plot.firstChild;
    if (!svg) return;
    this.cursorLine?.remove();
    this.cursorLine = null;
    if (this.timeline.cursor === null) return;
    const px = this.x.at(this.timeline.cursor);
    const scene = new Scene(1, 1).line(px, this.box.top, px, this.box.bottom, { stroke: palette().ink, opacity: 0.6 });
    this.cursorLine = toSvg(scene).firstChild;
    svg.append(this.cursorLine);
  }

  /** [name, value, colour] of every line at the cursor. */
  readings() {
    return this.lines.map((line) => {
      const i = nearest(line.x, this.timeline.cursor);
      return [line.name, i === null ? "–" : this.format(line.y[i]), line.colour];
    });
  }

  listen() {
    const { plot, timeline } = this;
    const stepAt = (event) => this.x.back(event.clientX - plot.getBoundingClientRect().left);
    let start = null;
    plot.addEventListener("pointerdown", (event) => {
      start = event.pointerType === "mouse" ? stepAt(event) : null;
    });
    plot.addEventListener("pointermove", (event) => timeline.point(Math.round(stepAt(event))));
    plot.addEventListener("pointerleave", () => {
      start = null;
      timeline.point(null);
    });
    plot.addEventListener("pointerup", (event) => {
      const end = stepAt(event);
      if (start !== null && Math.abs(this.x.at(end) - this.x.at(start)) > 8)
        timeline.zoom(Math.min(start, end), Math.max(start, end));
      start = null;
    });
    plot.addEventListener("dblclick", () => timeline.reset());
    plot.addEventListener("keydown", (event) => {
      const span = timeline.to - timeline.from;
      const at = timeline.cursor ?? (timeline.from + timeline.to) / 2;
      const actions = {
        ArrowLeft: () => timeline.point(Math.round(at - span / (event.shiftKey ? 10 : 60))),
        ArrowRight: () => timeline.point(Math.round(at + span / (event.shiftKey ? 10 : 60))),
        "+": () => timeline.zoom(at - span / 4, at + span / 4),
        "=": () => timeline.zoom(at - span / 4, at + span / 4),
        "-": () => timeline.zoom(at - span, at + span),
        0: () => timeline.reset(),
        Escape: () => timeline.reset(),
      };
      if (actions[event.key]) {
        event.preventDefault();
        actions[event.key]();
      }
    });
  }
}

/** Index of the value nearest to the wanted one in a growing list. */
export function nearest(list, wanted) {
  if (!list.length || wanted === null) return null;
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= wanted) low = middle;
    else high = middle;
  }
  return Math.abs(list[low] - wanted) <= Math.abs(list[high] - wanted) ? low : high;
}
