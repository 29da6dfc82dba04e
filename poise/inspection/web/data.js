// What Python wrote into the page: figures as JSON, maps as compressed numbers. Nothing is shown here.

import { byId } from "./dom.js";

/**
 * @typedef {{ name: string, heads: number, shuffled: number | null, rule: string, meaning: string }} HeadClass
 * @typedef {{ key: string, label: string, meaning: string }} Figure
 * @typedef {{ number: number, path: string, heads: number }} Layer
 * @typedef {{ layer: number, head: number, classes: string[], evidence: string, values: (number | null)[] }} Head
 * @typedef {{ offset: number, sinks: number[] }} Place where a layer's maps begin, in numbers; each head's sink
 * @typedef {{ title: string, queryTokens: string[], keyTokens: string[], queries: number, keys: number, exact: boolean, side: [number, number],
 *   rows: number, columns: number, places: Record<string, Place> }} Text
 * @typedef {{ model: string, about: string, classes: HeadClass[], figures: Figure[], layers: Layer[], heads: Head[],
 *   texts: Text[], note: string, start: [number, number] }} Report
 */

/** @type {Report} */
export const report = JSON.parse(byId("report").textContent ?? "");

/** @type {Map<string, Head>} */
const known = new Map(report.heads.map((head) => [`${head.layer}.${head.head}`, head]));

/** @param {number} layer an index into report.layers @param {number} head */
export function headAt(layer, head) {
  return known.get(`${layer}.${head}`);
}

/** @type {Map<number, Promise<ArrayBuffer>>} */
const unpacked = new Map();

/** @param {number} text @returns {Promise<ArrayBuffer>} */
function numbersOf(text) {
  let found = unpacked.get(text);
  if (!found) {
    const packed = Uint8Array.from(atob((byId(`maps-${text}`).textContent ?? "").trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    found = new Response(stream).arrayBuffer();
    unpacked.set(text, found);
  }
  return found;
}

/**
 * One head's map: `rows` × `columns` cells, of one pair each if exact.
 * @typedef {{ text: Text, sink: number, values: Float32Array, largest: Float32Array, place: Uint32Array | null }} HeadMap
 *   values: the weights, or their means; largest: the same, or the largest of each cell
 */

/**
 * @param {number} text
 * @param {number} layer
 * @param {number} head
 * @param {boolean} withoutSink each row without the key that gets most, scaled to 1 again
 * @returns {Promise<HeadMap | null>}
 */
export async function mapOf(text, layer, head, withoutSink) {
  const of = report.texts[text];
  const place = of?.places[String(layer)];
  const heads = report.layers[layer]?.heads;
  if (!of || !place || heads === undefined) return null;
  const buffer = await numbersOf(text);
  const size = of.rows * of.columns;
  /** @param {number} array */
  const floats = (array) => new Float32Array(buffer, 4 * (place.offset + (array * heads + head) * size), size);
  const sink = place.sinks[head] ?? 0;
  if (!of.exact) {
    const at = 4 * (place.offset + (4 * heads + head) * size);
    const places = withoutSink ? null : new Uint32Array(buffer, at, size);
    const [values, largest] = withoutSink ? [floats(2), floats(3)] : [floats(0), floats(1)];
    return { text: of, sink, values, largest, place: places };
  }
  const weights = floats(0);
  const values = withoutSink ? rescaled(weights, of.columns, sink) : weights;
  return { text: of, sink, values, largest: values, place: null };
}

/** @param {Float32Array} weights @param {number} columns @param {number} sink */
function rescaled(weights, columns, sink) {
  const made = new Float32Array(weights.length);
  for (let start = 0; start < weights.length; start += columns) {
    let whole = 0;
    for (let j = 0; j < columns; j++) whole += j === sink ? 0 : weights[start + j] ?? 0;
    for (let j = 0; j < columns && whole > 0; j++) if (j !== sink) made[start + j] = (weights[start + j] ?? 0) / whole;
  }
  return made;
}
