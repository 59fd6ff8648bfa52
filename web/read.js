"use strict";
// Read: a text under each model, at one length after the other; the last tokens, the targets, stay the same.

const DATA = JSON.parse(at("data").textContent);
const TOKENIZER = new Tokenizer(at("tokenizer").textContent);
const TRAINED = DATA.trained, MULTIPLES = [1, 2, 4, 8, 16], OWN = "own";
const state = { tokens: [], multiple: 1, chosen: null, found: new Map(), failed: null };

// ---- models, each in a thread ----

class Thread {
  constructor(made) {
    const engine = [at("engine"), at("worker")].map((script) => script.textContent).join("\n");
    Object.assign(this, made, { waiting: new Map(), count: 0 });
    this.worker = new Worker(URL.createObjectURL(new Blob([engine], { type: "text/javascript" })));
    this.worker.onmessage = ({ data }) => this.waiting.get(data.id)?.(data);
    this.worker.onerror = (event) => { state.failed = event.message; tell(); };
    this.ready = this.ask({ load: made, weights: at(`weights-${made.id}`).textContent });
  }

  // Resolves with the last answer; piece(answer) is called with those before it.
  ask(what, piece) {
    const id = ++this.count;
    return new Promise((done) => {
      this.waiting.set(id, (answer) => (answer.done ? (this.waiting.delete(id), done(answer)) : piece(answer)));
      this.worker.postMessage({ id, ...what });
    });
  }
}

const threads = DATA.models.map((made) => new Thread(made));

// ---- what is read ----

// The tokens of a length: its first is never a target, and its last ones are the targets.
const windowOf = (multiple) => state.tokens.slice(-(multiple * TRAINED + 1));
const fits = (multiple) => state.tokens.length > multiple * TRAINED;
const lossesAt = (thread, multiple) => state.found.get(`${thread.id} ${multiple}`);
const targetsMean = (losses) => {
  const part = losses?.slice(-TRAINED);
  return part && !part.some(Number.isNaN) ? mean(part) : NaN;
};

function choose(text) {
  const all = TOKENIZER.encode(text), tokens = all.slice(0, MULTIPLES.at(-1) * TRAINED);
  Object.assign(state, { tokens: [TOKENIZER.eot, ...tokens], cut: all.length > tokens.length, chosen: null, found: new Map() });
  const most = MULTIPLES.filter(fits).length;
  at("length").max = Math.max(most - 1, 0);
  at("length").disabled = at("all-lengths").disabled = most < 2;
  if (!fits(state.multiple)) state.multiple = MULTIPLES[Math.max(most - 1, 0)];
  return show();
}

// Read the window of this length in every model; false if there is none, or if something else was asked for meanwhile.
let asked = 0;
async function show(multiple = state.multiple) {
  Object.assign(state, { multiple, chosen: multiple === state.multiple ? state.chosen : null });
  at("length").value = MULTIPLES.indexOf(multiple);
  const mine = ++asked, window = windowOf(multiple);
  panels(window);
  tell();
  for (const thread of threads) thread.ask({});                          // what it may still be reading is of no use
  if (window.length < 2) return false;
  await Promise.all(threads.map(async (thread) => {
    const key = `${thread.id} ${multiple}`;
    if (!state.found.has(key) || state.found.get(key).some(Number.isNaN)) {
      await thread.ready;
      if (mine !== asked) return;
      const losses = new Float64Array(window.length - 1).fill(NaN);
      state.found.set(key, losses);
      await thread.ask({ read: window }, ({ from, losses: piece }) => {
        losses.set(piece, from);
        if (mine === asked) colour(thread, losses, from, from + piece.length);
      });
    }
    if (mine === asked) colour(thread, lossesAt(thread, multiple), 0, window.length - 1);
  }));
  if (mine === asked && state.chosen !== null) pick(threads.find(({ id }) => id === at("inside-model").value), state.chosen);
  return mine === asked;
}

async function everyLength() {
  for (const multiple of MULTIPLES.filter(fits)) if (!(await show(multiple))) return;
}

// ---- what is seen ----

function panels(window) {
  const first = window.length - 1 - Math.min(TRAINED, window.length - 1);
  at("models").replaceChildren(...threads.map((thread) => {
    const spans = window.slice(1).map((token, i) => element("span", { "data-i": i }, TOKENIZER.show(token)));
    spans.forEach((span, i) => i >= first && span.classList.add("target"));
    thread.spans = spans;
    thread.mean = element("p");
    thread.bar = element("progress", { max: window.length - 1, value: 0, "aria-label": `${thread.name}: tokens read` });
    thread.box = element("div", { class: "tokens", tabindex: 0, role: "application",
                                  "aria-label": `The text under ${thread.name}: the arrow keys choose a token` }, ...spans);
    thread.box.onclick = ({ target }) => "i" in target.dataset && pick(thread, Number(target.dataset.i));
    thread.box.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const now = state.chosen ?? (step > 0 ? -1 : spans.length);
      pick(thread, Math.max(0, Math.min(spans.length - 1, now + step)));
      spans[state.chosen]?.scrollIntoView({ block: "nearest" });
    };
    const head = element("h3", { class: "name", style: `--colour: ${thread.colour}` }, thread.name);
    return element("article", { class: "model" }, head, thread.bar, thread.mean, thread.box);
  }));
  for (const { box, spans } of threads) if (first > 0) box.scrollTop = spans[first].offsetTop - box.offsetTop;
}

