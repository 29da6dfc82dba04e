// What is being looked at; views say what changed, and are told when something has.

import { report } from "./data.js";

/**
 * @typedef {{ layer: number, head: number, text: number, colour: number, x: number, y: number, only: string | null,
 *   log: boolean, hidden: boolean, largest: boolean, cell: [number, number] }} State
 *   cell: the row and column of the map that is pointed at
 */

/** @param {string} key */
function figure(key) {
  return Math.max(0, report.figures.findIndex((each) => each.key === key));
}

/** @type {State} */
export const state = {
  layer: report.start[0],
  head: report.start[1],
  text: 0,
  colour: figure("sink"),
  x: figure("sink"),
  y: figure("entropy"),
  only: null,
  log: true,
  hidden: false,
  largest: false,
  cell: [0, 0],
};

/** @type {((changed: (keyof State)[]) => void)[]} */
const listeners = [];

/** @param {(changed: (keyof State)[]) => void} listener */
export function onChange(listener) {
  listeners.push(listener);
}

/** @param {Partial<State>} patch */
export function change(patch) {
  const keys = /** @type {(keyof State)[]} */ (Object.keys(patch));
  const changed = keys.filter((key) => state[key] !== patch[key]);
  if (!changed.length) return;
  Object.assign(state, patch);
  for (const listener of listeners) listener(changed);
}

/** @param {import("./data.js").Head} head */
export function isShown(head) {
  return state.only === null || head.classes.includes(state.only);
}
