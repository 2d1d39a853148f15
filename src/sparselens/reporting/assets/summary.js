// Summary: one sentence, one table, what met its target and what did not; provenance at the foot.

import { element, emptyNotice, number, percent, swatch, table } from "./dom.js";
import { ROLE_NAMES } from "./data.js";
import { Flow, FLOW_TOKENS } from "./flow.js";
import { withTerms } from "./glossary.js";
import { HeadGrid, loadMaps } from "./maps.js";
import { mapDownloads } from "./saved_maps.js";
import { section } from "./sections.js";

const STATES = { met: ["✓", "met"], care: ["!", "look twice"], missed: ["✕", "not met"], open: ["–", "open"] };

section("summary", (place, run, others) => {
  const { summary } = run;
  const opening = element("div", { class: "stack" });
  place.replaceChildren(
    element("h1", { id: "summary-title" }, summary.sentence),
    summary.story ? story(summary.story) : "",
    opening,
    verdictList(summary.verdicts),
    summary.facts.length ? factTable(summary) : "",
    summary.table.length
      ? element(
          "div",
          { class: "card stack", id: "summary-table" },
          comparisonTable(summary),
          others.map((other) => (other.summary.table.length ? comparisonTable(other.summary) : null)),
        )
      : summary.facts.length
        ? ""
        : emptyNotice("This Run has not finished; its end fills the table. This goes on with it:", run.commands.summary),
  );
  beforeAndAfter(opening, run.attention);
});

/** What was done, what it cost, what became simpler, and the one number of figure 2. */
function story({ sentences, number: one }) {
  return element(
    "div",
    { class: "story" },
    one
      ? element(
          "p",
          { class: "one-number", id: "one-number" },
          element("b", {}, one.value),
          element("span", {}, withTerms(one.what)),
          element("small", {}, withTerms(one.spread)),
        )
      : null,
    element(
      "ol",
      {},
      sentences.map((sentence) => element("li", {}, withTerms(sentence))),
    ),
  );
}

/** The attention of one prompt, dense and sparse: a line per word that some head reads; of a long one, a map per head. */
async function beforeAndAfter(place, rows) {
  const shown = rows?.prompts.filter((one) => one.models.sparse) ?? [];
  const short = shown.find((one) => one.tokens.length <= FLOW_TOKENS);
  const prompt = short ?? shown[0];
  const dense = prompt && ["dense", "control"].find((role) => prompt.models[role]);
  if (!dense) return;
  const filled = rows.filled || 1;
  const made = await Promise.all(
    [dense, "sparse"].map(async (role) => {
      const [model, maps] = [prompt.models[role], await loadMaps(rows.shape, prompt, role)];
      const title = role === "sparse" ? "After: sparse" : `Before: ${ROLE_NAMES[role].toLowerCase()}`;
      if (!short) {
        const grid = new HeadGrid(role, () => {});
        grid.show(maps, "weights", [-9, -9], null); // no head is chosen
        grid.canvas.removeAttribute("tabindex");
        grid.canvas.setAttribute("role", "img");
        grid.canvas.setAttribute("aria-label", `Attention maps of all heads, ${role} model: ${model.open} edges`);
        const note = element("span", { class: "note" }, `${number(model.open)} edges`);
        const save = mapDownloads(`attention-${role}`, () => ({ maps, view: "weights", head: null }));
        return element("figure", { class: "card" }, element("div", { class: "card-head" }, element("h3", {}, title), note, save), grid.box);
      }
      const flow = new Flow(role, title, () => {});
      flow.show(maps, model.says.map((text, i) => (i < model.says.length - filled ? null : text)), model.open, null);
      return flow.card;
    }),
  );
  place.replaceChildren(
    element("div", { class: "pair" }, made),
    element(
      "p",
      { class: "note" },
      short
        ? "Words of one prompt across, the input below. A line is a word that some head reads in that layer, dark where it reads much."
        : "One prompt. Each small square is a head: words across are read, words upward read; dark means much, blank nothing at all.",
    ),
  );
}

function factTable(summary) {
  const facts = summary.facts.map(([name, value]) => [element("dt", {}, name), element("dd", {}, number(value, 4))]);
  return element("div", { class: "card" }, element("dl", { class: "facts" }, facts));
}

function verdictList(verdicts) {
  return element(
    "ul",
    { class: "verdicts", "aria-label": "What met its target" },
    verdicts.map(({ state, label, detail, sentence }) =>
      element(
        "li",
        { class: state },
        element("span", { class: "sign", "aria-hidden": "true" }, STATES[state][0]),
        element(
          "details",
          {},
          element(
            "summary",
            {},
            element("span", { class: "sentence" }, sentence),
            element("span", { class: "word" }, STATES[state][1]),
          ),
          element("p", { class: "detail" }, element("span", { class: "label" }, `${label}: `), withTerms(detail)),
        ),
      ),
    ),
  );
}

function comparisonTable(summary) {
  const rows = summary.table;
  const any = (name) => rows.some((row) => row[name] !== null && row[name] !== undefined);
  const task = summary.task;
  const columns = [
    [
      "Loss",
      "nats",
      (row) => [
        number(row.loss, 4),
        row.loss_standard_error ? element("small", {}, ` ± ${number(row.loss_standard_error, 2)}`) : null,
      ],
    ],
    any("kl_to_base") && ["KL to base", "nats", (row) => number(row.kl_to_base)],
    summary.exact && ["Exactly right", "share", (row) => percent(row.exact, 4)],
    ["Density", "open of possible", (row) => percent(row.density)],
    any("edges_per_query") && [
      "Edges per query",
      "and head",
      (row) => (row.edges_per_query === null ? "–" : number(row.edges_per_query)),
    ],
    any("circuit_edges") && [
      "Circuit",
      `${summary.counted} for 90 % of ${task}`,
      (row) => ofTotal(row.circuit_edges, row.circuit_total),
    ],
    any("heads_edges") && ["Heads", `for 90 % of ${task}`, (row) => ofTotal(row.heads_edges, row.heads_total)],
  ].filter(Boolean);
  const caption = `${summary.title} (${summary.run}), ${number(rows[0].sequences)} held-out sequences; loss ± standard error`;
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${summary.title}` },
    table(
      ["Model", ...columns.map(([name, unit]) => [name, element("br"), element("small", {}, unit)])],
      rows.map((row) => [
        swatch(row.role === "base" ? "dense" : row.role, ROLE_NAMES[row.role]),
        ...columns.map(([, , show]) => show(row)),
      ]),
      caption,
    ),
  );
}

function ofTotal(part, total) {
  return part === undefined || part === null ? "–" : [number(Math.round(part)), element("small", {}, ` of ${number(total)}`)];
}

export function showProvenance(footer, runs) {
  footer.replaceChildren(
    element("h2", {}, "Where this comes from"),
    ...runs.map(({ summary }) => {
      const { versions = {}, command, commit, python } = summary.provenance;
      const facts = [
        ["run", summary.run],
        ["command", command],
        ["commit", commit],
        [
          "versions",
          [python && `python ${python}`, ...Object.entries(versions).map(([name, version]) => `${name} ${version}`)]
            .filter(Boolean)
            .join(", "),
        ],
        ["settings", summary.settings.map(([name, value]) => `${name} ${value}`).join(", ")],
      ];
      return element(
        "dl",
        {},
        facts.filter(([, value]) => value).map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
      );
    }),
    element("p", {}, "This page is one file. It loads nothing and sends nothing."),
  );
}
