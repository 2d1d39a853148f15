// Attention explorer: a prompt, every head of two models side by side, one head large, the flow of short prompts.

import { dropdown, element, emptyNotice, headName, heading, how, number, segments, swatch } from "./dom.js";
import { asked, remember } from "./address.js";
import { ROLE_NAMES } from "./data.js";
import { HeadGrid, loadMaps } from "./maps.js";
import { mapDownloads } from "./saved_maps.js";
import { Lens, tokenStrip, visible } from "./token_reads.js";
import { HeadMap, pairFacts, strongestPairs } from "./head.js";
import { Flow, FLOW_TOKENS } from "./flow.js";
import { section } from "./sections.js";

section("attention", (place, run) => {
  const rows = run.attention;
  const title = heading(
    "attention",
    "Attention",
    "What every head looks at, before and after. Point at a token to see what it reads and who reads it; choose a head to see it large.",
  );
  if (!rows || !rows.prompts.length) {
    place.replaceChildren(
      ...title,
      emptyNotice(
        "No attention has been recorded. This looks at the Run's models on a few prompts:",
        run.commands.attention,
      ),
    );
    return;
  }
  place.replaceChildren(...title);
  new Explorer(place, rows);
});

class Explorer {
  constructor(section, rows) {
    this.rows = rows;
    const roles = Object.keys(rows.prompts[0].models);
    this.left = roles.find((role) => role !== "sparse") ?? "sparse";
    Object.assign(this, { prompt: 0, view: "weights", layer: 0, head: 0, pinned: null, pointed: null, pair: null });
    this.restore(asked("attention"), roles);
    this.body = element("div", { class: "stack" });
    const dense = roles.filter((role) => role !== "sparse");
    section.append(
      how(
        "Each small square is one head: keys across, queries upward, darker means more weight. In the sparse model a blank cell is a closed gate: nothing at all flows there.",
        "The gate margin S + b says how far a gate is from its threshold: above zero it is open. Margins in grey are closed; the darker, the closer to opening.",
      ),
      element(
        "div",
        { class: "controls" },
        dropdown(
          "Prompt",
          rows.prompts.map((prompt, i) => [String(i), prompt.text.slice(0, 90)]),
          String(this.prompt),
          async (value) => {
            this.prompt = Number(value);
            this.pinned = this.pair = null;
            await this.build();
            this.remember();
          },
        ),
        dense.length > 1
          ? segments(
              "Compare with",
              dense.map((role) => [role, ROLE_NAMES[role]]),
              this.left,
              (role) => {
                this.left = role;
                this.build();
              },
            )
          : null,
        roles.includes("sparse")
          ? segments(
              "Show",
              [
                ["weights", "Weights"],
                ["margins", "Gate margins"],
              ],
              this.view,
              (view) => {
                this.view = view;
                this.refreshMaps();
                this.remember();
              },
            )
          : null,
      ),
      this.body,
      element(
        "p",
        { class: "note" },
        [
          ...rows.notes,
          ...(rows.left_out.length ? [`Left out to keep this file small: ${rows.left_out.join(", ")}.`] : []),
        ].join(" "),
      ),
    );
    this.build();
  }

  /** view: what the address asks for; what is not there is not shown. */
  restore({ prompt, head, show }, roles) {
    if (this.rows.prompts[Number(prompt)]) this.prompt = Number(prompt);
    if (show === "margins" && roles.includes("sparse")) this.view = show;
    const found = /^L(\d+)\.H(\d+)$/.exec(head ?? "");
    const { n_layers: layers, n_heads: heads } = this.rows.shape;
    if (!found || Number(found[1]) >= layers || Number(found[2]) >= heads) return;
    [this.layer, this.head] = [Number(found[1]), Number(found[2])];
    this.pair = [this.rows.prompts[this.prompt].tokens.length - 1, 0];
  }
  remember() {
    remember("attention", { prompt: this.prompt, head: headName(this.layer, this.head), show: this.view });
  }

  get token() {
    return this.pointed ?? this.pinned;
  }

