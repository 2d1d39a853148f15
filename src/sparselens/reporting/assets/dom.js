// Elements and numbers. Text always enters the page as text nodes; there is no innerHTML anywhere.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** element("p", { class: "note" }, "text", otherElement) */
export function element(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svgElement(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A head's name, everywhere: L11.H7. */
export const headName = (layer, head) => `L${layer}.H${head}`;

/** "a3.h1" of the files is head L3.H1, "m3" the MLP of layer 3. */
export const partName = (site) =>
  site.replace(/^a(\d+)\.h(\d+)/, (_, layer, head) => headName(layer, head)).replace(/^m(\d+)$/, "MLP $1");

let counter = 0;
const firstTime = (() => {
  try {
    const first = localStorage.getItem("sparselens-seen") === null;
    localStorage.setItem("sparselens-seen", "yes");
    return first;
  } catch {
    return false; // a page from disk may not remember anything
  }
})();
export const freshId = (stem) => `${stem}-${++counter}`;

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A number a person can read: 3 significant digits, thousands separated, never "1e-7" for zero. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 10 ** digits) return whole.format(value).replace("-", "−");
  if (size < 1e-4)
    return value
      .toExponential(Math.max(digits - 2, 0))
      .replace("e-", "e−")
      .replace(/^-/, "−");
  return Number(value.toPrecision(digits)).toString().replace("-", "−");
}

export function percent(share, digits = 3) {
  return share === null || share === undefined ? "–" : `${number(100 * share, digits)}\u00a0%`;
}

const ratio = (value) => (value >= 99.95 ? whole.format(value) : value < 0.095 ? value.toFixed(2) : value.toFixed(1));
const turned = ({ multiplier, low, high }) =>
  multiplier >= 1 ? [multiplier, low, high, "fewer"] : [1 / multiplier, 1 / high, 1 / low, "more"];

/** {multiplier, low, high} -> "2.2x fewer (1.9 to 2.5)", "1.9x more (1.2 to 2.4)": what the sparse model needs. */
export function fewer(row, interval = true) {
  if (!(row.multiplier > 0)) return "–"; // not measured
  const [value, , , word] = turned(row);
  return `${ratio(value)}x ${word}${interval ? ` (${fewer.interval(row)})` : ""}`;
}
fewer.interval = (row) => `${ratio(turned(row)[1])} to ${ratio(turned(row)[2])}`;

/** Radio buttons that look like one control. options: [[value, label], ...] */
export function segments(label, options, chosen, onChange) {
  const name = freshId("choice");
  const radios = options.map(([value, text]) =>
    element(
      "label",
      {},
      element("input", {
        type: "radio",
        name,
        value,
        checked: value === chosen,
        on: { change: () => onChange(value) },
      }),
      element("span", {}, text),
    ),
  );
  return element("fieldset", {}, element("legend", {}, label), element("div", { class: "segments" }, radios));
}

export function dropdown(label, options, chosen, onChange) {
  const id = freshId("select");
  const select = element(
    "select",
    { id, on: { change: () => onChange(select.value) } },
    options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)),
  );
  return element("div", {}, element("label", { for: id }, label, " "), select);
}

export function heading(section, text, lead) {
  return [element("h2", { id: `${section}-title` }, text), element("p", { class: "lead" }, lead)];
}

/** Open the first time a browser shows it; where nothing can be remembered, closed after that page. */
export function how(...paragraphs) {
  return element(
    "details",
    { class: "how", open: firstTime },
    element("summary", {}, "How to read this"),
    paragraphs.map((text) => element("p", {}, text)),
  );
}

/** headings: what stands in each column's head (or a ready <th>); rows: lists of cells, the first one heads its row. */
export function table(headings, rows, caption) {
  const head = headings.map((cell) => (cell.tagName === "TH" ? cell : element("th", { scope: "col" }, cell)));
  const body = rows.map(([first, ...cells]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, first),
      cells.map((cell) => element("td", {}, cell)),
    ),
  );
  return element(
    "table",
    {},
    caption ? element("caption", {}, caption) : null,
    element("thead", {}, element("tr", {}, head)),
    element("tbody", {}, body),
  );
}

/** What a section without rows says. */
export function emptyNotice(what, command) {
  return element("div", { class: "notice" }, element("p", {}, what), element("code", { class: "command" }, command));
}

export function swatch(role, text) {
  return element(
    "span",
    { class: role },
    element("span", { class: "swatch", "aria-hidden": "true" }),
    element("span", { class: "name" }, text),
  );
}
