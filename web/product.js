"use strict";
// Matrix products in WebAssembly, four floats at a time. A browser's plain JavaScript is five times slower.

// The function tile(x, xBytes, w, end, out, outBytes), assembled: out (4, 8) = x (4, I) times w (I, 8), all float32.
// x and out have rows so many bytes apart; w is contiguous, and ends at `end`. Everything is an address in bytes.
function assemble() {
  const number = (n) => (n < 128 ? [n] : [(n & 127) | 128, ...number(n >> 7)]);                // LEB128
  const list = (items) => [...number(items.length), ...items.flat()];
  const section = (id, content) => [id, ...number(content.length), ...content];
  const name = (word) => list([...word].map((letter) => letter.charCodeAt(0)));
  const get = (local) => [0x20, local], set = (local) => [0x21, local], tee = (local) => [0x22, local];
  const simd = (code, ...more) => [0xfd, ...number(code), ...more];
  const advance = (local, by) => [...get(local), ...by, 0x6a, ...set(local)];                  // local += by
  const int = (n) => [0x41, n];
  const load = (offset) => simd(0x00, 4, offset), splat = simd(0x09, 2, 0), store = (offset) => simd(0x0b, 4, offset);
  const [w, end, out, outBytes] = [2, 3, 4, 5], rows = [0, 6, 7, 8], [left, right, one] = [17, 18, 19];
  const sum = (r, half) => 9 + 2 * r + half;                                                   // eight of four floats
  const body = [
    ...rows.slice(1).flatMap((local, r) => [...get(rows[r]), ...get(1), 0x6a, ...set(local)]), // where each row begins
    0x03, 0x40,                                                                                // loop
    ...get(w), ...load(0), ...set(left), ...get(w), ...load(16), ...set(right),
    ...rows.flatMap((local, r) => [
      ...get(local), ...splat, ...tee(one), ...get(left), ...simd(0xe6), ...get(sum(r, 0)), ...simd(0xe4), ...set(sum(r, 0)),
      ...get(one), ...get(right), ...simd(0xe6), ...get(sum(r, 1)), ...simd(0xe4), ...set(sum(r, 1)),
      ...advance(local, int(4)),
    ]),
    ...advance(w, int(32)), ...get(w), ...get(end), 0x47, 0x0d, 0, 0x0b,                       // again while w != end
    ...rows.flatMap((_, r) => [
      ...get(out), ...get(sum(r, 0)), ...store(0), ...get(out), ...get(sum(r, 1)), ...store(16), ...advance(out, get(outBytes)),
    ]),
    0x0b,
  ];
  const code = [...list([[3, 0x7f], [11, 0x7b]]), ...body];                                    // locals: 3 i32, 11 v128
  return new Uint8Array([
    0x00, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, list([[0x60, ...list(Array(6).fill(0x7f)), 0]])),
    ...section(2, list([[...name("js"), ...name("memory"), 0x02, 0x00, 0x01]])),
    ...section(3, list([0])),
    ...section(7, list([[...name("tile"), 0x00, 0]])),
    ...section(10, list([[...number(code.length), ...code]])),
  ]);
}

const upTo = (n, step) => Math.ceil(n / step) * step;

// Arrays of float32 that products can be taken of. Sizes in floats; `take` returns one after the other.
class Memory {
  constructor(size) {
    this.memory = new WebAssembly.Memory({ initial: Math.ceil((4 * size) / 65536) });
    const module = new WebAssembly.Module(assemble());
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
