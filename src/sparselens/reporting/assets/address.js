// Where a reader stands, in the page's address: #circuits?task=ioi&n=200 restores that view. It stays on this machine.

/** What the address asks of a section, as texts; {} where it speaks of another one. */
export function asked(section) {
  const [name, rest = ""] = location.hash.slice(1).split("?", 2);
  return name === section ? Object.fromEntries(new URLSearchParams(rest)) : {};
}

/** Writes a view into the address; what is null or undefined is left out. */
export function remember(section, view) {
  const told = Object.entries(view).filter(([, value]) => value !== null && value !== undefined);
  const text = new URLSearchParams(told.map(([name, value]) => [name, String(value)]));
  history.replaceState(null, "", `#${section}?${text}`);
}

/** The browser itself knows no place called "circuits?task=ioi". */
export function goToAddress() {
  const [name, rest] = location.hash.slice(1).split("?", 2);
  const place = rest === undefined ? null : document.getElementById(name);
  if (!place) return;
  history.scrollRestoration = "manual";
  // Pictures above get their height when they are drawn.
  for (const wait of [0, 150, 600]) setTimeout(() => place.scrollIntoView({ behavior: "instant" }), wait);
}
