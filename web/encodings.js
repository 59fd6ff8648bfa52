"use strict";
// Every encoding of this page as pure functions of a position, and as doors. (expe.py has them in NumPy, and says whose.)

// ExPE, equation 3: entry j of row n. ExQPE, equation 5, in closed form.
const expeEntry = (n, j, { start, theta, constant }) => start + theta * (n + (constant ? 0 : j));
const exqpeEntry = (n, j, { start, theta1, theta2, l }) =>
  start + j * theta1 + theta2 * Math.max(0, Math.floor((n - j) / l) + 1);

const sinusoidalEntry = (n, j, { base, width }) => {
  const angle = n * base ** ((-2 * Math.floor(j / 2)) / width);
  return j % 2 ? Math.cos(angle) : Math.sin(angle);
};

// The angle by which pair i of D dimensions turns a position: [frequencies, the factor of cosines and sines].
function ropeFrequencies(D, { base, scaling = "none", factor = 1, trained = 512 }) {
  const plain = (b) => Array.from({ length: D / 2 }, (_, i) => b ** ((-2 * i) / D));
  const pair = (turns) => (D * Math.log(trained / (2 * Math.PI * turns))) / (2 * Math.log(base));
  return {
    none: () => [plain(base), 1],
    linear: () => [plain(base).map((f) => f / factor), 1],
    ntk: () => [plain(base * factor ** (D / (D - 2))), 1],
    yarn: () => {
      const low = Math.max(Math.floor(pair(32)), 0), high = Math.min(Math.ceil(pair(1)), D - 1);
      const ramp = (i) => Math.min(Math.max((i - low) / Math.max(high - low, 0.001), 0), 1);
      return [plain(base).map((f, i) => f * (1 - ramp(i) + ramp(i) / factor)), factor > 1 ? 0.1 * Math.log(factor) + 1 : 1];
    },
  }[scaling]();
}

function alibiSlopes(H) {
  const lower = 2 ** Math.floor(Math.log2(H));
  const slopes = Array.from({ length: lower }, (_, i) => 2 ** ((-8 * (i + 1)) / lower));
  const between = Array.from({ length: lower }, (_, i) => 2 ** ((-8 * (2 * i + 1)) / (2 * lower)));
  return [...slopes, ...between].slice(0, H);
}

// The doors of an encoding; one that is left out is shut. x, q and k are one row each, and are changed in place.
//   embed(x, n)                 what is added to the embedding of the token at position n
//   linear(C)                   if the keys' override is a line in n: by how much x grows from one position to the next
//   override(x, n), on          the first l numbers of what enters those of W_q, W_k and W_v that `on` names
//   rotate(x, n)                a query or key of all heads
//   key(h, n, p, before)        a number for each head, that every score of this key gets: `before` are the last key's.
//                               A bias that depends on m too, by a number that all keys share, is the same to a softmax.
function doorsOf({ width: C, heads: H, context }, e) {
  const fill = (entry, l) => (x, n) => { for (let j = 0; j < l; j++) x[j] = entry(n, j, e); };
  return {
    nope: () => ({}),
    sinusoidal: () => ({
      embed(x, n) { for (let j = 0; j < C; j++) x[j] += sinusoidalEntry(n, j, { base: e.base, width: C }); } }),
    expe: () => ({
      on: e.on, override: fill(expeEntry, e.l),
      linear: e.on.includes("k") && ((size) => Float64Array.from({ length: size }, (_, j) => (j < e.l ? e.theta : 0))),
    }),
    exqpe: () => ({ on: e.on, override: fill(exqpeEntry, e.l) }),
    rope: () => {
      const D = C / H, [frequencies] = ropeFrequencies(D, { base: e.base });
      return {
        rotate(x, n) {
          for (let i = 0; i < D / 2; i++) {
            const cos = Math.cos(n * frequencies[i]), sin = Math.sin(n * frequencies[i]);
            for (let at = i; at < C; at += D) {
              const a = x[at], b = x[at + D / 2];
              x[at] = a * cos - b * sin;
              x[at + D / 2] = b * cos + a * sin;
            }
          }
        },
      };
    },
    alibi: () => {                                                       // -slope (m - n), without what m adds
      const slopes = alibiSlopes(H).map((slope) => slope * e.slopes);
      return { key: (h, n) => slopes.map((slope) => slope * n) };
    },
    fox: () => ({                                                        // c_m - c_n likewise, c a running sum of ln f
      key: (h, n, p, before) => Array.from({ length: H }, (_, head) => {
        let z = p["encoding.bias"][head];
        for (let i = 0; i < C; i++) z += p["encoding.weight"][head * C + i] * h[i];
        return (before?.[head] ?? 0) + (z > 0 ? Math.log1p(Math.exp(-z)) : Math.log1p(Math.exp(z)) - z);
      }),
    }),
  }[e.pe]();
}
