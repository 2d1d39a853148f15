// Colours come from the style sheet, so that pictures follow the theme; views redraw when it or their width changes.

const views = new Set();
let forPrint = false;
let cached = null;

const PRINT = {
  ink: "#1b2130",
  soft: "#545e71",
  line: "#e2e5eb",
  grid: "#eceef2",
  well: "#f3f4f7",
  card: "#ffffff",
  dense: "#1f5fbf",
  control: "#667085",
  sparse: "#b8510a",
  accent: "#1f5fbf",
  mark: "#c8102e",
};

/** {ink, soft, line, dense, sparse, ...} of the theme in use. */
export function palette() {
  if (forPrint) return PRINT;
  if (!cached) {
    const style = getComputedStyle(document.documentElement);
    cached = Object.fromEntries(Object.keys(PRINT).map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return cached;
}

/** "#1f5fbf" -> [31, 95, 191] */
export function rgb(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const view = target.view;
    if (view && contentRect.width > 0 && Math.abs(contentRect.width - view.width) > 1) {
      view.width = contentRect.width;
      view.draw(view.width);
    }
  }
});

/** Calls draw(width) now, and again whenever the container's width or the theme changes. Returns a redraw function. */
export function keepDrawn(container, draw) {
  const view = { container, draw, width: 0 };
  container.view = view;
  views.add(view);
  sizes.observe(container);
  return () => view.width > 0 && draw(view.width);
}

export function redrawAll() {
  cached = null;
  for (const view of views) {
    if (!view.container.isConnected) views.delete(view);
    else if (view.width > 0) view.draw(view.width);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("beforeprint", () => {
  forPrint = true;
  redrawAll();
});
addEventListener("afterprint", () => {
  forPrint = false;
  redrawAll();
});
