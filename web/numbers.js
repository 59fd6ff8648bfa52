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

// Deflated halves, all high bytes before all low ones (which shrinks them by a sixth), to float32.
async function weightsOf(text, size) {
  const stream = new Blob([base85(text.trim()).slice(0, size)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer()), count = bytes.length / 2;
  return Float32Array.from({ length: count }, (_, i) => half((bytes[i] << 8) | bytes[count + i]));
}

// The number that 16 bits are in IEEE 754's half precision: 1 of sign, 5 of exponent, 10 of fraction.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
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
