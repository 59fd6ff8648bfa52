"use strict";
// Matrix products in WebAssembly, four floats at a time. A browser's plain JavaScript is five times slower.

// The function tile of product.wat, assembled: base64.b64encode(wasmtime.wat2wasm(text)) in Python.
const TILE = Uint8Array.from(atob(
  "AGFzbQEAAAABCgFgBn9/f39/fwACDgECanMGbWVtb3J5AgABAwIBAAcIAQR0aWxlAAAKwAIBvQICA38LeyAAIAFqIQYgBiABaiEHIAcgAWohCANA" +
  "IAL9AAQAIQkgAv0ABBAhCiAA/QkCACELIAwgCyAJ/eYB/eQBIQwgECALIAr95gH95AEhECAG/QkCACELIA0gCyAJ/eYB/eQBIQ0gESALIAr95gH9" +
  "5AEhESAH/QkCACELIA4gCyAJ/eYB/eQBIQ4gEiALIAr95gH95AEhEiAI/QkCACELIA8gCyAJ/eYB/eQBIQ8gEyALIAr95gH95AEhEyAAQQRqIQAg" +
  "BkEEaiEGIAdBBGohByAIQQRqIQggAkEgaiECIAIgA0cNAAsgBCAM/QsEACAEIBD9CwQQIAQgBWohBCAEIA39CwQAIAQgEf0LBBAgBCAFaiEEIAQg" +
  "Dv0LBAAgBCAS/QsEECAEIAVqIQQgBCAP/QsEACAEIBP9CwQQCwBrBG5hbWUCWQEAFAABeAEFeF9yb3cCAXcDA2VuZAQDb3V0BQdvdXRfcm93BgJ4" +
  "MQcCeDIIAngzCQRsZWZ0CgVyaWdodAsDb25lDAFhDQFiDgFjDwFkEAFlEQFmEgFnEwFoAwkBAAEABG5leHQ="), (letter) => letter.charCodeAt(0));

const upTo = (n, step) => Math.ceil(n / step) * step;

// Arrays of float32 that products can be taken of. Sizes in floats; `take` returns one after the other.
class Memory {
  constructor(size) {
    this.memory = new WebAssembly.Memory({ initial: Math.ceil((4 * size) / 65536) });
    const module = new WebAssembly.Module(TILE);
    this.tile = new WebAssembly.Instance(module, { js: { memory: this.memory } }).exports.tile;
    this.used = 0;
  }

  take(size) {
    const array = new Float32Array(this.memory.buffer, 4 * this.used, size);
    this.used += upTo(size, 4);
    return array;
  }

  // w (O, I) as a product reads it, eight rows side by side: (O/8, I, 8), with zeros for what is missing of the last.
  pack(w, I) {
    const O = w.length / I, packed = this.take(upTo(O, 8) * I);
    for (let o = 0; o < O; o++) for (let i = 0; i < I; i++) packed[(o - (o % 8)) * I + i * 8 + (o % 8)] = w[o * I + i];
    return packed;
  }

  // out (T, O) = x (T, I) w^T, w packed: O is rounded up to eights, T to fours, and so must be the room for them. Rows
  // of x and out are xRow and outRow floats apart, eights of w are wEight floats apart.
  product(x, w, out, T, I, O, { xRow = I, outRow = O, wEight = 8 * I } = {}) {
    for (let o = 0; o < O; o += 8) {
      const from = w.byteOffset + (o / 8) * wEight * 4;
      for (let t = 0; t < T; t += 4) {
        this.tile(x.byteOffset + 4 * t * xRow, 4 * xRow, from, from + 32 * I, out.byteOffset + 4 * (t * outRow + o), 4 * outRow);
      }
    }
  }
}
