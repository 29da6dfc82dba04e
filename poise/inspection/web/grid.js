// Layers × heads, coloured by one figure. One tab stop; arrow keys move, and moving chooses.

import { isDeep, shade } from "./colour.js";
import { headAt, report } from "./data.js";
import { arrow, byId, choice, make, short, within } from "./dom.js";
import { change, isShown, onChange, state } from "./state.js";

/** @type {Map<string, HTMLElement>} */
const cells = new Map();

export function showGrid() {
  const most = Math.max(...report.layers.map((layer) => layer.heads));
  const box = byId("grid");
  byId("grid-colour").append(
    choice("colour of the grid", report.figures.map((each) => each.label), state.colour, (colour) => change({ colour })),
  );
  box.style.setProperty("--columns", String(report.layers.length));
  box.style.setProperty("--high", `${within(13, 290 / most, 34)}px`);
  box.append(make("span", { class: "corner" }, "head"));
  report.layers.forEach((layer, index) => {
    const every = Math.ceil(report.layers.length / 32);
    box.append(make("span", { class: "name", title: layer.path }, index % every ? "" : String(layer.number)));
  });
  for (let head = 0; head < most; head++) {
    box.append(make("span", { class: "name" }, String(head)));
    report.layers.forEach((_, layer) => {
      const found = headAt(layer, head);
      const cell = make(found ? "button" : "span", found ? { tabindex: "-1", type: "button" } : {});
      box.append(cell);
      if (!found) return;
      cells.set(`${layer}.${head}`, cell);
      cell.addEventListener("click", () => change({ layer, head }));
    });
  }
  box.addEventListener("keydown", (event) => {
    const move = arrow(event.key);
    if (!move) return;
    event.preventDefault();
    const layer = within(0, state.layer + move[1], report.layers.length - 1);
    const head = within(0, state.head + move[0], (report.layers[layer]?.heads ?? 1) - 1);
    change({ layer, head });
    cells.get(`${layer}.${head}`)?.focus();
  });
  paint();
  mark();
  onChange((changed) => {
    if (changed.includes("colour") || changed.includes("only")) paint();
    if (changed.includes("layer") || changed.includes("head")) mark();
  });
}

export function paint() {
  const known = report.heads.map((head) => head.values[state.colour] ?? null).filter((x) => x !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const figure = report.figures[state.colour];
  for (const [key, cell] of cells) {
    const [layer, head] = key.split(".").map(Number);
    const found = headAt(layer ?? 0, head ?? 0);
    const value = found?.values[state.colour] ?? null;
    const share = value === null ? 0 : high > low ? (value - low) / (high - low) : 0.5;
    cell.style.background = value === null ? "transparent" : shade(share);
    cell.style.color = isDeep(share) ? "#fff" : "#111";
    cell.classList.toggle("faded", !found || !isShown(found));
    const kinds = found?.classes.join(", ") || "no class";
    const name = `layer ${report.layers[layer ?? 0]?.number} head ${head}: ${figure?.label} ${short(value)}; ${kinds}`;
    cell.title = name;
    cell.setAttribute("aria-label", name);
  }
  byId("grid-low").textContent = short(low);
  byId("grid-high").textContent = short(high);
  byId("grid-meaning").textContent = figure?.meaning ?? "";
}

function mark() {
  for (const cell of cells.values()) {
    cell.tabIndex = -1;
    cell.removeAttribute("aria-current");
  }
  const cell = cells.get(`${state.layer}.${state.head}`);
  if (!cell) return;
  cell.tabIndex = 0;
  cell.setAttribute("aria-current", "true");
}
