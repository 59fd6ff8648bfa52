"use strict";
// A tour, each step with one thing to do and a sentence of what was seen, in the numbers of this page. A step is left
// out if a model that it needs is not here; `do` resolves with what `seen` says, or false if something came between.

const named = (pe, on) => threads.find(({ config: { encoding: e } }) => e.pe === pe && (!on || e.on === on));
const rise = (thread) => {
  const [one, far] = [1, state.multiple].map((multiple) => targetsMean(lossesAt(thread, multiple)));
  return `${thread.name} ${number(one)} to ${number(far)}`;
};
const most = () => MULTIPLES.filter(fits).at(-1);
const readFar = async () => (await show(1)) && show(most());
const EXPE = named("expe", "qk"), KEYS = named("expe", "k"), ROPE = named("rope");

// {head, slope} of the query of the last target, with that many trained lengths read, in a head or in its steepest.
async function lookAtLast(multiple, head) {
  if (!(await show(multiple)) || !(await pick(EXPE, multiple * TRAINED - 1))) return false;
  showHead(head ?? steepest(view.heads));
  return { head: view.shown, slope: slopeOf(view.heads[view.shown]) };
}

const STEPS = [
  {
    title: "No order at all", where: "by-distance",
    text: "Attention compares a query with keys, and a sum over keys has no order. Choose no encoding, and look at the score against the distance.",
    do: () => turn("nope"),
    seen: () => "The score is flat: without an encoding a key has no place. (A causal mask alone still lets a model count.)",
    links: [["attention", "{{model_numpy.py: def attend_forward}}"], ["docs", "docs/doors.md"]],
  },
  {
    title: "Turn by an angle", where: "by-distance",
    text: "RoPE turns queries and keys by angles, so that a score depends on the distance alone. Choose RoPE and a larger base.",
    do: () => { turn("rope"); move("base", 17); },
    seen: () => "One curve for every query: the score knows the distance, and waves with it. The distances past the dotted line were never seen in training.",
    links: [["rope_inv_freq", "{{expe.py: def rope_inv_freq}}"], ["docs", "docs/doors.md"]],
  },
  {
    title: "Past the trained length", where: "by-length", needs: [ROPE],
    text: "The models were trained on windows of {TRAINED} tokens. Read the same targets with {TRAINED} tokens, and then with all there are.",
    do: readFar,
    seen: () => `The same targets, ${TRAINED} and ${state.multiple * TRAINED} tokens: ${rise(ROPE)} nats. All that was added is text before them, at distances that it never saw in training.`,
    links: [["same targets", "{{lab/measures.py: def same_targets}}"], ["docs", "docs/evidence.md"]],
  },
  {
    title: "A straight ramp", where: "by-distance",
    text: "ExPE writes the position itself, a ramp, over the first l numbers of what enters W_q and W_k. Choose it, and double its theta.",
    do: () => { turn("expe"); move("theta", -8); },
    seen: () => "The table is one ramp, and theta its gain. On queries and keys the later query has the steeper line.",
    links: [["expe_table", "{{expe.py: def expe_table}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "A slope that the query chooses", where: "added", needs: [EXPE],
    text: "What a ramp on the keys adds to a score is a line in the key's position, and the query chooses its slope. Look inside ExPE at the trained length.",
    do: () => lookAtLast(1),
    seen: ({ slope }) => `In its steepest head this query gives a key ${signed(slope)} nats for each token that it is nearer.`,
    links: [["the slopes", "{{studies/slopes.py: class TiltedAttention}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "The slope grows", where: "added", needs: [EXPE],
    text: "On queries and keys the query's own position enters its slope. Look at the same target with all that comes before it.",
    do: async () => {
      const near = await lookAtLast(1), far = near && (await lookAtLast(most(), near.head));
      return far && [near, far];
    },
    seen: ([near, far]) => `At position ${state.multiple * TRAINED - 1} the same head's slope is ${signed(far.slope)}, and was ` +
      `${signed(near.slope)} at the trained length: ${rise(EXPE)} nats on the same targets.`,
    links: [["override_on", "{{model_numpy.py: def override_on}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "Keys alone", where: "by-length", needs: [KEYS],
    text: "Written over the keys alone, the ramp gives slopes that depend on what the query says and not on where it stands. Read everything again.",
    do: readFar,
    seen: () => `The same targets, ${TRAINED} and ${state.multiple * TRAINED} tokens: ` +
      `${[KEYS, ...[EXPE, ROPE, named("alibi")].filter(Boolean)].map(rise).join(", ")} nats.`,
    links: [["--on k", "{{model_numpy.py: def override_on}}"], ["docs", "docs/explained.md"]],
  },
].filter(({ needs = [] }) => needs.every(Boolean));

let step = 0, doing = 0;

function showStep(i) {
  const { title, text, links } = STEPS[step = i];
  doing++;
  at("tour-title").textContent = `Tour, step ${i + 1} of ${STEPS.length}: ${title}`;
  at("tour-text").textContent = text.replaceAll("{TRAINED}", TRAINED);
  at("tour-seen").textContent = "";
  at("tour-back").disabled = i === 0;
  at("tour-next").disabled = i === STEPS.length - 1;
  at("tour-links").replaceChildren(...links.map(([words, href]) => element("a", { href: `${DATA.root}${href}` }, words)));
}

async function doStep() {
  const { where, do: act, seen } = STEPS[step], mine = ++doing;
  at("tour-seen").textContent = "...";
  if (!fits(2)) {                                                        // too short to show what is past the length
    at("text").value = 0;
    at("text").onchange();
  }
  const acting = act(), bring = () => at(where).closest("figure").scrollIntoView({ block: "nearest" });
  bring();                                                               // to see it drawn, and where it then stands
  const found = await acting;
  if (mine !== doing) return;
  at("tour-seen").textContent = found === false ? "Something else was asked for meanwhile: do it again." : seen(found);
  bring();
}

at("tour-back").onclick = () => showStep(step - 1);
at("tour-next").onclick = () => showStep(step + 1);
at("tour-do").onclick = doStep;
showStep(0);