function colour(thread, losses, from, to) {
  for (let i = from; i < to; i++) {
    if (!Number.isNaN(losses[i])) thread.spans[i]?.style.setProperty("--x", `${Math.min(losses[i] / 8, 1) * 80}%`);
  }
  thread.bar.value = losses.findLastIndex((loss) => !Number.isNaN(loss)) + 1;
  thread.mean.textContent = `${thread.flags}: targets ${number(targetsMean(losses))} nats, all ` +
    number(mean([...losses].filter((loss) => !Number.isNaN(loss))));
  due ??= setTimeout(curves, 100);                                       // for all that comes in until then
}

let due = null;
function curves() {
  due = null;
  const lengths = MULTIPLES.filter(fits).map((multiple) => multiple * TRAINED), last = Math.max(lengths.at(-1) ?? 0, 2 * TRAINED);
  const sameTargets = threads.map((thread) => ({
    name: thread.name, colour: thread.colour, dots: true,
    points: MULTIPLES.filter(fits).map((multiple) => [multiple * TRAINED, targetsMean(lossesAt(thread, multiple))]),
  }));
  const words = sameTargets.map(({ name, points }) => `${name}: ${points.filter(([, y]) => !Number.isNaN(y))
    .map(([x, y]) => `${number(y)} at ${x}`).join(", ") || "not read yet"}`);
  draw(at("by-length"), sameTargets, { xs: [TRAINED, last], log: true, ticks: lengths,
       about: `Mean loss of the same ${TRAINED} targets by tokens read. ${words.join("; ")}` });
  const size = state.multiple * TRAINED, part = Math.max(16, size / 32), positions = threads.map((thread) => {
    const losses = lossesAt(thread, state.multiple) ?? [], points = [];
    for (let i = 0; i < losses.length; i += part) points.push([i + part / 2, mean([...losses.slice(i, i + part)])]);
    return { name: thread.name, colour: thread.colour, points };
  });
  draw(at("by-position"), positions, { xs: [0, size], mark: [TRAINED, `trained: ${TRAINED}`], ticks: [0, size],
       about: `Mean loss of each ${part} tokens, by position, in each model` });
}

// Choose target i; true once the model has been looked into.
function pick(thread, i) {
  state.chosen = i;
  for (const each of threads) each.spans.forEach((span, at) => span.classList.toggle("chosen", at === i));
  const window = windowOf(state.multiple), loss = lossesAt(thread, state.multiple)?.[i];
  at("chosen").textContent = `Token ${JSON.stringify(TOKENIZER.show(window[i + 1]))} at position ${i + 1}: ` +
    threads.map((each) => `${each.name} ${number(lossesAt(each, state.multiple)?.[i], 2)}`).join(", ") + " nats";
  at("inside-model").value = thread.id;
  return Number.isFinite(loss) && look();
}

function tell() {
  const tokens = state.tokens.length - 1, words = state.multiple * TRAINED;
  at("length-words").textContent = `${Math.min(words, tokens).toLocaleString("en")} tokens: ` +
    (tokens < TRAINED ? "less than the trained length" : `${state.multiple}x the trained length`);
  at("length").setAttribute("aria-valuetext", at("length-words").textContent);
  at("read-note").textContent = state.failed ? `A model stopped: ${state.failed}` :
    tokens < 1 ? "Type a text: nothing to read yet." :
    tokens < TRAINED ? `${tokens} tokens: the trained length is ${TRAINED}, and past it there is more to see.` :
    tokens < MULTIPLES.at(-1) * TRAINED ? `${tokens.toLocaleString("en")} tokens: enough for ${MULTIPLES.filter(fits).at(-1)}x.` :
    state.cut ? `The first ${tokens.toLocaleString("en")} tokens of this text are read.` : "";
}

options(at("text"), [...DATA.texts.map(({ title }, i) => [i, title]), [OWN, "my own text"]]);
at("text").onchange = () => {
  const own = at("text").value === OWN;
  at("own").hidden = !own;
  if (own) at("own").focus();
  choose(own ? at("own").value : DATA.texts[at("text").value].text);
};
let typing;
at("own").oninput = () => { clearTimeout(typing); typing = setTimeout(() => choose(at("own").value), 400); };
at("length").oninput = () => show(MULTIPLES[at("length").value]);
at("all-lengths").onclick = everyLength;
at("about").textContent = DATA.about;
choose(DATA.texts[0].text);
