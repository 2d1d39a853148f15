// Summary: one sentence, one table, what met its target and what did not; provenance at the foot.

import { element, emptyNotice, number, percent, swatch, table } from "./dom.js";
import { ROLE_NAMES } from "./data.js";

const STATES = { met: ["✓", "met"], care: ["!", "look twice"], missed: ["✕", "not met"], open: ["–", "open"] };

export function showSummary(section, run, others) {
  const { overview } = run;
  section.replaceChildren(
    element("h1", { id: "summary-title" }, overview.sentence),
    verdictList(overview.verdicts),
    overview.facts.length ? factTable(overview) : "",
    overview.table.length
      ? element(
          "div",
          { class: "card stack", id: "summary-table" },
          comparisonTable(overview),
          others.map((other) => (other.overview.table.length ? comparisonTable(other.overview) : null)),
        )
      : overview.facts.length
        ? ""
        : emptyNotice("This Run has not finished; its end fills the table. This goes on with it:", run.commands.overview),
  );
}

function factTable(overview) {
  const facts = overview.facts.map(([name, value]) => [element("dt", {}, name), element("dd", {}, number(value, 4))]);
  return element("div", { class: "card" }, element("dl", { class: "facts" }, facts));
}

function verdictList(verdicts) {
  return element(
    "ul",
    { class: "verdicts", "aria-label": "What met its target" },
    verdicts.map(({ state, label, detail }) =>
      element(
        "li",
        { class: state },
        element("span", { class: "sign", "aria-hidden": "true" }, STATES[state][0]),
        element(
          "span",
          {},
          element("span", { class: "label" }, label),
          element("span", { class: "word" }, STATES[state][1]),
        ),
        element("span", { class: "detail" }, detail),
      ),
    ),
  );
}

function comparisonTable(overview) {
  const rows = overview.table;
  const any = (name) => rows.some((row) => row[name] !== null && row[name] !== undefined);
  const task = overview.task;
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
    overview.title === "addition" && ["Exact sums", "share", (row) => percent(row.exact, 4)],
    ["Density", "open of possible", (row) => percent(row.density)],
    any("edges_per_query") && [
      "Edges per query",
      "and head",
      (row) => (row.edges_per_query === null ? "–" : number(row.edges_per_query)),
    ],
    any("circuit_edges") && [
      "Circuit",
      `edges for 90 % of ${task}`,
      (row) => ofTotal(row.circuit_edges, row.circuit_total),
    ],
    any("heads") && ["Heads", `for 90 % of ${task}`, (row) => ofTotal(row.heads, row.heads_total)],
  ].filter(Boolean);
  const caption = `${overview.title} (${overview.run}), ${number(rows[0].sequences)} held-out sequences; loss ± standard error`;
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${overview.title}` },
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
  return part === undefined || part === null ? "–" : [number(part), element("small", {}, ` of ${number(total)}`)];
}

export function showProvenance(footer, runs) {
  footer.replaceChildren(
    element("h2", {}, "Where this comes from"),
    ...runs.map(({ overview }) => {
      const { versions = {}, command, commit, python } = overview.provenance;
      const facts = [
        ["run", overview.run],
        ["command", command],
        ["commit", commit],
        [
          "versions",
          [python && `python ${python}`, ...Object.entries(versions).map(([name, version]) => `${name} ${version}`)]
            .filter(Boolean)
            .join(", "),
        ],
        ["settings", overview.settings.map(([name, value]) => `${name} ${value}`).join(", ")],
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
