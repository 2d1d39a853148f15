// Words of the trade, explained where they stand: as a tooltip, by pointer, touch or keyboard.

import { element } from "./dom.js";

const TERMS = {
  nats: "The unit of loss: 0.01 nats more means that every word is about 1 % less likely in the mean.",
  KL: "How far one model's next-word probabilities are from another's, in nats. 0: the same.",
  gate: "A switch at one attention edge: open, and the word is read; closed, and nothing at all flows.",
  "attention edges": "One head, one word that reads, one word that is read: the smallest thing attention does.",
  "attention edge": "One head, one word that reads, one word that is read: the smallest thing attention does.",
  "held-out": "Text that the model was not trained on.",
  control: "A dense model trained the same way for as long, without gates: what the training alone does.",
  circuit: "The few edges that alone do most of what the model does for a task.",
  "steering slice": "The small part of held-out text that decided when to open or close more gates.",
  density: "The share of attention edges that are open.",
  ioi: "A task. “When Mary and John went to the store, John gave a drink to”: Mary. IOI: indirect object identification.",
  "ioi-long": "The task ioi with more sentences in between.",
  "greater-than": "A task. “The war lasted from 1732 to 17”: a number above 32.",
  docstring: "A task: the next argument in the documentation of a Python function.",
  antonym: "A task. “The opposite of large is”: small.",
  induction: "A task: words that came before come again, in the same order.",
  "95\u00a0% interval": "Where the number would lie with other prompts, 95 times in 100.",
};
const FIND = new RegExp(`\\b(${Object.keys(TERMS).sort((a, b) => b.length - a.length).join("|")})\\b`, "g");

/** Text as nodes, the first of each known word with its explanation. */
export function withTerms(text) {
  const seen = new Set();
  return text.split(FIND).map((part) => {
    if (!TERMS[part] || seen.has(part)) return part;
    seen.add(part);
    return element("button", { type: "button", class: "term-word", "data-tip": TERMS[part], "aria-label": `${part}: ${TERMS[part]}` }, part);
  });
}
