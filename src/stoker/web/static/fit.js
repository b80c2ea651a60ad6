// Draws how a batch size was found: the probes, the line through them, the limit, and what was chosen.
"use strict";

(() => {
  const GIB = 2 ** 30;
  const SIZES = Array.from({ length: 32 }, (_, power) => 2 ** power); // batch sizes come in these
  const plots = new Map(); // element -> uPlot

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const gib = (values) => values.map((bytes) => (bytes === null ? null : bytes / GIB));

  function dots(label, name, size, inside = name) {
    const ink = colour(name);
    return { label, stroke: ink, paths: () => null, points: { show: true, size, fill: colour(inside), stroke: ink, width: 2 } };
  }

  function options(element, told) {
    // Letters go by the reader's own font size.
    const scale = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: `${12 * scale}px system-ui, sans-serif` };
    const most = Math.max(told.limit, ...told.line, ...told.fits, ...told.oom) / GIB;
    return {
      width: element.clientWidth,
      height: element.clientHeight,
      legend: { show: false },
      cursor: { show: false },
      select: { show: false },
      scales: { x: { time: false, range: (_, low, high) => [0, (high || 1) * 1.06] }, y: { range: [0, most * 1.08 || 1] } },
      axes: [
        { ...axis, label: "batch size", labelSize: 20 * scale, labelFont: axis.font, size: 34 * scale, incrs: SIZES },
        { ...axis, label: "GiB", labelSize: 16 * scale, labelFont: axis.font, size: 44 * scale },
      ],
      series: [
        {},
        { label: "expected", stroke: colour("--cool"), width: 1.5, points: { show: false } },
        { label: "limit", stroke: colour("--attention"), width: 1.5, dash: [6, 4], points: { show: false } },
        dots("chosen", "--accent", 15),
        dots("fits", "--cool", 8),
        dots("does not fit", "--bad", 9, "--card"), // hollow: told apart without its colour too
      ],
    };
  }

  function draw(element) {
    let told;
    try { told = JSON.parse(element.dataset.fit); } catch { return; }
    if (!element.clientWidth) return;
    const limit = told.sizes.map(() => told.limit);
    const data = [told.sizes, gib(told.line), gib(limit), gib(told.chosen), gib(told.fits), gib(told.oom)];
    plots.set(element, new uPlot(options(element, told), data, element));
  }

  function drop(element) {
    plots.get(element)?.destroy();
    plots.delete(element);
  }

  function drawAll() {
    for (const element of [...plots.keys()]) if (!element.isConnected) drop(element);
    for (const element of document.querySelectorAll("[data-fit]")) if (!plots.has(element)) draw(element);
  }

  function redraw() {
    for (const element of [...plots.keys()]) drop(element);
    drawAll();
  }

  let settled = 0;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's bars come and go
    width = innerWidth;
    clearTimeout(settled);
    settled = setTimeout(redraw, 200);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("stoker:swapped", drawAll);
  drawAll();
})();
