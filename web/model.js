"use strict";
// The GPT of model_numpy.py: forward alone, one sequence, read piece by piece; the keys and values of what is read stay.
// T new tokens, S all keys so far, H heads, D width of a head, C = H D; arrays are flat and of float32.

const PIECES = { cpu: 64, gpu: 256 };    // tokens that are read at once at most: an answer of a GPU takes its time
const FEW = 32, CONTEXTS = 2;            // tokens of a product that no GPU is asked for; texts whose keys and values are kept

const row = (x, t, size) => x.subarray(t * size, (t + 1) * size);        // a view

function layernorm(x, out, T, C, eps, weight, bias) {
  for (let at = 0; at < T * C; at += C) {
    let mean = 0, square = 0;
    for (let i = 0; i < C; i++) mean += x[at + i] / C;
    for (let i = 0; i < C; i++) square += (x[at + i] - mean) ** 2 / C;
    const rstd = 1 / Math.sqrt(square + eps);
    for (let i = 0; i < C; i++) out[at + i] = (x[at + i] - mean) * rstd * weight[i] + bias[i];
  }
}

function gelu(x, size) {                                                 // the tanh form, in place
  for (let i = 0; i < size; i++) x[i] *= 0.5 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x[i] + 0.044715 * x[i] ** 3)));
}

// w x of one row: w (O, I), x (I,).
const times = (w, x) => Float64Array.from({ length: w.length / x.length }, (_, o) => dotOf(row(w, o, x.length), x));
const dotOf = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

// The weights of scores from..to-1, in place; all others of the first `size` become 0.
function softmax(scores, from, to, size) {
  let top = -Infinity, total = 0;
  for (let s = from; s < to; s++) if (scores[s] > top) top = scores[s];
  for (let s = from; s < to; s++) total += scores[s] = Math.exp(scores[s] - top);
  for (let s = from; s < to; s++) scores[s] /= total;
  scores.fill(0, 0, from);
  scores.fill(0, to, size);
  return scores;
}

// -log softmax(z)[target] for the logits z (V,) of each target, in nats.
function lossesOf(logits, targets) {
  return Float64Array.from(logits, (z, t) => {
    let top = -Infinity, total = 0;
    for (let v = 0; v < z.length; v++) if (z[v] > top) top = z[v];
    for (let v = 0; v < z.length; v++) total += Math.exp(z[v] - top);
    return top + Math.log(total) - z[targets[t]];
  });
}

// The count most likely tokens: [[token, its probability], ...].
function likeliest(z, count) {
  const [loss] = lossesOf([z], [0]), all = Array.from(z, (logit, token) => [token, Math.exp(logit - z[0] - loss)]);
  return all.sort((a, b) => b[1] - a[1]).slice(0, count);
}

class Model {
  // longest: the most tokens that will be read of a text. gpu: a Gpu for the large products with weights, or null.
  constructor({ config, tensors }, weights, longest, gpu = null) {
    const { width: C, heads: H, layers, mlp_width } = config, D = C / H, blocks = [];
    Object.assign(this, { config, top: {}, blocks, V8: upTo(config.vocab, 8), longest: upTo(longest, 8), gpu });
    this.piece = gpu ? PIECES.gpu : PIECES.cpu;
    let at = 0;
    for (const [name, shape] of tensors) {
      const size = shape.reduce((a, b) => a * b, 1), block = /^blocks\.(\d+)\.(?:attn\.)?(.*)$/.exec(name);
      const into = block ? (blocks[block[1]] ??= {}) : this.top;
      into[block ? block[2] : name] = weights.subarray(at, at += size);
    }
    const kept = CONTEXTS * (2 * layers * this.longest + this.longest + 4) * C;
    const scratch = this.piece * (7 * C + mlp_width + Math.max(this.longest, this.V8));
    const m = this.memory = new Memory(layers * (4 * C * C + 2 * C * mlp_width) + C * this.V8 + kept + scratch);
    for (const p of blocks) {
      const [q, k, v] = [0, 1, 2].map((i) => m.pack(p["qkv.weight"].subarray(i * C * C, (i + 1) * C * C), C));
      p.packed = { q, k, v, proj: m.pack(p["proj.weight"], C), up: m.pack(p["mlp.up.weight"], C),
                   down: m.pack(p["mlp.down.weight"], mlp_width) };
    }
    this.head = m.pack(this.top["head.weight"] ?? this.top["embedding.weight"], C);
    this.contexts = Array.from({ length: CONTEXTS }, () => ({ tokens: [], used: 0, blocks: blocks.map(() => ({
      k: m.take(H * this.longest * D),                                   // (H, longest/8, D, 8)
      v: m.take(H * this.longest * D),                                   // (H, D/8, longest, 8)
      q: new Float32Array(this.longest * C), keys: [],                   // (longest, C); of each key what doors.key gives
      far: new Float32Array(H * this.longest) })),                       // (H, longest): each query's weight on far keys
      h: m.take((this.longest + 4) * C) }));                             // the final norm's output
    for (const name of ["x", "input", "h", "q", "k", "v", "y"]) this[name] = m.take(this.piece * C);
    Object.assign(this, { mlp: m.take(this.piece * mlp_width), scores: m.take(this.piece * Math.max(this.longest, this.V8)) });
    this.doors = doorsOf(config, config.encoding);
    this.far = config.context;                                           // a key that is so far back, or more, is far
    this.clock = 0;
  }

