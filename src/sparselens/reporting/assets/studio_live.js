// The live half of the studio: asks its server, shows the answers.

import { dropdown, element, number, percent, segments, swatch, table } from "./dom.js";
import { ROLE_NAMES } from "./data.js";
import { downloads } from "./download.js";
import { HeadGrid, loadMaps } from "./maps.js";
import { HeadMap } from "./head.js";
import { Lens, tokenStrip, visible } from "./token_reads.js";
import { EdgeField } from "./studio_edges.js";
import { mapDownloads } from "./saved_maps.js";
import { keptList } from "./studio_kept.js";
import {
  changesInWords, countChanges, hasChange, readAddress, scaledBy, toggled, untouched, wordAt, writeAddress,
} from "./studio_state.js";

const PAUSE = 120; // ms without a key before a prompt is asked

const signedNumber = (value) => (value > 0 ? `+${number(value)}` : number(value));
const button = (text, click, more = {}) =>
  element("button", { type: "button", class: "plain", ...more, on: { click } }, text);

async function ask(verb, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(`api/${verb}`, options || {});
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? `the server answered ${answer.status}`);
  return found;
}

export class LiveStudio {
  constructor(place) {
    this.place = place;
    this.status = element("p", { class: "note", id: "studio-status", role: "status", "aria-live": "polite" });
    this.body = element("div", { class: "stack" });
    place.append(this.status, this.body);
    this.asked = {};
    this.busy = 0; // things asked and not yet answered
    this.poll();
  }

  say(text, wrong = false) {
    this.status.textContent = text;
    this.status.classList.toggle("limit", wrong);
  }

  /** Until the models are there; then for jobs. */
  async poll() {
    try {
      const told = await ask("status");
      if (told.state === "failed") return this.say(`This did not work: ${told.message}`, true);
      if (told.state === "ready" && !this.models) {
        if (told.run && !document.getElementById("summary")) return location.reload(); // the Run has been made
        this.begin(told);
      } else if (told.state === "preparing") this.say(`Preparing: ${told.message}`);
      if (this.models) this.showJobs(told);
    } catch (error) {
      this.say(`The server does not answer (${error.message}). What was kept is safe; start it again.`, true);
    }
    setTimeout(() => this.poll(), this.models ? 700 : 400);
  }

  begin(told) {
    this.models = told.models;
    this.told = told;
    const roles = Object.keys(told.models);
    const role = roles.includes("sparse") ? "sparse" : roles[0];
    this.state = readAddress({ text: told.prompts[0] ?? 'The opposite of "large" is "', role });
    if (!told.models[this.state.role]) this.state.role = role;
    this.history = [];
    this.build(roles);
    this.look();
  }

