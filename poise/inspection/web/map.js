// The map of one head on one text: queries down, keys across. Pointing at a cell tells who looks at whom, and how much.

import { isDark, isDeep, onScale, ramp, shade } from "./colour.js";
import { headAt, mapOf, report } from "./data.js";
import { arrow, byId, choice, make, precise, short, within } from "./dom.js";
import { change, onChange, state } from "./state.js";

const LABELS = 84; // pixels for tokens beside and above the map
const PLAIN = 40; // for numbers
const SMALLEST = 11; // pixels of a cell that has room for a token

/** @type {import("./data.js").HeadMap | null} */
let shown = null;
let layout = { left: LABELS, top: LABELS, cell: 1 };
/** @type {{ query: Set<number>, key: Set<number> }} cells whose tokens are searched for */
let found = { query: new Set(), key: new Set() };
let asked = 0;

const canvas = /** @type {HTMLCanvasElement} */ (byId("map"));

export function showMap() {
  const titles = report.texts.map((text) => text.title);
  if (titles.length) byId("map-text").append(choice("text", titles, state.text, (text) => change({ text })));
  for (const [id, key] of /** @type {const} */ ([["map-log", "log"], ["map-hidden", "hidden"], ["map-largest", "largest"]])) {
    const box = /** @type {HTMLInputElement} */ (byId(id));
    box.checked = state[key];
    box.addEventListener("change", () => change({ [key]: box.checked }));
    onChange((changed) => void (changed.includes(key) && (box.checked = state[key])));
  }
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("keydown", (event) => {
    const move = arrow(event.key);
    if (!move || !shown) return;
    event.preventDefault();
    const [row, column] = state.cell;
    goTo(row + move[0] * (event.shiftKey ? 5 : 1), column + move[1] * (event.shiftKey ? 5 : 1));
  });
  for (const axis of /** @type {const} */ (["query", "key"])) {
    const input = /** @type {HTMLInputElement} */ (byId(`find-${axis}`));
    input.addEventListener("input", () => search());
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") next(axis, event.shiftKey ? -1 : 1);
      if (event.key === "Escape") (input.value = ""), search();
    });
  }
  new ResizeObserver(() => draw()).observe(byId("map-box"));
  onChange((changed) => {
    if (["layer", "head", "text", "hidden"].some((key) => changed.includes(/** @type {any} */ (key)))) void load();
    else if (["log", "largest"].some((key) => changed.includes(/** @type {any} */ (key)))) draw();
    else if (changed.includes("cell")) draw(), tell();
  });
  return load();
}

async function load() {
  const mine = ++asked;
  const map = await mapOf(state.text, state.layer, state.head, state.hidden);
  if (mine !== asked) return; // another head was chosen meanwhile
  const same = map?.text === shown?.text;
  shown = map;
  if (map && !same) state.cell = interesting(map);
  byId("map-box").hidden = !map;
  byId("no-map").hidden = Boolean(map);
  byId("map-largest-label").hidden = !map || map.text.exact;
  search();
  draw();
  tell();
  document.documentElement.dataset["ready"] = `${state.text} ${state.layer} ${state.head} ${state.hidden}`;
}

/** Where to begin: the cell with most weight among the later queries. @param {import("./data.js").HeadMap} map */
function interesting(map) {
  const { rows, columns } = map.text;
  let best = [rows - 1, 0, -1];
  for (let i = rows >> 1; i < rows; i++) {
    for (let j = 1; j < columns; j++) {
      const p = map.values[i * columns + j] ?? 0;
      if (p > (best[2] ?? 0)) best = [i, j, p];
    }
  }
  return /** @type {[number, number]} */ ([best[0], best[1]]);
}

function numbers() {
  if (!shown) return new Float32Array();
  return state.largest && !shown.text.exact ? shown.largest : shown.values;
}

