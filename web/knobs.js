"use strict";
// Turn the knobs: a table, the formula of the entry that is pointed at, scores against distance, and fewer bits.

const fraction = (x) => (x < 1 && Number.isInteger(1 / x) ? `1/${1 / x}` : `${Number(x.toPrecision(6))}`);
const power = (low, high, start) => ({ low, high, start, step: 1, value: (x) => 2 ** x });         // a slider of exponents
const slider = (low, high, start, step = 1) => ({ low, high, start, step, value: (x) => x });
const base = { low: 1, high: 20, start: 13.2877123795, step: "any", value: (x) => Math.round(2 ** x) };

// What can be turned; of an entry of the table its value and its formula with numbers; how wide the table is; and the
// score of query m with key n, content left out.
const KNOBS = {
  nope: {
    name: "none", inputs: {}, width: () => 1, entry: () => 0, score: () => 0,
    words: () => "No order: whatever the distance, the score is the same.",
  },
  sinusoidal: {
    name: "sinusoidal, added to the embedding", inputs: { width: slider(2, 128, 64, 2), base },
    width: (s) => s.width, entry: sinusoidalEntry,
    words: (n, j, s) => `p[${n}, ${j}] = ${j % 2 ? "cos" : "sin"}(n / base^(${2 * Math.floor(j / 2)}/${s.width})) = ` +
      `${j % 2 ? "cos" : "sin"}(${n} / ${s.base}^${(2 * Math.floor(j / 2) / s.width).toFixed(3)})`,
    score: (m, n, s) => dot(s.width, (j) => sinusoidalEntry(m, j, s) * sinusoidalEntry(n, j, s)) / Math.sqrt(s.width),
  },
  rope: {
    name: "RoPE, turns queries and keys",
    inputs: { width: slider(4, 128, 32, 2), base, scaling: ["none", "linear", "ntk", "yarn"], factor: slider(1, 16, 4) },
    width: (s) => s.width,
    entry: (n, j, s) => {
      const [f, more] = frequencies(s), angle = n * f[j % (s.width / 2)];
      return more * (j < s.width / 2 ? Math.cos(angle) : Math.sin(angle));
    },
    words: (n, j, s) => {
      const i = j % (s.width / 2), [f, more] = frequencies(s), what = j < s.width / 2 ? "cos" : "sin";
      return `pair ${i}: ${more === 1 ? "" : `${more.toFixed(3)} `}${what}(n f) = ${what}(${n} x ${f[i].toPrecision(4)}), f = ` +
        (s.scaling === "none" ? `${s.base}^(-2 x ${i}/${s.width})` : `that of ${s.scaling} by ${s.factor}, trained at ${TRAINED}`);
    },
    score: (m, n, s) => {
      const [f, more] = frequencies(s);
      return (more ** 2 * 2 * dot(s.width / 2, (i) => Math.cos((m - n) * f[i]))) / Math.sqrt(s.width);
    },
  },
  alibi: {
    name: "ALiBi, a fixed slope a head", inputs: { heads: slider(1, 16, 4) },
    width: (s) => s.heads, entry: (n, j, s) => -alibiSlopes(s.heads)[j] * n,
    words: (n, j, s) => `head ${j}, ${n} tokens back: -slope d = -${fraction(alibiSlopes(s.heads)[j])} x ${n}`,
    score: (m, n, s) => -alibiSlopes(s.heads)[0] * (m - n),
  },
  expe: {
    name: "ExPE, a ramp in place of l dimensions",
    inputs: { l: slider(1, 128, 24), start: slider(0, 8, 0), theta: power(-12, 3, -9), on: ["qk", "k"] },
    width: (s) => s.l, entry: expeEntry,
    words: (n, j, s) => `p[${n}, ${j}] = start + theta (n + j) = ${s.start} + ${fraction(s.theta)} x (${n} + ${j})`,
    score: overridden(expeEntry),
  },
  exqpe: {
    name: "ExQPE, one dimension raised a position",
    inputs: { l: slider(1, 128, 24), start: slider(0, 8, 0), theta1: power(-12, 0, -11), theta2: power(-8, 3, -4), on: ["qk", "k"] },
    width: (s) => s.l, entry: exqpeEntry,
    words: (n, j, s) => `p[${n}, ${j}] = start + j theta1 + theta2 max(0, floor((n - j)/l) + 1) = ${s.start} + ${j} x ` +
      `${fraction(s.theta1)} + ${fraction(s.theta2)} x ${Math.max(0, Math.floor((n - j) / s.l) + 1)}`,
    score: overridden(exqpeEntry),
  },
};

const dot = (size, term) => Array.from({ length: size }, (_, i) => term(i)).reduce((a, b) => a + b, 0);
const frequencies = (s) => ropeFrequencies(s.width, { ...s, trained: TRAINED });
// Keys have the row of n; queries that of m, or, on keys alone, content: 1 in each dimension.
function overridden(entry) {
  return (m, n, s) => dot(s.l, (j) => (s.on === "k" ? 1 : entry(m, j, s)) * entry(n, j, s)) / Math.sqrt(s.l);
}

const ROWS = 128, knobs = { pe: "expe", settings: {}, entry: [5, 3] };

function turn(pe) {
  knobs.pe = pe;
  at("knobs-pe").value = pe;
  at("knobs-inputs").replaceChildren(...Object.entries(KNOBS[pe].inputs).map(([name, knob]) => {
    const input = Array.isArray(knob) ? element("select", {}, ...knob.map((word) => element("option", {}, word))) :
      element("input", { type: "range", min: knob.low, max: knob.high, step: knob.step, value: knob.start });
    const said = element("b");
    input.name = name;
    input.oninput = () => { set(name, input, knob, said); redraw(); };
    set(name, input, knob, said);
    return element("label", {}, `${name} `, said, " ", input);
  }));
  redraw();
}

