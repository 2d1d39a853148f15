// The studio: a prompt typed, models asked, gates closed, and what the answer does. Offline: what was kept.

import { element, emptyNotice, heading, how } from "./dom.js";
import { report } from "./data.js";
import { section } from "./sections.js";
import { keptList } from "./studio_kept.js";
import { LiveStudio } from "./studio_live.js";

section("studio", (place, run) => {
  const live = Boolean(report.studio);
  const title = heading(
    "studio",
    "Studio",
    live
      ? "Type a prompt. Close a gate, silence a head or scale a feature, and see what the answer does."
      : "What was tried by hand in the studio, with the change that was measured.",
  );
  if (live) {
    place.replaceChildren(
      ...title,
      how(
        "Bars show the likeliest next tokens of each model. Choose one: the picture then shows the edges that matter most to it. Tokens stand across, the input is below, and a thick line is an edge whose loss should change the answer most.",
        "Click a line to close its gate. “Measured” is the model run again without it. “Predicted” is what the gradient said, to first order: good where an edge is one of many, poor where a sparse model hangs on a few.",
        "Heads are named L3.H1: layer 3, head 1, both counted from 0. Log-odds are log p − log(1 − p), in nats.",
      ),
    );
    new LiveStudio(place);
    return;
  }
  if (!run.studio?.kept.length) {
    place.replaceChildren(...title, emptyNotice("Nothing has been kept. This starts the studio:", run.commands.studio));
    return;
  }
  place.replaceChildren(...title, element("div", { class: "stack" }, keptList(run.studio.kept)));
});
