"use strict";
// Write: two models go on with what is read, each with its likeliest token, side by side.

const PAIR = ["write-a", "write-b"];
PAIR.forEach((id, i) => {
  options(at(id), threads.map(({ id, name }) => [id, name]));
  const wanted = threads.find(({ config: { encoding: e } }) => (i ? e.pe === "rope" : e.pe === "expe" && e.on === "k"));
  at(id).value = (wanted ?? threads[Math.min(i, threads.length - 1)]).id;
});

async function write() {
  const setting = now(), mine = asked, window = windowOf(state.length);
  const prompt = state.chosen === null ? window : window.slice(0, chosenIndex() + 1);      // up to before the chosen token
  const end = prompt.slice(-12).map((token) => TOKENIZER.show(token)).join("");
  const chosen = [...new Set(PAIR.map((id) => at(id).value))].map(threadOf);
  at("write-words").textContent = "Writing ...";
  const done = await Promise.all(chosen.map(async (thread, i) => {
    const written = [], said = element("span"), box = element("div", { class: "tokens" }, element("span", { class: "prompt" }, end), said);
    const head = element("h3", { class: "name", style: `--colour: ${thread.colour}` }, thread.name);
    at("written").replaceChildren(...(i ? [at("written").firstChild] : []), element("article", { class: "model" }, head, box));
    await thread.ready;
    return thread.ask({ write: prompt, how: how(setting), count: WRITTEN }, ({ token }) => {
      written.push(token);
      said.textContent = TOKENIZER.text(written);
      thread.written = written;
    });
  }));
  at("write-words").textContent = done.every(Boolean) ? `Each model wrote ${WRITTEN} tokens after ${plural(prompt.length - 1, "token")}, ` +
    `always the likeliest. The grey text is the end of what it read.` : "Something else was asked for meanwhile.";
  return mine === asked && done.every(Boolean);
}

function clearWritten() {
  at("written").replaceChildren();
  at("write-words").textContent = "Two models go on with the text that is read, or with what stands before the chosen token.";
}

at("write-do").onclick = write;