  // A context that has read these tokens, a beginning of them (of which most are kept), or nothing.
  //   see     how many keys each query sees, the last ones; its own is among them
  //   start   the position of the first token
  context(tokens, { see = Infinity, start = 0 } = {}) {
    const common = (c) => { let t = 0; while (t < tokens.length && c.tokens[t] === tokens[t]) t++; return t; };
    const fits = (c) => c.see === see && c.start === start && common(c) > Math.min(c.tokens.length / 2, tokens.length - 1);
    const oldest = this.contexts.reduce((a, b) => (a.used < b.used ? a : b));
    const found = this.contexts.find(fits) ?? Object.assign(oldest, { tokens: [], see, start });
    const kept = common(found);
    if (kept < tokens.length) found.tokens.length = kept;
    found.used = ++this.clock;
    return found;
  }

  // Memory.product with weights, which a GPU computes if there is one and the tokens are not few; never again after an error.
  async product(x, w, out, T, I, O) {
    try {
      if (this.gpu && T > FEW) return await this.gpu.product(x, w, out, T, I, O);
    } catch {
      this.gpu = null;
    }
    this.memory.product(x, w, out, T, I, O);
  }

  // Read the next tokens, at most `piece` of them, after the first `from` of a context, whose others are forgotten.
  // cut: see attend.
  async read(tokens, context, { from = context.tokens.length, cut } = {}) {
    const { width: C, mlp_width, norm_eps: eps } = this.config, T = tokens.length;
    const { x, h, input, y, mlp } = this, n = Array.from(tokens, (_, t) => context.start + from + t);
    context.tokens.length = from;
    context.tokens.push(...tokens);
    tokens.forEach((token, t) => {
      row(x, t, C).set(row(this.top["embedding.weight"], token, C));
      this.doors.embed?.(row(x, t, C), n[t]);
    });
    const add = (more) => { for (let i = 0; i < T * C; i++) x[i] += more[i]; };
    for (const [b, p] of this.blocks.entries()) {
      layernorm(x, h, T, C, eps, p["norm1.weight"], p["norm1.bias"]);
      await this.project(p, n);
      this.attend(context, p, b, n, from, cut);
      await this.product(y, p.packed.proj, input, T, C, C);
      add(input);
      layernorm(x, h, T, C, eps, p["norm2.weight"], p["norm2.bias"]);
      await this.product(h, p.packed.up, mlp, T, C, mlp_width);
      gelu(mlp, T * mlp_width);
      await this.product(mlp, p.packed.down, input, T, mlp_width, C);
      add(input);
    }
    layernorm(x, context.h.subarray(from * C), T, C, eps, this.top["norm.weight"], this.top["norm.bias"]);
  }

  // The logits (V,) of the tokens that follow tokens from..to-1 of a context, at most `piece`; valid until the next call.
  async logits(context, from, to) {
    const { width: C, vocab: V } = this.config, { scores, V8 } = this;
    await this.product(context.h.subarray(from * C), this.head, scores, to - from, C, V8);
    return Array.from({ length: to - from }, (_, t) => row(scores, t, V8).subarray(0, V));
  }

  // this.q, k and v (T, C) of this.h (T, C) in one block, at positions n, through the doors override and rotate. Where
  // the positions of keys add a line to the scores, it is added to these, exactly, and the keys are those of position 0.
  async project(p, n) {
    const { width: C } = this.config, { doors, h, input } = this;
    for (const part of ["q", "k", "v"]) {
      const own = doors.on?.includes(part);
      if (own) {
        input.set(h);
        n.forEach((position, t) => doors.override(row(input, t, C), part === "k" && doors.linear ? 0 : position));
      }
      await this.product(own ? input : h, p.packed[part], this[part], n.length, C, C);
    }
    if (doors.rotate) for (const part of ["q", "k"]) n.forEach((position, t) => doors.rotate(row(this[part], t, C), position));
  }

