"use strict";
// A tour, each step with something to predict, one thing to do, and a sentence of what was seen, in the numbers of this
// page. A step is left out if a model that it needs is not here; `do` resolves with what `seen` and `right` say, or false
// if something came between. `ask` has a question and its answers, of which `right` is the number of the right one.

const named = (pe, on) => threads.find(({ config: { encoding: e } }) => e.pe === pe && (!on || e.on === on));
const loss = (thread, setting) => number(targetsMean(thread, setting));
const list = (words) => words.join(", ").replace(/, ([^,]+)$/, words.length > 1 ? " and $1" : "$1");
const fresh = (length) => ({ length, see: 0, start: 0, chosen: null });
const readFar = () => { state.chosen = null; return everyLength({ see: 0, start: 0 }); };
const EXPE = named("expe", "qk"), KEYS = named("expe", "k"), ROPE = named("rope"), FIRST = ROPE ?? EXPE ?? threads[0];
const MOVED = { ...plain(TRAINED), start: START }, hidden = () => ({ ...plain(count()), see: TRAINED });

const by = (thread, from, to) => targetsMean(thread, to) - targetsMean(thread, from);
const rise = (thread) => by(thread, plain(TRAINED), plain(count()));
const rises = (thread) => rise(thread) >= FLAT;

// "RoPE rises from 3.041 to 4.312", by the losses of two settings.
function change(thread, from = plain(TRAINED), to = plain(count())) {
  return `${thread.name} ${verbOf(by(thread, from, to))} from ${loss(thread, from)} to ${loss(thread, to)}`;
}

// What a loss may do, and the number of what it did.
const WAYS = ["It rises", "It stays flat", "It falls"];
const wayOf = (change) => (Math.abs(change) < FLAT ? 1 : change > 0 ? 0 : 2);

// What an edit gives or takes away beside a model's rise with length; without a rise, that there is none.
function besideRise(thread, edit, part) {
  if (!rises(thread)) return `With length ${change(thread)} nats: there is no rise to explain on this text.`;
  return `${edit} ${part < FLAT ? `less than ${FLAT}` : nats(part)} nats; ${thread.name}'s rise with length is ${nats(rise(thread))}.`;
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
    (TASK ? "Flat is not the same as useful: whether a model can use far text is another question, which the task answers." : "");
}

// The share of right answers at the longest length of the task, and what is right without reading the text.
const taskResult = () => `${solvers.map(({ id, name }) => `${name} has ${percent(TASK.accuracy[id].at(-1))} right`).join(", ")}; ` +
  `chance is ${percent(TASK.chance)}, and the best guess without positions ${percent(TASK.guess.at(-1))}`;

