"use strict";
// Read: a text under each model, with more and more before the last tokens, which are the targets and stay the same; and
// two switches that take apart what changes with the length: the distance of keys, and the positions.

const DATA = JSON.parse(at("data").textContent);
const TOKENIZER = new Tokenizer(at("tokenizer").textContent);
const TRAINED = DATA.trained, MULTIPLES = DATA.multiples, MOST = MULTIPLES.at(-1) * TRAINED, OWN = "own";
const NEAR = TRAINED / 4, START = MOST - TRAINED, WRITTEN = 40;        // keys that are near; tokens that are written
const VOCAB = DATA.models[0].config.vocab, CHANCE = Math.log(VOCAB);     // the loss if all tokens had the same probability
const GPU = !new URLSearchParams(location.search).has("cpu");            // ?cpu in the address: without one
const SOURCE = { stdlib: "Python's standard library", packages: "Python packages" }[DATA.source] ?? DATA.source;
const LACKS = ["Worker", "WebAssembly", "DecompressionStream"].filter((name) => !(name in globalThis));
if (LACKS.length) {
  at("not-run").textContent = `This browser lacks ${LACKS.join(" and ")}, which the models need.`;
  throw new Error(at("not-run").textContent);
}
// wanted: the length that was asked for last, which another text may lack
const state = { tokens: [], length: TRAINED, wanted: TRAINED, see: 0, start: 0, chosen: null, found: new Map(), failed: null };

// ---- models, each in a thread ----

class Thread {
  constructor(made, longest) {
    const engine = [at("engine"), at("worker")].map((script) => script.textContent).join("\n");
    Object.assign(this, made, { waiting: new Map(), count: 0 });
    this.worker = new Worker(URL.createObjectURL(new Blob([engine], { type: "text/javascript" })));
    this.worker.onmessage = ({ data }) => {
      if (data.failed) fail(`${this.name}: ${data.failed}`);
      if (data.done && this.gpu !== data.gpu) {
        this.gpu = data.gpu;
        computes();
      }
      this.waiting.get(data.id)?.(data);
    };
    this.worker.onerror = (event) => fail(`${this.name}: ${event.message}`);
    this.ready = this.ask({ load: made, weights: at(`weights-${made.id}`).textContent, longest, gpu: GPU });
  }

  // Resolves with what was found; piece(answer) is called with what comes before that.
  ask(what, piece) {
    const id = ++this.count;
    return new Promise((done) => {
      this.waiting.set(id, (answer) => (answer.done ? (this.waiting.delete(id), done(answer.found)) : piece(answer)));
      this.worker.postMessage({ id, ...what });
    });
  }
}

function fail(words) {
  state.failed ??= words;
  const note = at("not-run");                                            // until all of this page has begun
  if (note) note.textContent = `This page cannot run here: ${state.failed}.`;
  else tell();
}

addEventListener("error", ({ message }) => fail(message));
addEventListener("unhandledrejection", ({ reason }) => fail(String(reason)));

const threads = DATA.models.map((made) => new Thread(made, MOST + WRITTEN));
const threadOf = (id) => threads.find((thread) => thread.id === id);

// ---- what is read ----

// The tokens of a length: its first is never a target, and its last ones are the targets.
const windowOf = (length) => state.tokens.slice(-(length + 1));
const count = () => state.tokens.length - 1;
// The lengths at which a text can be read: the multiples of the trained length that it has, and all of it.
const lengths = () => [...new Set([...MULTIPLES.map((multiple) => multiple * TRAINED).filter((n) => n < count()), count()])];
const now = () => ({ length: state.length, see: state.see, start: state.start });
const how = ({ see, start }) => ({ see: see || Infinity, start });
const keyOf = (thread, { length, see, start }) => [thread.id, length, see, start].join(" ");
const lossesAt = (thread, setting) => state.found.get(keyOf(thread, setting))?.losses;
const farAt = (thread, setting) => state.found.get(keyOf(thread, setting))?.far;         // the weight on far keys, a head
const complete = (losses) => Boolean(losses) && !losses.some(Number.isNaN);
const targetsMean = (thread, setting) => {
  const losses = lossesAt(thread, setting);
  return complete(losses) ? mean([...losses.slice(-TRAINED)]) : NaN;
};
const plain = (length) => ({ length, see: 0, start: 0 });

