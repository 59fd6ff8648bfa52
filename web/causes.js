"use strict";
// Causes: the targets' loss with each switch, in a table that is filled by what is read, and what follows from it.

const SETTINGS = () => [
  ["1x", plain(TRAINED)],
  [`1x, from position ${whole(START)}`, { ...plain(TRAINED), start: START }],
  [timesTrained(count()), plain(count())],
  [`${timesTrained(count())}, last ${TRAINED} keys`, { ...plain(count()), see: TRAINED }],
  [`${timesTrained(count())}, last ${NEAR} keys`, { ...plain(count()), see: NEAR }],
];
const timesTrained = (length) => `${Number((length / TRAINED).toFixed(1))}x`;
const FLAT = 0.1;                        // nats: a smaller change does not count, and is called flat
// The mean share of its keys that are so far back, or more, of each of the last queries of a length: uniform weights.
const uniformFar = (length, back) => mean(Array.from({ length: Math.min(TRAINED, length) }, (_, i) =>
  Math.max(0, length - i - back) / (length - i)));

// What the losses say of a model: at 1x, moved to a large position, at 16x, and there with far keys hidden.
function verdict({ one, moved, far, hidden }) {
  const rise = far - one, shift = moved - one;
  if (rise < FLAT && Math.abs(shift) >= FLAT) return `does not rise with length, but ${shift > 0 ? "rises" : "falls"} if the text is moved`;
  if (rise < FLAT) return rise > -FLAT ? "stays flat" : "falls with length";
  if (shift >= rise / 2) return "fails on positions";
  return far - hidden >= rise / 2 ? "fails on distances" : "fails, and neither switch alone explains it";
}

const verbOf = (by) => (Math.abs(by) < FLAT ? "stays flat," : by > 0 ? "rises" : "falls");
const nats = (x) => number(x, 2);
// The numbers that say so, as docs/why-length-breaks.md has them.
const brief = ({ one, moved, far, hidden }) => `${verbOf(far - one)} from ${nats(one)} to ${nats(far)}` +
  (far - one < FLAT ? "" : moved - one >= (far - one) / 2 ? `, and the move alone gives ${nats(moved)}` : `, and with far keys hidden it has ${nats(hidden)}`);
const explain = ({ one, moved, far, hidden }, most) => `${nats(one)} at ${TRAINED} tokens, ${nats(far)} at ${most}; with far keys ` +
  `hidden ${nats(hidden)}, and if the ${TRAINED} tokens begin at position ${whole(START)}, ${nats(moved)}`;

// {one, moved, far, hidden, near} of a model on this text; null before all of it is read.
function measured(thread) {
  const [one, moved, far, hidden, near] = SETTINGS().map(([, setting]) => targetsMean(thread, setting));
  return [one, moved, far, hidden, near].every(Number.isFinite) ? { one, moved, far, hidden, near } : null;
}

// {one, moved, far, hidden} of a model on all held-out texts.
function heldOut({ id }) {
  const { losses, moved, hidden } = DATA.results[id];
  return { one: losses[0], moved, far: losses.at(-1), hidden };
}

// The share of a head's weight on far keys: of all heads, and of those with the least and the most.
function farWords(thread) {
  const far = farAt(thread, plain(count()));
  return far ? `${percent(mean(far))} (${percent(Math.min(...far))} to ${percent(Math.max(...far))})` : "-";
}

function causes() {
  const enough = count() > TRAINED, columns = enough ? SETTINGS() : [];
  at("causes-do").disabled = !enough;
  at("causes").replaceChildren(
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Loss of the targets, nats a token"),
      ...columns.map(([words]) => element("th", { scope: "col" }, words)),
      ...(enough ? [element("th", { scope: "col" }, `${timesTrained(count())}: weight beyond the last ${TRAINED} keys`)] : []))),
    element("tbody", {}, ...threads.map((thread) => element("tr", {},
      element("th", { scope: "row", class: "name", style: `--colour: ${thread.colour}` }, thread.name),
      ...columns.map(([, setting]) => element("td", {}, number(targetsMean(thread, setting)))),
      ...(enough ? [element("td", {}, farWords(thread))] : []))),
      ...(enough ? [element("tr", {}, element("th", { scope: "row" }, "Chance: all tokens, or keys, alike"),
        ...columns.map(() => element("td", {}, number(CHANCE))), element("td", {}, percent(uniformFar(count(), TRAINED))))] : [])));
  at("verdicts").replaceChildren(...threads.flatMap((thread) => {
    const found = enough && measured(thread);
    return found ? [element("li", {}, `${thread.name} ${verdict(found)}: ${explain(found, whole(count()))}. ` +
      `With the last ${NEAR} keys alone it has ${nats(found.near)}.`)] : [];
  }));
}

async function readCauses() {
  const done = await readEach([...SETTINGS().map(([, setting]) => setting), plain(count())]);
  curves();
  return done;
}

at("causes-do").onclick = readCauses;
at("flat-words").textContent = `On this page a loss rises or falls if it changes by ${FLAT} nats or more; if by less, it stays flat.`;
at("verdict-words").textContent = `A model fails on positions if the large positions alone give half of its rise or more, and on ` +
  `distances if hiding far keys takes half of it or more away. A rise is one of ${FLAT} nats or more; a smaller change is flat.`;