  // this.y (T, C) of this.q, k and v, in one block of a context of which `from` tokens were read before.
  // cut {block, head, near}: that head sees only the last `near` keys; cut.far[block * H + head] grows by what each
  // query's weights come to on the keys before those.
  attend(context, p, b, n, from, cut) {
    const { width: C, heads: H } = this.config, D = C / H, { longest, q, y, scores } = this;
    const T = n.length, S = from + T, kept = context.blocks[b];
    kept.q.set(q.subarray(0, T * C), from * C);
    kept.keys.length = this.doors.key ? from : 0;
    for (let t = 0, s = from; t < T; t++, s++) {
      if (this.doors.key) kept.keys.push(this.doors.key(row(this.h, t, C), n[t], p, kept.keys.at(-1)));
      for (let i = 0; i < C; i++) {
        const head = Math.floor(i / D), d = i % D;
        kept.k[head * longest * D + (s - (s % 8)) * D + d * 8 + (s % 8)] = this.k[t * C + i];
        kept.v[head * longest * D + (d - (d % 8)) * longest + s * 8 + (d % 8)] = this.v[t * C + i];
      }
    }
    for (let i = 0; i < T * C; i++) q[i] /= Math.sqrt(D);
    for (let head = 0; head < H; head++) {
      const low = Math.max(0, from - context.see + 1), first = low - (low % 8), keys = upTo(S, 8) - first;
      const see = cut && cut.block === b && cut.head === head ? Math.min(cut.near, context.see) : context.see;
      this.memory.product(q.subarray(head * D), kept.k.subarray(head * longest * D + first * D), scores, T, D, keys, { xRow: C });
      for (let t = 0; t < T; t++) {
        const z = row(scores, t, keys), m = from + t;
        const added = this.added(kept, p, head, m);
        if (added) for (let s = low; s <= m; s++) z[s - first] += added(s);
        softmax(z, Math.max(0, m - see + 1) - first, m + 1 - first, keys);
        const beyond = (back) => { let sum = 0; for (let s = first; s <= m - back; s++) sum += z[s - first]; return sum; };
        kept.far[head * longest + m] = beyond(this.far);
        if (cut?.far) cut.far[b * H + head] += beyond(cut.near);
      }
      this.memory.product(scores, kept.v.subarray(head * longest * D + first * 8), y.subarray(head * D),
                          T, S - first, D, { xRow: keys, outRow: C, wEight: 8 * longest });
    }
  }

  // What the position adds to the score of query m with key s, as a function of s, up to a number that all keys share
  // (it is 0 at s = m, to keep digits): the line that ExPE's q_m . w makes of the keys' positions, or the bias of ALiBi
  // and FoX; null if it is neither. w is what one position more changes in a key.
  added(kept, p, head, m) {
    const { width: C, heads: H } = this.config, D = C / H;
    if (this.doors.key) {
      const last = kept.keys[m][head];
      return (s) => kept.keys[s][head] - last;
    }
    if (!this.doors.linear) return null;
    p.w ??= times(p["qkv.weight"].subarray(C * C, 2 * C * C), this.doors.linear(C));
    let slope = 0;
    for (let i = head * D; i < (head + 1) * D; i++) slope += kept.q[m * C + i] * p.w[i];
    slope /= Math.sqrt(D);
    return (s) => slope * (s - m);
  }

  // The weight on far keys in each block and head, the mean of the queries from..to-1 of a context.
  farWeights(context, from, to) {
    return context.blocks.flatMap(({ far }) => Array.from({ length: this.config.heads }, (_, head) => {
      const some = far.subarray(head * this.longest + from, head * this.longest + to);
      return some.reduce((a, b) => a + b, 0) / some.length;
    }));
  }

  // What query m of a context does, in each block and head: its scores and weights on the keys 0..m, and what the
  // position adds to its scores. Keys that it does not see have the weight 0.
  inside(context, m) {
    const { width: C, heads: H } = this.config, D = C / H, { longest } = this;
    return this.blocks.flatMap((p, b) => Array.from({ length: H }, (_, head) => {
      const kept = context.blocks[b], line = this.added(kept, p, head, m);
      const scores = Float64Array.from({ length: m + 1 }, (_, s) => {
        let score = 0;
        for (let d = 0; d < D; d++) {
          score += kept.q[m * C + head * D + d] * kept.k[head * longest * D + (s - (s % 8)) * D + d * 8 + (s % 8)];
        }
        return score / Math.sqrt(D) + (line?.(s) ?? 0);
      });
      const added = line && Float64Array.from(scores, (_, s) => line(s));
      return { block: b, head, scores, added, weights: softmax(scores.slice(), Math.max(0, m - context.see + 1), m + 1, m + 1) };
    }));
  }
}