  build(roles) {
    this.input = element("textarea", { id: "prompt", rows: 2, maxlength: 4000, spellcheck: "false" });
    this.input.value = this.state.text;
    this.input.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.type(this.input.value), PAUSE);
    });
    this.generated = element("span", { class: "says" });
    this.answers = element("div", { class: "triple", id: "answers" });
    this.outcome = element("div", { id: "outcome", role: "status", "aria-live": "polite" });
    this.changes = element("div", { id: "changes" });
    this.field = new EdgeField((edge) => this.touch("closed", edge));
    this.tables = element("div", { class: "pair loose edges" });
    this.why = element("div", { id: "why" });
    this.strip = element("div", {});
    this.grid = new HeadGrid(this.state.role, (layer, head) => this.chooseHead(layer, head));
    this.map = new HeadMap(this.state.role, (query, key) => this.choosePair(query, key));
    this.lens = new Lens(this.state.role, () => {}, () => {});
    this.mapNote = element("div", {});
    this.jobs = element("div", { id: "jobs" });
    this.kept = element("div", { id: "kept" });
    this.positions = element("div", {});
    this.body.replaceChildren(
      element(
        "div",
        { class: "card stack" },
        element("label", { for: "prompt" }, "Prompt"),
        this.input,
        element(
          "div",
          { class: "controls" },
          this.told.prompts.slice(0, 4).map((text) => button(text.slice(0, 40), () => this.replacePrompt(text))),
          this.told.filled ? null : button("Generate one token", () => this.generate(), { id: "generate" }),
          this.told.filled ? null : button("Generate ten", () => this.generateMany(10), { id: "generate-ten" }),
          this.told.filled ? null : button("Drop generated", () => this.setMore([])),
          this.generated,
        ),
        this.told.notes.map((text) => element("p", { class: "note" }, text)),
      ),
      this.answers,
      element(
        "div",
        { class: "card stack" },
        element(
          "div",
          { class: "controls" },
          segments("Touch the model", roles.map((role) => [role, ROLE_NAMES[role]]), this.state.role, (role) => {
            this.set({ ...untouched(this.state), role, answer: null });
            this.look();
          }),
          this.positions,
        ),
        this.outcome,
        this.changes,
        this.field.box,
        element("p", { class: "note" }, "Click a line to close its gate; click it again to open it."),
      ),
      this.why,
      this.tables,
      element(
        "div",
        { class: "card stack" },
        element(
          "div",
          { class: "card-head" },
          element("h3", {}, "Every head, and who reads whom"),
          mapDownloads("studio-heads", () => ({ maps: this.maps, view: "weights", head: null })),
        ),
        this.strip,
        this.lens.box,
        element("div", { class: "pair loose" }, this.grid.box, element("div", {}, this.map.box, this.mapNote)),
      ),
      this.askCard(roles),
      element(
        "div",
        { class: "card stack" },
        element("h3", {}, "Kept"),
        this.told.run
          ? element("p", { class: "note" }, "Saved in the Run as soon as it is kept.", " ", button("Write the offline report", () => this.export(), { id: "export" }))
          : element("p", { class: "note" }, "There is no Run here: what is kept is gone when the studio ends."),
        this.kept,
      ),
    );
  }

  askCard(roles) {
    const field = (name, label, value) => {
      const id = `ask-${name}`;
      this[`ask_${name}`] = element("input", { id, type: "text", maxlength: 4000, value });
      return element("div", {}, element("label", { for: id }, label, " "), this[`ask_${name}`]);
    };
    const transcoded = roles.some((role) => this.models[role].features);
    return element(
      "div",
      { class: "card stack" },
      element("h3", {}, "Ask"),
      element(
        "p",
        { class: "note" },
        "Two sentences with the same number of tokens, and what should follow each. The studio looks for the fewest attention edges that keep 90 % of the effect.",
      ),
      element(
        "div",
        { class: "controls ask" },
        field("clean", "Sentence", this.state.text),
        field("corrupted", "Changed sentence", ""),
        field("answer", "Answer", ""),
        field("wrong", "Answer to the changed one", ""),
        button("Find the circuit", () => this.discover(), { id: "discover" }),
        transcoded
          ? button("Trace this prompt", () => this.trace(), { id: "trace" })
          : element("span", { class: "note" }, "Tracing needs a transcoder in the Run's folder transcoders/."),
      ),
      this.jobs,
    );
  }

  // ---- state ----

  set(state, remember = true) {
    if (remember) this.history.push(this.state);
    this.state = state;
    writeAddress(state);
  }
  type(text) {
    if (this.ask_clean.value === this.state.text) this.ask_clean.value = text; // what nobody has changed follows
    this.set({ ...untouched(this.state), text, more: [], answer: null, position: null });
    this.look();
  }
  replacePrompt(text) {
    this.input.value = text;
    this.type(text);
  }
  setMore(more) {
    this.set({ ...untouched(this.state), more, answer: null, position: null });
    return this.look();
  }
  async generate() {
    const next = this.prompt?.models[this.state.role].next[0];
    if (next) await this.setMore([...this.state.more, next.id]);
  }
  /** Step by step, so that the edges of every new token light up; anything else that is asked meanwhile ends it. */
  async generateMany(n) {
    for (let i = 0; i < n; i++) {
      const before = this.state.more.length;
      await this.generate();
      if (this.state.more.length !== before + 1 || this.prompt.tokens.length >= this.told.most_tokens) return;
    }
  }
  touch(kind, place) {
    this.set(toggled(this.state, kind, place));
    this.refresh();
  }
  open(row) {
    const { role, text, more, answer, position, changes } = row;
    this.set({ role, text, more, answer: { id: answer, text: row.says }, position, ...changes });
    this.input.value = text;
    this.look();
  }
  question() {
    const { text, more, role, answer, position, closed, silenced, scaled } = this.state;
    return { text, more, role, answer: answer.id, position, closed, silenced, scaled };
  }

  // ---- asking ----

  /** Of several askings of one kind only the latest counts. */
  async attempt(kind, work) {
    const number = (this.asked[kind] = (this.asked[kind] ?? 0) + 1);
    const current = () => number === this.asked[kind];
    this.status.dataset.busy = this.busy += 1;
    try {
      await work(current);
    } catch (error) {
      if (current()) this.say(error.message, true);
    } finally {
      this.status.dataset.busy = this.busy -= 1;
    }
  }

  look() {
    return this.attempt("prompt", async (current) => {
      const begun = performance.now();
      const { text, more, position } = this.state;
      const prompt = await ask("look", { text, more, position });
      if (!current()) return;
      this.prompt = prompt;
      const role = this.state.role;
      if (!this.state.answer) {
        this.state.answer = prompt.models[role].next[0];
        writeAddress(this.state);
      }
      if (this.about() !== this.shown) {
        this.active = null; // features and reasons were of another question
        this.why.replaceChildren();
      }
      this.shown = null;
      this.showAnswers();
      const took = Math.round(performance.now() - begun);
      this.say(`Answered in ${took} ms.`);
      this.status.dataset.look = took;
      // Answers first; what the heads look at, and which edges matter, follow.
      Object.assign(prompt.models[role], await ask("maps", { role, text, more }));
      if (!current()) return;
      const maps = await loadMaps(this.models[role], prompt, role);
      if (!current()) return;
      this.maps = maps;
      this.grid.role = this.map.role = this.lens.role = role;
      this.showPrompt();
      this.edges = [];
      const { edges } = await ask("effects", this.question());
      if (!current()) return;
      this.edges = edges;
      this.shown = this.about();
      await this.showTouched(current);
    });
  }

  /** What is asked, changes aside. */
  about() {
    const { role, text, more, position, answer } = this.state;
    return JSON.stringify([role, text, more, position, answer?.id]);
  }

  refresh() {
    if (this.shown !== this.about()) return this.look(); // its maps and edges are still to come
    return this.attempt("prompt", (current) => this.showTouched(current));
  }

  async showTouched(current) {
    const begun = performance.now();
    const n = countChanges(this.state);
    const found = n ? await ask("touch", this.question()) : null;
    if (!current()) return;
    this.touched = found;
    this.showAnswers(found);
    this.showOutcome(found);
    this.field.show(this.maps, this.edges, this.state, this.state.more.length ? this.maps.size - 1 : null);
    this.showTables();
    if (found) {
      this.status.dataset.touch = Math.round(performance.now() - begun);
      this.say(`Measured in ${this.status.dataset.touch} ms.`);
    }
  }

  // ---- showing ----

  showAnswers(touched = null) {
    const { role, answer } = this.state;
    this.answers.replaceChildren(
      ...Object.entries(this.prompt.models).map(([name, model]) => {
        const after = name === role ? touched?.next : null;
        return element(
          "div",
          { class: "card", "data-answers": name },
          element("div", { class: "card-head" }, element("h3", {}, swatch(name, ROLE_NAMES[name])), element("span", { class: "note" }, `${number(model.open)} edges open`)),
          element(
            "div",
            { class: "before-after" },
            [["before", model.next], ["after the changes", after]]
              .filter(([, next]) => next)
              .map(([when, next]) => element("div", {}, after ? element("p", { class: "note" }, when) : null, bars(next, name, answer?.id, (row) => this.chooseAnswer(name, row)))),
          ),
        );
      }),
    );
  }

  chooseAnswer(role, answer) {
    this.set({ ...(role === this.state.role ? this.state : untouched(this.state)), role, answer });
    for (const radio of this.body.querySelectorAll(".segments input")) if (radio.value === role) radio.checked = true;
    this.look();
  }

  showPrompt() {
    const { tokens } = this.prompt;
    const pin = (token) => this.lens.show(this.maps, token);
    this.strip.replaceChildren(tokenStrip(tokens, (token) => this.lens.show(this.maps, token), pin).list);
    this.lens.show(this.maps, null);
    const [layer, head] = this.head ?? [0, 0];
    this.head = [Math.min(layer, this.maps.layers - 1), Math.min(head, this.maps.heads - 1)];
    this.grid.show(this.maps, "weights", this.head, null);
    this.map.show(this.maps, "weights", ...this.head, null);
    this.generated.textContent = this.state.more.length ? `… ${tokens.slice(-this.state.more.length).join("")}` : "";
    const chosen = this.state.position ?? tokens.length - 1;
    const options = tokens.map((token, i) => [String(i), `${i}: ${visible(token)}`]);
    this.positions.replaceChildren(
      dropdown(this.told.filled ? "Answer at" : "Answer after", options, String(chosen), (value) => {
        const last = Number(value) === tokens.length - 1;
        this.set({ ...this.state, position: last ? null : Number(value), answer: null });
        this.look();
      }),
    );
  }

  chooseHead(layer, head) {
    this.head = [layer, head];
    this.grid.mark([layer, head]);
    this.map.show(this.maps, "weights", layer, head, null);
    this.mapNote.replaceChildren(element("p", { class: "note" }, `Head L${layer}.H${head}. `, this.silenceButton(layer, head)));
  }
  choosePair(query, key) {
    const edge = [...this.head, query, key];
    this.map.show(this.maps, "weights", ...this.head, [query, key]);
    const margin = this.maps.margin(...edge);
    this.mapNote.replaceChildren(
      element("p", { class: "note" }, `L${edge[0]}.H${edge[1]}: ${wordAt(this.prompt.tokens, query)} reads ${wordAt(this.prompt.tokens, key)}, weight ${number(this.maps.weight(...edge))}${margin === null ? "" : `, gate margin ${signedNumber(margin)}`}. `, this.closeButton(edge), " ", this.silenceButton(edge[0], edge[1]), " ", this.whyButton(edge)),
    );
  }
  closeButton(edge) {
    const off = hasChange(this.state, "closed", edge);
    return button(off ? "Open" : "Close", () => this.touch("closed", edge), { "aria-pressed": String(off), "data-close": edge.join(".") });
  }
  silenceButton(layer, head) {
    const off = hasChange(this.state, "silenced", [layer, head]);
    return button(off ? "Unsilence" : "Silence", () => this.touch("silenced", [layer, head]), { "aria-pressed": String(off), "data-silence": `${layer}.${head}` });
  }
  whyButton(edge) {
    return this.models[this.state.role].features ? button("Why?", () => this.explain(edge), { "data-why": edge.join(".") }) : null;
  }

  showOutcome(found) {
    const { answer } = this.state;
    const words = changesInWords(this.state, this.prompt.tokens);
    this.outcome.replaceChildren(
      found
        ? element(
            "p",
            { class: "big" },
            `Probability of “${answer.text.trim()}”: ${percent(found.p_before)} → `,
            element("span", { id: "p-after", "data-p": found.p_after }, percent(found.p_after)),
          )
        : element("p", { class: "note" }, `Edges that matter most to “${(answer.text ?? "").trim()}”. Nothing is changed yet.`),
      found
        ? element(
            "p",
            { class: "note" },
            `Log-odds: measured ${signedNumber(found.after - found.before)} nats; predicted ${signedNumber(found.predicted)} to first order.`,
          )
        : "",
    );
    this.changes.replaceChildren(
      words.length
        ? element(
            "ul",
            { class: "note" },
            words.map(([kind, place, text]) => element("li", {}, `${text} `, button("take back", () => this.touch(kind, place)))),
          )
        : "",
      element(
        "p",
        {},
        button("Undo", () => this.undo(), { id: "undo", disabled: !this.history.length }),
        " ",
        button("Reset", () => this.reset(), { id: "reset", disabled: !words.length }),
        " ",
        button("Keep", () => this.keep(), { id: "keep", disabled: !words.length }),
      ),
    );
  }

  undo() {
    const before = this.history.pop();
    if (!before) return;
    this.set(before, false);
    this.input.value = before.text;
    this.look();
  }
  reset() {
    this.set(untouched(this.state));
    this.refresh();
  }

  showTables() {
    const { tokens } = this.prompt;
    const rows = this.edges.slice(0, 24).map((edge) => {
      const place = edge.slice(0, 4);
      const [layer, head, query, key, effect] = edge;
      return [
        `L${layer}.H${head}`, wordAt(tokens, query), wordAt(tokens, key), number(this.maps.weight(...place)),
        signedNumber(effect), element("span", {}, this.closeButton(place), " ", this.whyButton(place)),
      ];
    });
    const heads = new Map();
    for (const [layer, head, , , effect] of this.edges) heads.set(`${layer}.${head}`, (heads.get(`${layer}.${head}`) ?? 0) + effect);
    const ranked = [...heads].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 12);
    const headRows = ranked.map(([name, effect]) => {
      const [layer, head] = name.split(".").map(Number);
      return [`L${layer}.H${head}`, signedNumber(effect), this.silenceButton(layer, head)];
    });
    this.tables.replaceChildren(
      element("div", { class: "card" }, element("div", { class: "card-head" }, element("h3", {}, "Edges"), this.saved()), element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Edges" }, table(["head", "reads at", "from", "weight", "if closed, nats", ""], rows))),
      element(
        "div",
        { class: "card stack" },
        element("h3", {}, "Heads"),
        element("div", { class: "scroll" }, table(["head", "if silenced, nats", ""], headRows)),
      ),
      this.models[this.state.role].features
        ? element(
            "div",
            { class: "card stack wide" },
            element("h3", {}, "Features"),
            this.active ? this.featureTable() : button("Show features", () => this.showFeatures(), { id: "show-features" }),
          )
        : "",
    );
  }

  /** All edges the picture was made from, and what was asked. */
  saved() {
    const columns = ["layer", "head", "query", "key", "if_closed_nats", "weight"];
    const rows = () => this.edges.map((edge) => [...edge, this.maps.weight(...edge.slice(0, 4))]);
    return downloads("studio-edges", {
      scene: () => this.field.scene(this.field.plot.view.width),
      json: () => ({ ...this.state, tokens: this.prompt.tokens, measured: this.touched, columns, edges: rows() }),
      csv: () => [columns, ...rows()],
    });
  }

  showFeatures() {
    return this.attempt("features", async (current) => {
      const { features } = await ask("active", this.question());
      if (!current()) return;
      this.active = features;
      this.showTables();
    });
  }

  /** Those active on this prompt that push the answer most; each can be scaled. */
  featureTable() {
    const factors = [1, 0, 0.5, 2, -1].map((factor) => [String(factor), `times ${factor}`]);
    const rows = this.active.slice(0, 20).map((f) => {
      const place = [f.layer, f.position, f.feature];
      const now = this.state.scaled.find((other) => String(other.slice(0, 3)) === String(place))?.[3] ?? 1;
      const scaled = () => {
        this.set(scaledBy(this.state, place, Number(choice.value)));
        this.refresh();
      };
      const choice = element("select", { "aria-label": `Scale ${f.label}`, "data-feature": place.join("."), on: { change: scaled } }, factors.map(([value, text]) => element("option", { value, selected: Number(value) === now }, text)));
      return [f.label, number(f.activation), signedNumber(f.share), choice];
    });
    const name = { tabindex: "0", role: "region", "aria-label": "Features" };
    return element("div", { class: "scroll tall wrap", ...name }, table(["feature", "activation", "share, nats", "scale"], rows));
  }

  explain(edge) {
    return this.attempt("why", async (current) => {
      const found = await ask("opened", { ...this.question(), edge });
      if (!current()) return;
      const gate = found.margin === null ? "" : ` Gate margin ${signedNumber(found.margin)}: ${found.margin > 0 ? "open" : "closed"}.`;
      this.why.replaceChildren(
        element(
          "div",
          { class: "card" },
          element("h3", {}, `Why L${edge[0]}.H${edge[1]} reads ${wordAt(this.prompt.tokens, edge[3])} at ${wordAt(this.prompt.tokens, edge[2])}`),
          element("p", {}, `Attention logit ${signedNumber(found.logit)}.${gate}`),
          found.closing.length ? element("p", { class: "note" }, `Without any one of these the gate would close: ${found.closing.map((row) => row.label).join("; ")}.`) : null,
          element("div", { class: "scroll wrap" }, table(["query side", "key side", "term"], [...found.terms.map((t) => [t.query, t.key, signedNumber(t.term)]), ["all other pairs", "", signedNumber(found.rest)]])),
        ),
      );
    });
  }

  // ---- asking for more, and keeping ----

  discover() {
    const body = { role: this.state.role };
    for (const name of ["clean", "corrupted", "answer", "wrong"]) body[name] = this[`ask_${name}`].value;
    return this.attempt("discover", () => ask("discover", body));
  }
  trace() {
    return this.attempt("trace", () => ask("trace", this.question()));
  }
  keep() {
    return this.attempt("kept", async () => this.showKept(await ask("keep", this.question())));
  }
  remove(id) {
    return this.attempt("kept", async () => this.showKept(await ask("remove", { id })));
  }
  export() {
    return this.attempt("export", async () => {
      this.say("Writing the report …");
      const { folder, file } = await ask("export", {});
      this.say(`Written: ${folder}/${file}. It opens from disk, offline.`);
    });
  }
  showKept({ kept, version }) {
    this.keptVersion = version;
    this.kept.replaceChildren(keptList(kept, (row) => this.open(row), (id) => this.remove(id)));
  }
  showJobs({ jobs, kept }) {
    if (kept !== this.keptVersion) this.attempt("kept", async () => this.showKept(await ask("kept")));
    const stamp = JSON.stringify(jobs.map((job) => [job.number, job.state, job.done, job.message]));
    if (stamp === this.jobStamp) return;
    this.jobStamp = stamp;
    this.jobs.replaceChildren(
      ...jobs.map((job) =>
        element(
          "div",
          { class: "job", "data-job": job.number, "data-state": job.state },
          element("p", {}, `${job.kind}: ${job.state} `, job.of && job.state === "running" ? `${job.done} of ${job.of} ` : "", ["running", "failed"].includes(job.state) ? job.message : "", " ", ["waiting", "running"].includes(job.state) ? button("Cancel", () => this.attempt("cancel", () => ask("cancel", { number: job.number })), { "data-cancel": job.number }) : null),
          job.state === "running" ? element("progress", { max: job.of || 1, value: job.done, "aria-label": job.kind }) : null,
          job.state === "done" && job.kind === "discover" ? element("p", {}, `${number(job.result.n_edges)} edges: kept below.`) : null,
          job.state === "done" && job.kind === "trace" ? element("p", {}, "The trace has joined the page. ", button("Show it", () => { location.hash = "#attribution"; location.reload(); })) : null,
        ),
      ),
    );
  }
}

function bars(next, role, chosen, onChoose) {
  return element(
    "ul",
    { class: "bars" },
    next.map((row) =>
      element(
        "li",
        {},
        element(
          "button",
          { type: "button", class: "plain", "aria-pressed": String(row.id === chosen), "data-p": row.p, on: { click: () => onChoose(row) } },
          element("span", { class: "says" }, visible(row.text)),
          element("meter", { class: role, min: 0, max: 1, value: row.p, "aria-hidden": "true" }),
          element("span", {}, percent(row.p, 2)),
        ),
      ),
    ),
  );
}
