// One edge of the attribution graph, opened: the heads that carry it, their maps, why they look there.

import { element, headName, number, percent, table } from "./dom.js";
import { keepDrawn, palette } from "./palette.js";
import { fit } from "./scene.js";
import { atlas } from "./maps.js";
import { mapDownloads } from "./saved_maps.js";
import { withFaces } from "./features.js";

const MOST_MAPS = 60;

export const nameOf = ({ layer, head }) => headName(layer, head);

/** "carried at 80 % by": the heads, a map each, the links, what closing or removing them was predicted and measured to do. */
export function edgeDetail(trace, edge, maps, onLook) {
  const [source, target] = [trace.clusters[edge.source], trace.clusters[edge.target]];
  const main = trace.main && trace.edges[trace.main.edge] === edge ? trace.main : null;
  const facts = [
    ["weight", number(edge.weight)],
    ["one change of position", share(edge.single_hop, edge.weight)],
    ["several", share(edge.multi_hop, edge.weight)],
    ["through no head", share(edge.direct, edge.weight)],
    ["removing the source: predicted, measured", changes(edge.predicted, edge.measured)],
    ["the same with MLPs held", changes(edge.predicted_direct, edge.measured_direct)],
    ["and predicted along the cut", number(edge.predicted_path)],
    ["closing its links: predicted, measured", main ? changes(main.predicted, main.measured) : "–"],
    ["cutting these heads, of cutting the edge (measured)", percent(main?.heads_share, 2)],
  ].filter(([, value]) => value !== "–");
  return element(
    "div",
    { class: "stack edge-detail" },
    element(
      "div",
      { class: "card-head" },
      element("h3", {}, source.name, " → ", target.name),
      maps && edge.heads.length ? mapDownloads(`heads-${source.name}-${target.name}`, () => ({ maps, view: "weights", some: carriers(edge) })) : null,
    ),
    element(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
    ),
    edge.heads.length
      ? element(
          "p",
          {},
          "Carried at 80 % by ",
          element("b", {}, edge.heads.map(nameOf).join(", ")),
          ` (${edge.heads.length} of ${trace.n_layers * trace.n_heads} heads)`,
        )
      : element("p", { class: "note" }, "No head is named for this edge."),
    maps
      ? element(
          "div",
          { class: "head-maps" },
          edge.heads.slice(0, MOST_MAPS).map((head) => headMap(maps, head, edge)),
          edge.heads.length > MOST_MAPS
            ? element("p", { class: "note" }, `and ${edge.heads.length - MOST_MAPS} more`)
            : null,
        )
      : null,
    beyond(edge, main)
      ? element(
          "p",
          { class: "note" },
          "Shares above 100 % or below 0 %: parts of an edge may have opposite signs and cancel. Signed, they add up to 100 %. Of a cut: the heads together undo some of what a few of them do.",
        )
      : null,
    linkTable(trace, edge, onLook),
  );
}

const carriers = (edge) => ({
  heads: edge.heads.slice(0, MOST_MAPS).map(({ layer, head }) => [layer, head]),
  marks: [...edge.arrival, ...edge.departure],
});

/** Whether any share that is shown lies outside of what shares usually do. */
function beyond(edge, main) {
  const parts = [edge.single_hop, edge.multi_hop, edge.direct, ...edge.heads.map((head) => head.share)];
  const shares = [...parts, ...edge.arrival.slice(0, 8).map((link) => link.share)].map((part) => part / edge.weight);
  return [...shares, main?.heads_share ?? 0].some((value) => value > 1.005 || value < -0.005);
}

const changes = (predicted, measured) =>
  predicted === null || predicted === undefined ? "–" : `${number(predicted)}, ${number(measured)}`;
const share = (part, whole) => (part === null || part === undefined || !whole ? "–" : percent(part / whole, 2));