export function draw() {
  if (!shown) return;
  const { rows, columns, exact, side, queryTokens, keyTokens } = shown.text;
  const width = Math.max(240, byId("map-box").clientWidth);
  const labelled = exact && (width - LABELS) / columns >= SMALLEST;
  const margin = labelled ? LABELS : PLAIN;
  const cell = within(1, Math.floor((Math.min(width, 720) - margin - 2) / Math.max(columns, rows)), 48);
  layout = { left: margin, top: margin, cell };
  const [wide, high] = [margin + columns * cell + 2, margin + rows * cell + 2];
  const dots = devicePixelRatio || 1;
  canvas.width = wide * dots;
  canvas.height = high * dots;
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${high}px`;
  Object.assign(canvas.dataset, { left: margin, top: margin, cell, rows, columns });
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.scale(dots, dots);
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, line, accent] = ["--ink", "--faint", "--line", "--accent"].map((name) => style.getPropertyValue(name));
  const values = numbers();
  const most = top(values);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture(values, rows, columns, most), margin, margin, columns * cell, rows * cell);
  pen.strokeStyle = line ?? "";
  pen.strokeRect(margin - 0.5, margin - 0.5, columns * cell + 1, rows * cell + 1);
  pen.font = `${labelled ? within(9, cell - 3, 12) : 11}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  const [row, column] = state.cell;
  /** @param {number} i @param {string[]} tokens @param {number} side */
  const label = (i, tokens, side) => (labelled ? clipped(tokens[i] ?? "") : String(i * side));
  const every = labelled ? 1 : Math.ceil(columns / 8);
  for (let i = 0; i < rows; i += every) {
    pen.fillStyle = (i === row ? ink : faint) ?? "";
    pen.textAlign = "right";
    pen.fillText(label(i, queryTokens, side[0]), margin - 8, margin + (i + 0.5) * cell, margin - 12);
  }
  for (let j = 0; j < columns; j += every) {
    pen.save();
    pen.translate(margin + (j + 0.5) * cell, margin - 8);
    pen.rotate(labelled ? -Math.PI / 2 : 0);
    pen.fillStyle = (j === column ? ink : faint) ?? "";
    pen.textAlign = labelled ? "left" : "center";
    pen.fillText(label(j, keyTokens, side[1]), 0, labelled ? 0 : -4, margin - 12);
    pen.restore();
  }
  pen.fillStyle = accent ?? "";
  for (const i of found.query) pen.fillRect(margin - 6, margin + i * cell, 4, Math.max(cell - 1, 1));
  for (const j of found.key) pen.fillRect(margin + j * cell, margin - 6, Math.max(cell - 1, 1), 4);
  pen.strokeStyle = accent ?? "";
  pen.globalAlpha = 0.35;
  pen.strokeRect(margin, margin + row * cell + 0.5, columns * cell, cell - 1);
  pen.strokeRect(margin + column * cell + 0.5, margin, cell - 1, rows * cell);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.strokeRect(margin + column * cell, margin + row * cell, cell, cell);
  byId("map-low").textContent = state.log ? `≤ ${lowest()}` : "0";
  byId("map-high").textContent = state.log ? "1" : short(most);
}

/** Where the logarithmic scale begins: means over many pairs are small. */
function lowest() {
  return !state.log ? 0 : shown?.text.exact ? 0.001 : 0.00001;
}

/** @param {Float32Array} values */
function top(values) {
  let most = 0;
  for (const p of values) if (p > most) most = p;
  return most;
}

/** One pixel per cell; what gets nothing is left open. @param {Float32Array} values @param {number} rows @param {number} columns @param {number} most */
function picture(values, rows, columns, most) {
  const made = document.createElement("canvas");
  [made.width, made.height] = [columns, rows];
  const pen = /** @type {CanvasRenderingContext2D} */ (made.getContext("2d"));
  const image = pen.createImageData(columns, rows);
  const colours = ramp();
  values.forEach((p, i) => {
    if (p === 0) return;
    const at = 3 * Math.round(255 * onScale(p, most, lowest()));
    image.data.set([colours[at] ?? 0, colours[at + 1] ?? 0, colours[at + 2] ?? 0, 255], 4 * i);
  });
  pen.putImageData(image, 0, 0);
  return made;
}

/** @param {PointerEvent} event */
function point(event) {
  if (!shown) return;
  const box = canvas.getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top - layout.top) / layout.cell);
  const column = Math.floor((event.clientX - box.left - layout.left) / layout.cell);
  if (row >= 0 && column >= 0 && row < shown.text.rows && column < shown.text.columns) goTo(row, column);
}

/** @param {number} row @param {number} column */
function goTo(row, column) {
  if (!shown) return;
  const cell = /** @type {[number, number]} */ ([
    within(0, row, shown.text.rows - 1),
    within(0, column, shown.text.columns - 1),
  ]);
  if (cell[0] !== state.cell[0] || cell[1] !== state.cell[1]) change({ cell });
}

