// What was kept in a studio: experiments with what was measured, circuits of typed sentences. Also on the offline page.

import { element, number, percent, table } from "./dom.js";
import { ROLE_NAMES } from "./data.js";
import { changesInWords, wordAt } from "./studio_state.js";

const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

/** onRemove(id) puts a button beside each; onOpen(row) another. */
export function keptList(kept, onOpen, onRemove) {
  if (!kept.length) return element("p", { class: "note" }, "Nothing has been kept yet.");
  return element(
    "ol",
    { class: "kept" },
    kept.map((row) =>
      element(
        "li",
        { class: "card", id: row.id ? `kept-${row.id}` : null },
        row.kind === "circuit" ? circuitCard(row) : experimentCard(row),
        element(
          "p",
          {},
          onOpen && row.kind === "experiment" ? small("Open", () => onOpen(row)) : null,
          " ",
          onRemove ? small("Remove", () => onRemove(row.id)) : null,
          " ",
          row.id ? element("a", { href: `#kept-${row.id}` }, "Its address") : null,
        ),
      ),
    ),
  );
}

const small = (text, click) => element("button", { type: "button", class: "plain", on: { click } }, text);

function experimentCard(row) {
  const changes = changesInWords(row.changes, row.tokens);
  return [
    element("p", { class: "says" }, row.text + (row.more?.length ? row.tokens.slice(-row.more.length).join("") : "")),
    element(
      "p",
      {},
      `${ROLE_NAMES[row.role] ?? row.role} model, answer “${row.says.trim()}”: probability ${percent(row.p_before)} before, ${percent(row.p_after)} after. `,
      `Log-odds changed by ${signed(row.after - row.before)} nats (measured); ${signed(row.predicted)} predicted to first order.`,
    ),
    element("ul", { class: "note" }, changes.map(([, , words]) => element("li", {}, words))),
  ];
}

export function circuitCard(row) {
  const name = ROLE_NAMES[row.role] ?? row.role;
  const rows = row.edges
    .slice(0, 24)
    .map(([layer, head, query, key, share]) => [
      `L${layer}.H${head}`,
      wordAt(row.tokens, query),
      wordAt(row.tokens, key),
      signed(share),
    ]);
  return [
    element("p", { class: "says" }, `${row.clean}  |  ${row.corrupted}`),
    element(
      "p",
      {},
      `${name} model: ${number(row.n_edges)} of ${number(row.n_possible)} attention edges alone keep ${percent(row.effect)} of what attention does for “${[row.answer].flat().map((text) => text.trim()).join("” or “")}” on this one prompt, the others removed.`,
    ),
    element(
      "details",
      {},
      element("summary", {}, "The edges"),
      element("div", { class: "scroll" }, table(["head", "reads at", "from", "share, nats"], rows)),
    ),
  ];
}