/** A small map, keys across, queries upward, the links of this edge marked. */
function headMap(maps, head, edge) {
  const canvas = element("canvas", {
    role: "img",
    "aria-label": `Attention of ${nameOf(head)}; the links that carry this edge are marked`,
  });
  const box = element("div", { class: "plot" }, canvas);
  const marks = [...edge.arrival, ...edge.departure].filter(
    (link) => link.layer === head.layer && link.head === head.head,
  );
  keepDrawn(box, (width) => {
    const side = Math.min(width, 120);
    const context = fit(canvas, side, side);
    const colours = palette();
    const unit = side / maps.size;
    context.fillStyle = colours.well;
    context.beginPath();
    context.moveTo(0, side);
    context.lineTo(0, 0);
    context.lineTo(side, 0);
    context.fill();
    context.imageSmoothingEnabled = unit < 1;
    context.drawImage(
      atlas(maps, "weights"),
      head.head * maps.size,
      head.layer * maps.size,
      maps.size,
      maps.size,
      0,
      0,
      side,
      side,
    );
    context.strokeStyle = colours.mark;
    context.lineWidth = Math.max(1.5, unit / 8);
    for (const { query, key } of marks.slice(0, 3))
      context.strokeRect(
        key * unit + 0.5,
        (maps.size - 1 - query) * unit + 0.5,
        Math.max(unit - 1, 2),
        Math.max(unit - 1, 2),
      );
  });
  return element(
    "figure",
    {},
    element(
      "figcaption",
      {},
      nameOf(head),
      head.share === null ? "" : element("small", {}, ` ${share(head.share, edge.weight)}`),
    ),
    box,
  );
}

function linkTable(trace, edge, onLook) {
  const rows = edge.arrival.slice(0, 8);
  if (!rows.length) return null;
  const looks = new Map(trace.looks.map((look) => [`${look.layer} ${look.head} ${look.query} ${look.key}`, look]));
  const token = (position) => trace.tokens[position] ?? "";
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Links that bring this edge to its target" },
    table(
      ["Head", "Query → key", "Share", "Margin"],
      rows.map((link) => {
        const look = looks.get(`${link.layer} ${link.head} ${link.query} ${link.key}`);
        const on = { click: () => onLook(look) };
        return [
          look
            ? element("button", { class: "says", type: "button", "data-look": nameOf(link), on }, nameOf(link))
            : nameOf(link),
          element("span", { class: "says" }, `${token(link.query)} ${link.query} → ${token(link.key)} ${link.key}`),
          share(link.share, edge.weight),
          look ? number(look.margin) : "–",
        ];
      }),
      "Links that bring it to its target",
    ),
  );
}

/** Why a head looks there: its logit as a sum of terms between what the query and what the key are made of. */
export function lookDetail(look, trace = {}) {
  const largest = Math.max(...look.terms.map((term) => Math.abs(term.term)), 1e-12);
  return element(
    "div",
    { class: "stack look-detail" },
    element("h3", {}, `Why ${nameOf(look)} looks from ${look.query} to ${look.key}`),
    element(
      "p",
      { class: "note" },
      `attention logit ${number(look.logit)}`,
      look.margin === null || look.margin === undefined
        ? ""
        : `, gate margin ${number(look.margin)}: ${look.margin > 0 ? "open" : "closed"}`,
      `; all other terms together ${number(look.rest)}`,
    ),
    element(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Terms of the attention logit" },
      table(
        ["Query side", "Key side", "Term", element("span", { class: "unseen" }, "size")],
        look.terms.slice(0, 12).map((term) => {
          const bar = element("div", { class: term.term < 0 ? "term negative" : "term" });
          bar.style.width = `${(80 * Math.abs(term.term)) / largest}px`;
          const [query, key] = [term.query_source, term.key_source].map((name) => withFaces(String(name), trace));
          return [query, key, number(term.term), bar];
        }),
      ),
    ),
    look.closing?.length
      ? element(
          "p",
          {},
          "Without ",
          element("b", {}, look.closing.slice(0, 5).join(", or ")),
          " alone, the gate would close.",
        )
      : null,
  );
}