// Take a text, of which the first MOST tokens are read: all of them, or as many as were wanted.
function choose(text, all) {
  const { tokens, letters } = TOKENIZER.begin(text, MOST), { wanted } = state;
  Object.assign(state, { tokens: [TOKENIZER.eot, ...tokens], letters, of: text.length, chosen: null, found: new Map() });
  clearWritten();
  if (!at("tour").classList.contains("done")) askFor();                  // of so many tokens
  const length = all ? count() : lengths().findLast((n) => n <= wanted) ?? lengths()[0], shown = show({ length });
  state.wanted = wanted;
  return shown;
}

// What is shown, in the address: a link to it. A text of one's own stays here. Not at once, since browsers limit how often.
let noting;
function remember() {
  clearTimeout(noting);
  noting = setTimeout(noteAddress, 300);
}

function noteAddress() {
  const { length, see, start, chosen } = state, text = at("text").value, shown = { text, length, see, start, chosen, step };
  const usual = { text: "0", length: TRAINED, see: 0, start: 0, chosen: null, step: 0 };
  const changed = Object.entries(shown).filter(([name, value]) => value !== usual[name] && value !== OWN);
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
}

addEventListener("hashchange", () => restore());
document.querySelector(".skip").onclick = (event) => {                   // its own address would take this one's place
  event.preventDefault();
  at("read").focus();
};

function restore() {
  const given = new URLSearchParams(location.hash.slice(1)), read = (name) => Math.max(0, parseInt(given.get(name)) || 0);
  const text = Math.min(read("text"), DATA.texts.length - 1), see = read("see");
  at("text").value = text;
  at("own").hidden = true;
  Object.assign(state, { wanted: read("length") || TRAINED, see: [TRAINED, NEAR].includes(see) ? see : 0, start: read("start") && START });
  const shown = choose(DATA.texts[text].text);
  showStep(Math.min(read("step"), STEPS.length - 1));
  return /^\d+$/.test(given.get("chosen")) ? show({ chosen: Math.min(read("chosen"), state.length - 1) }) : shown;
}

// Read a setting in every model; false if there is nothing to read, or if something else was asked for meanwhile.
let asked = 0, due = null;
async function show(change = {}) {
  Object.assign(state, change, "length" in change ? { wanted: change.length } : {});
  const mine = ++asked, setting = now(), window = windowOf(state.length);
  if (state.chosen !== null && state.chosen > window.length - 2) state.chosen = null;
  clearInside();
  panels(window);
  tell();
  due ??= setTimeout(curves, 100);
  for (const thread of threads) thread.ask({});                          // what it may still be doing is of no use
  if (window.length < 2) return false;
  await Promise.all(threads.map(async (thread) => {
    if (!complete(lossesAt(thread, setting))) {
      await thread.ready;
      if (mine !== asked) return;
      const losses = new Float64Array(window.length - 1).fill(NaN), found = { losses };
      state.found.set(keyOf(thread, setting), found);
      found.far = await thread.ask({ read: window, how: how(setting) }, ({ from, losses: piece }) => {
        losses.set(piece, from);
        if (mine === asked) paint(thread, losses, from, from + piece.length);
      });
    }
    if (mine === asked) paint(thread, lossesAt(thread, setting), 0, window.length - 1);
  }));
  if (mine === asked) tell();                                            // of losses, too
  if (mine === asked && state.chosen !== null) await look();
  return mine === asked && threads.every((thread) => complete(lossesAt(thread, setting)));
}

// Read one setting after the other, and only then look into the chosen token again.
async function readEach(settings) {
  const { chosen } = state;
  for (const setting of settings) if (!(await show({ ...setting, chosen: null }))) return false;
  return show({ chosen });
}

