"use strict";
// A tour, each step with one thing to do and a sentence of what was seen, in the numbers of this page. A step is left
// out if a model that it needs is not here; `do` resolves with what `seen` says, or false if something came between.

const named = (pe, on) => threads.find(({ config: { encoding: e } }) => e.pe === pe && (!on || e.on === on));
const loss = (thread, setting) => number(targetsMean(thread, setting));
const list = (words) => words.join(", ").replace(/, ([^,]+)$/, words.length > 1 ? " and $1" : "$1");
const fresh = (length) => ({ length, see: 0, start: 0, chosen: null });
const readFar = () => { state.chosen = null; return everyLength({ see: 0, start: 0 }); };
const EXPE = named("expe", "qk"), KEYS = named("expe", "k"), ROPE = named("rope");

// "RoPE rises from 3.041 to 4.312", by the losses of two settings.
function change(thread, from = plain(TRAINED), to = plain(count())) {
  return `${thread.name} ${verbOf(targetsMean(thread, to) - targetsMean(thread, from))} from ${loss(thread, from)} to ${loss(thread, to)}`;
}

// What moving the text does to ExPE, beside what its length does.
function positionsAlone() {
  const one = targetsMean(EXPE, plain(TRAINED)), rise = targetsMean(EXPE, plain(count())) - one;
  const shift = targetsMean(EXPE, { ...plain(TRAINED), start: START }) - one, share = Math.round((100 * shift) / rise);
  if (rise < FLAT) return `With ${count()} tokens from position 0 ${change(EXPE)}: there is no rise to explain on this text.`;
  return `With ${count()} tokens from position 0 ${change(EXPE)}. ` + (share > 94 ? "The size of the positions alone makes as much." :
    share < 5 ? "The size of the positions makes nothing of that." : `The size of the positions alone makes ${share}% of that.`);
}

// {head, slope} of the query of the last target at a length, in a head of ExPE or in its steepest.
async function lookAtLast(length, head) {
  if (!(await show(fresh(length))) || !(await pick(EXPE, length - 1))) return false;
  showHead(head ?? steepest(view.heads));
  return { head: view.shown, slope: slopeOf(view.heads[view.shown]) };
}

// What each model does, "RoPE fails on distances", those that do the same together.
function verdicts(losses) {
  const found = {}, many = (words) => words.replace(/^(stay|fail|fall)s/, "$1").replace("does", "do").replace(/but (rise|fall)s/, "but $1");
  for (const thread of threads.filter(losses)) (found[verdict(losses(thread))] ??= []).push(thread.name);
  return Object.entries(found).map(([words, names]) => `${list(names)} ${names.length > 1 ? many(words) : words}. `).join("");
}

// What follows from the switches for this text, and for all held-out texts, as docs/why-length-breaks.md has it.
function conclusion() {
  const all = [ROPE, EXPE, KEYS].filter(Boolean).map((thread) => `${thread.name} ${brief(heldOut(thread))}`);
  return `This text: ${verdicts(measured)}All ${DATA.documents} held-out texts: ${verdicts(heldOut)}${all.join("; ")} nats. ` +
    (TASK ? `Flat is not the same as useful: whether a model can use far text is another question, which the task answers (${taskResult()}).` : "");
}

// The share of right answers at the longest length of the task.
const taskResult = () => `right answers at ${MULTIPLES.at(-1)}x the trained length: ` +
  solvers.map(({ id, name }) => `${name} ${Math.round(100 * TASK.accuracy[id].at(-1))}%`).join(", ");

