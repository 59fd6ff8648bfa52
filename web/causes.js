"use strict";
// Causes: the targets' loss with each switch, in a table that is filled by what is read, and what follows from it.

const SETTINGS = () => [
  ["1x", plain(TRAINED)],
  [`1x, from position ${START.toLocaleString("en")}`, { ...plain(TRAINED), start: START }],
  [timesTrained(count()), plain(count())],
  [`${timesTrained(count())}, last ${TRAINED} keys`, { ...plain(count()), see: TRAINED }],
  [`${timesTrained(count())}, last ${NEAR} keys`, { ...plain(count()), see: NEAR }],
];
const timesTrained = (length) => `${Number((length / TRAINED).toFixed(1))}x`;
const FLAT = 0.1, SLIGHT = 0.05;         // nats: below it a loss does not change with length, or by less keys

// What the switches say of a model: {flat, cause, words}; null before all that it takes is read.
function verdict(thread) {
  const [one, moved, far, window, near] = SETTINGS().map(([, setting]) => targetsMean(thread, setting));
  if (![one, moved, far, window, near].every(Number.isFinite)) return null;
  const rise = far - one, percent = (x) => `${Math.round(100 * Math.min(Math.max(x, 0), 1))}%`;
  if (rise < FLAT) {
    return { flat: true, near: near - far, words: `its loss does not rise with length (${signed(rise)} nats). ` +
      (near - far < SLIGHT ? `It does not use the far context either: with the last ${NEAR} keys alone, its loss changes by ${signed(near - far)}.`
                           : `It uses keys more than ${NEAR} back: without them, its loss changes by ${signed(near - far)}.`) };
  }
  const distance = (far - window) / rise, position = (moved - one) / rise;
  const cause = position >= 0.5 ? "positions" : distance >= 0.5 ? "distances" : "neither alone";
  return { flat: false, cause, words: `its loss rises by ${number(rise, 2)}. Large positions without any added text make ` +
    `${percent(position)} of that rise; hiding keys more than ${TRAINED} back takes ${percent(distance)} of it away. ` +
    { positions: "The cause is the size of the positions.", distances: "The cause is the distances that it never saw in training.",
      "neither alone": "Neither switch alone explains it." }[cause] };
}

function causes() {
  const enough = count() > TRAINED, columns = enough ? SETTINGS() : [];
  at("causes-do").disabled = !enough;
  at("causes").replaceChildren(
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Loss of the targets, nats a token"),
      ...columns.map(([words]) => element("th", { scope: "col" }, words)))),
    element("tbody", {}, ...threads.map((thread) => element("tr", {},
      element("th", { scope: "row", class: "name", style: `--colour: ${thread.colour}` }, thread.name),
      ...columns.map(([, setting]) => element("td", {}, number(targetsMean(thread, setting))))))));
  at("verdicts").replaceChildren(...threads.flatMap((thread) => {
    const found = enough && verdict(thread);
    return found ? [element("li", {}, `${thread.name}: ${found.words}`)] : [];
  }));
}

async function readCauses() {
  const done = await readEach([...SETTINGS().map(([, setting]) => setting), plain(count())]);
  curves();
  return done;
}

at("causes-do").onclick = readCauses;
