"use strict";
// Curves as SVG. All that a text says gets into the page as text, never as markup.

const at = (id) => document.getElementById(id);
const number = (x, digits = 3) => (Number.isFinite(x) ? x.toFixed(digits) : "-");
const whole = (n) => n.toLocaleString("en");                              // 2,048
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
const signed = (x) => (x > -0.0005 ? "+" : "-") + Math.abs(x).toFixed(3);               // and no -0.000
const LOSS = "loss, nats a token";
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function element(name, attributes = {}, ...inside) {
  const svg = ["svg", "path", "line", "text", "circle"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => element("option", { value }, text)));
}

// curves: [{name, colour, points: [[x, y], ...], dots, dashed, faint}]; no line is drawn through a point without a y.
// log: of the x axis; xs and ys are [low, high], or made from the points; mark: an x with a dotted line, and words for
// it; ticks: of the x axis; x and y: the titles of the axes.
function draw(where, curves, { xs, ys, log = false, mark, ticks, x: xTitle, y: yTitle, about }) {
  const W = Math.min(innerWidth - 30, 460), H = 260, left = 50, top = 24, bottom = 46;         // so that text is not made smaller
  const right = Math.min(0.4 * W, 26 + 7 * Math.max(0, ...curves.map(({ name }) => name?.length ?? 0)));
  const all = curves.flatMap((curve) => curve.points).filter(([, y]) => Number.isFinite(y));
  const scale = (x) => (log ? Math.log2(x) : x);
  const span = (values, least) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (!values.length) [low, high] = [0, 1];
    const more = Math.max(least - (high - low), 0) / 2;
    return [low - more, high + more];
  };
  const [x0, x1] = (xs ?? span(all.map(([x]) => x), 1)).map(scale);
  const [y0, y1] = ys ?? span(all.map(([, y]) => y), 0.5);
  const px = (x) => left + ((scale(x) - x0) / (x1 - x0 || 1)) * (W - left - right);
  const py = (y) => H - bottom - ((y - y0) / (y1 - y0 || 1)) * (H - top - bottom);
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": about ?? "" });
  const line = (a, b, c, d, kind) => svg.append(element("line", { x1: a, y1: b, x2: c, y2: d, class: kind }));
  const digits = Math.max(0, Math.min(4, 1 - Math.floor(Math.log10((y1 - y0) / 4 || 1))));
  for (const share of [0, 1 / 3, 2 / 3, 1]) {
    const y = y0 + share * (y1 - y0);
    line(left, py(y), W - right, py(y), "axis");
    svg.append(element("text", { x: left - 5, y: py(y) + 4, "text-anchor": "end" }, y.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })));
  }
  for (const x of ticks ?? [xs?.[0] ?? 0, xs?.[1] ?? 1]) {
    const [place, words] = [px(x), whole(x)];
    svg.append(element("text", { x: place, y: H - bottom + 16, "text-anchor": "middle" }, words));
  }
  svg.append(element("text", { x: 0, y: 12 }, yTitle));
  svg.append(element("text", { x: (left + W - right) / 2, y: H - 8, "text-anchor": "middle" }, xTitle));
  if (mark) {
    const x = px(mark[0]), late = x > W / 2;
    line(x, top, x, H - bottom, "trained");
    svg.append(element("text", { x: x + (late ? -4 : 4), y: H - bottom - 5, "text-anchor": late ? "end" : "start" }, mark[1]));
  }
  const ends = [];
  for (const { name, colour, points, dots, dashed, faint } of curves) {
    const shown = points.filter(([, y]) => Number.isFinite(y));
    if (!shown.length) continue;
    const path = points.map(([x, y], i) => !Number.isFinite(y) ? "" :
      `${i && Number.isFinite(points[i - 1][1]) ? "L" : "M"}${px(x).toFixed(2)} ${py(y).toFixed(2)}`).join("");
    svg.append(element("path", { stroke: colour, d: path, class: dashed ? "dashed" : faint ? "faint" : "solid" }));
    if (dots && !faint) for (const [x, y] of shown) svg.append(element("circle", { cx: px(x), cy: py(y), r: 3, fill: colour }));
    const [x, y] = shown.at(-1);
    if (name) ends.push({ name, colour, x: px(x), y: py(y) });
  }
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => { end.y = Math.max(end.y, i ? ends[i - 1].y + 13 : top + 4); });
  const over = ends.length ? Math.max(0, ends.at(-1).y - (H - bottom)) : 0;
  for (const { name, colour, y } of ends) {
    svg.append(element("text", { x: W - right + 6, y: y - over + 4, style: `--colour: ${colour}`, class: "name" }, name));
  }
  where.replaceChildren(svg);
}
