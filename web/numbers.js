"use strict";
// Numbers: what a page holds them as, and what fewer bits make of them.

// Four bytes of every five letters: Python's base64.b85encode, but for "," in place of "<", which means much in a page.
function base85(text) {
  const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
  const values = new Uint8Array(128), bytes = new DataView(new ArrayBuffer((text.length / 5) * 4));
  for (let i = 0; i < 85; i++) values[letters.charCodeAt(i)] = i;
  for (let i = 0; i < text.length; i += 5) {
    let sum = 0;
    for (let j = i; j < i + 5; j++) sum = sum * 85 + values[text.charCodeAt(j)];
    bytes.setUint32((i / 5) * 4, sum);
  }
  return bytes.buffer;
}

// The weights of all tensors, float32, from what explorer.py packed: the 8-bit codes of the matrices, then a scale for each
// of their rows, and all other numbers, in the order of the tensors.
async function weightsOf(text, size, tensors) {
  const stream = new Blob([base85(text.trim()).slice(0, size)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer(), sizes = tensors.map(([, shape]) => shape.reduce((a, b) => a * b));
  const all = sizes.reduce((a, b) => a + b), matrices = sizes.filter((_, i) => tensors[i][1].length === 2).reduce((a, b) => a + b);
  const codes = new Int8Array(bytes, 0, matrices), others = new Float32Array(bytes.slice(matrices)), weights = new Float32Array(all);
  let at = 0, code = 0, other = 0;
  for (const [i, [, [rows, columns]]] of tensors.entries()) {
    if (!columns) {
      weights.set(others.subarray(other, other += sizes[i]), at);
      at += sizes[i];
    } else for (let row = 0; row < rows; row++) {
      const scale = others[other++];
      for (let column = 0; column < columns; column++) weights[at++] = codes[code++] * scale;
    }
  }
  return weights;
}

// x to the nearest number with that many bits of fraction, ties to even, and no exponent below the least.
function nearest(x, fraction, least, most) {
  if (x === 0 || !Number.isFinite(x)) return x;
  const unit = 2 ** (Math.max(Math.floor(Math.log2(Math.abs(x))), least) - fraction);
  const down = Math.floor(x / unit), over = x / unit - down;
  const rounded = (over > 0.5 || (over === 0.5 && down % 2) ? down + 1 : down) * unit;
  return Math.abs(rounded) > most ? Math.sign(x) * Infinity : rounded;
}

const FORMATS = {
  bf16: (x) => nearest(Math.fround(x), 7, -126, 2 ** 127 * (2 - 2 ** -7)),
  fp16: (x) => nearest(Math.fround(x), 10, -14, 65504),
  fp32: Math.fround,
};
