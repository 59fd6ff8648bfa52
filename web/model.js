"use strict";
// The GPT of model_numpy.py: forward alone, one sequence, read piece by piece with its queries, keys and values kept.
// T new tokens, S all keys so far, H heads, D width of a head, C = H D; arrays are flat and of float32, sums of float64.

// out = x w^T: x (T, I), w (O, I), out (T, O). Four rows and two columns at a time, so that what is loaded is used.
function linear(x, w, I) {
  const T = x.length / I, O = w.length / I, out = new Float32Array(T * O);
  for (let t = 0; t < T; t += 4) {
    const t1 = Math.min(t + 1, T - 1), t2 = Math.min(t + 2, T - 1), t3 = Math.min(t + 3, T - 1);
    for (let o = 0; o < O; o += 2) {
      const o1 = Math.min(o + 1, O - 1);
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
      for (let i = 0; i < I; i++) {
        const a = w[o * I + i], b = w[o1 * I + i];
        const x0 = x[t * I + i], x1 = x[t1 * I + i], x2 = x[t2 * I + i], x3 = x[t3 * I + i];
        a0 += a * x0; a1 += a * x1; a2 += a * x2; a3 += a * x3;
        b0 += b * x0; b1 += b * x1; b2 += b * x2; b3 += b * x3;
      }
      out[t * O + o] = a0; out[t1 * O + o] = a1; out[t2 * O + o] = a2; out[t3 * O + o] = a3;
      out[t * O + o1] = b0; out[t1 * O + o1] = b1; out[t2 * O + o1] = b2; out[t3 * O + o1] = b3;
    }
  }
  return out;
}

function layernorm(x, C, eps, weight, bias) {
  const out = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += C) {
    let mean = 0, square = 0;
    for (let i = 0; i < C; i++) mean += x[at + i] / C;
    for (let i = 0; i < C; i++) square += (x[at + i] - mean) ** 2 / C;
    const rstd = 1 / Math.sqrt(square + eps);
    for (let i = 0; i < C; i++) out[at + i] = (x[at + i] - mean) * rstd * weight[i] + bias[i];
  }
  return out;
}

function gelu(x) {                                                       // the tanh form, in place
  for (let i = 0; i < x.length; i++) {
    x[i] *= 0.5 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x[i] + 0.044715 * x[i] ** 3)));
  }
  return x;
}

const row = (x, t, size) => x.subarray(t * size, (t + 1) * size);        // a view

// `count` columns of x (T, C), from one on: (T, count).
function columns(x, C, from, count) {
  const out = new Float32Array((x.length / C) * count);
  for (let t = 0; t * C < x.length; t++) for (let i = 0; i < count; i++) out[t * count + i] = x[t * C + from + i];
  return out;
}

function transposed(x, I) {                                              // (T, I) to (I, T)
  const T = x.length / I, out = new Float32Array(x.length);
  for (let t = 0; t < T; t++) for (let i = 0; i < I; i++) out[i * T + t] = x[t * I + i];
  return out;
}

function joined(a, b) {
  const out = new Float32Array(a.length + b.length);
  out.set(a);
  out.set(b, a.length);
  return out;
}

function add(x, more) {
  for (let i = 0; i < x.length; i++) x[i] += more[i];
}

// The queries, keys and values of one block: h (T, C) at positions n (T,), through the doors override and rotate.
function project(h, n, p, C, doors) {
  const [q, k, v] = ["q", "k", "v"].map((part, i) => {
    let input = h;
    if (doors.on?.includes(part)) {
      input = h.slice();
      n.forEach((position, t) => doors.override(row(input, t, C), position));
    }
    return linear(input, p["qkv.weight"].subarray(i * C * C, (i + 1) * C * C), C);
  });
  if (doors.rotate) {
    for (const x of [q, k]) n.forEach((position, t) => doors.rotate(row(x, t, C), position));
  }
  return { q, k, v };
}

class Model {
  constructor({ config, tensors }, weights) {
    Object.assign(this, { config, blocks: [], top: {} });
    let at = 0;
    for (const [name, shape] of tensors) {
      const size = shape.reduce((a, b) => a * b, 1), block = /^blocks\.(\d+)\.(?:attn\.)?(.*)$/.exec(name);
      const into = block ? (this.blocks[block[1]] ??= {}) : this.top;
      into[block ? block[2] : name] = weights.subarray(at, at += size);
    }
    this.doors = doorsOf(config, config.encoding);
    this.forget();
  }

  // Begin another text.
  forget() {
    this.tokens = [];
    this.kept = this.blocks.map(() => ({ q: [], k: [], v: [], keys: [] }));          // (S, C) each, and S lists of H
  }

