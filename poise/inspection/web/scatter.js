// Every head as a point; any two figures as axes. With the keyboard: one tab stop, left and right along the axis.

import { classColour } from "./colour.js";
import { report } from "./data.js";
import { byId, choice, draw, short } from "./dom.js";
import { change, isShown, onChange, state } from "./state.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, EDGE] = [560, 330, 52, 40, 20];

export function showScatter() {
  const labels = report.figures.map((each) => each.label);
  byId("scatter-axes").append(
    choice("horizontal axis", labels, state.x, (x) => change({ x })),
    "against",
    choice("vertical axis", labels, state.y, (y) => change({ y })),
  );
  const box = byId("scatter");
  box.addEventListener("keydown", (event) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.preventDefault();
    const order = [...report.heads].filter(isShown).sort((a, b) => (a.values[state.x] ?? 0) - (b.values[state.x] ?? 0));
    const at = order.findIndex((head) => head.layer === state.layer && head.head === state.head);
    const next = order[Math.min(Math.max(at + step, 0), order.length - 1)];
    if (next) change({ layer: next.layer, head: next.head });
  });
  plot();
  onChange((changed) => {
    if (["x", "y", "only", "layer", "head"].some((key) => changed.includes(/** @type {any} */ (key)))) plot();
  });
}

/** @param {number} figure @param {number} from @param {number} to */
function axis(figure, from, to) {
  const known = report.heads.map((head) => head.values[figure] ?? null).filter((x) => x !== null);
  const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  const span = high - low || 1;
  return {
    ticks: [0, 0.25, 0.5, 0.75, 1].map((share) => low + share * span),
    /** @param {number} x */
    at: (x) => from + ((x - low) / span) * (to - from),
  };
}

export function plot() {
  const x = axis(state.x, LEFT + 6, WIDTH - EDGE);
  const y = axis(state.y, HEIGHT - BOTTOM - 6, EDGE);
  /** @type {SVGElement[]} */
  const parts = [];
  for (const tick of x.ticks) {
    parts.push(draw("line", { x1: x.at(tick), x2: x.at(tick), y1: EDGE, y2: HEIGHT - BOTTOM, class: "rule" }));
    parts.push(draw("text", { x: x.at(tick), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, short(tick)));
  }
  for (const tick of y.ticks) {
    parts.push(draw("line", { x1: LEFT, x2: WIDTH - EDGE, y1: y.at(tick), y2: y.at(tick), class: "rule" }));
    parts.push(draw("text", { x: LEFT - 6, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  const middle = (LEFT + WIDTH) / 2;
  parts.push(draw("text", { x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, report.figures[state.x]?.label ?? ""));
  /** @type {SVGElement[]} */
  const chosen = [];
  for (const head of report.heads) {
    const [a, b] = [head.values[state.x] ?? null, head.values[state.y] ?? null];
    if (a === null || b === null) continue;
    const mine = head.layer === state.layer && head.head === state.head;
    const kind = report.classes.findIndex((each) => each.name === head.classes[0]);
    const point = draw("circle", { cx: x.at(a), cy: y.at(b), r: mine ? 8 : 5, class: mine ? "chosen" : "" });
    point.style.fill = kind < 0 ? "var(--faint)" : classColour(kind);
    point.classList.toggle("faded", !isShown(head));
    const name = `layer ${report.layers[head.layer]?.number} head ${head.head}`;
    point.append(draw("title", {}, `${name}: ${short(a)}, ${short(b)}; ${head.classes.join(", ") || "no class"}`));
    point.addEventListener("click", () => change({ layer: head.layer, head: head.head }));
    (mine ? chosen : parts).push(point);
  }
  byId("scatter").replaceChildren(
    draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "heads as points" }, ...parts, ...chosen),
  );
}
