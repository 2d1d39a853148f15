// Features with faces: a label wherever a feature is named, a card when it is clicked, and a search.

import { element, emptyNotice, heading, how, number, percent } from "./dom.js";
import { section } from "./sections.js";

const NAMED = /feature (\d+) of layer (\d+)/;
const FOUND = 60; // shown of a search

section("features", (place, run) => {
  const title = heading(
    "features",
    "Features",
    "What the features of the transcoders are about: the words they are active on, what they promote, and a label made from these.",
  );
  const { cards, sets } = run.features?.cards ? run.features : { cards: {}, sets: [] };
  const groups = [
    ...Object.entries(cards).map(([name, found]) => ({ name: whose(name, run.attribution), cards: found, traced: true })),
    ...sets.map(({ name, about, cards: found }) => ({ name: `of ${name}`, cards: found, about })),
  ].filter((group) => Object.keys(group.cards).length);
  if (!groups.length) {
    const what = "Features have no faces yet. With a transcoder and some text, this gives every feature its own:";
    place.replaceChildren(...title, emptyNotice(what, run.commands.features));
    return;
  }
  place.replaceChildren(
    ...title,
    how(
      "A label is made by rules, without a language model: the word most of a feature's strongest contexts share, what kind of word it is, or what it follows. “fits” counts the contexts it is true of. Activation is shaded from none to the feature's largest.",
      "Bars count tokens by activation, doubling every second bar. Promoted words are those its decoder, all its layers together, raises most; numbers are standard deviations over the vocabulary.",
    ),
    search(groups),
  );
});

/** Which model's features a trace shows; several traces keep their names. */
function whose(name, traces) {
  const role = traces?.find((trace) => trace.name === name)?.role;
  return role ? `of the ${role} model${traces.length > 2 ? ` (${name})` : ""}` : `of ${name}`;
}

/** A box to search in, what was found, and the card of the chosen one. */
function search(groups) {
  const list = element("div", { class: "feature-list" });
  const said = element("p", { class: "note", "aria-live": "polite" });
  const input = element("input", { type: "search", placeholder: "a word, a label, or layer/feature such as 3/17", "aria-label": "Search features by word, label or number" });
  const order = element(
    "select",
    { "aria-label": "Order" },
    [
      ["own", "most influential or busiest first"],
      ["largest", "largest activation first"],
      ["share", "most often active first"],
    ].map(([value, text]) => element("option", { value }, text)),
  );
  const show = () => {
    const wanted = input.value.trim().toLowerCase();
    const found = groups.flatMap((group) =>
      Object.entries(group.cards)
        .filter(([name, card]) => matches(card, name, wanted))
        .map(([name, card]) => ({ name, card, group })),
    );
    if (order.value !== "own") found.sort((a, b) => b.card[order.value] - a.card[order.value]);
    said.textContent = found.length
      ? `${found.length} features${found.length > FOUND ? `, the first ${FOUND} shown` : ""}`
      : `No feature here has “${input.value}” in its label or its words. Try a part of a word; the page holds the traced features and the busiest ones, sl.features(...).search looks through all.`;
    list.replaceChildren(
      ...found.slice(0, FOUND).map(({ name, card, group }) =>
        element(
          "button",
          { type: "button", class: "feature-row detail", "data-feature": name, on: { click: () => openCard(card, group.cards) } },
          element("b", {}, labelOf(card)),
          element("small", {}, `${name}${groups.length > 1 ? ` ${group.name}` : ""} · on ${percent(card.share, 2)} of the tokens`),
        ),
      ),
    );
  };
  input.addEventListener("input", show);
  order.addEventListener("change", show);
  show();
  return element("div", { class: "card stack" }, element("div", { class: "controls" }, input, order), said, list);
}

const labelOf = (card) => card.own || card.label;

function matches(card, name, wanted) {
  if (!wanted) return true;
  if (/^\d+\/\d+$/.test(wanted)) return name === wanted;
  if (labelOf(card).toLowerCase().includes(wanted)) return true;
  const fired = card.top.some((one) => one.text[one.at]?.trim().toLowerCase() === wanted);
  return fired || card.promoted.some(([word]) => word.trim().toLowerCase() === wanted);
}

