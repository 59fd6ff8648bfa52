"use strict";
// A model in a thread of its own. In: {load}, {read: window}, {inside: window, index} or nothing, each with an id; a
// later one stops an earlier read or inside. Each is answered. A window is tokens, each but the first of them a target.
const PIECE = 32;
let model, latest = 0;

const others = () => new Promise((done) => setTimeout(done));            // so that messages can come in between

// Read up to a target of a window, or go on with it; tells each piece. False if something later came.
async function readUpTo(id, window, last, tell) {
  const same = model.tokens.every((token, t) => token === window[t]);
  if (!same || model.tokens.length > window.length - 1 || tell) model.forget();
  while (model.tokens.length < last) {
    const from = model.tokens.length, to = Math.min(from + PIECE, last);
    const logits = model.read(window.slice(from, to));
    tell?.(from, lossesOf(logits, window.slice(from + 1, to + 1)));
    await others();
    if (latest !== id) return false;
  }
  return true;
}

onmessage = async ({ data: { id, ...asked } }) => {
  if (asked.load) {
    model = new Model(asked.load, await weightsOf(asked.weights, asked.load.bytes));
    return postMessage({ id, done: true });
  }
  latest = id;
  const window = asked.read ?? asked.inside, last = asked.read ? window.length - 1 : asked.index;
  const whole = window && await readUpTo(id, window, last, asked.read && ((from, losses) => postMessage({ id, from, losses })));
  postMessage({ id, done: true, found: whole && asked.inside && model.inside(asked.index - 1) });
};
