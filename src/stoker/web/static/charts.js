// What each GPU did over the last hour: drawn when it comes into view, asked for once per machine, brought up to date slowly.
"use strict";

(() => {
  const FRESH_FOR = 45000; // milliseconds; the server has one point a minute
  const histories = new Map(); // host -> { at, answer: Promise }
  const charts = new Map(); // element -> uPlot
  const seen = new Set();

  function history(host) {
    const known = histories.get(host);
    if (known && Date.now() - known.at < FRESH_FOR) return known.answer;
    const answer = fetch(`/api/v1/history?host=${encodeURIComponent(host)}`, { headers: { Accept: "application/json" } })
      .then((got) => (got.ok ? got.json() : null))
      .catch(() => null);
    histories.set(host, { at: Date.now(), answer });
    answer.then((told) => { if (!told) histories.delete(host); });
    return answer;
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function made(element, data) {
    const accent = colour("--accent");
    return new uPlot({
      width: element.clientWidth,
      height: element.clientHeight,
      padding: [3, 0, 1, 0],
      legend: { show: false },
      cursor: { show: false },
      select: { show: false },
      scales: { x: { time: true }, y: { range: [0, 1] } },
      axes: [{ show: false }, { show: false }],
      series: [
        {},
        { stroke: accent, width: 1.5, fill: `${accent}2e`, points: { show: false }, spanGaps: false },
        { stroke: colour("--cool"), width: 1.5, points: { show: false }, spanGaps: false },
      ],
    }, data, element);
  }

  async function draw(element) {
    const { host, gpu, memory } = element.dataset;
    const told = await history(host);
    if (!element.isConnected || !seen.has(element)) return;
    const one = told?.gpus.find((series) => series.gpu === gpu);
    // A line needs two points.
    if (!one || one.utilization.concat(one.memory).filter((value) => value !== null).length < 4) {
      element.dataset.nothing = told ? "No history yet" : "The last hour cannot be shown now";
      if (!charts.has(element)) element.classList.add("nothing");
      return;
    }
    element.classList.remove("nothing");
    const total = Number(memory) || Math.max(1, ...one.memory);
    const data = [told.times, one.utilization, one.memory.map((bytes) => (bytes === null ? null : Math.min(1, bytes / total)))];
    if (charts.has(element)) charts.get(element).setData(data);
    else charts.set(element, made(element, data));
    describe(element, one.utilization);
  }

  function describe(element, utilization) {
    const known = utilization.filter((value) => value !== null);
    if (!known.length) return;
    const percent = (value) => `${Math.round(value * 100)}%`;
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    element.title = `Last hour: used ${percent(mean)} on average, ${percent(Math.max(...known))} at most`;
    element.setAttribute("aria-label", element.title);
  }

  function drop(element) {
    charts.get(element)?.destroy();
    charts.delete(element);
  }

  const eye = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) {
        seen.add(target);
        draw(target);
      } else seen.delete(target);
    }
  }, { rootMargin: "200px" });

  function observe() {
    for (const element of [...charts.keys()]) if (!element.isConnected) { drop(element); seen.delete(element); }
    for (const element of document.querySelectorAll("[data-chart]")) eye.observe(element);
  }

  function redraw() {
    for (const element of [...charts.keys()]) drop(element);
    for (const element of seen) draw(element);
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
  document.addEventListener("stoker:swapped", observe);
  setInterval(() => { if (!document.hidden) for (const element of seen) draw(element); }, FRESH_FOR + 5000);
  observe();
})();
