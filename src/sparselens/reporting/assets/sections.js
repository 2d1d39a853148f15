// Which function shows which section: every section's script registers its own, in the order of the page.

const renderers = new Map();

/** show(place, run, others): fill the element `place` with what `run` holds for this section. */
export function section(name, show) {
  renderers.set(name, show);
}

export function showSections(run, others) {
  for (const [name, show] of renderers) show(document.getElementById(name), run, others);
}