const everyLength = (more) => readEach(lengths().map((length) => ({ length, ...more })));

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
      const chosen = state.chosen === null ? (step > 0 ? -1 : spans.length) : spans.length - 1 - state.chosen;
      pick(thread, Math.max(0, Math.min(spans.length - 1, chosen + step)));
      chosenSpan(thread)?.scrollIntoView({ block: "nearest" });
    };
    const head = element("h3", { class: "name", style: `--colour: ${thread.colour}` }, thread.name);
    return element("article", { class: "model" }, head, thread.bar, thread.mean, thread.box);
  }));
  for (const { box, spans } of threads) if (first > 0) box.scrollTop = spans[first].offsetTop - box.offsetTop;
}

function paint(thread, losses, from, to) {
  for (let i = from; i < to; i++) {
    if (!Number.isNaN(losses[i])) thread.spans[i]?.style.setProperty("--x", `${Math.min(losses[i] / 8, 1) * 80}%`);
  }
  thread.bar.value = losses.findLastIndex((loss) => !Number.isNaN(loss)) + 1;
  const read = [...losses].filter((loss) => !Number.isNaN(loss));
  thread.mean.textContent = `targets ${number(targetsMean(thread, now()))} nats a token, all tokens ${number(mean(read))}`;
  due ??= setTimeout(curves, 200);                                       // for all that comes in until then
}

function computes() {
  const names = threads.filter(({ gpu }) => gpu).map(({ name }) => name).join(", ");
  at("computes").textContent = !names ? "WebAssembly computes all matrix products." :
    `WebGPU computes the large matrix products of ${names}; with ?cpu in the address, WebAssembly does.`;
}

function curves() {
  due = null;
  const all = lengths(), ticks = all.filter((n) => n && (n === count() || count() / n > 1.4));
  const bySetting = (more, look) => threads.map((thread) => ({
    name: thread.name, colour: thread.colour, dots: true, ...look,
    points: all.map((length) => [length, targetsMean(thread, { length, ...more })]),
  }));
  const switched = state.see || state.start, { see, start } = state;
  const live = bySetting({ see, start }), before = switched ? bySetting({ see: 0, start: 0 }, { name: "", faint: true }) : [];
  const words = live.map(({ name, points }) => `${name}: ${points.filter(([, y]) => !Number.isNaN(y))
    .map(([x, y]) => `${number(y)} at ${whole(x)}`).join(", ") || "not read yet"}`);
  draw(at("by-length"), [...before, ...live], {
    xs: [Math.min(all[0] || TRAINED, TRAINED), Math.max(all.at(-1), 2 * TRAINED)], log: true, ticks, x: "tokens read", y: LOSS,
    about: `Mean loss of the same targets by tokens read. ${words.join("; ")}` });
  const size = state.length, part = Math.max(1, Math.min(16, Math.ceil(size / 8)), size / 32), positions = threads.map((thread) => {
    const losses = lossesAt(thread, now()) ?? [], points = [];
    for (let i = 0; i < losses.length; i += part) {
      const piece = [...losses.slice(Math.round(i), Math.round(i + part))];
      points.push([state.start + i + piece.length / 2, mean(piece)]);
    }
    return { name: thread.name, colour: thread.colour, points };
  });
  const ends = [state.start, state.start + size];
  draw(at("by-position"), positions, { xs: ends, mark: [TRAINED, `trained: ${TRAINED}`], ticks: ends, x: "position", y: LOSS,
                                       about: `Mean loss of groups of ${Math.round(part)} tokens, by position, in each model` });
  causes();
}

const chosenIndex = () => state.length - 1 - state.chosen;               // of the losses; the chosen one is kept from the end
const chosenSpan = (thread) => state.chosen === null ? undefined : thread.spans[thread.spans.length - 1 - state.chosen];

// Choose target i; true once the model has been looked into.
function pick(thread, i) {
  for (const each of threads) chosenSpan(each)?.classList.remove("chosen");
  state.chosen = state.length - 1 - i;
  at("inside-model").value = thread.id;
  remember();
  return look();
}

