// Save what is on the page: pictures as SVG and PNG, numbers as JSON and CSV. Files are made here; nothing is fetched.

import { element } from "./dom.js";
import { palette } from "./palette.js";
import { paint, toSvg } from "./scene.js";

function saveBlob(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // a busy machine may read it late
}

const saveText = (text, type, name) => saveBlob(new Blob([text], { type }), name);

function savePng(scene, name) {
  const canvas = element("canvas", { width: scene.width * 3, height: scene.height * 3 });
  const context = canvas.getContext("2d");
  context.scale(3, 3);
  context.fillStyle = palette().card;
  context.fillRect(0, 0, scene.width, scene.height);
  paint(scene, context);
  canvas.toBlob((blob) => saveBlob(blob, name));
}

/** Buttons for what can be saved. sources: { scene: () => Scene, json: () => value, csv: () => [[...], ...] } */
export function downloads(stem, sources) {
  const name = () => (typeof stem === "function" ? stem() : stem).replace(/[^\w.-]+/g, "-");
  const kinds = {
    SVG:
      sources.scene &&
      (() => saveText(new XMLSerializer().serializeToString(toSvg(sources.scene())), "image/svg+xml", `${name()}.svg`)),
    PNG: sources.scene && (() => savePng(sources.scene(), `${name()}.png`)),
    JSON:
      sources.json && (() => saveText(JSON.stringify(sources.json(), null, 1), "application/json", `${name()}.json`)),
    CSV:
      sources.csv &&
      (() =>
        saveText(
          sources
            .csv()
            .map((row) => row.map(csvCell).join(","))
            .join("\r\n"),
          "text/csv",
          `${name()}.csv`,
        )),
  };
  const what = typeof stem === "function" ? "picture" : stem;
  return element(
    "span",
    { class: "downloads", role: "group", "aria-label": `Download ${what}` },
    Object.entries(kinds)
      .filter(([, save]) => save)
      .map(([kind, save]) =>
        element("button", { class: "plain", type: "button", "data-download": kind, on: { click: save } }, kind),
      ),
  );
}

/** Quoted where needed; a leading = + - @ that is not a number would be run as a formula by spreadsheets. */
function csvCell(value) {
  let text = String(value ?? "");
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
