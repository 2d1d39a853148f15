// A picture as a list of shapes, drawn on a canvas (many shapes, fast), as SVG (few shapes, crisp, text stays text),
// and saved as either. One description, so that what is downloaded is what was seen.

import { svgElement } from "./dom.js";

const FONT = 'system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif';
const MONO = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace';

export class Scene {
  constructor(width, height) {
    Object.assign(this, { width, height, shapes: [] });
  }
  add(kind, shape) {
    this.shapes.push({ kind, ...shape });
    return this;
  }
  line(x1, y1, x2, y2, style) {
    return this.add("line", { x1, y1, x2, y2, ...style });
  }
  /** A line that bows out to (cx, cy). */
  curve(x1, y1, cx, cy, x2, y2, style) {
    return this.add("curve", { x1, y1, cx, cy, x2, y2, ...style });
  }
  /** points: [x, y, x, y, ...]; NaN lifts the pen. */
  path(points, style) {
    return this.add("path", { points, ...style });
  }
  circle(x, y, r, style) {
    return this.add("circle", { x, y, r, ...style });
  }
  rect(x, y, width, height, style) {
    return this.add("rect", { x, y, width, height, ...style });
  }
  /** Pixels, kept as they are however large they are drawn. */
  image(x, y, width, height, canvas) {
    return this.add("image", { x, y, width, height, canvas });
  }
  text(x, y, text, style) {
    return this.add("text", { x, y, text: String(text), ...style });
  }
}

/** Thousands of weak lines of one look are one stroke: ten times faster. Their dashes could not be told apart. */
export function weakLines() {
  const pens = new Map();
  return {
    add(x1, y1, x2, y2, style) {
      const key = Math.round(20 * style.opacity);
      if (!pens.has(key)) pens.set(key, { kind: "path", points: [], ...style, dash: null });
      pens.get(key).points.push(x1, y1, x2, y2, NaN, NaN);
    },
    shapes: () => pens.values(),
  };
}

const rounded = (value) => Math.round(value * 100) / 100;

function pathData(points, close) {
  let data = "",
    down = false;
  for (let i = 0; i < points.length; i += 2) {
    if (Number.isNaN(points[i + 1])) {
      down = false;
      continue;
    }
    data += `${down ? "L" : "M"}${rounded(points[i])} ${rounded(points[i + 1])}`;
    down = true;
  }
  return data + (close ? "Z" : "");
}

/** The scene as an <svg> element. */
export function toSvg(scene, label) {
  const root = svgElement("svg", {
    viewBox: `0 0 ${rounded(scene.width)} ${rounded(scene.height)}`,
    width: rounded(scene.width),
    height: rounded(scene.height),
    role: label ? "img" : null,
    "aria-label": label,
    "aria-hidden": label ? null : "true",
  });
  for (const s of scene.shapes) {
    const common = {
      stroke: s.stroke ?? null,
      "stroke-width": s.stroke ? (s.thick ?? 1) : null,
      "stroke-dasharray": s.dash?.join(" "),
      fill: s.fill ?? "none",
      opacity: s.opacity ?? null,
      "stroke-linecap": s.stroke ? "round" : null,
      "stroke-linejoin": s.stroke ? "round" : null,
    };
    if (s.kind === "line")
      root.append(
        svgElement("line", { x1: rounded(s.x1), y1: rounded(s.y1), x2: rounded(s.x2), y2: rounded(s.y2), ...common }),
      );
    else if (s.kind === "curve")
      root.append(
        svgElement("path", {
          d: `M${rounded(s.x1)} ${rounded(s.y1)}Q${rounded(s.cx)} ${rounded(s.cy)} ${rounded(s.x2)} ${rounded(s.y2)}`,
          ...common,
        }),
      );
    else if (s.kind === "image") {
      const [x, y, width, height] = [s.x, s.y, s.width, s.height].map(rounded);
      const href = s.canvas.toDataURL();
      root.append(svgElement("image", { x, y, width, height, href, "image-rendering": "pixelated" }));
    } else if (s.kind === "path") root.append(svgElement("path", { d: pathData(s.points, s.close), ...common }));
    else if (s.kind === "circle")
      root.append(svgElement("circle", { cx: rounded(s.x), cy: rounded(s.y), r: rounded(s.r), ...common }));
    else if (s.kind === "rect")
      root.append(
        svgElement("rect", {
          x: rounded(s.x),
          y: rounded(s.y),
          width: rounded(s.width),
          height: rounded(s.height),
          rx: s.radius ?? null,
          ...common,
        }),
      );
    else
      root.append(
        svgElement(
          "text",
          {
            x: rounded(s.x),
            y: rounded(s.y),
            fill: s.fill,
            "font-size": s.size ?? 12,
            "font-weight": s.weight ?? null,
            "text-anchor": s.anchor ?? "start",
            "dominant-baseline": s.baseline ?? null,
            "font-family": s.mono ? MONO : FONT,
            "xml:space": "preserve",
            transform: s.rotate ? `rotate(${s.rotate} ${rounded(s.x)} ${rounded(s.y)})` : null,
            opacity: s.opacity ?? null,
          },
          s.text,
        ),
      );
  }
  return root;
}

