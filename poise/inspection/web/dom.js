// Elements by name, and what every view shares: nothing about attention.

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string>} [attributes]
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {(Node | string)[]} children
 * @returns {SVGElement}
 */
export function draw(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/**
 * @param {string} label
 * @param {string[]} options
 * @param {number} chosen
 * @param {(index: number) => void} changed
 */
export function choice(label, options, chosen, changed) {
  const select = make("select", { "aria-label": label });
  options.forEach((text, index) => select.append(make("option", { value: String(index) }, text)));
  select.value = String(chosen);
  select.addEventListener("change", () => changed(Number(select.value)));
  return select;
}

/**
 * How far an arrow key moves.
 * @param {string} key
 * @returns {[number, number] | null} down, right
 */
export function arrow(key) {
  /** @type {Record<string, [number, number]>} */
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  return moves[key] ?? null;
}

/** @param {number} low @param {number} x @param {number} high */
export function within(low, x, high) {
  return Math.min(Math.max(x, low), high);
}

/**
 * A number in few characters.
 * @param {number | null} x
 */
export function short(x) {
  if (x === null || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && size < 0.001) return x.toExponential(1);
  return x.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

/**
 * A probability with all the digits that it has: it is a float of 32 bits.
 * @param {number} p
 */
export function precise(p) {
  return p !== 0 && p < 1e-4 ? p.toExponential(6) : String(Number(p.toPrecision(7)));
}