  // Read the next T tokens; returns the logits (T, V) of the tokens that follow each.
  read(tokens) {
    const { d_model: C, norm_eps: eps } = this.config, first = this.tokens.length;
    const n = Array.from(tokens, (_, t) => first + t);
    this.tokens.push(...tokens);
    const x = new Float32Array(tokens.length * C);
    tokens.forEach((token, t) => {
      row(x, t, C).set(row(this.top["embedding.weight"], token, C));
      this.doors.embed?.(row(x, t, C), n[t]);
    });
    this.blocks.forEach((p, b) => {
      const h = layernorm(x, C, eps, p["norm1.weight"], p["norm1.bias"]);
      add(x, linear(this.attend(h, n, p, this.kept[b]), p["proj.weight"], C));
      const g = layernorm(x, C, eps, p["norm2.weight"], p["norm2.bias"]);
      add(x, linear(gelu(linear(g, p["mlp.up.weight"], C)), p["mlp.down.weight"], this.config.d_mlp));
    });
    const h = layernorm(x, C, eps, this.top["norm.weight"], this.top["norm.bias"]);
    return linear(h, this.top["head.weight"] ?? this.top["embedding.weight"], C);
  }

  // y (T, C) of one block, whose queries, keys and values are added to what is kept.
  attend(h, n, p, kept) {
    const { d_model: C, n_heads: H } = this.config, D = C / H, made = project(h, n, p, C, this.doors);
    for (const part of "qkv") kept[part] = joined(kept[part], made[part]);
    n.forEach((position, t) => {
      if (this.doors.key) kept.keys.push(this.doors.key(row(h, t, C), position, p, kept.keys.at(-1)));
    });
    const y = new Float32Array(h.length), S = kept.k.length / C;
    for (let head = 0; head < H; head++) {
      const scores = this.scores(columns(made.q, C, head * D, D), kept, head);
      for (let t = 0; t < n.length; t++) softmax(row(scores, t, S), S - n.length + t + 1);
      const mixed = linear(scores, transposed(columns(kept.v, C, head * D, D), D), S);
      for (let t = 0; t < n.length; t++) row(y, t, C).set(row(mixed, t, D), head * D);
    }
    return y;
  }

  // The scores (T, S) of queries (T, D) of one head with all of its keys, later ones too.
  scores(q, kept, head) {
    const { d_model: C, n_heads: H } = this.config, D = C / H;
    const scores = linear(q.map((x) => x / Math.sqrt(D)), columns(kept.k, C, head * D, D), D);
    if (this.doors.key) {                                                // counted from the last key, to keep digits
      const S = kept.keys.length, last = kept.keys[S - 1][head];
      for (let i = 0; i < scores.length; i++) scores[i] += kept.keys[i % S][head] - last;
    }
    return scores;
  }

  // What query m does, in each block and head: its scores and weights (S,), and what the position adds to its scores:
  // the line that ExPE's q_m . w makes of the keys' positions n, or the bias of ALiBi and FoX; null if it is neither.
  inside(m) {
    const { d_model: C, n_heads: H, encoding: e } = this.config, D = C / H, found = [];
    this.blocks.forEach((p, b) => {
      const kept = this.kept[b];
      let line = this.doors.key && ((head, s) => kept.keys[s][head] - kept.keys[m][head]);
      if (this.doors.on?.includes("k") && e.pe === "expe") {
        const place = (n) => {                                           // what W_k makes of a position alone
          const phi = new Float32Array(C);
          this.doors.override(phi, n);
          return linear(phi, p["qkv.weight"].subarray(C * C, 2 * C * C), C);
        };
        const near = place(0), far = place(1024);
        line = (head, s) => {
          let slope = 0;
          for (let i = head * D; i < (head + 1) * D; i++) slope += (kept.q[m * C + i] * (far[i] - near[i])) / 1024;
          return (slope / Math.sqrt(D)) * (s - m);
        };
      }
      for (let head = 0; head < H; head++) {
        const scores = this.scores(columns(row(kept.q, m, C), C, head * D, D), kept, head).slice(0, m + 1);
        const added = line ? Float64Array.from(scores, (_, s) => line(head, s)) : null;
        found.push({ block: b, head, scores, weights: softmax(scores.slice(), m + 1), added });
      }
    });
    return found;
  }
}

// The weights of the first `seen` scores, in place; those of the others are 0.
function softmax(scores, seen) {
  let top = -Infinity, total = 0;
  for (let s = 0; s < seen; s++) top = Math.max(top, scores[s]);
  for (let s = 0; s < seen; s++) total += scores[s] = Math.exp(scores[s] - top);
  for (let s = 0; s < scores.length; s++) scores[s] = s < seen ? scores[s] / total : 0;
  return scores;
}

// -log softmax(logits)[target] of each row, in nats. logits (T, V), targets (T,).
function lossesOf(logits, targets) {
  const V = logits.length / targets.length;
  return Float64Array.from(targets, (target, t) => {
    const z = row(logits, t, V), top = z.reduce((a, b) => Math.max(a, b));
    return top + Math.log(z.reduce((sum, x) => sum + Math.exp(x - top), 0)) - z[target];
  });
}
