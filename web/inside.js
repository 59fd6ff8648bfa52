"use strict";
// Look inside: the query that predicts the chosen token, in every block and head of one model; what each model expects
// there; and what the weights that a head puts far back are worth.

const view = { heads: [], shown: 0, worth: [] };
const HINT = "Choose a token above: the query that predicts it is shown here.";
options(at("inside-model"), threads.map(({ id, name }) => [id, name]));
options(at("inside-head"), []);

function clearInside(words = state.chosen === null ? HINT : "Reading ...") {
  Object.assign(view, { heads: [], far: undefined, worth: [] });
  at("inside-words").textContent = words;
  at("chosen").textContent = at("worth-words").textContent = at("next-words").textContent = "";
  at("heads").replaceChildren();
  options(at("inside-head"), []);
  at("worth-do").disabled = true;
  for (const id of ["added", "scores", "weights", "next"]) at(id).replaceChildren();
}

// True if the chosen token is shown; false if not all is read (then show() looks), or something else was asked for.
async function look() {
  const thread = threadOf(at("inside-model").value), i = chosenIndex(), index = i + 1, mine = asked, setting = now();
  const window = windowOf(state.length), losses = threads.map((each) => lossesAt(each, setting)?.[i]);
  const stays = () => mine === asked && index === chosenIndex() + 1 && thread.id === at("inside-model").value;
  for (const each of threads) chosenSpan(each)?.classList.add("chosen");
  at("chosen").textContent = `Token ${JSON.stringify(TOKENIZER.show(window[index]))}, read at position ${whole(state.start + index)}: ` +
    threads.map(({ name }, j) => `${name} ${number(losses[j], 2)}`).join(", ") + " nats";
  if (!complete(lossesAt(thread, setting))) return false;
  at("inside-words").textContent = `Looking into ${thread.name} ...`;
  const found = await thread.ask({ inside: window, how: how(setting), index });
  if (!found || !stays()) return false;
  if (view.thread !== thread) view.shown = steepest(found.heads);
  Object.assign(view, { heads: found.heads, thread, index, setting, worth: [], near: null });
  options(at("inside-head"), found.heads.map(({ block, head }, j) => [j, `block ${block}, head ${head}`]));
  at("worth-do").disabled = state.length <= NEAR;
  showHead(view.shown);
  const expected = new Map([[thread.id, found.next]]);
  showNext(expected, window[index]);
  if (state.chosen < TRAINED && state.length > TRAINED) {                // the same query with less before it
    const short = { ...setting, length: TRAINED };
    const before = await thread.ask({ inside: windowOf(TRAINED), how: how(short), index: TRAINED - state.chosen });
    if (!before || !stays()) return false;
    view.near = before.heads;
    showHead(view.shown);
  }
  for (const each of threads.filter((other) => other !== thread && complete(lossesAt(other, setting)))) {
    each.ask({ inside: window, how: how(setting), index }).then((theirs) => {
      if (!theirs || !stays()) return;
      expected.set(each.id, theirs.next);
      showNext(expected, window[index]);
    });
  }
  return true;
}

// By how much the line rises from one key to the next: a slope is what a nearer key gains a token.
const slopeOf = ({ added }) => (added && added.length > 1 ? (added.at(-1) - added[0]) / (added.length - 1) : NaN);
const steepness = (head) => Math.abs(slopeOf(head)) || 0;                // a slope may be negative; 0 of a head without one
const steepest = (heads) => heads.reduce((best, head, i) => (steepness(head) > steepness(heads[best]) ? i : best), 0);
const backOf = ({ weights }) => weights.reduce((sum, weight, s) => sum + weight * (weights.length - 1 - s), 0);

function showHead(i) {
  const { heads, thread, index, near } = view, { added, scores, weights, block, head } = heads[i];
  view.shown = Number(i);
  at("inside-head").value = i;
  if (at("heads").children.length !== heads.length) {
    at("heads").replaceChildren(...heads.map((_, j) => {
      const button = element("button", { type: "button" });
      button.onclick = () => showHead(j);
      return button;
    }));
  }
  heads.forEach((each, j) => {
    const button = at("heads").children[j], slope = slopeOf(each), worth = view.worth[j];
    button.setAttribute("aria-pressed", j === view.shown);
    button.textContent = `block ${each.block}, head ${each.head}` + (Number.isNaN(slope) ? "" : `: slope ${signed(slope)}`) +
      (worth ? `; far ${Math.round(100 * worth.far)}%, worth ${signed(worth.worth)}` : "");
  });
  const window = windowOf(state.length), token = (n) => JSON.stringify(TOKENIZER.show(window[n])), start = view.setting.start;
  const kind = { expe: "this query's slope", alibi: "the head's fixed slope", fox: "the keys' gates, on average" };
  const slope = slopeOf(heads[i]), what = Number.isFinite(slope) && kind[thread.config.encoding.pe];
  at("inside-words").textContent = `${thread.name}, block ${block}, head ${head}: query ${token(index - 1)} at position ` +
    `${whole(start + index - 1)}, which predicts ${token(index)}. ` +
    (index === 1 ? "It is the first token and has one key, its own, so that there is nothing to compare. " :
     what ? `A key gains ${signed(slope)} nats for each token that it is nearer (${what}). ` :
            "This encoding does not add a line to the scores. ") +
    `The head looks back ${plural(Number(backOf(heads[i]).toFixed(1)), "token")} on average` +
    (near ? `, and ${plural(Number(backOf(near[i]).toFixed(1)), "token")} when only ${TRAINED} are read` : "") +
    (index > 1 ? `; with uniform weights it would be ${whole((index - 1) / 2)}${near ? ` and ${whole((TRAINED - state.chosen - 1) / 2)}` : ""}.` : ".");
  at("worth-words").textContent = worthWords(i);
  const keys = (values) => Array.from(values ?? [], (y, s) => [start + s, y]), last = start + index - 1;
  const span = { xs: [start, Math.max(last, start + 1)], ticks: [start, last], x: "position of the key" };
  const mark = index > TRAINED ? [last + 1 - TRAINED, `${TRAINED} back`] : undefined, { colour } = thread;
  draw(at("added"), [{ colour, points: keys(added) }], { ...span, mark, y: "nats", about: what ? `From ${number(added[0])} at the first key to 0 at its own` : "Nothing" });
  draw(at("scores"), [{ colour, points: keys(scores) }], { ...span, mark, y: "score", about: "Scores by key" });
  drawWeights();
  const most = Math.max(...weights);
  thread.spans.forEach((span, s) => {
    span.classList.toggle("attended", s + 1 < index);
    span.style.setProperty("--w", `${s + 1 < index ? (weights[s + 1] / most) * 50 : 0}%`);
  });
}