const BASELINES = { middle: "middle", hanging: "top", central: "middle" };
const ANCHORS = { start: "left", middle: "center", end: "right" };

/** The scene on a canvas context whose unit is a CSS pixel. */
export function paint(scene, context) {
  for (const s of scene.shapes) {
    context.globalAlpha = s.opacity ?? 1;
    if (s.kind === "text") {
      context.font = `${s.weight ?? 400} ${s.size ?? 12}px ${s.mono ? MONO : FONT}`;
      context.textAlign = ANCHORS[s.anchor ?? "start"];
      context.textBaseline = BASELINES[s.baseline] ?? "alphabetic";
      context.fillStyle = s.fill;
      context.save();
      context.translate(s.x, s.y);
      if (s.rotate) context.rotate((s.rotate * Math.PI) / 180);
      context.fillText(s.text, 0, 0);
      context.restore();
      continue;
    }
    if (s.kind === "image") {
      context.imageSmoothingEnabled = false;
      context.drawImage(s.canvas, s.x, s.y, s.width, s.height);
      continue;
    }
    context.beginPath();
    if (s.kind === "line") {
      context.moveTo(s.x1, s.y1);
      context.lineTo(s.x2, s.y2);
    } else if (s.kind === "curve") {
      context.moveTo(s.x1, s.y1);
      context.quadraticCurveTo(s.cx, s.cy, s.x2, s.y2);
    } else if (s.kind === "circle") context.arc(s.x, s.y, s.r, 0, 2 * Math.PI);
    else if (s.kind === "rect")
      s.radius ? context.roundRect(s.x, s.y, s.width, s.height, s.radius) : context.rect(s.x, s.y, s.width, s.height);
    else tracePath(context, s);
    if (s.fill && s.fill !== "none") {
      context.fillStyle = s.fill;
      context.fill();
    }
    if (s.stroke) {
      context.strokeStyle = s.stroke;
      context.lineWidth = s.thick ?? 1;
      context.lineCap = context.lineJoin = "round";
      context.setLineDash(s.dash ?? []);
      context.stroke();
    }
  }
  context.globalAlpha = 1;
  context.setLineDash([]);
}

function tracePath(context, { points, close }) {
  let down = false;
  for (let i = 0; i < points.length; i += 2) {
    if (Number.isNaN(points[i + 1])) {
      down = false;
      continue;
    }
    if (down) context.lineTo(points[i], points[i + 1]);
    else context.moveTo(points[i], points[i + 1]);
    down = true;
  }
  if (close) context.closePath();
}

/** Sizes a canvas in CSS pixels, sharp on this screen, and returns its cleared context. */
export function fit(canvas, width, height) {
  const ratio = Math.min(Math.max(devicePixelRatio || 1, 1), 3);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
