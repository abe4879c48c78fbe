"""Style and script of the report: everything that the page needs is inside it."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --dim: #57606a; --rule: #d8dee4;
  --grid: #e8ebef; --code: #f0f2f5; --warn: #8a4b00; --warn-card: #fff4e0;
  --run0: #0969c8; --run1: #c4500a; --run2: #14805a; --run3: #9b3fb0; --run4: #b3261e; --run5: #8a6d00; --run6: #3f51b5;
  --run7: #5d6b78;
  --time0: #4a7fb5; --time1: #7aa95c; --time2: #d28a3c; --time3: #9a77b8; --time4: #c76b7e; --time5: #9aa3ad }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #181c22; --text: #e6e9ed; --dim: #9aa4af;
  --rule: #303740; --grid: #262c34; --code: #20262e; --warn: #f0b866; --warn-card: #2e2413;
  --run0: #58a6ff; --run1: #ff9a57; --run2: #4fcf9b; --run3: #d493e6; --run4: #ff8a80; --run5: #e0c04c; --run6: #9fa8ff;
  --run7: #aab4bf;
  --time0: #6ea3dc; --time1: #92c474; --time2: #e3a458; --time3: #b796d6; --time4: #de8b9c; --time5: #7b858f } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif }
main { max-width: 1440px; margin: 0 auto; padding: 24px 20px 60px }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere } h2 { font-size: 19px; margin: 40px 0 12px }
h3 { font-size: 15px; margin: 0; font-weight: 600; overflow-wrap: anywhere }
p { margin: 4px 0; max-width: 80ch } .dim, figcaption { color: var(--dim); font-size: 13px }
.legend { position: sticky; top: 0; z-index: 2; background: var(--page); padding: 10px 0;
  display: flex; flex-wrap: wrap; gap: 6px 18px; border-bottom: 1px solid var(--rule); margin-top: 14px;
  font-size: 14px }
.legend label { display: inline-flex; gap: 7px; align-items: center; cursor: pointer; overflow-wrap: anywhere }
.legend input { accent-color: var(--colour); margin: 0; flex: none }
.swatch { display: inline-block; vertical-align: middle; width: 18px; height: 4px; border-radius: 2px;
  background: var(--colour); flex: none }
.grid-of-charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)) }
figure, .card { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 14px; min-width: 0 }
figure { position: relative } figcaption { min-height: 1.5em }
svg { display: block; width: 100%; height: auto; overflow: visible; margin-top: 4px }
.tick { font-size: 12px; fill: var(--dim) } .end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--grid) } .axis { stroke: var(--rule) }
polyline { fill: none; stroke: var(--colour); stroke-linejoin: round; stroke-linecap: round }
.line { stroke-width: 2 } .raw { stroke-width: 1; opacity: 0.22 }
.held-out { stroke-width: 1.5; stroke-dasharray: 2 5; opacity: 0.8 }
.point { fill: var(--card); stroke: var(--colour); stroke-width: 2 }
.mark { stroke: var(--colour); stroke-dasharray: 4 4; opacity: 0.6 }
.cursor { stroke: var(--dim); visibility: hidden }
.run0 { --colour: var(--run0) } .run1 { --colour: var(--run1) } .run2 { --colour: var(--run2) }
.run3 { --colour: var(--run3) } .run4 { --colour: var(--run4) } .run5 { --colour: var(--run5) }
.run6 { --colour: var(--run6) } .run7 { --colour: var(--run7) }
.hide0 svg .run0, .hide1 svg .run1, .hide2 svg .run2, .hide3 svg .run3, .hide4 svg .run4, .hide5 svg .run5,
.hide6 svg .run6, .hide7 svg .run7 { display: none }
.tip { position: absolute; z-index: 3; pointer-events: none; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; padding: 6px 9px; font-size: 13px; box-shadow: 0 3px 12px rgb(0 0 0 / 20%); max-width: 260px;
  visibility: hidden }
.tip div { display: flex; gap: 7px; align-items: center; overflow-wrap: anywhere }
.tip b { margin-left: auto; padding-left: 10px; font-variant-numeric: tabular-nums; white-space: nowrap }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; min-width: 100% }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top }
td { overflow-wrap: break-word; max-width: 34em } th { font-weight: 600; white-space: nowrap }
td:first-child { min-width: 9em }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap }
code, pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
pre { background: var(--code); border-radius: 6px; padding: 9px 11px; margin: 4px 0 10px; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 24em; overflow-y: auto }
.warnings { background: var(--warn-card); color: var(--warn); border-radius: 8px; padding: 10px 14px; margin-top: 14px }
.warnings ul { margin: 4px 0; padding-left: 20px }
.samples { display: grid; gap: 14px } .texts { display: grid; gap: 4px 16px; margin-top: 8px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)) }
.texts h4 { margin: 0; font-size: 13px; font-weight: 600; color: var(--dim);
  display: flex; gap: 7px; align-items: center }
.texts > div { min-width: 0 }
.bar { display: flex; height: 22px; border-radius: 4px; overflow: hidden; background: var(--grid); margin: 4px 0 10px;
  gap: 1px }
.time0 { --colour: var(--time0) } .time1 { --colour: var(--time1) } .time2 { --colour: var(--time2) }
.time3 { --colour: var(--time3) } .time4 { --colour: var(--time4) } .time5 { --colour: var(--time5) }
.bar span { background: var(--colour) } .keys { display: flex; flex-wrap: wrap; gap: 4px 16px;
  font-size: 13px; margin-bottom: 10px }
.keys span { display: inline-flex; align-items: center; gap: 6px }
.keys i { width: 11px; height: 11px; border-radius: 3px; background: var(--colour) }
details { margin-top: 14px } summary { cursor: pointer; font-weight: 600 } details[open] summary { margin-bottom: 10px }
footer { margin-top: 40px; color: var(--dim); font-size: 13px }
@media (max-width: 640px) { th { white-space: normal } td { overflow-wrap: anywhere; min-width: 6.5em }
  td.number { min-width: 5.5em; white-space: normal; overflow-wrap: normal } td.number .dim { display: inline-block }
  td code { overflow-wrap: normal } }
@media print { .legend { position: static } figure, .card { break-inside: avoid } }
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("series").textContent);
for (const box of document.querySelectorAll(".legend input")) {
  box.addEventListener("change", () => document.body.classList.toggle("hide" + box.value, !box.checked));
}
function shown(line) { return !document.body.classList.contains("hide" + line.run); }
function nearest(points, step) {
  return points.reduce((best, p) => Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best);
}
function number(value) {
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = data.charts[figure.dataset.chart];
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const lines = chart.lines.filter(shown);
    if (lines.length === 0) return hide();
    const frame = svg.getBoundingClientRect();
    const units = (event.clientX - frame.left) / frame.width * data.width;
    const share = (units - data.left) / (data.width - data.left - data.right);
    const wanted = chart.low + share * (chart.high - chart.low);
    const step = nearest(lines.flatMap(line => line.points), wanted)[0];
    const x = data.left + (step - chart.low) / (chart.high - chart.low) * (data.width - data.left - data.right);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.style.visibility = "visible";
    tip.replaceChildren();
    const head = document.createElement("div"); head.textContent = "step " + step; tip.append(head);
    for (const line of lines) {
      const point = line.points.find(p => p[0] === step);
      if (!point) continue;
      const row = document.createElement("div"), swatch = document.createElement("i");
      const value = document.createElement("b");
      swatch.className = "swatch run" + line.run; value.textContent = number(point[1]);
      row.append(swatch, line.label + (line.heldOut ? " (held-out)" : ""), value); tip.append(row);
    }
    const outer = figure.getBoundingClientRect(), left = event.clientX - outer.left;
    tip.style.left = Math.max(4, Math.min(left + 14, figure.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = (frame.bottom - outer.top + 4) + "px"; tip.style.visibility = "visible";
  });
}
"""