  async build() {
    const prompt = this.rows.prompts[this.prompt];
    const wanted = [...new Set([this.left, "sparse"])].filter((role) => prompt.models[role]);
    const models = await Promise.all(wanted.map((role) => loadMaps(this.rows.shape, prompt, role)));
    if (this.rows.prompts[this.prompt] !== prompt) return; // another one was chosen meanwhile
    this.models = models;
    if (this.pair === null) this.startAt(models.at(-1));
    const point = (token) => this.point(token);
    const pin = (token) => this.pin(token);
    this.strip = tokenStrip(prompt.tokens, point, pin);
    this.lenses = wanted.map((role) => new Lens(role, point, pin));
    this.grids = wanted.map((role) => new HeadGrid(role, (layer, head) => this.choose(layer, head)));
    this.large = wanted.map(
      (role) =>
        new HeadMap(role, (query, key) => {
          this.pair = [query, key];
          this.refreshHead();
        }),
    );
    this.flows =
      prompt.tokens.length <= FLOW_TOKENS ? wanted.map((role) => new Flow(role, `Flow, ${role} model`, point)) : [];
    this.facts = element("div", { class: "stack" });
    this.table = element("div", {});
    this.headTitle = element("h3", {});
    this.body.replaceChildren(
      element(
        "div",
        { class: "card" },
        this.strip.list,
        prompt.cut
          ? element("p", { class: "note" }, `The first ${prompt.tokens.length} tokens of a longer prompt.`)
          : null,
      ),
      element(
        "div",
        { class: "pair" },
        wanted.map((role, i) =>
          element(
            "div",
            { class: "card stack", "data-model": role },
            this.modelHead(role, prompt),
            this.lenses[i].box,
            this.grids[i].box,
          ),
        ),
      ),
      element(
        "div",
        { class: "card", id: "head-detail" },
        element(
          "div",
          { class: "card-head" },
          this.headTitle,
          element("span", { class: "note" }, "keys across, queries upward"),
        ),
        element(
          "div",
          { class: "triple" },
          this.large.map((map, i) =>
            element(
              "div",
              {},
              element(
                "div",
                { class: "card-head" },
                swatch(wanted[i], ROLE_NAMES[wanted[i]]),
                mapDownloads(`head-${wanted[i]}`, () => ({ maps: map.maps, view: map.view, head: [map.layer, map.head] })),
              ),
              map.box,
            ),
          ),
          element("div", { class: "stack" }, this.facts, this.table),
        ),
      ),
      this.flows.length
        ? element(
            "div",
            { class: "pair", id: "flow" },
            this.flows.map((flow) => flow.card),
          )
        : "",
    );
    this.refresh();
  }

  /** Begin where something is to be seen: the open edge with the most weight in the sparse model. */
  startAt(maps) {
    let best = -1;
    for (let layer = 0; layer < maps.layers; layer++)
      for (let head = 0; head < maps.heads; head++)
        for (let query = 1; query < maps.size; query++)
          for (let key = 1; key < query; key++) {
            const weight = maps.weight(layer, head, query, key);
            if (weight > best) [best, this.layer, this.head, this.pair] = [weight, layer, head, [query, key]];
          }
  }

  /** What the model says where the answer stands: at the last tokens of a filled prompt, or after the last one. */
  answer(model) {
    return model.says.slice(-(this.rows.filled || 1));
  }

  mapsOf(role) {
    return this.models.find((maps) => maps.role === role);
  }

  modelHead(role, prompt) {
    const model = prompt.models[role];
    const answer = this.answer(model).join("");
    return element(
      "div",
      {},
      element(
        "div",
        { class: "card-head" },
        element("h3", {}, swatch(role, ROLE_NAMES[role])),
        element("span", { class: "note" }, `${number(model.open)} edges with weight`),
        mapDownloads(`attention-${role}`, () => ({ maps: this.mapsOf(role), view: this.view, head: null })),
      ),
      element(
        "p",
        { class: "note" },
        "says ",
        element("span", { class: "says name" }, visible(answer)),
        this.rows.filled ? "" : ` (p = ${number(model.probability.at(-1), 2)})`,
      ),
    );
  }

  point(token) {
    if (token === this.pointed) return;
    this.pointed = token;
    this.refreshToken();
  }
  pin(token) {
    this.pinned = this.pinned === token ? null : token;
    this.refreshToken();
  }
  choose(layer, head) {
    Object.assign(this, { layer, head });
    this.grids.forEach((grid) => grid.mark([layer, head]));
    this.refreshHead();
    this.remember();
  }
  refresh() {
    this.refreshMaps();
    this.refreshToken();
  }
  refreshMaps() {
    this.grids.forEach((grid, i) => grid.show(this.models[i], this.view, [this.layer, this.head], this.token));
    this.refreshHead();
  }
  refreshHead() {
    this.headTitle.textContent = headName(this.layer, this.head);
    this.large.forEach((map, i) => map.show(this.models[i], this.view, this.layer, this.head, this.pair));
    this.facts.replaceChildren(pairFacts(this.models, this.layer, this.head, this.pair));
    const key = `${this.prompt} ${this.left} ${this.layer} ${this.head}`;
    if (key === this.tableKey) return;
    this.tableKey = key;
    this.table.replaceChildren(
      strongestPairs(this.models, this.layer, this.head, (query, at) => {
        this.pair = [query, at];
        this.refreshHead();
      }),
    );
  }
  refreshToken() {
    const prompt = this.rows.prompts[this.prompt];
    this.lenses.forEach((lens, i) => lens.show(this.models[i], this.token));
    this.grids.forEach((grid) => {
      grid.token = this.token;
      grid.overlay();
    });
    this.flows.forEach((flow, i) => {
      const model = prompt.models[this.models[i].role];
      const answer = this.answer(model);
      const before = Array(model.says.length - answer.length).fill(null);
      flow.show(this.models[i], [...before, ...answer], model.open, this.token);
    });
    const glow = this.models.at(-1).around(this.token ?? prompt.tokens.length - 1);
    this.strip.buttons.forEach((button, i) => {
      button.setAttribute("aria-pressed", String(i === this.pinned));
      const strength = Math.max(...glow.map((row) => row[i]));
      button.style.setProperty("--glow", `${Math.round(40 * Math.sqrt(strength))}%`);
    });
  }
}
