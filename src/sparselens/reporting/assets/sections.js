// Which function shows which section: every section's script registers its own, in the order of the page.

const renderers = new Map();

/** show(place, run, others): fill the element `place` with what `run` holds for this section. */
export function section(name, show) {
  renderers.set(name, show);
}

export function showSections(run, others) {
  for (const [name, show] of renderers) {
    const place = document.getElementById(name); // a studio without a Run has one section alone
    if (place) show(place, run, others);
  }
}