function set(name, input, knob, said) {
  knobs.settings[name] = Array.isArray(knob) ? input.value : knob.value(Number(input.value));
  said.textContent = Array.isArray(knob) ? "" : fraction(knobs.settings[name]);
  input.setAttribute("aria-valuetext", fraction(Number(knobs.settings[name])));
}

// Put a knob at a value of its slider, as a hand would.
function move(name, value) {
  const input = at("knobs-inputs").querySelector(`[name=${name}]`);
  input.value = value;
  input.oninput();
}

function redraw() {
  const kind = KNOBS[knobs.pe], s = knobs.settings, columns = kind.width(s), canvas = at("table");
  const values = Array.from({ length: ROWS }, (_, n) => Array.from({ length: columns }, (_, j) => kind.entry(n, j, s)));
  const flat = values.flat(), low = Math.min(...flat), high = Math.max(...flat), image = new ImageData(columns, ROWS);
  flat.forEach((x, i) => {
    const share = high > low ? (x - low) / (high - low) : 0.5;            // from blue by white to orange
    const [r, g, b] = [[15, 101, 206], [255, 255, 255], [230, 98, 2]].slice(share > 0.5, share > 0.5 ? 3 : 2)
      .reduce((a, c) => a.map((x, k) => x + (c[k] - x) * (share > 0.5 ? 2 * share - 1 : 2 * share)));
    image.data.set([r, g, b, 255], 4 * i);
  });
  Object.assign(canvas, { width: columns, height: ROWS }).getContext("2d").putImageData(image, 0, 0);
  at("table-words").textContent = `${knobs.pe === "alibi" ? "Bias of a distance (down) in each head" : "Position (down) by dimension"}: ` +
    `${low.toPrecision(3)} (blue) to ${high.toPrecision(3)} (orange)`;
  point();
  const queries = [[TRAINED, "var(--link)"], [4 * TRAINED, "var(--text)"], [16 * TRAINED, "var(--hot)"]], most = 2 * TRAINED;
  draw(at("by-distance"), queries.map(([m, colour]) => {
    const own = kind.score(m, m, s);
    return { name: `query at ${whole(m)}`, colour,
             points: Array.from({ length: Math.min(m, most) }, (_, d) => [d, kind.score(m, m - d, s) - own]) };
  }), { xs: [0, most], ticks: [0, TRAINED, most], mark: [TRAINED, "trained"], x: "distance, tokens back", y: "score", about: "Score by distance, from 0 at the query's own key, at three positions of the query" });
  strips();
}

function point(n = knobs.entry[0], j = knobs.entry[1]) {
  const kind = KNOBS[knobs.pe], columns = kind.width(knobs.settings);
  knobs.entry = [Math.max(0, Math.min(ROWS - 1, n)), Math.max(0, Math.min(columns - 1, j))];
  const value = kind.entry(...knobs.entry, knobs.settings);
  at("formula").textContent = knobs.pe === "nope" ? KNOBS.nope.words() :
    `${kind.words(...knobs.entry, knobs.settings)} = ${Number(value.toPrecision(8))}`;
}

at("table").onpointermove = ({ offsetX, offsetY, target }) =>
  point(Math.floor((offsetY / target.clientHeight) * ROWS), Math.floor((offsetX / target.clientWidth) * target.width));
at("table").onkeydown = (event) => {
  const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [0, 0];
  if (!down && !right) return;
  event.preventDefault();
  point(knobs.entry[0] + down, knobs.entry[1] + right);
};

// ---- which positions merge ----

// How many of the first `count` rows, rounded, are no other than the row before.
function mergedOf(entry, s, round, count) {
  const row = (n) => Array.from({ length: s.l }, (_, j) => round(entry(n, j, s))).join();
  let last = row(0);
  return Array.from({ length: count - 1 }, (_, n) => { const now = row(n + 1), same = now === last; last = now; return same; });
}

function strips() {
  const own = ["expe", "exqpe"].includes(knobs.pe), s = knobs.settings, round = FORMATS[at("format").value], shown = 64;
  if (!own) {
    at("merged").textContent = "Choose ExPE or ExQPE: its rows are what is rounded.";
    return at("strips").replaceChildren();
  }
  const kinds = knobs.pe === "exqpe" ? [["ExQPE", exqpeEntry, s]] :
    [["equal columns", expeEntry, { ...s, constant: true, l: 1 }], ["staggered columns, as ExPE has them", expeEntry, s]];
  const found = kinds.map(([name, entry, settings]) => [name, mergedOf(entry, settings, round, 16 * TRAINED)]);
  at("merged").textContent = `Of positions 0 to ${whole(16 * TRAINED - 1)}, so many are the same as the one before: ` +
    found.map(([name, merged]) => `${whole(merged.filter(Boolean).length)} with ${name}`).join(", ");
  at("strips").replaceChildren(...found.flatMap(([name, merged]) => {
    let odd = false;
    const cells = [false, ...merged.slice(-shown + 1)].map((same) => {
      if (!same) odd = !odd;
      return element("i", { class: odd ? "odd" : "" });
    });
    return [element("p", { class: "note" }, `${name}, the last ${shown} positions: neighbours of one shade are one position`),
            element("div", { class: "strip", "aria-hidden": "true" }, ...cells)];
  }));
}

options(at("knobs-pe"), Object.entries(KNOBS).map(([pe, { name }]) => [pe, name]));
at("knobs-pe").onchange = () => turn(at("knobs-pe").value);
at("format").onchange = strips;
turn("expe");
