// Colours that all kinds of colour vision tell apart, on light and on dark paper.

const STEPS = ["#ffffe5", "#e3f3c2", "#a6dbb8", "#57bcc4", "#2b8fc0", "#2463a8", "#1f3484", "#0b1a4e"];
const DARK = ["#10141f", "#14284d", "#1f4a80", "#2476a8", "#33a3b8", "#74cbb0", "#c3e8b6", "#fdfbd0"];
const CLASSES = {
  light: ["#d55e00", "#e69f00", "#0072b2", "#56b4e9", "#009e73", "#8a8a8a", "#cc79a7", "#a89200"],
  dark: ["#ff7a1a", "#ffbe3d", "#4aa3df", "#8fd0f7", "#2cc598", "#a5a5a5", "#e79bc3", "#f0e442"],
};

const asked = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const forced = document.documentElement.dataset["theme"];
  return forced ? forced === "dark" : asked.matches;
}

/** @param {() => void} changed */
export function onTheme(changed) {
  asked.addEventListener("change", changed);
}

/** @param {number} index of a class */
export function classColour(index) {
  return CLASSES[isDark() ? "dark" : "light"][index] ?? "#888";
}

/** @param {string} hex @returns {[number, number, number]} */
function parsed(hex) {
  const n = parseInt(hex.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

const tables = new Map([STEPS, DARK].map((steps) => [steps, table(steps)]));

/** @param {string[]} steps */
function table(steps) {
  const colours = steps.map(parsed);
  const made = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (colours.length - 1);
    const low = Math.min(Math.floor(at), colours.length - 2);
    for (let c = 0; c < 3; c++) {
      const [a, b] = [colours[low]?.[c] ?? 0, colours[low + 1]?.[c] ?? 0];
      made[3 * i + c] = a + (b - a) * (at - low);
    }
  }
  return made;
}

/** The 256 colours from nothing to most, three bytes each. */
export function ramp() {
  return /** @type {Uint8ClampedArray} */ (tables.get(isDark() ? DARK : STEPS));
}

/** @param {number} share 0 to 1 */
export function shade(share) {
  const at = 3 * Math.round(255 * Math.min(Math.max(share, 0), 1));
  const [r, g, b] = ramp().subarray(at, at + 3);
  return `rgb(${r},${g},${b})`;
}

/** Whether text on that shade should be light. @param {number} share */
export function isDeep(share) {
  return isDark() ? share < 0.5 : share > 0.5;
}

/**
 * Where on the ramp, 0 to 1.
 * @param {number} p @param {number} most @param {number} lowest where a logarithmic scale begins; 0 for a linear one
 */
export function onScale(p, most, lowest) {
  if (!lowest) return most > 0 ? p / most : 0;
  return p <= lowest ? 0 : Math.min(1, 1 - Math.log10(p) / Math.log10(lowest));
}
