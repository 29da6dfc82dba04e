// All heads as a table, sorted by any column.

import { headAt, report } from "./data.js";
import { byId, make, short } from "./dom.js";
import { change, isShown, onChange, state } from "./state.js";

const sorted = { column: 3, down: true };

export function showTable() {
  fill();
  onChange((changed) => {
    if (changed.includes("only")) fill();
    else if (changed.includes("layer") || changed.includes("head")) mark();
  });
}

/** @param {import("./data.js").Head} head @returns {(number | string | null)[]} */
function columnsOf(head) {
  return [report.layers[head.layer]?.number ?? 0, head.head, head.classes.join(", "), ...head.values];
}

function fill() {
  const names = ["layer", "head", "classes", ...report.figures.map((each) => each.label)];
  const row = make("tr");
  names.forEach((name, column) => {
    const button = make("button", { type: "button" }, name);
    const cell = make("th", { scope: "col", title: report.figures[column - 3]?.meaning ?? "" }, button);
    if (column === sorted.column) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    button.addEventListener("click", () => {
      sorted.down = column === sorted.column ? !sorted.down : column > 2;
      sorted.column = column;
      fill();
      /** @type {HTMLElement | null} */ (byId("table").querySelector(`th:nth-child(${column + 1}) button`))?.focus();
    });
    row.append(cell);
  });
  const heads = report.heads.filter(isShown).map((head) => ({ head, columns: columnsOf(head) }));
  heads.sort((a, b) => {
    const [x, y] = [a.columns[sorted.column] ?? null, b.columns[sorted.column] ?? null];
    if (x === null || y === null) return Number(x === null) - Number(y === null); // what is not known comes last
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return sorted.down ? -order : order;
  });
  const body = make("tbody");
  for (const { head, columns } of heads) {
    const line = make("tr", { "data-head": `${head.layer}.${head.head}`, title: head.evidence });
    columns.forEach((value, column) => {
      const text = column < 3 ? String(value) : short(/** @type {number | null} */ (value));
      line.append(column < 2 ? make("th", { scope: "row" }, text) : make("td", {}, text));
    });
    line.addEventListener("click", () => change({ layer: head.layer, head: head.head }));
    body.append(line);
  }
  byId("table").replaceChildren(make("table", {}, make("thead", {}, row), body));
  mark();
}

function mark() {
  for (const line of document.querySelectorAll("#table tr[data-head]")) {
    const mine = line.getAttribute("data-head") === `${state.layer}.${state.head}`;
    line.classList.toggle("chosen", mine && headAt(state.layer, state.head) !== undefined);
  }
}