const STEPS = [
  {
    title: "Past the trained length", where: "by-length",
    text: `The models were trained on windows of ${TRAINED} tokens. Read the same targets with ${TRAINED} tokens, and with more and more before them.`,
    ask: () => [`Of how many models does the loss rise, by ${FLAT} nats or more?`, ["None", "Some", "All"]],
    do: readFar,
    right: () => [threads.some(rises), threads.every(rises)].filter(Boolean).length,
    seen: () => `With ${whole(count())} tokens in place of ${TRAINED}, ${threads.map((thread) => change(thread)).join("; ")} nats. ` +
      (threads.some(rises) ? "Added text brings keys at distances that training never had, and also larger positions: which of them does it?" :
       "No loss rises on this text: choose another text to see one that does."),
    links: [["same targets", "{{lab/measures.py: def same_targets}}"], ["docs", "docs/evidence.md"]],
  },
  {
    title: "Where the weights go", where: "causes",
    text: `Attention shares out a weight of 1 among the keys. See how much of it lies beyond the last ${TRAINED} keys, where no key was in training.`,
    ask: () => [`With the same weight on every key, ${percent(uniformFar(count(), TRAINED))} would lie there. Of which model is it the most?`,
                threads.map(({ name }) => name)],
    do: readFar,
    right: () => {
      const far = threads.map((thread) => mean(farAt(thread, plain(count()))));
      return far.indexOf(Math.max(...far));
    },
    seen: () => `With ${whole(count())} tokens read, the mean of all heads (and the least and most of one head) is: ` +
      `${threads.map((thread) => `${thread.name} ${farWords(thread)}`).join("; ")}. Uniform weights would have ` +
      `${percent(uniformFar(count(), TRAINED))}. Near keys lack this weight.`,
    links: [["attend", "{{model_numpy.py: def attend(}}"], ["docs", "docs/why-length-breaks.md"]],
  },
  {
    title: "Hide the far keys", where: "by-length", needs: [ROPE],
    text: `Let every query see its last ${TRAINED} keys only. The text, and every position in it, stays.`,
    ask: () => [`What does RoPE's loss with ${whole(count())} tokens do when far keys are hidden?`, WAYS],
    do: async () => (await readFar()) && everyLength({ see: TRAINED }),
    right: () => wayOf(by(ROPE, plain(count()), hidden())),
    seen: () => `With ${whole(count())} tokens RoPE has ${loss(ROPE, plain(count()))} nats with all keys and ${loss(ROPE, hidden())} with the last ` +
      `${TRAINED} only. ${besideRise(ROPE, "That takes away", by(ROPE, hidden(), plain(count())))}` +
      (rises(ROPE) && by(ROPE, hidden(), plain(count())) >= rise(ROPE) / 2 ? " The positions did not change, so distances do it." : ""),
    links: [["the window", "{{model_torch.py: def unseen}}"], ["docs", "docs/why-length-breaks.md"]],
  },
  {
    title: "Rotate by an angle", where: "by-distance",
    text: "RoPE rotates queries and keys by angles. Choose RoPE and a larger base, and compare the scores of queries at three positions.",
    ask: () => ["Do the curves of the three queries differ?", ["Yes", "No, they are one curve"]],
    do: () => { turn("rope"); move("base", 17); },
    right: () => 1,
    seen: () => "There is one curve for every query: the score depends on the distance alone, and oscillates with it. Distances from the " +
      "dotted line on were never seen in training.",
    links: [["rope_inv_freq", "{{expe.py: def rope_inv_freq}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "Move the text", where: "by-length", needs: [EXPE],
    text: `Begin to count at position ${whole(START)}. At ${TRAINED} tokens no text is added and no distance changes.`,
    ask: () => [`What does ExPE's loss with ${TRAINED} tokens do?`, WAYS],
    do: async () => (await readFar()) && everyLength({ start: START }),
    right: () => wayOf(by(EXPE, plain(TRAINED), MOVED)),
    seen: () => `With ${TRAINED} tokens that begin at position ${whole(START)} in place of 0, ` +
      `${[EXPE, ROPE].filter(Boolean).map((thread) => change(thread, plain(TRAINED), MOVED)).join("; ")} nats. ` +
      besideRise(EXPE, "The move alone gives", by(EXPE, plain(TRAINED), MOVED)),
    links: [["expe_override", "{{model_numpy.py: def expe_override}}"], ["docs", "docs/why-length-breaks.md"]],
  },
  {
    title: "A straight ramp", where: "by-distance",
    text: "ExPE writes the position itself, a ramp, over the first l numbers of what enters W_q and W_k. Choose it, and double its theta.",
    ask: () => ["Which query's line is the steepest?", [TRAINED, 4 * TRAINED, 16 * TRAINED].map((m) => `That at ${whole(m)}`).concat("All are alike")],
    do: () => { turn("expe"); move("theta", -8); },
    right: () => 2,
    seen: () => "The table is one ramp, and theta is how steep it is. With the ramp on queries and keys, a later query has a steeper line.",
    links: [["expe_table", "{{expe.py: def expe_table}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "A slope that the query chooses", where: "added", needs: [EXPE],
    text: "What a ramp on the keys adds to a score is a line in the key's position, and the query chooses its slope, up or down. Look inside ExPE.",
    ask: () => ["In its steepest head, do near keys gain or lose by that line?", ["They gain", "They lose"]],
    do: () => lookAtLast(TRAINED),
    right: ({ slope }) => (slope > 0 ? 0 : 1),
    seen: ({ slope }) => `In its steepest head, whose slope is the furthest from 0, this query gives a key ${signed(slope)} nats for each token ` +
      "that it is nearer.",
    links: [["docs", "docs/explained.md"]],
  },
  {
    title: "The position in the slope", where: "added", needs: [EXPE],
    text: "With the ramp on queries too, the query's own position enters its slope. Look at the same target with all that comes before it.",
    ask: () => [`In the steepest head, is the slope at position ${whole(count() - 1)} further from 0 than at ${TRAINED - 1}?`, ["Yes", "No"]],
    do: async () => {
      const near = (await readFar()) && (await lookAtLast(TRAINED)), far = near && (await lookAtLast(count(), near.head));
      return far && [near, far];
    },
    right: ([near, far]) => (Math.abs(far.slope) > Math.abs(near.slope) ? 0 : 1),
    seen: ([near, far]) => `At position ${TRAINED - 1} the head's slope is ${signed(near.slope)}, and at position ${whole(count() - 1)} it is ` +
      `${signed(far.slope)}, ${Math.abs(far.slope) > Math.abs(near.slope) ? "further from" : "not further from"} 0. On the same targets ${change(EXPE)} nats.`,
    links: [["expe_override", "{{model_numpy.py: def expe_override}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "ExPE on keys only", where: "by-length", needs: [KEYS],
    text: "ExPE-K overrides the keys alone. Its slopes depend on what the query says, and not on where it stands. Read everything again.",
    ask: () => [`What does its loss do from ${TRAINED} to ${whole(count())} tokens?`, WAYS],
    do: readFar,
    right: () => wayOf(rise(KEYS)),
    seen: () => `With ${whole(count())} tokens in place of ${TRAINED}, ${[KEYS, EXPE, ROPE].filter(Boolean).map((thread) => change(thread)).join("; ")} nats.`,
    links: [["--on k", "{{model_numpy.py: def expe_override}}"], ["docs", "docs/explained.md"]],
  },
  {
    title: "Weights that fetch nothing", where: "weights", needs: [KEYS],
    text: `A flat loss need not mean that far text is used. Measure what each head of ExPE-K loses when it cannot see keys ${NEAR} or more back.`,
    ask: () => ["How many of its heads lose by that, more than two standard errors?", ["None", "Less than half", "Half or more"]],
    do: async () => (await show(fresh(count()))) && (await pick(KEYS, count() - 1)) && measureWorth(),
    right: (worth) => [worth.some(uses), worth.filter(uses).length >= worth.length / 2].filter(Boolean).length,
    seen: (worth) => {
      const far = worth.map((its, i) => ({ ...its, i })).sort((a, b) => b.far - a.far)[0];
      showHead(far.i);
      const used = worth.filter(uses).length;
      return `The head with the most far weight has ${(100 * far.far).toFixed(0)}% of it there (uniform weights: ` +
        `${percent(uniformFar(count(), NEAR))}), worth ${signed(far.worth)} nats. Of ${plural(worth.length, "head")}, ${used} ` +
        `${used === 1 ? "loses" : "lose"} more than two standard errors without them.`;
    },
    links: [["docs", "docs/explained.md"]],
  },
  {
    title: "A task that needs far text", where: "task-accuracy", needs: [TASK],
    text: "These models learned, in a minute, to fetch one letter from a text. Ask them in a text of 16 times the length that they were trained on.",
    ask: () => ["Which model has the most right answers there?", [...solvers.map(({ name }) => name), "About the same, within 5 points"]],
    do: () => solve({ length: MULTIPLES.at(-1) * TASK.trained }),
    right: () => {
      const shares = solvers.map(({ id }) => TASK.accuracy[id].at(-1)), most = Math.max(...shares);
      return most - Math.min(...shares) <= 0.05 ? shares.length : shares.indexOf(most);
    },
    seen: () => `Of all such texts, ${taskResult()}. ` + solvers.map(({ id, name }) => {
      const head = fetching(task.answers.get(id)[0], placeOf(0));
      return `In this text, ${name}'s best head has ${percent(head.weights[placeOf(0)])} of its weight on the letter that is asked for`;
    }).join(". ") + `; uniform weights have ${percent(1 / (queries()[0] + 1))}.`,
    links: [["the tasks", "{{tasks.py: def needle}}"], ["docs", "docs/use.md"]],
  },
  {
    title: "Conclusion", where: "causes", needs: [],
    text: "Read this text with each switch, and see what follows for all models.",
    ask: () => [`What will be said of ${FIRST.name} on this text?`, ["It does not rise", "It fails on positions", "It fails on distances", "Neither explains it"]],
    do: readCauses,
    right: () => {
      const said = verdict(measured(FIRST));
      return said.startsWith("fails") ? 1 + ["fails on positions", "fails on distances"].concat(said).indexOf(said) : 0;
    },
    seen: conclusion,
    links: [["docs", "docs/why-length-breaks.md"]],
  },
].filter(({ needs = [] }) => needs.every(Boolean));

let step = 0, doing = 0;

function showStep(i) {
  const { title, text, links } = STEPS[step = i];
  doing++;
  at("tour").classList.remove("done");
  at("tour-title").textContent = `Tour, step ${i + 1} of ${STEPS.length}: ${title}`;
  at("tour-text").textContent = text;
  at("tour-seen").textContent = "";
  askFor();
  remember();
  at("tour-back").disabled = i === 0;
  if (i === STEPS.length - 1 && document.activeElement === at("tour-next")) at("tour-answers").querySelector("input").focus();
  at("tour-next").disabled = i === STEPS.length - 1;
  at("tour-links").replaceChildren(...links.map(([words, href]) => (DATA.root ? element("a", { href: DATA.root + href }, words)
    : element("code", {}, href.replace("#L", ", line ")))));              // without an address, what to look for
}

// The question of this step, and its answers; the step can be done once one of them is chosen.
function askFor() {
  const [question, answers] = STEPS[step].ask();
  at("tour-question").textContent = `First predict: ${question}`;
  at("tour-answers").replaceChildren(...[...answers, "I cannot say"].map((answer, i) => {
    const input = element("input", { type: "radio", name: "prediction", value: i });
    input.onchange = () => { at("tour-do").disabled = false; };
    return element("label", {}, input, ` ${answer}`);
  }));
  at("tour-do").disabled = true;
}

// What became of the prediction; "" if there was none.
function judge(answers, predicted, right) {
  const said = (i) => `"${answers[i]}"`;
  if (predicted === undefined || right === undefined) return "";
  if (predicted === right) return `You predicted ${said(right)}, which is right. `;
  return answers[predicted] ? `You predicted ${said(predicted)}; the answer is ${said(right)}. ` : `The answer: ${said(right)}. `;
}

async function doStep() {
  const { where, do: act, seen, right } = STEPS[step], mine = ++doing;
  const chosen = at("tour-answers").querySelector(":checked")?.value, predicted = chosen === undefined ? undefined : Number(chosen);
  at("tour").classList.add("done");
  at("tour-seen").textContent = "Reading ...";
  let first = "";
  if (count() <= TRAINED) {
    first = `The text has ${plural(count(), "token")}, too few to show what is past ${TRAINED}: this is held-out text 1. `;
    at("text").value = 0;
    at("text").onchange();
  }
  const answers = STEPS[step].ask()[1], acting = (async () => act())();
  bring(where);                                                          // to see it drawn, and where it then stands
  let words;
  try {
    const found = await acting;
    if (mine !== doing) return;
    words = found === false ? "Something else was asked for meanwhile: do it again." : judge(answers, predicted, right(found)) + seen(found);
  } catch (error) {
    fail(String(error));
  }
  at("tour-seen").textContent = state.failed ? `Something failed here (${state.failed}): load the page again.` : first + words;
  bring(where);
}

// Scroll to a figure, or a table, below the box of the tour, which stays where it is.
function bring(where) {
  document.documentElement.style.setProperty("--tour", `${at("tour").offsetHeight}px`);
  at(where).closest("figure, .scroll").scrollIntoView({ block: "nearest" });
}

at("tour-back").onclick = () => showStep(step - 1);
at("tour-next").onclick = () => showStep(step + 1);
at("tour-do").onclick = doStep;
