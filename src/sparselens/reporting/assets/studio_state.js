// What a studio is asked about: a prompt, a model, an answer, and what was changed. It lives in the page's address.

const EMPTY = { text: "", more: [], role: "", answer: null, position: null, closed: [], silenced: [], scaled: [] };

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** The state in the address, over a beginning. A damaged address is no address. */
export function readAddress(beginning) {
  const state = { ...structuredClone(EMPTY), ...beginning };
  const [name, rest] = location.hash.slice(1).split("?", 2);
  if (name !== "studio" || !rest) return state;
  const found = new URLSearchParams(rest);
  for (const key of Object.keys(EMPTY)) {
    if (!found.has(key)) continue;
    try {
      const value = key === "text" || key === "role" ? found.get(key) : JSON.parse(found.get(key));
      if (Array.isArray(value) === Array.isArray(EMPTY[key])) state[key] = value;
    } catch {
      /* left as it was */
    }
  }
  return state;
}

export function writeAddress(state) {
  const told = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (!(key in EMPTY) || same(value, EMPTY[key])) continue;
    told.set(key, typeof value === "string" ? value : JSON.stringify(value));
  }
  history.replaceState(null, "", `#studio?${told}`);
}

/** Adds a change, or takes it back if it is there. Returns a new state. */
export function toggled(state, kind, place) {
  const there = state[kind].some((other) => same(other, place));
  const others = state[kind].filter((other) => !same(other, place));
  return { ...state, [kind]: there ? others : [...others, place] };
}

/** A feature has one factor at a time. */
export function scaledBy(state, place, factor) {
  const others = state.scaled.filter((other) => !same(other.slice(0, 3), place));
  return { ...state, scaled: factor === 1 ? others : [...others, [...place, factor]] };
}

export const hasChange = (state, kind, place) => state[kind].some((other) => same(other, place));
export const untouched = (state) => ({ ...state, closed: [], silenced: [], scaled: [] });
export const countChanges = (state) => state.closed.length + state.silenced.length + state.scaled.length;

/** A word of the prompt and its place: “ball” (13). */
export const wordAt = (tokens, i) => `“${(tokens[i] ?? "").trim() || "␣"}” (${i})`;

/** Every change in words. tokens: the prompt's. */
export function changesInWords(state, tokens) {
  const at = (i) => wordAt(tokens, i);
  return [
    ...state.closed.map((p) => ["closed", p, `gate L${p[0]}.H${p[1]}, ${at(p[2])} no longer reads ${at(p[3])}`]),
    ...state.silenced.map((p) => ["silenced", p, `head L${p[0]}.H${p[1]} silenced`]),
    ...state.scaled.map((p) => ["scaled", p, `feature ${p[2]} of layer ${p[0]} at ${at(p[1])} times ${p[3]}`]),
  ];
}
