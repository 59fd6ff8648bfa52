"use strict";
// A model in a thread of its own. A message has an id and what is asked; a later one stops what it is still doing, and
// each is answered, with what was found or with nothing, and with whether a GPU computes; or with what failed. A window
// is tokens, each but the first of them a target; how is {see, start}, as in model.js.
//   {load, weights, longest, gpu}      a model, and whether it may use a GPU
//   {read: window, how}                the losses of all targets, in pieces {from, losses}; then the weights on far keys
//                                      of each head, the mean of the last queries, as many as the trained length
//   {inside: window, how, index}       what the query that predicts token `index` does, and the five likeliest tokens
//   {worth: window, how, targets, near}  by how much the mean loss of the last targets rises if one head sees only the
//                                      last `near` keys, with its standard error, and the weight that the head has on
//                                      the keys before those: for each head in turn
//   {write: tokens, how, count}        the likeliest token after these, and the one after that, one after the other
let model, broken, latest = 0;           // broken: why there is no model

const others = () => new Promise((done) => setTimeout(done));            // so that messages can come in between

// Has a context read the first `last` tokens of a window; each(from, to) is awaited for every part of them. Null if
// something later was asked for meanwhile.
async function readUpTo(id, window, how, last, each = () => {}) {
  const context = model.context(window.slice(0, last), how), kept = Math.min(context.tokens.length, last);
  for (let from = 0; from < last;) {
    const to = Math.min(from + model.piece, from < kept ? kept : last);
    if (to > kept) {
      await model.read(window.slice(from, to), context);
      await others();
    }
    if (latest !== id) return null;
    await each(context, from, to);
    from = to;
  }
  return context;
}

// The losses of the targets that follow tokens from..to-1.
const lossesIn = async (context, window, from, to) => lossesOf(await model.logits(context, from, to), window.slice(from + 1, to + 1));

const ANSWERS = {
  async read(id, { read: window, how }) {
    const tell = async (context, from, to) => postMessage({ id, from, losses: await lossesIn(context, window, from, to) });
    const last = window.length - 1, context = await readUpTo(id, window, how, last, tell);
    return context && model.farWeights(context, Math.max(0, last - model.far), last);
  },

  async inside(id, { inside: window, how, index }) {
    const context = await readUpTo(id, window, how, index);
    if (!context) return null;
    const [z] = await model.logits(context, index - 1, index);
    return { heads: model.inside(context, index - 1), next: likeliest(z, 5) };
  },

  async worth(id, { worth: window, how, targets, near }) {
    const last = window.length - 1, first = last - targets, { layers: L, heads: H } = model.config;
    const context = await readUpTo(id, window, how, last);
    if (!context) return null;
    const again = async (cut) => {
      const losses = [];
      for (let from = first; from < last; from += model.piece) {
        const to = Math.min(from + model.piece, last);
        await model.read(window.slice(from, to), context, { from, cut });
        losses.push(...await lossesIn(context, window, from, to));
      }
      return losses;
    };
    const mean = (x) => x.reduce((a, b) => a + b) / targets;
    const far = new Float64Array(L * H), whole = await again({ near, far });
    for (let i = 0; i < L * H && latest === id; i++) {
      const cut = { near, block: Math.floor(i / H), head: i % H };
      const rises = (await again(cut)).map((loss, t) => loss - whole[t]), worth = mean(rises);
      const error = Math.sqrt(mean(rises.map((rise) => (rise - worth) ** 2)) / (targets - 1));
      postMessage({ id, head: i, worth, error, far: far[i] / targets });
      await others();
    }
    context.tokens.length = first;                                       // the rest was read with a head cut
    return latest === id;
  },

  async write(id, { write: tokens, how, count }) {
    const context = await readUpTo(id, tokens, how, tokens.length - 1);
    for (let i = 0, all = [...tokens]; context && i < count; i++) {
      await model.read(all.slice(-1), context, { from: all.length - 1 });
      const [z] = await model.logits(context, all.length - 1, all.length);
      all.push(z.indexOf(Math.max(...z)));
      postMessage({ id, token: all.at(-1) });
      await others();
      if (latest !== id) return null;
    }
    return Boolean(context);
  },
};

let busy = Promise.resolve();            // so that what is stopped has ended before what stopped it begins

onmessage = ({ data: { id, ...asked } }) => {
  latest = id;
  busy = busy.then(async () => {
    if (asked.load) {
      const weights = await weightsOf(asked.weights, asked.load.bytes, asked.load.tensors), gpu = asked.gpu ? await Gpu.find() : null;
      model = new Model(asked.load, weights, asked.longest, gpu);
    }
    const kind = Object.keys(ANSWERS).find((name) => name in asked);
    const found = kind && latest === id ? await ANSWERS[kind](id, asked) : null;
    postMessage({ id, done: true, found, gpu: Boolean(model.gpu) });
  }).catch((error) => {
    if (!model) broken ??= error;
    postMessage({ id, done: true, found: null, failed: String(broken ?? error) });
  });
};