const STEPS = [
  {
    title: "Past the trained length", where: "by-length",
    text: "The models were trained on windows of {TRAINED} tokens. Read the same targets with {TRAINED} tokens, and with more and more before them.",
    do: readFar,
    seen: () => `With ${count()} tokens in place of ${TRAINED}, ${threads.map((thread) => change(thread)).join("; ")} nats. Text was added before the ` +
      "targets. That adds keys at distances that training never had, and also larger positions: which of them does it?",
    links: [["same targets", "{{lab/measures.py: def same_targets}}"], ["docs", "docs/evidence.md"]],
  },
  {
    title: "Where the weights go", where: "causes",
    text: "Attention shares out a weight of 1 among the keys. See how much of it lies beyond the last {TRAINED} keys, where no key was in training.",
    do: readFar,
    seen: () => `With ${count()} tokens read, the mean of all heads (and the least and most of one head) is: ` +
      `${threads.map((thread) => `${thread.name} ${farWords(thread)}`).join("; ")}. Near keys lack this weight.`,
    links: [["attend", "{{model_numpy.py: def attend(}}"], ["docs", "docs/why-length-breaks.md"]],
  },
  {
    title: "Hide the far keys", where: "by-length", needs: [ROPE],
    text: "Let every query see its last {TRAINED} keys only. The text, and every position in it, stays.",
    do: async () => (await readFar()) && everyLength({ see: TRAINED }),
    seen: () => {
      const all = plain(count()), near = { ...all, see: TRAINED }, rise = targetsMean(ROPE, all) - targetsMean(ROPE, plain(TRAINED));
      const share = Math.round((100 * (targetsMean(ROPE, all) - targetsMean(ROPE, near))) / rise), part = share > 94 ? "the whole" : `${share}%`;
      return `RoPE has ${loss(ROPE, all)} nats with all ${count()} keys and ${loss(ROPE, near)} with the last ${TRAINED} only. ` +
        (rise < FLAT ? `Its loss ${verbOf(rise)} from ${loss(ROPE, plain(TRAINED))} to ${loss(ROPE, all)} with length: there is no rise to explain on this text.` :
         share < 5 ? "Hiding far keys takes nothing of its rise away: distances do not explain it on this text." :
         `The positions did not change, and ${part} of its rise is gone: that is due to distances.`);
    },
    links: [["the window", "{{model_torch.py: def unseen}}"], ["docs", "docs/why-length-breaks.md"]],
  },
  {
    title: "Rotate by an angle", where: "by-distance",
    text: "RoPE rotates queries and keys by angles, so that a score depends on the distance alone. Choose RoPE and a larger base.",
    do: () => { turn("rope"); move("base", 17); },
    seen: () => "There is one curve for every query: the score knows the distance, and oscillates with it. The distances past the dotted line were never seen in training.",
    links: [["rope_inv_freq", "{{expe.py: def rope_inv_freq}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "Move the text", where: "by-length", needs: [EXPE],
    text: "Begin to count at position {START}. At {TRAINED} tokens no text is added and no distance changes.",
    do: async () => (await readFar()) && everyLength({ start: START }),
    seen: () => `With ${TRAINED} tokens that begin at position ${START} in place of 0, ` +
      `${[EXPE, ROPE].filter(Boolean).map((thread) => change(thread, plain(TRAINED), { ...plain(TRAINED), start: START })).join("; ")} nats. ` +
      positionsAlone(),
    links: [["expe_override", "{{model_numpy.py: def expe_override}}"], ["docs", "docs/why-length-breaks.md"]],
  },
  {
    title: "A straight ramp", where: "by-distance",
    text: "ExPE writes the position itself, a ramp, over the first l numbers of what enters W_q and W_k. Choose it, and double its theta.",
    do: () => { turn("expe"); move("theta", -8); },
    seen: () => "The table is one ramp, and theta is how steep it is. With the ramp on queries and keys, a later query has a steeper line.",
    links: [["expe_table", "{{expe.py: def expe_table}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "A slope that the query chooses", where: "added", needs: [EXPE],
    text: "What a ramp on the keys adds to a score is a line in the key's position, and the query chooses its slope. Look inside ExPE at the trained length.",
    do: () => lookAtLast(TRAINED),
    seen: ({ slope }) => `In its steepest head this query gives a key ${signed(slope)} nats for each token that it is nearer.`,
    links: [["docs", "docs/explained.md"]],
  },
  {
    title: "The slope grows", where: "added", needs: [EXPE],
    text: "With the ramp on queries too, the query's own position enters its slope. Look at the same target with all that comes before it.",
    do: async () => {
      const near = (await readFar()) && (await lookAtLast(TRAINED)), far = near && (await lookAtLast(count(), near.head));
      return far && [near, far];
    },
    seen: ([near, far]) => `At position ${TRAINED - 1} the head's slope is ${signed(near.slope)}, and at position ${count() - 1} it is ` +
      `${signed(far.slope)}: it ${far.slope > near.slope ? "grew" : "did not grow"}. On the same targets ${change(EXPE)} nats.`,
    links: [["expe_override", "{{model_numpy.py: def expe_override}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "ExPE on keys only", where: "by-length", needs: [KEYS],
    text: "ExPE-K overrides the keys alone. Its slopes depend on what the query says, and not on where it stands. Read everything again.",
    do: readFar,
    seen: () => `With ${count()} tokens in place of ${TRAINED}, ${[KEYS, EXPE, ROPE].filter(Boolean).map((thread) => change(thread)).join("; ")} nats.`,
    links: [["--on k", "{{model_numpy.py: def expe_override}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "Weights that fetch nothing", where: "weights", needs: [KEYS],
    text: "A flat loss need not mean that far text is used. Look into ExPE-K, and measure what each head loses when it cannot see keys more than {NEAR} back.",
    do: async () => (await show(fresh(count()))) && (await pick(KEYS, count() - 1)) && measureWorth(),
    seen: (worth) => {
      const far = worth.map((its, i) => ({ ...its, i })).sort((a, b) => b.far - a.far)[0];
      showHead(far.i);
      const used = worth.filter(uses).length;
      return `The head with the most far weight has ${(100 * far.far).toFixed(0)}% of it on keys more than ${NEAR} back, worth ${signed(far.worth)} nats. ` +
        `Of ${plural(worth.length, "head")}, ${used} ${used === 1 ? "loses" : "lose"} more than two standard errors without them.`;
    },
    links: [["docs", "docs/explained.md"]],
  },
  {
    title: "A task that needs far text", where: "task-accuracy", needs: [TASK],
    text: "These models learned, in a minute, to fetch one letter from a text. Ask them in a text of 16 times the length that they were trained on.",
    do: () => solve({ length: MULTIPLES.at(-1) * TASK.trained }),
    seen: () => `Of all such texts, ${taskResult()}. ` + solvers.map(({ id, name }) => {
      const head = fetching(task.answers.get(id)[0], placeOf(0));
      return `In this text, ${name}'s best head has ${(100 * head.weights[placeOf(0)]).toFixed(0)}% of its weight on the letter that is asked for`;
    }).join(". ") + ".",
    links: [["the tasks", "{{tasks.py: def needle}}"], ["docs", "docs/use.md"]],
  },
  {
    title: "Conclusion", where: "causes", needs: [],
    text: "Read this text with each switch, and see what follows for all models.",
    do: readCauses,
    seen: conclusion,
    links: [["docs", "docs/why-length-breaks.md"]],
  },
].filter(({ needs = [] }) => needs.every(Boolean));

let step = 0, doing = 0;

function showStep(i) {
  const { title, text, links } = STEPS[step = i];
  doing++;
  at("tour-title").textContent = `Tour, step ${i + 1} of ${STEPS.length}: ${title}`;
  at("tour-text").textContent = text.replaceAll("{TRAINED}", TRAINED).replaceAll("{START}", START).replaceAll("{NEAR}", NEAR);
  at("tour-seen").textContent = "";
  remember();
  at("tour-back").disabled = i === 0;
  if (i === STEPS.length - 1 && document.activeElement === at("tour-next")) at("tour-do").focus();
  at("tour-next").disabled = i === STEPS.length - 1;
  at("tour-links").replaceChildren(...links.map(([words, href]) => (DATA.root ? element("a", { href: DATA.root + href }, words)
    : element("code", {}, href.replace("#L", ", line ")))));              // without an address, what to look for
}

async function doStep() {
  const { where, do: act, seen } = STEPS[step], mine = ++doing;
  at("tour-seen").textContent = "Reading ...";
  let first = "";
  if (count() <= TRAINED) {
    first = `The text has ${plural(count(), "token")}, too few to show what is past ${TRAINED}: this is held-out text 1. `;
    at("text").value = 0;
    at("text").onchange();
  }
  const acting = (async () => act())(), bring = () => at(where).closest("figure, .scroll").scrollIntoView({ block: "nearest" });
  bring();                                                               // to see it drawn, and where it then stands
  let words;
  try {
    const found = await acting;
    if (mine !== doing) return;
    words = found === false ? "Something else was asked for meanwhile: do it again." : seen(found);
  } catch (error) {
    fail(String(error));
  }
  at("tour-seen").textContent = state.failed ? `Something failed here (${state.failed}): load the page again.` : first + words;
  bring();
}

at("tour-back").onclick = () => showStep(step - 1);
at("tour-next").onclick = () => showStep(step + 1);
at("tour-do").onclick = doStep;