/** What the cell says, and the tokens it is about. */
function tell() {
  const about = headAt(state.layer, state.head);
  if (!shown || !about) return;
  const { text, values, largest, place, sink } = shown;
  const [row, column] = state.cell;
  const at = row * text.columns + column;
  const pair = place && (largest[at] ?? 0) > 0 ? place[at] ?? 0 : -1; // that is largest in a pooled cell
  const said = byId("told");
  if (text.exact) {
    said.replaceChildren(
      token(text.queryTokens, row), " looks at ", token(text.keyTokens, column), " with ",
      make("strong", { id: "weight" }, precise(values[at] ?? 0)),
    );
  } else {
    const [down, across] = text.side;
    const parts = [
      `Queries ${span(row, down, text.queries)}, keys ${span(column, across, text.keys)}: mean `,
      make("strong", { id: "weight" }, precise(values[at] ?? 0)), ", largest ",
      make("strong", { id: "largest" }, precise(largest[at] ?? 0)),
    ];
    if (pair >= 0) {
      parts.push(": ", token(text.queryTokens, Math.floor(pair / text.keys)), " looks at ", token(text.keyTokens, pair % text.keys));
    }
    said.replaceChildren(...parts);
  }
  const gone = byId("gone");
  gone.hidden = !state.hidden;
  gone.replaceChildren("Left out: ", token(text.keyTokens, sink), ", the key that gets most; each row is scaled to 1 again.");
  strip("query", row, text.exact ? row : Math.floor(pair / text.keys), (i) => values[i * text.columns + column] ?? 0);
  strip("key", column, text.exact ? column : pair % text.keys, (j) => values[row * text.columns + j] ?? 0);
}

/** @param {number} cell @param {number} side @param {number} all */
function span(cell, side, all) {
  return `${cell * side}–${Math.min((cell + 1) * side, all) - 1}`;
}

/** @param {string[]} tokens @param {number} i */
function token(tokens, i) {
  return make("span", { class: "token" }, make("q", {}, visible(tokens[i] ?? "")), make("small", {}, ` ${i}`));
}

/** @param {string} piece */
function visible(piece) {
  return piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
}

/** @param {string} piece */
function clipped(piece) {
  const text = visible(piece).trim() || "␣";
  return [...text].length > 10 ? `${[...text].slice(0, 9).join("")}…` : text;
}

/**
 * The text itself, shaded: along one axis, by what belongs to the chosen cell of the other.
 * @param {"query" | "key"} axis @param {number} chosen @param {number} marked a token
 * @param {(cell: number) => number} weight
 */
function strip(axis, chosen, marked, weight) {
  if (!shown) return;
  const { text } = shown;
  const side = text.side[axis === "query" ? 0 : 1];
  const tokens = axis === "query" ? text.queryTokens : text.keyTokens;
  const [first, last] = text.exact ? [0, tokens.length] : [chosen * side, Math.min((chosen + 1) * side, tokens.length)];
  const parts = [];
  for (let i = first; i < last; i++) {
    const span = make("span", i === marked ? { class: "chosen" } : {}, visible(tokens[i] ?? ""));
    if (text.exact) {
      const share = onScale(weight(i), 1, 0);
      span.style.background = share > 0.004 ? shade(Math.sqrt(share)) : "none";
      span.style.color = share > 0.004 ? (isDeep(Math.sqrt(share)) ? "#fff" : "#111") : "";
      span.title = `${i}: ${precise(weight(i))}`;
      span.addEventListener("click", () =>
        axis === "query" ? goTo(i, state.cell[1]) : goTo(state.cell[0], i),
      );
    }
    parts.push(span);
  }
  byId(`${axis}-tokens`).replaceChildren(...parts);
}

function search() {
  found = { query: new Set(), key: new Set() };
  for (const axis of /** @type {const} */ (["query", "key"])) {
    const input = /** @type {HTMLInputElement} */ (byId(`find-${axis}`));
    const wanted = input.value.trim().toLocaleLowerCase();
    let count = 0;
    if (shown && wanted) {
      const { text } = shown;
      (axis === "query" ? text.queryTokens : text.keyTokens).forEach((piece, i) => {
        if (!piece.toLocaleLowerCase().includes(wanted)) return;
        count++;
        found[axis].add(Math.floor(i / text.side[axis === "query" ? 0 : 1]));
      });
    }
    byId(`found-${axis}`).textContent = wanted ? `${count} found` : "";
  }
  draw();
}

/** To the next cell with a token that is searched for. @param {"query" | "key"} axis @param {number} step */
function next(axis, step) {
  const cells = [...found[axis]].sort((a, b) => a - b);
  if (!cells.length) return;
  const now = state.cell[axis === "query" ? 0 : 1];
  const after = step > 0 ? cells.find((cell) => cell > now) : cells.findLast((cell) => cell < now);
  const to = after ?? (step > 0 ? cells[0] : cells[cells.length - 1]) ?? 0;
  if (axis === "query") goTo(to, state.cell[1]);
  else goTo(state.cell[0], to);
}

export function repaintMap() {
  byId("map-ramp").style.background = `linear-gradient(to right, ${[0, 1, 2, 3, 4, 5, 6, 7].map((i) => shade(i / 7)).join(",")})`;
  byId("grid-ramp").style.background = byId("map-ramp").style.background;
  canvas.style.colorScheme = isDark() ? "dark" : "light";
  draw();
  tell();
}