/** Text in which a feature is named, with its label and a button for its card; unchanged where it has no face. */
export function withFaces(text, trace) {
  const found = NAMED.exec(text);
  if (!found) return text;
  const name = `${found[2]}/${found[1]}`;
  const [before, after] = [text.slice(0, found.index), text.slice(found.index + found[0].length)];
  return [before, featureButton(name, trace) ?? found[0], after];
}

/** A button named by the label, or null where the feature has no label. */
export function featureButton(name, trace) {
  const card = trace.cards?.[name];
  const label = card ? labelOf(card) : trace.labels?.[name];
  if (!label) return null;
  const text = [element("b", {}, label), element("small", {}, ` ${name}`)];
  if (!card) return element("span", { class: "face" }, text);
  const on = { click: () => openCard(card, trace.cards) };
  return element("button", { type: "button", class: "face", "data-feature": name, on }, text);
}

/** Opens the card of a feature, where this trace has it. */
export function featureCard(name, trace) {
  if (trace.cards?.[name]) openCard(trace.cards[name], trace.cards);
}

/** The card in a dialog; features near it lead on where they have cards here. */
export function openCard(card, cards) {
  document.querySelector("dialog.feature-card")?.remove();
  const close = element("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
  const dialog = element("dialog", { class: "feature-card", "aria-label": `Feature: ${labelOf(card)}` }, close, faceOf(card, cards));
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

function faceOf(card, cards) {
  const near = card.nearest.map(([layer, feature, cosine, label]) => {
    const name = `${layer}/${feature}`;
    const text = `${label ?? name} (${number(cosine, 2)})`;
    const on = { click: () => openCard(cards[name], cards) };
    return cards[name] ? element("button", { type: "button", class: "says", on }, text) : element("span", {}, text);
  });
  return element(
    "div",
    { class: "stack" },
    element("h3", {}, labelOf(card)),
    element(
      "p",
      { class: "note" },
      `feature ${card.feature} of layer ${card.layer}`,
      card.fits ? ` · the label fits ${card.fits} of its strongest contexts` : "",
      ` · active on ${percent(card.share, 2)} of the tokens, mean ${number(card.mean)}, largest ${number(card.largest)}`,
    ),
    histogram(card),
    words("promotes", card.promoted),
    words("suppresses", card.suppressed),
    element("div", { class: "excerpts" }, card.top.map((one) => excerpt(one))),
    card.lower.length ? element("p", { class: "note" }, "weaker activations") : null,
    element("div", { class: "excerpts" }, card.lower.map((one) => excerpt(one))),
    near.length ? element("p", { class: "near" }, element("small", {}, "reads and writes alike: "), near) : null,
  );
}

function words(name, found) {
  if (!found.length) return null;
  const shown = found.slice(0, 10).map(([word, z]) => element("code", { title: `${number(z, 2)} standard deviations` }, word.trim() || "␣"));
  return element("p", { class: "feature-words" }, element("small", {}, `${name} `), shown);
}

function histogram(card) {
  const most = Math.max(...card.histogram, 1);
  const bars = card.histogram.map((count, i) => {
    const bar = element("span", { title: `${number(count)} tokens from ${number(card.lowest * 2 ** (i / 2), 2)}` });
    bar.style.height = `${count ? Math.max(2, Math.round((32 * count) / most)) : 0}px`;
    return bar;
  });
  return element("div", { class: "feature-histogram", role: "img", "aria-label": "Tokens by activation" }, bars);
}

function excerpt({ text, activations, value }) {
  const parts = text.map((piece, i) => {
    const shown = piece.replaceAll("\n", "↵");
    if (!activations[i]) return shown;
    const mark = element("mark", {}, shown);
    mark.style.setProperty("--level", String(Math.min(activations[i], 255) / 255));
    return mark;
  });
  return element("p", { class: "excerpt", title: `activation ${number(value)}` }, parts);
}
