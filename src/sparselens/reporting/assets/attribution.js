// Attribution: clusters and features of a traced prompt over layers and positions, and who carries each edge.

import { dropdown, element, emptyNotice, heading, how, number, percent, segments, swatch, table } from "./dom.js";
import { asked, remember } from "./address.js";
import { ROLE_NAMES } from "./data.js";
import { loadMaps } from "./maps.js";
import { downloads } from "./download.js";
import { edgeDetail, lookDetail, nameOf } from "./head_shares.js";
import { checkPlot, singlesTable } from "./intervention_plot.js";
import { TracePicture } from "./trace_picture.js";
import { cutPlot } from "./cut_plot.js";
import { section } from "./sections.js";

section("attribution", (place, run) => {
  const title = heading(
    "attribution",
    "Attribution",
    "From the words of a prompt to what the model says next: groups of features, the edges between them, and the heads that carry each edge.",
  );
  if (!run.attribution.length) {
    place.replaceChildren(
      ...title,
      emptyNotice(
        "No prompt has been traced. With a transcoder of the model (sparselens transcode), this traces one:",
        run.commands.attribution,
      ),
    );
    return;
  }
  place.replaceChildren(
    ...title,
    how(
      "Positions go across, layers upward; the prompt is at the bottom, the output at the top. A box is a cluster of features and spans its layers; a line is what one contributes to another, thick when much influence passes through it, dashed when it is negative. Attention patterns are held fixed, so contributions add up exactly.",
      "Click an edge, here or in the table, to see which heads carry it: the smallest set that brings 80 % of it. Their maps show keys across and queries upward, with the links that matter marked.",
    ),
  );
  const traces = run.attribution.map((trace) => ({ ...trace, cards: run.features?.cards?.[trace.name] }));
  const prompts = [...new Set(traces.map((trace) => trace.prompt))];
  const view = asked("attribution");
  const chosen = prompts.includes(view.prompt) ? view.prompt : prompts[0];
  const body = element("div", { class: "stack" });
  const show = (prompt) => {
    const found = traces
      .filter((trace) => trace.prompt === prompt)
      .sort((a, b) => (a.role === "dense" ? 0 : 1) - (b.role === "dense" ? 0 : 1));
    body.replaceChildren(...found.map((trace) => new TraceView(trace, run.attention).box));
  };
  if (prompts.length > 1)
    place.append(
      element(
        "div",
        { class: "controls" },
        dropdown(
          "Prompt",
          prompts.map((prompt) => [prompt, prompt.slice(0, 90)]),
          chosen,
          (prompt) => {
            show(prompt);
            remember("attribution", { prompt });
          },
        ),
      ),
    );
  place.append(body);
  show(chosen);
});

class TraceView {
  constructor(trace, attention) {
    Object.assign(this, { trace, chosen: null, maps: null });
    this.picture = new TracePicture(
      trace,
      (edge) => this.point(edge),
      (edge) => this.choose(edge),
    );
    this.detail = element("div", {});
    this.look = element("div", {});
    this.table = element("div", {
      class: "scroll tall",
      tabindex: "0",
      role: "region",
      "aria-label": `Edges, ${trace.role} model`,
    });
    this.box = element(
      "div",
      { class: "stack", "data-trace": trace.role },
      element(
        "div",
        { class: "card" },
        this.head(),
        this.toggle(),
        element("div", { class: "trace" }, this.picture.box, this.table),
      ),
      element(
        "div",
        { class: "pair loose" },
        element("div", { class: "card" }, this.detail),
        element("div", { class: "stack" }, this.look, cutPlot(trace) ?? checkPlot(trace), singlesTable(trace)),
      ),
    );
    this.fillTable();
    const carried = trace.main?.edge ?? trace.edges.findIndex((edge) => edge.heads.length > 0);
    const view = asked("attribution");
    const wanted = view.model === trace.role && view.prompt === trace.prompt ? Number(view.edge) : NaN;
    if (trace.edges.length) this.choose(trace.edges[wanted] ? wanted : Math.max(carried, 0));
    else this.showDetail();
    this.findMaps(attention);
    this.began = true;
  }

  head() {
    const { role, target, scores, completeness_error: error } = this.trace;
    const facts = [
      `says ${target}`,
      scores?.replacement === undefined ? null : `replacement ${percent(scores.replacement)}`,
      scores?.completeness === undefined ? null : `completeness ${percent(scores.completeness)}`,
      error === null ? null : `rows add up to ${number(error, 2)}`,
    ];
    const sources = {
      scene: () => this.picture.scene(this.picture.plot.view.width),
      json: () => this.trace,
      csv: () => this.csv(),
    };
    return element(
      "div",
      { class: "card-head" },
      element("h3", {}, swatch(role, `${ROLE_NAMES[role]} model`)),
      element("span", { class: "note" }, facts.filter(Boolean).join(" · ")),
      downloads(`attribution-${role}`, sources),
    );
  }

  toggle() {
    if (!this.trace.graph || !this.trace.clusters.length) return null;
    const options = [
      ["clusters", "Clusters"],
      ["features", "Features"],
    ];
    return element(
      "div",
      { class: "controls" },
      segments("Show", options, "clusters", (view) => this.picture.show(view)),
    );
  }

  /** Maps of the same prompt and model from the attention explorer, if they are there. */
  async findMaps(attention) {
    const { prompt, tokens, role } = this.trace;
    const same = (found) => found.text === prompt && found.tokens.length === tokens.length && found.models[role];
    const found = attention?.prompts.find(same);
    if (!found) return;
    this.maps = await loadMaps(attention.shape, found, role);
    this.showDetail();
  }

  csv() {
    const name = (i) => this.trace.clusters[i].name;
    const rows = this.trace.edges.map(({ source, target, weight, single_hop, predicted, measured, heads }) => {
      return [name(source), name(target), weight, single_hop, predicted, measured, heads.map(nameOf).join(" ")];
    });
    return [["source", "target", "weight", "single_hop", "predicted", "measured", "heads_for_80"], ...rows];
  }

  fillTable() {
    const { clusters, edges } = this.trace;
    const rows = edges.slice(0, 60).map((edge, i) => {
      const on = { click: () => this.choose(i), focus: () => this.point(i), blur: () => this.point(null) };
      const name = `${clusters[edge.source].name} → ${clusters[edge.target].name}`;
      return [
        element("button", { class: "says", type: "button", "data-edge": i, on }, name),
        number(edge.weight),
        edge.heads.length ? String(edge.heads.length) : "–",
      ];
    });
    const made = table(["Edge", "Weight", "Heads for 80 %"], rows);
    this.rows = [...made.tBodies[0].rows];
    this.table.replaceChildren(made);
  }

  point(edge) {
    if (edge === this.picture.hover) return;
    this.picture.hover = edge;
    this.picture.redraw();
  }

  choose(edge) {
    this.chosen = this.picture.chosen = edge;
    this.look.replaceChildren();
    this.rows.forEach((row, i) => {
      if (i === edge) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
    this.showDetail();
    this.picture.redraw();
    const { prompt, role: model } = this.trace;
    if (this.began) remember("attribution", { prompt, model, edge });
  }

  showDetail() {
    if (this.chosen === null) {
      this.detail.replaceChildren(element("p", { class: "note" }, "There are no edges between clusters here."));
      return;
    }
    const onLook = (look) => this.look.replaceChildren(element("div", { class: "card" }, lookDetail(look, this.trace)));
    this.detail.replaceChildren(edgeDetail(this.trace, this.trace.edges[this.chosen], this.maps, onLook));
  }
}
