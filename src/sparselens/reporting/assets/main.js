// The page: sections of the chosen Run, the theme, where one is, and, when served, news.

import { element, segments } from "./dom.js";
import { goToAddress } from "./address.js";
import { report } from "./data.js";
import { redrawAll } from "./palette.js";
import { showSections } from "./sections.js";
import { showProvenance } from "./summary.js";

const place = (id) => document.getElementById(id);

function show(index) {
  const run = report.runs[index];
  const others = report.runs.filter((_, i) => i !== index);
  document.title = run.summary ? `${run.summary.title} – sparselens report` : "sparselens studio";
  showSections(run, others);
  if (run.summary) showProvenance(place("provenance"), report.runs);
}

function themeButton() {
  const order = ["auto", "light", "dark"];
  const root = document.documentElement;
  const button = element(
    "button",
    {
      class: "plain",
      type: "button",
      id: "theme",
      on: {
        click: () => {
          const next = order[(order.indexOf(root.dataset.theme ?? "auto") + 1) % order.length];
          if (next === "auto") delete root.dataset.theme;
          else root.dataset.theme = next;
          button.textContent = `Theme: ${next}`;
          redrawAll();
        },
      },
    },
    "Theme: auto",
  );
  return button;
}

/** Marks the section one is reading in the navigation. */
function followScroll() {
  const links = new Map([...document.querySelectorAll(".bar nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        for (const [id, link] of links)
          id === target.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
      }
    },
    { rootMargin: "-30% 0px -65% 0px" },
  );
  for (const id of links.keys()) if (place(id)) seen.observe(place(id));
}

/** A served page asks its own server whether the Run has changed. A page from disk never asks anybody. */
function followRun() {
  if (!report.live) return;
  setInterval(async () => {
    try {
      const answer = await fetch("/stamp");
      if (answer.ok && (await answer.text()) !== report.stamp) location.reload();
    } catch {
      /* the server has gone; the page stays as it is */
    }
  }, 2000);
}

if (report.runs.length > 1) {
  place("tools").append(
    segments(
      "Run",
      report.runs.map((run, i) => [String(i), run.summary.run]),
      "0",
      (value) => show(Number(value)),
    ),
  );
}
place("tools").append(themeButton());
show(0);
goToAddress();
followScroll();
followRun();