// The weights of the shown head by distance, of this length and of the trained one, up to where 99% of both are.
function drawWeights() {
  const { heads, near, shown, thread, setting } = view, back = ({ weights }) => Array.from(weights).reverse();
  const curves = [[back(heads[shown]), plural(setting.length, "token"), thread.colour],
                  ...(near ? [[back(near[shown]), plural(TRAINED, "token"), "var(--soft)"]] : [])];
  const reach = Math.max(8, ...curves.map(([weights]) => {
    let sum = 0;
    return 1 + weights.findIndex((weight) => (sum += weight) >= 0.99);
  }));
  draw(at("weights"), curves.map(([weights, name, colour], i) => ({
    name, colour, dashed: i > 0, points: weights.slice(0, reach + 1).map((weight, d) => [d, weight]) })), {
    xs: [0, reach], ticks: [0, Math.round(reach / 2), reach], ys: [0, Math.max(...curves.flatMap(([weights]) => weights))],
    mark: TRAINED < reach ? [TRAINED, "trained"] : undefined, x: "tokens back", y: "weight",
    about: curves.map(([weights, name]) => `Weights with ${name} read: ${number(weights[0])} on its own key`).join("; ") });
}

// ---- what far weights are worth ----

const SINK = 0.05;                       // the share of weight that counts as much
const uses = ({ worth, error }) => worth > 2 * error;

function worthWords(i) {
  const found = view.worth[i];
  if (!found) return "";
  const { far, worth, error } = found, targets = Math.min(TRAINED, state.length);
  const means = uses(found) ? "The head uses them." : worth < -2 * error ? "They do harm." :
    far > SINK ? "That is within chance. No use of them is seen: such weight can be parked there and fetch nothing (a sink)." :
                 "That is within chance, and there is little weight.";
  return `Over the ${plural(targets, "target")}, this head puts ${(100 * far).toFixed(1)}% of its weight on keys ${NEAR} or more back ` +
    `(uniform weights: ${percent(uniformFar(view.setting.length, NEAR))}). When it alone cannot see them, the mean loss changes by ${signed(worth)} nats, with a standard error of ${number(error)}. ${means}`;
}

// Fills view.worth; the sum of what was found, or false if something else was asked for.
async function measureWorth() {
  const { thread, setting } = view, mine = asked, heads = view.heads, targets = Math.min(TRAINED, setting.length);
  at("worth-do").disabled = true;
  at("worth-words").textContent = `Reading the targets again, once for each head ...`;
  const done = await thread.ask({ worth: windowOf(setting.length), how: how(setting), targets, near: NEAR }, ({ head, worth, error, far }) => {
    if (mine !== asked || view.heads !== heads) return;
    view.worth[head] = { worth, error, far };
    showHead(view.shown);
  });
  if (view.heads === heads) at("worth-do").disabled = false;
  return Boolean(done) && mine === asked && view.worth;
}

// ---- what is expected ----

function showNext(expected, token) {
  const cell = ([guess, p]) => element("td", guess === token ? { class: "right" } : {},
    element("code", {}, JSON.stringify(TOKENIZER.show(guess))), ` ${(100 * p).toFixed(1)}%`);
  at("next-words").textContent = `The five likeliest tokens where ${JSON.stringify(TOKENIZER.show(token))} stands; that token is underlined.`;
  at("next").replaceChildren(
    element("tbody", {}, ...threads.filter(({ id }) => expected.has(id)).map(({ id, name, colour }) => element("tr", {},
      element("th", { scope: "row", class: "name", style: `--colour: ${colour}` }, name), ...expected.get(id).map(cell)))));
}

at("inside-model").onchange = () => state.chosen !== null && look();
at("inside-head").onchange = () => showHead(Number(at("inside-head").value));
at("worth-do").onclick = measureWorth;
