// The page: header, classes, the chosen head's figures, keys that work everywhere. Views do the rest.

import { classColour, isDark, onTheme } from "./colour.js";
import { headAt, report } from "./data.js";
import { byId, make, short } from "./dom.js";
import { paint, showGrid } from "./grid.js";
import { repaintMap, showMap } from "./map.js";
import { plot, showScatter } from "./scatter.js";
import { change, onChange, state } from "./state.js";
import { showTable } from "./table.js";

function showClasses() {
  byId("classes").replaceChildren(
    ...report.classes.map((each, index) => {
      const button = make("button", { type: "button", title: each.meaning, "aria-pressed": String(state.only === each.name) });
      const dot = make("i", {});
      dot.style.background = classColour(index);
      const control = each.shuffled === null ? "" : `${each.shuffled} shuffled`;
      button.append(dot, make("b", {}, String(each.heads)), each.name, make("small", {}, control));
      button.addEventListener("click", () => change({ only: state.only === each.name ? null : each.name }));
      return button;
    }),
  );
}

function showHead() {
  const head = headAt(state.layer, state.head);
  if (!head) return;
  const layer = report.layers[head.layer];
  byId("head-name").textContent = `Layer ${layer?.number} · head ${head.head}`;
  byId("head-path").textContent = layer?.path ?? "";
  byId("head-evidence").textContent = head.evidence || "Of no class.";
  byId("head-classes").replaceChildren(
    ...head.classes.map((name) => {
      const chip = make("span", { class: "chip" }, name);
      chip.style.borderColor = classColour(report.classes.findIndex((each) => each.name === name));
      return chip;
    }),
  );
  byId("figures").replaceChildren(
    ...report.figures.flatMap((figure, index) => [
      make("dt", { title: figure.meaning }, figure.label),
      make("dd", {}, short(head.values[index] ?? null)),
    ]),
  );
}

/** @param {number} step */
function neighbour(step) {
  const at = report.heads.findIndex((head) => head.layer === state.layer && head.head === state.head);
  const next = report.heads[(at + step + report.heads.length) % report.heads.length];
  if (next) change({ layer: next.layer, head: next.head });
}

/** @type {Record<string, () => void>} */
const KEYS = {
  "[": () => neighbour(-1),
  "]": () => neighbour(1),
  l: () => change({ log: !state.log }),
  s: () => change({ hidden: !state.hidden }),
  m: () => change({ largest: !state.largest }),
  "/": () => byId("find-query").focus(),
};

function repaint() {
  showClasses();
  showHead();
  paint();
  plot();
  repaintMap();
}

function begin() {
  document.title = `${report.model} · poise inspect`;
  byId("model").textContent = report.model;
  byId("about").textContent = report.about;
  byId("note").textContent = report.note;
  byId("note").hidden = !report.note;
  showGrid();
  showScatter();
  showTable();
  const ready = showMap();
  onChange((changed) => {
    if (changed.includes("only")) showClasses();
    if (changed.includes("layer") || changed.includes("head")) showHead();
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLInputElement && event.target.type === "search";
    const does = KEYS[event.key];
    if (!does || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    does();
  });
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset["theme"] = isDark() ? "light" : "dark";
    repaint();
  });
  onTheme(repaint);
  repaint();
  void ready.then(repaintMap);
}

begin();
