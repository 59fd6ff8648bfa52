"use strict";
// A task of tasks.py, solved by small models in this page: their answers, and the head that fetches them.

const TASK = DATA.task, solvers = TASK ? DATA.task_models.map((made) => new Thread(made, MULTIPLES.at(-1) * TASK.trained)) : [];
const task = { length: TASK?.trained, sequence: 0, query: 0, asked: 0, answers: new Map() };
const is = (...symbols) => (token) => symbols.includes(TASK.symbols[token]);
const ABOUT = {                          // what is asked; and the place of the answer to the query at m
  needle: {
    words: "A text of letters has one marker, N. After the last letter the models must name the letter behind the marker. It can be " +
      "as far back as the text is long, so that here the far context must be used.",
    place: (tokens) => tokens.findIndex(is("N")) + 1,
  },
  "first-last": {
    words: "A text of letters stands behind some filler symbols. Each of the last four symbols is a question: F asks for the first " +
      "letter of the text, and L for the last. The answer to F can be as far back as the text is long.",
    place: (tokens, m) => {
      const letter = (token) => !is(..."+-#*FL")(token);
      return is("F")(tokens[m]) ? tokens.findIndex(letter) : tokens.findLastIndex(letter);
    },
  },
};
const sequence = () => TASK.sequences[task.length][task.sequence];
const queries = () => Object.keys(sequence().targets).map(Number);

// Ask every model; true once the answers to all queries of this sequence are here.
async function solve(change = {}) {
  Object.assign(task, { query: 0 }, change, { answers: new Map() });
  const mine = ++task.asked, { tokens } = sequence();
  at("task-length").value = task.length;
  drawTask();
  for (const solver of solvers) {
    await solver.ready;
    const answers = [];
    for (const place of queries()) {
      const found = await solver.ask({ inside: [...tokens, 0], how: how(plain()), index: place + 1 });
      if (!found) drawTask();
      if (!found || mine !== task.asked) return false;
      answers.push({ ...found, answer: found.next[0][0] });
    }
    task.answers.set(solver.id, answers);
    drawTask();
  }
  return true;
}

const placeOf = (query) => ABOUT[TASK.name].place(sequence().tokens, queries()[query]);

// The head with the most weight on the place of the answer.
const fetching = ({ heads }, place) => heads.reduce((best, head) => (head.weights[place] > best.weights[place] ? head : best));

function drawTask() {
  const { tokens, targets } = sequence(), symbol = (token) => TASK.symbols[token], place = placeOf(task.query);
  const ask = queries()[task.query];
  const buttons = queries().map((at, i) => {
    const button = element("button", { type: "button", "aria-pressed": i === task.query }, `${symbol(tokens[at])}?`);
    button.onclick = () => { task.query = i; drawTask(); document.querySelector("#task-queries [aria-pressed=true]").focus(); };
    return button;
  });
  at("task-queries").replaceChildren(...(buttons.length > 1 ? ["Question: ", ...buttons] : []));
  const boxes = [];
  at("task-models").replaceChildren(...solvers.map((solver) => {
    const answers = task.answers.get(solver.id), found = answers?.[task.query], head = found && fetching(found, place);
    const most = head && Math.max(...head.weights);
    const box = element("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `The text, as ${solver.name} weights it` },
      ...tokens.map((token, i) => element("span", { class: [i === place && "target", i === ask && "chosen", head && i <= ask && "attended"]
        .filter(Boolean).join(" "), style: head && i <= ask ? `--w: ${(head.weights[i] / most) * 50}%` : "" }, symbol(token))));
    boxes.push(box);
    const said = answers?.map(({ answer }, i) => {
      const right = targets[queries()[i]], words = answers.length > 1 ? `${symbol(tokens[queries()[i]])}: ` : "";
      return `${words}${symbol(answer)}, ${answer === right ? "right" : `wrong (it is ${symbol(right)})`}`;
    }).join("; ");
    return element("article", { class: "model" },
      element("h3", { class: "name", style: `--colour: ${solver.colour}` }, solver.name),
      element("p", said?.includes("wrong") ? { class: "wrong" } : {}, said ? `Answer: ${said}` : state.failed ? `No answer: ${state.failed}` : "Reading ..."),
      element("p", {}, head ? `Block ${head.block}, head ${head.head} puts ${(100 * head.weights[place]).toFixed(1)}% of its weight on the ` +
        `letter that is asked for, ${plural(ask - place, "token")} back: the most of all heads. Uniform weights: ${percent(1 / (ask + 1))}.` : ""), box);
  }));
  for (const box of boxes) box.scrollTop = box.children[place].offsetTop - box.clientHeight / 2;
}

if (TASK) {
  const places = Object.keys(TASK.sequences).map(Number);
  at("task-about").textContent = `${ABOUT[TASK.name].words} The models were trained on texts of up to ` +
    `${TASK.trained} symbols. A letter drawn at random is right in ${percent(TASK.chance)} of all texts. The letter that is asked for is underlined, and what the shown head attends to is marked.`;
  options(at("task-length"), places.map((length, i) => [length, `${whole(length)} symbols, ${MULTIPLES[i]}x`]));
  at("task-length").onchange = () => solve({ length: Number(at("task-length").value) });
  at("task-another").onclick = () => solve({ sequence: (task.sequence + 1) % TASK.sequences[task.length].length });
  const points = (values) => values.map((share, i) => [places[i], 100 * share]);
  draw(at("task-accuracy"), [
    ...solvers.map(({ id, name, colour }) => ({ name, colour, dots: true, points: points(TASK.accuracy[id]) })),
    { name: "best guess", colour: "var(--soft)", dashed: true, points: points(TASK.guess) }], {
    xs: [places[0], places.at(-1)], ys: [0, 100], log: true, ticks: places, x: "symbols read", y: "right answers, %",
    about: solvers.map(({ id, name }) => `${name}: ${points(TASK.accuracy[id]).map(([n, y]) => `${y.toFixed(0)}% at ${whole(n)}`).join(", ")}`).join("; ") });
  solve();
} else at("task").remove();
