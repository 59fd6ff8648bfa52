"use strict";
// A tour of seven steps, each with one thing to do and a sentence of what was seen, in the numbers of this page.

const named = (pe, on) => threads.find(({ config: { encoding: e } }) => e.pe === pe && (!on || e.on === on));
const rise = (thread) => {
  const [one, far] = [1, state.multiple].map((multiple) => targetsMean(lossesAt(thread, multiple)));
  return `${thread.name} ${number(one)} to ${number(far)}`;
};
const most = () => MULTIPLES.filter(fits).at(-1);
const readFar = async () => { await show(1); await show(most()); };
async function lookAt(thread, i) {
  pick(thread, i);
  await look();
  return slopeOf(view.heads[view.shown]);
}

const STEPS = [
  {
    title: "No order at all", where: "knobs",
    text: "Attention compares a query with keys, and a sum over keys has no order. Choose no encoding, and look at the score against the distance.",
    do: () => turn("nope"),
    seen: () => "The score is flat: without an encoding a key has no place. (A causal mask alone still lets a model count.)",
    links: [["attention", "{{model_numpy.py: def attend_forward}}"], ["docs", "docs/doors.md"]],
  },
  {
    title: "Turn by an angle", where: "knobs",
    text: "RoPE turns queries and keys by angles, so that a score depends on the distance alone. Choose RoPE and a larger base.",
    do: () => { turn("rope"); move("base", 17); },
    seen: () => "One curve for every query: the score knows the distance, and waves with it. Distances past the trained length were never seen.",
    links: [["rope_inv_freq", "{{expe.py: def rope_inv_freq}}"], ["docs", "docs/doors.md"]],
  },
  {
    title: "Past the trained length", where: "read",
    text: "The models were trained on windows of {TRAINED} tokens. Read the same targets with {TRAINED} tokens, and then with all there are.",
    do: readFar,
    seen: () => `The same targets, ${TRAINED} and ${state.multiple * TRAINED} tokens: ${rise(named("rope"))} nats. All that was added is more text before them.`,
    links: [["same targets", "{{lab/measures.py: def same_targets}}"], ["docs", "docs/evidence.md"]],
  },
  {
    title: "A straight ramp", where: "knobs",
    text: "ExPE writes the position itself, a ramp, over the first l numbers of what enters W_q and W_k. Choose it, and double its theta.",
    do: () => { turn("expe"); move("theta", -8); },
    seen: () => "The table is one ramp, and theta its gain. On queries and keys the later query has the steeper line.",
    links: [["expe_table", "{{expe.py: def expe_table}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "A slope that the query chooses", where: "inside",
    text: "What a ramp on the keys adds to a score is a line in the key's position, and the query chooses its slope. Look inside ExPE at the trained length.",
    do: async () => {
      await show(1);
      view.steepest = null;                                              // choose the head anew
      STEPS[4].slope = await lookAt(named("expe", "qk"), Math.min(TRAINED, state.tokens.length - 1) - 1);
      STEPS[4].head = view.shown;
    },
    seen: () => `In its steepest head this query gives a key ${signed(STEPS[4].slope)} nats for each token that it is nearer.`,
    links: [["the slopes", "{{lab/slopes.py: class TiltedAttention}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "The slope grows", where: "inside",
    text: "On queries and keys the query's own position enters its slope. Look at the last token with all that comes before it.",
    do: async () => {
      await show(most());
      await lookAt(named("expe", "qk"), state.multiple * TRAINED - 1);
      showHead(STEPS[4].head);
      STEPS[5].slope = slopeOf(view.heads[view.shown]);
    },
    seen: () => `At position ${state.multiple * TRAINED - 1} the same head's slope is ${signed(STEPS[5].slope)}, and was ` +
      `${signed(STEPS[4].slope)} at the trained length: ${rise(named("expe", "qk"))} nats on the same targets.`,
    links: [["override_on", "{{model_numpy.py: def override_on}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "Keys alone", where: "read",
    text: "Written over the keys alone, the ramp gives slopes that depend on what the query says and not on where it stands. Read everything again.",
    do: readFar,
    seen: () => `The same targets, ${TRAINED} and ${state.multiple * TRAINED} tokens: ${rise(named("expe", "k"))} nats, beside ` +
      `${[named("expe", "qk"), named("rope"), named("alibi")].map(rise).join(", ")}.`,
    links: [["--on k", "{{model_numpy.py: def override_on}}"], ["docs", "docs/explained.md"]],
  },
];

let step = 0;

function showStep(i) {
  const { title, text, links } = STEPS[step = i];
  at("tour-title").textContent = `Tour, step ${i + 1} of ${STEPS.length}: ${title}`;
  at("tour-text").textContent = text.replaceAll("{TRAINED}", TRAINED);
  at("tour-seen").textContent = "";
  at("tour-back").disabled = i === 0;
  at("tour-next").disabled = i === STEPS.length - 1;
  at("tour-links").replaceChildren(...links.map(([words, href]) => element("a", { href }, words)));
}

async function doStep() {
  const { where, do: act, seen } = STEPS[step], mine = step;
  at(where).scrollIntoView();
  at("tour-do").disabled = true;
  at("tour-seen").textContent = "...";
  if (mine === 5 && STEPS[4].slope === undefined) await STEPS[4].do();
  await act();
  at("tour-do").disabled = false;
  if (mine === step) at("tour-seen").textContent = seen();
}

at("tour-back").onclick = () => showStep(step - 1);
at("tour-next").onclick = () => showStep(step + 1);
at("tour-do").onclick = doStep;
showStep(0);
