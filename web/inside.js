"use strict";
// Look inside: the query that predicts the chosen token, in every block and head of one model.

const view = { heads: [], shown: 0 };
options(at("inside-model"), threads.map(({ id, name }) => [id, name]));
options(at("inside-head"), []);

// True if the chosen token is shown; false if not all is read (then show() looks), or something else was asked for.
async function look() {
  const thread = threads.find(({ id }) => id === at("inside-model").value), index = state.chosen + 1, mine = asked;
  if (lossesAt(thread, state.multiple)?.some(Number.isNaN) ?? true) return false;
  const { found } = await thread.ask({ inside: windowOf(state.multiple), index });
  if (!found || mine !== asked || index !== state.chosen + 1 || thread.id !== at("inside-model").value) return false;
  if (view.thread !== thread) view.shown = steepest(found);
  Object.assign(view, { heads: found, thread, index });
  options(at("inside-head"), found.map(({ block, head }, i) => [i, `block ${block}, head ${head}`]));
  showHead(view.shown);
  return true;
}

// By how much the line rises from one key to the next: a slope is what a nearer key gains a token.
const slopeOf = ({ added }) => (added && added.length > 1 ? (added.at(-1) - added[0]) / (added.length - 1) : NaN);
const steepest = (heads) => heads.reduce((best, head, i) => (slopeOf(head) > (slopeOf(heads[best]) || -Infinity) ? i : best), 0);

function showHead(i) {
  const { heads, thread, index } = view, { added, scores, weights, block, head } = heads[i];
  view.shown = Number(i);
  at("inside-head").value = i;
  at("heads").replaceChildren(...heads.map((each, j) => {
    const words = `block ${each.block}, head ${each.head}`, slope = slopeOf(each);
    const button = element("button", { type: "button", "aria-pressed": j === view.shown },
                           Number.isNaN(slope) ? words : `${words}: ${signed(slope)}`);
    button.onclick = () => showHead(j);
    return button;
  }));
  const window = windowOf(state.multiple), token = (n) => JSON.stringify(TOKENIZER.show(window[n]));
  const kind = { expe: "this query's slope", alibi: "the head's fixed slope", fox: "the keys' gates, on average" };
  const slope = slopeOf(heads[i]), what = Number.isFinite(slope) && kind[thread.config.encoding.pe], far = weights.reduce((sum, weight, s) => sum + weight * (index - 1 - s), 0);
  at("inside-words").textContent = `${thread.name}, block ${block}, head ${head}: query ${token(index - 1)} at position ` +
    `${index - 1}, which predicts ${token(index)}. ` +
    (what ? `A key gains ${signed(slope)} nats for each token that it is nearer (${what}). `
          : "Its position adds no line to the scores. ") +
    `It looks back ${far.toFixed(1)} tokens on average.` +
    (what ? " The buttons give each head's slope." : "");
  const keys = (values) => Array.from(values ?? [], (y, s) => [s, y]), span = { xs: [0, Math.max(index - 1, 1)], ticks: [0, index - 1] };
  const mark = index > TRAINED ? [index - TRAINED, `${TRAINED} back`] : undefined, colour = thread.colour;
  draw(at("added"), [{ colour, points: keys(added) }], { ...span, mark, about: what ? `From ${number(added[0])} at the first key to 0 at its own` : "Nothing" });
  draw(at("scores"), [{ colour, points: keys(scores) }], { ...span, mark, about: "Scores by key" });
  draw(at("weights"), [{ colour, points: keys(weights) }], { ...span, mark, ys: [0, Math.max(...weights)], about: "Weights by key" });
  const most = Math.max(...weights);
  thread.spans.forEach((span, s) => {
    span.classList.toggle("key", s + 1 < index);
    span.style.setProperty("--w", `${s + 1 < index ? (weights[s + 1] / most) * 50 : 0}%`);
  });
}

at("inside-model").onchange = () => state.chosen !== null && look();
at("inside-head").onchange = () => showHead(Number(at("inside-head").value));
