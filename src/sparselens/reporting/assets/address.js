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

const HELD = 4000; // ms after loading

/** Goes where the address says and stays there while pictures above get their height, until the reader does something. */
export function goToAddress() {
  const [name] = location.hash.slice(1).split("?", 2);
  const place = name && document.getElementById(name);
  if (!place) return;
  history.scrollRestoration = "manual";
  const go = () => place.scrollIntoView({ behavior: "instant" });
  const grown = new ResizeObserver(go);
  const events = ["wheel", "touchstart", "pointerdown", "keydown"];
  const leave = () => {
    grown.disconnect();
    for (const event of events) removeEventListener(event, leave, true);
  };
  for (const event of events) addEventListener(event, leave, true);
  grown.observe(document.querySelector("main"));
  go();
  setTimeout(leave, HELD);
}