// What to say of a text that all models find less likely than tokens drawn at random; "" of another.
function strange() {
  const losses = threads.map((thread) => targetsMean(thread, now()));
  return losses.every((loss) => loss > CHANCE) ? `These models have read ${SOURCE} alone. To all of them the targets are less likely ` +
    `than tokens that are drawn at random, which have ${number(CHANCE)} nats: they say little of other texts.` : "";
}

const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

function tell() {
  const all = lengths(), tokens = count(), multiple = Number((state.length / TRAINED).toFixed(1));
  Object.assign(at("length"), { max: all.length - 1, value: all.indexOf(state.length), disabled: all.length < 2 });
  at("all-lengths").disabled = all.length < 2;
  at("write-do").disabled = tokens < 1;
  at("see").value = state.see;
  at("start").checked = state.start > 0;
  at("length-words").textContent = `${plural(state.length, "token")}: ` +
    (state.length < TRAINED ? "less than the trained length" : `${multiple}x the trained length`);
  at("length").setAttribute("aria-valuetext", at("length-words").textContent);
  const note = tokens < 1 ? "Type a text: there is nothing to read yet." :
    state.letters < state.of ? `The first ${plural(tokens, "token")} are read, which is as far as this page goes: ` +
      `${plural(state.letters, "character")} of ${whole(state.of)}.` :
    tokens < TRAINED ? `${plural(tokens, "token")}: the trained length is ${TRAINED}. A longer text shows more.` :
    tokens < MOST ? `All ${plural(tokens, "token")} of this text can be read, ${Number((tokens / TRAINED).toFixed(1))}x the trained length.` : "";
  at("read-note").textContent = state.failed ? `Something failed here (${state.failed}): load the page again.` : `${note} ${strange()}`.trim();
  remember();
}

options(at("text"), [...DATA.texts.map(({ title }, i) => [i, title]), [OWN, "my own text"]]);
at("text").onchange = () => {
  const own = at("text").value === OWN;
  at("own").hidden = !own;
  if (own) at("own").focus();
  return own ? choose(at("own").value, true) : choose(DATA.texts[at("text").value].text);
};
let typing;
at("own").oninput = () => { clearTimeout(typing); typing = setTimeout(() => choose(at("own").value, true), 400); };
at("length").oninput = () => show({ length: lengths()[at("length").value] });
at("all-lengths").onclick = () => everyLength();
options(at("see"), [[0, "all keys"], [TRAINED, `the last ${TRAINED} keys only`], [NEAR, `the last ${NEAR} keys only`]]);
at("see").onchange = () => show({ see: Number(at("see").value) });
at("start-words").textContent = `Begin at position ${whole(START)}`;
at("start").onchange = () => show({ start: at("start").checked ? START : 0 });
const FLAGS = new Set([...DATA.models, ...DATA.task_models].map(({ name, flags }) => `${name}: ${flags}`));
at("about").textContent = `${DATA.about} ${[...FLAGS].join("; ")}.`;
if (DATA.root) at("code").append("and ", element("a", { href: DATA.root }, "the code"), ", where all of it is measured.");

// ---- the result, which was computed when the page was made ----

const PLACES = MULTIPLES.map((multiple) => multiple * TRAINED);
draw(at("result"), threads.map(({ id, name, colour }) => ({
  name, colour, dots: true, points: DATA.results[id].losses.map((loss, i) => [PLACES[i], loss]) })), {
  xs: [TRAINED, MOST], log: true, ticks: PLACES, x: "tokens read", y: LOSS,
  about: `Mean loss of the targets. ${threads.map(({ id, name }) => `${name}: ${DATA.results[id].losses.map((loss, i) =>
    `${number(loss)} at ${whole(PLACES[i])}`).join(", ")}`).join("; ")}` });
at("result-words").textContent = `Here the same ${TRAINED} last tokens of ${plural(DATA.documents, "held-out text")} are read with more and ` +
  `more text before them. The training windows had ${TRAINED} tokens; models differ in their positional encoding. ` +
  `Chance, the same probability for each of the ${whole(VOCAB)} tokens, has ${number(CHANCE)} nats.`;
at("targets-words").textContent = `the last ${TRAINED} of a text, the same at every length.`;
